/* SPDX-License-Identifier: Apache-2.0 */
/* Computes GEMMs (matrix products) on the host with OpenBLAS, and bfloat16 GEMMs with oneDNN.
 * The libraries are loaded at first use. Without OpenBLAS, plain loops compute the GEMMs. */
#ifndef EPIC_EXPERTS_BLAS_H
#define EPIC_EXPERTS_BLAS_H

#include <stdbool.h>
#include <stdint.h>

/* One GEMM: C [m, n] = op(A) op(B) or, if `add` is set, C += op(A) op(B).
 *
 * op(A) is [m, k]. With transpose_a, A is stored as [k, m], and op(A) is its transpose. op(B)
 * is [k, n], and transpose_b has the same meaning for B. lda, ldb and ldc are the distances in
 * elements from one stored row to the next. m, n and k are above 0 and below 2^31. */
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

/* gemm_f32() multiplies float32 matrices, and gemm_f64() float64 matrices, of any alignment.
 * Any thread may call these functions. */
void gemm_f32(const gemm *g);
void gemm_f64(const gemm *g);

/* Returns true if gemm_bf16() may be called, that is, if oneDNN is loaded. EPIC loads oneDNN
 * only on processors with bfloat16 instructions. */
bool gemm_has_bf16(void);
/* Multiplies bfloat16 matrices A and B. C is a float32 matrix. Any thread may call this
 * function. */
void gemm_bf16(const gemm *g);

/* Multiply without OpenBLAS, so that the bits of an element of C depend only on its row of
 * op(A), its column of op(B) and k, and not on m and n. If the last terms of the sum over k are
 * zeros, leaving these terms out does not change the bits. The float32 function uses
 * host_kernels.product, the float64 function plain loops. The functions overwrite `memory`,
 * which has gemm_invariant_bytes() bytes. */
void gemm_invariant_f32(const gemm *g, void *memory);
void gemm_invariant_f64(const gemm *g, void *memory);
int64_t gemm_invariant_bytes(bool is_f64);

/* gemm_few() multiplies matrices A and B of type EPIC_F32 or EPIC_BF16 without OpenBLAS.
 * Requires that m is at most HOST_FEW_ROWS, that no matrix is transposed, and that `memory` has
 * room for HOST_FEW_MEMORY floats. gemm_has_few() returns true if gemm_few() is the fastest
 * GEMM for few rows on this processor, because its kernels use vector instructions. */
bool gemm_has_few(void);
void gemm_few(const gemm *g, uint32_t a_type, uint32_t b_type, void *memory);

/* Multiply with plain loops, even if OpenBLAS is loaded, so that tests can compare the results.
 * At most one of A and B may be transposed. */
void gemm_plain_f32(const gemm *g);
void gemm_plain_f64(const gemm *g);

/* Between experts_blas_enter() and experts_blas_leave(), OpenBLAS and oneDNN use one thread per
 * GEMM. With more threads, the bits of a GEMM would depend on the number of threads.
 *
 * OpenBLAS has one setting for the whole process. The first thread that enters sets this
 * setting to one thread, and the last thread that leaves restores the earlier value. oneDNN has
 * a separate setting for each thread. Any thread may call these functions, and pairs of calls
 * may be nested. */
void experts_blas_enter(void);
void experts_blas_leave(void);

#endif
