/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that all processes of a group on a CUDA backend may be stopped together, while the
 * clock of the device continues. */
#include "stops.h"

#include <cuda_runtime_api.h>
#include <string.h>

#include "check.h"

#ifndef BACKEND
#define BACKEND "p2p"
#endif
#define MOST_BYTES 4096

static float *memory; /* memory on the device */
static cudaStream_t stream;

/* Distributes the ranks over the GPUs of this machine. */
static void choose_gpu(int rank)
{
    int gpus = 0;
    CHECK(cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0 &&
          cudaSetDevice(rank % gpus) == cudaSuccess);
}

static epic_result add_on_device(epic_context *ctx, const epic_allreduce_sum_args *args)
{
    const size_t bytes = (size_t)args->count * sizeof *args->data;
    epic_allreduce_sum_args a = *args;
    if (!memory &&
        (!CHECK(cudaMalloc((void **)&memory, MOST_BYTES) == cudaSuccess) ||
         !CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess)))
        return EPIC_EDEVICE;
    cudaMemcpyAsync(memory, args->data, bytes, cudaMemcpyHostToDevice, stream);
    a.data = memory;
    a.call.stream = stream;
    const epic_result result = epic_allreduce_sum(ctx, &a);
    if (result != EPIC_OK) return result;
    cudaMemcpyAsync(args->data, memory, bytes, cudaMemcpyDeviceToHost, stream);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    return epic_check(ctx);
}

int main(void)
{
    const stops_way way = {.backend = BACKEND,
                           .processes = true,
                           .groups = 4,
                           .width = 1,
                           .most_ranks = 4,
                           .prepare = choose_gpu,
                           .sum = add_on_device};
    return stops_main(&way);
}
