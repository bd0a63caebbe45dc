/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the router for one token in float64 (row_template.h). Tests use float64 to check
 * gradients. */
#define REAL double
#define OF(name) name##_f64
#include "router/row_template.h"
