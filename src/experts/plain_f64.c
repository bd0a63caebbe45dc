/* SPDX-License-Identifier: Apache-2.0 */
/* GEMMs with plain loops in float64 (plain_template.h). */
#define REAL double
#define OF(name) name##_f64
#include "experts/plain_template.h"
