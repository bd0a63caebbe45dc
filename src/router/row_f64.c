/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of the router for one token in float64, with which tests check gradients. */
#define REAL double
#define OF(name) name##_f64
#include "router/row_template.h"
