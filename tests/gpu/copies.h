/* SPDX-License-Identifier: Apache-2.0 */
/* Copies that return when the device has the bytes. cudaMemset(), and cudaMemcpy() from memory
 * that CUDA does not know, may return earlier, and a stream made with cudaStreamNonBlocking
 * does not wait for them. */
#ifndef EPIC_TEST_COPIES_H
#define EPIC_TEST_COPIES_H

#include <cuda_runtime_api.h>

static inline cudaError_t copy_in(void *device, const void *host, size_t bytes)
{
    const cudaError_t error = cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice);
    return error == cudaSuccess ? cudaStreamSynchronize(NULL) : error;
}

static inline cudaError_t fill_in(void *device, int value, size_t bytes)
{
    const cudaError_t error = cudaMemset(device, value, bytes);
    return error == cudaSuccess ? cudaStreamSynchronize(NULL) : error;
}

#endif
