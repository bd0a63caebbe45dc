/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products as plain loops, in float32. */
#define REAL float
#define OF(name) name##_f32
#include "experts/plain_template.h"
