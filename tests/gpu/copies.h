/* SPDX-License-Identifier: Apache-2.0 */
/* cudaMemset, and cudaMemcpy from memory that CUDA does not know, may return before the device has
 * the bytes, and a stream made with cudaStreamNonBlocking does not wait for them.  These return
 * when the device has them. */
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
