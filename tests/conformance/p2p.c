/* SPDX-License-Identifier: Apache-2.0 */
/* The suite on the backend p2p: ranks are threads, assigned to the GPUs in turn. With
 * EPIC_HOST=%r and a net it runs on the backend hosts.
 *   p2p [RANKS ...]
 * With SEATS, it runs the suite in groups with vacant seats instead. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "suite.h"
#include "suite_memory.h"

#ifndef BACKEND
#define BACKEND "p2p"
#endif
#ifdef SEATS
#include "context/context.h"
#endif
#define ARENA_BYTES (96 << 20) /* memory for all arrays of a rank's call */

/* A rank's memory is allocated once, because an allocation waits for running kernels, and
 * kernels wait for other ranks. */
static _Thread_local struct {
    unsigned char *bytes;
    int64_t used, count;
    cudaStream_t stream;
} arena;

static void need(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, BACKEND ": %s: %s\n", what, cudaGetErrorString(error));
    _Exit(1); /* otherwise peers would wait for this rank */
}

static int num_gpus(void)
{
    int count = 0;
    need(cudaGetDeviceCount(&count), "no GPU");
    return count;
}

/* Makes a stream and runs work on it, which ranks that share a GPU need
 * (docs/internals/cuda.md). */
static void open_arena(const epic_bootstrap *bootstrap)
{
    need(cudaSetDevice(bootstrap->rank % num_gpus()), "the GPU");
    need(cudaMalloc((void **)&arena.bytes, ARENA_BYTES), "memory");
    need(cudaStreamCreateWithFlags(&arena.stream, cudaStreamNonBlocking), "a stream");
    need(cudaMemsetAsync(arena.bytes, 0, 64, arena.stream), "the stream");
    need(cudaStreamSynchronize(arena.stream), "the stream");
    arena.used = arena.count = 0;
}

static void close_arena(void)
{
    need(cudaStreamDestroy(arena.stream), "the stream");
    need(cudaFree(arena.bytes), "memory");
}

/* Allocates from the arena, which is empty again when everything was released. The address
 * of every third array is not a multiple of 64. */
static void *allocate(int64_t bytes)
{
    unsigned char *at = arena.bytes + arena.used + 16 * (arena.count % 3);
    arena.used += (bytes + 32 + 255) / 256 * 256;
    arena.count++;
    if (arena.used > ARENA_BYTES) need(cudaErrorMemoryAllocation, "the arena");
    return at;
}

static void release(void *memory)
{
    (void)memory;
    if (--arena.count == 0) arena.used = 0;
}

static void synchronise(void)
{
    need(cudaStreamSynchronize(arena.stream), "a call");
}

/* Copies. The stream must be idle: a copy that waited for a kernel would keep other ranks
 * from launching theirs. */
static void copy(void *to, const void *from, int64_t bytes)
{
    need(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, arena.stream), "a copy");
    synchronise();
}

static epic_stream stream(void)
{
    return arena.stream;
}

/* Two contexts per rank share three quarters of a GPU. */
static uint32_t max_sms(int num_ranks)
{
    int sms = 0;
    const int sharers = (num_ranks + num_gpus() - 1) / num_gpus();
    need(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "the GPU");
    const int share = sms * 3 / 4 / sharers / 2;
    return share > 1 ? (uint32_t)share : 1;
}

static const suite_memory gpu = {.open = open_arena,
                                 .close = close_arena,
                                 .allocate = allocate,
                                 .release = release,
                                 .copy = copy,
                                 .synchronise = synchronise,
                                 .stream = stream,
                                 .max_sms = max_sms,
                                 .device = true,
                                 .lacks = SUITE_F64 | SUITE_EXPERTS | SUITE_BY_K,
                                 .most_experts = 8192};

#ifdef SEATS
static void set_members(epic_context *ctx, const world_seats *seats)
{
    seat_set members = {{0}};
    for (int m = 0; m < seats->num_members; m++) seat_set_add(&members, seats->of[m]);
    CHECK_SAY(context_set_members(ctx, &members) == EPIC_OK, "%s", epic_error(ctx));
}

/* The oracle knows only the members. So the results must be those of a group that has only the
 * members. */
static int run_suite(int argc, char **argv)
{
    static const world_seats groups[] = {{3, 2, {0, 2}},       {4, 3, {1, 2, 3}},
                                         {4, 2, {1, 2}},       {4, 1, {2}},
                                         {8, 4, {1, 2, 3, 6}}, {9, 4, {1, 3, 4, 8}}};
    check_begin();
    printf("seed %llu\n", (unsigned long long)run_seed());
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++)
        if (argc == 1 || atoi(argv[1]) == groups[g].num_seats)
            suite_run_vacant(BACKEND, &groups[g], set_members);
    return check_end();
}
#else
static int run_suite(int argc, char **argv)
{
    return suite_main(BACKEND, (const int[]){1, 2, 3, 4, 8, 0}, argc, argv);
}
#endif

int main(int argc, char **argv)
{
    int count = 0;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32",
           0); /* so that no kernel waits for that of another rank */
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0)
        return check_skip("no GPU can be used here");
    suite_there = &gpu;
    return run_suite(argc, argv);
}
