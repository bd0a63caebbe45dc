/* SPDX-License-Identifier: Apache-2.0 */
/* Random numbers of any type on the host, and arrays that exist on host and device. */
#ifndef EPIC_TEST_NUMBERS_H
#define EPIC_TEST_NUMBERS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "copies.h"
#include "epic/epic.h"
#include "host/convert.h"

static uint64_t random_state = 1;

static inline uint32_t random_below(uint32_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)((random_state >> 33) * n >> 31);
}

static inline double random_number(double size)
{
    return ((double)random_below(1u << 24) / (1 << 23) - 1) * size;
}

static inline int64_t bytes_of(uint32_t type)
{
    return type == EPIC_F64 ? 8 : type == EPIC_F32 ? 4 : type == EPIC_E4M3 ? 1 : 2;
}

static inline double get_number(const void *data, uint32_t type, int64_t i)
{
    if (type == EPIC_F64) return ((const double *)data)[i];
    if (type == EPIC_F32) return ((const float *)data)[i];
    if (type == EPIC_E4M3) return float_of_e4m3(((const uint8_t *)data)[i]);
    const uint16_t bits = ((const uint16_t *)data)[i];
    return type == EPIC_BF16 ? float_of_bf16(bits) : float_of_f16(bits);
}

static inline void put_number(void *data, uint32_t type, int64_t i, double x)
{
    if (type == EPIC_F64)
        ((double *)data)[i] = x;
    else if (type == EPIC_F32)
        ((float *)data)[i] = (float)x;
    else if (type == EPIC_E4M3)
        ((uint8_t *)data)[i] = e4m3_of_float((float)x);
    else
        ((uint16_t *)data)[i] =
            type == EPIC_BF16 ? bf16_of_float((float)x) : f16_of_float((float)x);
}

/* Rounds x to a value of that type. */
static inline double round_to_type(double x, uint32_t type)
{
    double held;
    put_number(&held, type, 0, x);
    return get_number(&held, type, 0);
}

/* An array in float64, on the device, and as copied back from the device. */
typedef struct both {
    double *truth; /* values of an input in float64 */
    void *host, *device;
    uint32_t type;
    int64_t count;
    size_t bytes;
} both;

static inline void must_succeed(bool good, const char *what)
{
    if (good) return;
    fprintf(stderr, "%s: %s, %s\n", what, epic_error(NULL),
            cudaGetErrorString(cudaGetLastError()));
    exit(1);
}

/* Makes an array of poison: every byte is 0xff, which is a NaN in every type. */
static inline both make_both(uint32_t type, int64_t count)
{
    both b = {.type = type, .count = count, .bytes = (size_t)(count * bytes_of(type)) + 16};
    b.truth = calloc((size_t)count + 1, sizeof *b.truth);
    b.host = malloc(b.bytes);
    must_succeed(b.truth && b.host && cudaMalloc(&b.device, b.bytes) == cudaSuccess, "memory");
    memset(b.host, 0xff, b.bytes);
    return b;
}

static inline void set_number(both *b, int64_t i, double x)
{
    put_number(b->host, b->type, i, x);
    b->truth[i] = get_number(b->host, b->type, i);
}

static inline both random_both(uint32_t type, int64_t count, double size)
{
    both b = make_both(type, count);
    for (int64_t i = 0; i < count; i++) set_number(&b, i, random_number(size));
    return b;
}

static inline void push_to_device(const both *b)
{
    must_succeed(copy_in(b->device, b->host, b->bytes) == cudaSuccess, "a copy to the device");
}

/* Like random_both(), but also copies the numbers to the device. */
static inline both pushed_both(uint32_t type, int64_t count, double size)
{
    both b = random_both(type, count, size);
    push_to_device(&b);
    return b;
}

static inline void pull_from_device(const both *b)
{
    must_succeed(cudaMemcpy(b->host, b->device, b->bytes, cudaMemcpyDeviceToHost) ==
                     cudaSuccess,
                 "a copy from the device");
}

static inline void free_both(both *b)
{
    free(b->truth);
    free(b->host);
    cudaFree(b->device);
    *b = (both){0};
}

/* Returns whether the element is unchanged since make_both(). */
static inline bool is_poison(const both *b, int64_t i)
{
    static const uint64_t ones = UINT64_MAX;
    const size_t size = (size_t)bytes_of(b->type);
    return memcmp((const char *)b->host + (size_t)i * size, &ones, size) == 0;
}

#endif
