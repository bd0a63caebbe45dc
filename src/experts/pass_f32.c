/* SPDX-License-Identifier: Apache-2.0 */
/* The experts' work on one slab in float32: rows and weights F32, BF16, F16. */
#define REAL float
#define OF(name) name##_f32
#include "experts/pass_template.h"
