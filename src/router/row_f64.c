/* SPDX-License-Identifier: Apache-2.0 */
/* The rows of a router in float64: what gradients are checked in. */
#define REAL double
#define OF(name) name##_f64
#include "router/row_template.h"
