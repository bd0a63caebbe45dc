/* SPDX-License-Identifier: Apache-2.0 */
/* The dense arithmetic of the layer in float64. */
#define REAL double
#define GEMM gemm_f64
#define OPS dense_f64
#include "moe/dense_template.h"
