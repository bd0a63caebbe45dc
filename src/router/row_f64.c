/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of the router on one token in float64 (row_template.h). Tests check gradients in it. */
#define REAL double
#define OF(name) name##_f64
#include "router/row_template.h"
