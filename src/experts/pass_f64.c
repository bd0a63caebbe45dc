/* SPDX-License-Identifier: Apache-2.0 */
/* Forward and backward on one slab in float64 (pass_template.h). Tests check gradients in
 * it. */
#define REAL double
#define OF(name) name##_f64
#include "experts/pass_template.h"
