/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products as plain loops, in float64. */
#define REAL double
#define OF(name) name##_f64
#include "experts/plain_template.h"
