/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products on the host: OpenBLAS, and oneDNN for bfloat16, both loaded at first use.
 * Plain loops if neither is found. */
#ifndef EPIC_EXPERTS_BLAS_H
#define EPIC_EXPERTS_BLAS_H

#include <stdbool.h>
#include <stdint.h>

/* C [m, n] = op(A) op(B), or C += with `add`. op(A) is [m, k]: A itself, or the transpose of
 * A stored as [k, m] with transpose_a. B likewise, [k, n]. Rows are contiguous; lda, ldb and
 * ldc are the elements from one stored row to the next. m, n and k are above 0 and below
 * 2^31. */
typedef struct gemm {
    int64_t m, n, k;
    const void *a;
    int64_t lda;
    bool transpose_a;
    const void *b;
    int64_t ldb;
    bool transpose_b;
    void *c;
    int64_t ldc;
    bool add;
} gemm;

/* Multiply float32 (float64) matrices. No alignment is needed. Any thread may call these. */
void gemm_f32(const gemm *g);
void gemm_f64(const gemm *g);

/* Can gemm_bf16() be called? It needs oneDNN and a processor with bfloat16 instructions. */
bool gemm_has_bf16(void);
/* Multiplies bfloat16 A and B; C is float32. */
void gemm_bf16(const gemm *g);

/* Multiply by plain loops, whatever is loaded. Not both matrices may be transposed. Also for
 * tests. */
void gemm_plain_f32(const gemm *g);
void gemm_plain_f64(const gemm *g);

/* Between experts_blas_enter() and experts_blas_leave() OpenBLAS uses one thread per call,
 * because the bits of a product depend on the number of threads. That setting is
 * process-wide: the first thread to enter sets it, the last to leave restores it. oneDNN's
 * setting is per thread. Any thread may call these, and they nest. */
void experts_blas_enter(void);
void experts_blas_leave(void);

#endif
