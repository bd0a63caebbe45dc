/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of dense_template.h in float32. */
#define REAL float
#define GEMM gemm_f32
#define GEMM_INVARIANT gemm_invariant_f32
#define OPS dense_f32
#include "moe/dense_template.h"
