/* SPDX-License-Identifier: Apache-2.0 */
/* The only product of cuBLAS that the tests need, as a kernel of one warp. alpha must be 1 and
 * beta 0. */
#include <cublas_v2.h>
#include <stdlib.h>

#include "emulator.h"

struct emulated_cublas {
    cudaStream_t stream;
};

typedef struct product { /* c = a b, in column-major order */
    int m, n, k, lda, ldb, ldc;
    const float *a, *b;
    float *c;
} product;

static void multiply_matrices(const void *arguments)
{
    const product *p = arguments;
    for (int j = (int)emulator_here->thread; j < p->n; j += EMULATOR_WARP)
        for (int i = 0; i < p->m; i++) {
            float sum = 0;
            for (int l = 0; l < p->k; l++) sum += p->a[l * p->lda + i] * p->b[j * p->ldb + l];
            p->c[j * p->ldc + i] = sum;
        }
}

cublasStatus_t cublasCreate(cublasHandle_t *handle)
{
    *handle = calloc(1, sizeof **handle);
    if (!*handle) emulator_die("no memory for a handle");
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream)
{
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t op_a,
                           cublasOperation_t op_b, int m, int n, int k, const float *alpha,
                           const float *a, int lda, const float *b, int ldb, const float *beta,
                           float *c, int ldc)
{
    static const char kernel;
    const product p = {m, n, k, lda, ldb, ldc, a, b, c};
    if (op_a || op_b || *alpha != 1 || *beta != 0) emulator_die("such a product is not here");
    (void)emulator_enqueue(&kernel, multiply_matrices, &p, sizeof p, 1, EMULATOR_WARP, 0,
                           handle->stream);
    return CUBLAS_STATUS_SUCCESS;
}
