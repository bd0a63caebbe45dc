/* SPDX-License-Identifier: Apache-2.0 */
/* Forward and backward on one slab in float32, for types F32, BF16 and F16
 * (pass_template.h). */
#define REAL float
#define OF(name) name##_f32
#include "experts/pass_template.h"
