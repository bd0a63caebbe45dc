/* SPDX-License-Identifier: Apache-2.0 */
/* Multiplies matrices of small integers, which float32 represents exactly. */
#include "product.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

enum { N = 96 };
#define BYTES (N * N * sizeof(float))

/* Multiplies in column-major order, like cuBLAS. */
static void multiply_matrices(const float *a, const float *b, float *c)
{
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            float sum = 0;
            for (int k = 0; k < N; k++) sum += a[k * N + i] * b[j * N + k];
            c[j * N + i] = sum;
        }
}

static bool multiply_there(const float *a, const float *b, float *c)
{
    const float one = 1, zero = 0;
    cublasHandle_t handle = NULL;
    cudaStream_t stream = NULL;
    float *device = NULL;
    bool good = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
                cudaMalloc((void **)&device, 3 * BYTES) == cudaSuccess &&
                cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS &&
                cublasSetStream(handle, stream) == CUBLAS_STATUS_SUCCESS;
    if (good) {
        float *x = device, *y = device + N * N, *z = device + 2 * N * N;
        good = cudaMemcpyAsync(x, a, BYTES, cudaMemcpyDefault, stream) == cudaSuccess &&
               cudaMemcpyAsync(y, b, BYTES, cudaMemcpyDefault, stream) == cudaSuccess &&
               cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, N, N, N, &one, x, N, y, N, &zero,
                           z, N) == CUBLAS_STATUS_SUCCESS &&
               cudaMemcpyAsync(c, z, BYTES, cudaMemcpyDefault, stream) == cudaSuccess &&
               cudaStreamSynchronize(stream) == cudaSuccess;
    }
    if (!good)
        fprintf(stderr, "the matrix product: %s\n", cudaGetErrorString(cudaGetLastError()));
    if (handle) cublasDestroy(handle);
    if (device) cudaFree(device);
    if (stream) cudaStreamDestroy(stream);
    return good;
}

bool product_is_right(void)
{
    float a[N * N], b[N * N], want[N * N], got[N * N];
    for (int i = 0; i < N * N; i++) {
        a[i] = (float)(i * 7 % 17 - 8);
        b[i] = (float)(i * 5 % 13 - 6);
    }
    multiply_matrices(a, b, want);
    if (!multiply_there(a, b, got)) return false;
    if (!memcmp(want, got, BYTES)) return true;
    fprintf(stderr, "the matrix product is wrong\n");
    return false;
}
