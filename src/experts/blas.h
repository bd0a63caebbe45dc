/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products: OpenBLAS, and oneDNN for bfloat16, loaded at first use, or plain loops. */
#ifndef EPIC_EXPERTS_BLAS_H
#define EPIC_EXPERTS_BLAS_H

#include <stdbool.h>
#include <stdint.h>

/* C [m, n] = op(A) op(B), added to C with `add`; rows are contiguous.  op(A) is [m, k]: A as it
 * lies, or transposed, when it lies as [k, m]; B alike.  m, n and k are above 0 and below 2^31.
 * `lda`, `ldb`, `ldc` are the elements from one row of what lies there to the next. */
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

void gemm_f32(const gemm *g);
void gemm_f64(const gemm *g);

/* A and B bfloat16, C and what is added up float32: by oneDNN, on a processor that multiplies
 * bfloat16.  `ready`: both are there; the other is called only then.  */
bool gemm_has_bf16(void);
void gemm_bf16(const gemm *g);

/* The plain loops themselves, whatever is loaded; for tests.  Not both transposed. */
void gemm_plain_f32(const gemm *g);
void gemm_plain_f64(const gemm *g);

/* Between these, from any number of threads, OpenBLAS uses one thread for each call, so that
 * bits do not depend on their number.  Process-wide: the first to enter sets it, the last to
 * leave puts back what was there.  oneDNN alike, for the calling thread alone. */
void experts_blas_enter(void);
void experts_blas_leave(void);

#endif
