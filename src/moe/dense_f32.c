/* SPDX-License-Identifier: Apache-2.0 */
/* Host arithmetic of the layer's dense part in float32 (dense_template.h). */
#define REAL float
#define GEMM gemm_f32
#define OPS dense_f32
#include "moe/dense_template.h"
