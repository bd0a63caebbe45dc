/* SPDX-License-Identifier: Apache-2.0 */
/* The dense arithmetic of the layer in float32. */
#define REAL float
#define GEMM gemm_f32
#define OPS dense_f32
#include "moe/dense_template.h"
