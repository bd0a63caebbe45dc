/* SPDX-License-Identifier: Apache-2.0 */
/* A float32 product of the caller, for tests. It waits for the stream, which a real product
 * should not do, and multiplies on the host. */
#ifndef EPIC_TEST_OWN_PRODUCT_H
#define EPIC_TEST_OWN_PRODUCT_H

#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "epic/epic.h"

/* Copies on the stream of the call, because other threads may be in other calls. It waits for
 * the stream before it copies. Otherwise a copy to pageable memory that waits for a kernel
 * could keep another thread of this process from launching the kernel for which the first
 * kernel waits. */
static inline void *own_copy(const void *device, int64_t bytes, cudaStream_t stream)
{
    void *host = malloc((size_t)bytes + 1);
    if (host && !cudaStreamSynchronize(stream) &&
        !cudaMemcpyAsync(host, device, (size_t)bytes, cudaMemcpyDeviceToHost, stream) &&
        !cudaStreamSynchronize(stream))
        return host;
    fprintf(stderr, "a copy of %lld bytes\n", (long long)bytes);
    exit(1);
}

/* e: the expert; row: the first row of its slab; count: its tokens. */
static inline double own_sum(const epic_gemm_args *a, const float *left, const float *right,
                             int64_t e, int64_t row, int64_t count, int64_t line,
                             int64_t column)
{
    const int64_t k = a->k, n = a->n;
    double sum = 0;
    if (a->pass == EPIC_GEMM_WEIGHT)
        for (int64_t r = row; r < row + count; r++)
            sum += (double)left[r * k + line] * right[r * n + column];
    else if (a->pass == EPIC_GEMM_FORWARD)
        for (int64_t i = 0; i < k; i++)
            sum += (double)left[(row + line) * k + i] * right[(e * k + i) * n + column];
    else
        for (int64_t i = 0; i < n; i++)
            sum += (double)left[(row + line) * n + i] * right[(e * k + column) * n + i];
    return sum;
}

/* The multiply function of an epic_gemm; self is an atomic_int that counts calls. */
static inline epic_result own_multiply(void *self, const epic_gemm_args *a)
{
    const bool weight = a->pass == EPIC_GEMM_WEIGHT, input = a->pass == EPIC_GEMM_INPUT;
    const int64_t slots = a->num_slots, matrices = a->num_experts * a->k * a->n;
    const int64_t columns = input ? a->k : a->n;
    const int64_t bytes = (weight ? matrices : slots * columns) * 4;
    cudaStream_t stream = a->call.stream;
    int32_t *rows = own_copy(a->expert_rows, a->num_experts * 4, stream);
    int32_t *tokens = own_copy(a->expert_tokens, a->num_experts * 4, stream);
    float *left = own_copy(a->a, slots * (input ? a->n : a->k) * 4, stream);
    float *right = own_copy(a->b, (weight ? slots * a->n : matrices) * 4, stream);
    float *out = own_copy(a->out, bytes, stream);
    for (int64_t e = 0, row = 0; e < a->num_experts; row += rows[e++])
        for (int64_t line = 0; line < (weight ? a->k : rows[e]); line++)
            for (int64_t c = 0; c < columns; c++) {
                const bool there = weight || line < tokens[e];
                const double sum =
                    there ? own_sum(a, left, right, e, row, tokens[e], line, c) : 0;
                float *to = out + (weight ? e * a->k + line : row + line) * columns + c;
                *to = (float)(a->flags & EPIC_ACCUMULATE ? *to + sum : sum);
            }
    const bool good =
        !cudaMemcpyAsync(a->out, out, (size_t)bytes, cudaMemcpyHostToDevice, stream) &&
        !cudaStreamSynchronize(stream);
    void *all[] = {rows, tokens, left, right, out};
    for (int i = 0; i < 5; i++) free(all[i]);
    atomic_fetch_add((atomic_int *)self, 1);
    return good ? EPIC_OK : EPIC_EDEVICE;
}

#endif
