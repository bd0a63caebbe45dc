/* SPDX-License-Identifier: Apache-2.0 */
/* Forward and backward on one slab in float64 (pass_template.h), for rows and weights of type
 * F64. Tests use it to check gradients. */
#define REAL double
#define OF(name) name##_f64
#include "experts/pass_template.h"
