/* SPDX-License-Identifier: Apache-2.0 */
/* One step of a Mixture-of-Experts layer on a GPU.  Every call enqueues work on the stream and
 * returns, and the data stay on the device.
 *
 *     build/examples/step_cuda
 *
 * With several ranks, each calls cudaSetDevice first; examples/step.c shows how to start them.
 * epic_check reports invalid data that kernels found, after a synchronization. */
#include <cuda_runtime_api.h>
#include <stdio.h>

#include "epic/epic.h"

enum { TOKENS = 4, TOP_K = 2, EXPERTS = 8, HIDDEN = 16, ROW = HIDDEN * sizeof(float) };

int main(void)
{
    struct {
        float tokens[TOKENS][HIDDEN], weights[TOKENS][TOP_K], out[TOKENS][HIDDEN];
        int32_t chosen[TOKENS][TOP_K]; /* experts, as a router chooses them */
    } host, *gpu;                      /* the same arrays on the host and on the device */
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < HIDDEN; h++) host.tokens[t][h] = (float)(t + 1);
        for (int k = 0; k < TOP_K; k++) {
            host.chosen[t][k] = (t + 3 * k) % EXPERTS;
            host.weights[t][k] = k ? 0.5f : 0.75f;
        }
    }
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaMalloc((void **)&gpu, sizeof host);
    cudaMemcpyAsync(gpu, &host, sizeof host, cudaMemcpyDefault, stream);
    epic_dispatcher *step;
    epic_slots slots;
    epic_dispatcher_config config = {.max_tokens = TOKENS,
                                     .num_experts = EXPERTS,
                                     .top_k = TOP_K,
                                     .hidden = HIDDEN,
                                     .type = EPIC_F32};
    config.gradients = 1; /* results get a buffer separate from rows */
    config.backend = "gpu", config.stream = stream;
    const int failed =
        epic_dispatcher_open(&step, &config) ||
        epic_dispatcher_dispatch(step, gpu->tokens, *gpu->chosen, *gpu->weights, TOKENS,
                                 &slots) ||
        cudaMemcpyAsync(slots.results, slots.rows, slots.capacity * ROW, cudaMemcpyDefault,
                        stream) || /* the experts: each returns its rows */
        epic_dispatcher_combine(step, gpu->out) ||
        cudaMemcpyAsync(&host, gpu, sizeof host, cudaMemcpyDefault, stream) ||
        cudaStreamSynchronize(stream);
    if (failed) fprintf(stderr, "%s\n", epic_error(NULL));
    for (int t = 0; !failed && t < TOKENS; t++)
        printf("token %d: %g sent, %g returned\n", t, host.tokens[t][0], host.out[t][0]);
    epic_dispatcher_close(step);
    return failed;
}
