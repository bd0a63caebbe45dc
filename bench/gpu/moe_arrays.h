/* SPDX-License-Identifier: Apache-2.0 */
/* Arrays of the benchmark moe.c on the GPU. */
#ifndef BENCH_MOE_ARRAYS_H
#define BENCH_MOE_ARRAYS_H

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "copies.h"
#include "epic/epic.h"

/* Ends the program unless `good`. */
static inline void must(bool good, const char *what, const epic_context *ctx)
{
    if (good) return;
    fprintf(stderr, "gpu_moe: %s: %s\n", what, epic_error(ctx));
    _exit(1);
}

/* Arrays on the GPU, which are freed together. */
typedef struct arrays {
    void *list[64];
    int num;
} arrays;

/* Allocates an array on the GPU. */
static inline void *bytes_on(arrays *a, int64_t bytes)
{
    void *p = NULL;
    must(cudaMalloc(&p, (size_t)bytes) == cudaSuccess, "memory of the GPU", NULL);
    a->list[a->num++] = p;
    return p;
}

/* Returns random numbers on the GPU. A short sequence repeats, because the GPU's clock depends
 * on the values. */
static inline void *numbers_on(arrays *a, int64_t count, uint32_t type, float size)
{
    enum { PIECE = 1 << 20 };
    const int64_t element = type == EPIC_F32 ? 4 : type == EPIC_E4M3 ? 1 : 2;
    const int64_t bytes = count * element;
    char *p = bytes_on(a, bytes), *piece = malloc(PIECE * 4);
    static _Atomic uint32_t seed = 1;
    uint32_t state = seed++ * 2654435761u | 1;
    for (int i = 0; i < PIECE; i++) {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        const float x = ((float)(state >> 8) * 0x1p-23f - 1) * size;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (type == EPIC_F32)
            ((float *)(void *)piece)[i] = x;
        else if (type == EPIC_E4M3)
            piece[i] = (char)(bits >> 18 & 0xbf); /* so that the value is below 2 */
        else
            ((uint16_t *)(void *)piece)[i] = (uint16_t)(bits >> 16);
    }
    for (int64_t done = 0; done < bytes; done += PIECE * element) {
        const int64_t left = bytes - done,
                      now = left < PIECE * element ? left : PIECE * element;
        must(copy_in(p + done, piece, (size_t)now) == cudaSuccess, "a copy", NULL);
    }
    free(piece);
    return p;
}

#endif
