/* SPDX-License-Identifier: Apache-2.0 */
/* The experts' work on one slab in float64: what gradients are checked in. */
#define REAL double
#define OF(name) name##_f64
#include "experts/pass_template.h"
