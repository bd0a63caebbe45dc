/* SPDX-License-Identifier: Apache-2.0 */
/* GEMMs with plain loops in float32 (plain_template.h). */
#define REAL float
#define OF(name) name##_f32
#include "experts/plain_template.h"
