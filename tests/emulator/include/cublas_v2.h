/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix product with which the GPU tests check that the GPU still works, on the emulator.
 */
#ifndef EPIC_EMULATED_CUBLAS_H
#define EPIC_EMULATED_CUBLAS_H

#include <cuda_runtime_api.h>

typedef struct emulated_cublas *cublasHandle_t;
typedef enum cublasStatus { CUBLAS_STATUS_SUCCESS = 0 } cublasStatus_t;
typedef enum cublasOperation { CUBLAS_OP_N = 0 } cublasOperation_t;

cublasStatus_t cublasCreate(cublasHandle_t *handle);
cublasStatus_t cublasDestroy(cublasHandle_t handle);
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t op_a,
                           cublasOperation_t op_b, int m, int n, int k, const float *alpha,
                           const float *a, int lda, const float *b, int ldb, const float *beta,
                           float *c, int ldc);

#endif
