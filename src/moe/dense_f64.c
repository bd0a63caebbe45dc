/* SPDX-License-Identifier: Apache-2.0 */
/* Host arithmetic of the layer's dense part in float64 (dense_template.h). */
#define REAL double
#define GEMM gemm_f64
#define OPS dense_f64
#include "moe/dense_template.h"
