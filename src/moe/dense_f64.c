/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of dense_template.h in float64. */
#define REAL double
#define GEMM gemm_f64
#define GEMM_INVARIANT gemm_invariant_f64
#define OPS dense_f64
#include "moe/dense_template.h"
