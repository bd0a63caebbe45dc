/* SPDX-License-Identifier: Apache-2.0 */
/* Forward and backward on one slab in float32 (pass_template.h), for rows and weights of type
 * F32, BF16 and F16. */
#define REAL float
#define OF(name) name##_f32
#include "experts/pass_template.h"
