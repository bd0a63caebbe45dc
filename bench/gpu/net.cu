/* SPDX-License-Identifier: Apache-2.0 */
/* Measures the net "local" (tests/gpu/net) without EPIC's kernels: two threads, each with a
 * GPU, put rows to each other at the same time. Also measures kernels that write pinned memory,
 * that read it, and that write poison back after reading, as EPIC's kernels do. Prints GB/s of
 * the slower thread, to compare with gpu_hosts. If there is only one GPU, both ranks share it.
 *   gpu_net [MB] */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "net/net.h"

enum { RANKS = 2, ROUNDS = 20, ROW = 14336 };

static const net_engine *engine;
static size_t total = 58u << 20;
static int gpus;
static pthread_barrier_t barrier;
static char cards[RANKS][NET_HANDLE_BYTES];
static double slowest[RANKS];

struct seat {
    int rank;
    bool on_gpu;
    void *inbox, *outbox;
    cudaStream_t stream;
    net *w;
};

static void need(bool good, const char *what)
{
    if (good) return;
    fprintf(stderr, "gpu_net: %s: %s\n", what, cudaGetErrorString(cudaGetLastError()));
    _exit(1);
}

static double now_us()
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void *memory(bool on_gpu)
{
    void *p = NULL;
    if (on_gpu)
        need(cudaMalloc(&p, total) == cudaSuccess, "memory of the GPU");
    else
        need(cudaHostAlloc(&p, total, cudaHostAllocMapped) == cudaSuccess, "pinned memory");
    return p;
}

static void open_seat(seat *s)
{
    char why[NET_WHY_BYTES];
    need(cudaSetDevice(s->rank % gpus) == cudaSuccess, "the GPU");
    need(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking) == cudaSuccess,
         "a stream");
    s->inbox = memory(s->on_gpu);
    s->outbox = memory(s->on_gpu);
    net_setup setup = {};
    setup.host = s->rank;
    setup.num_hosts = RANKS;
    setup.on_gpu = s->on_gpu;
    setup.inbox = s->inbox;
    setup.outbox = s->outbox;
    setup.inbox_bytes = setup.outbox_bytes = total;
    need(engine->open(&s->w, &setup, cards[s->rank], why) == EPIC_OK, why);
    pthread_barrier_wait(&barrier);
    need(engine->connect(s->w, cards, why) == EPIC_OK, why);
}

/* Puts rows from the whole memory, `bytes` per put. */
static void put_all(seat *s, size_t bytes, uint64_t *given)
{
    const int to = 1 - s->rank;
    for (size_t at = 0; at + bytes <= total; at += bytes, (*given)++)
        while (!engine->put(s->w, to, at, (char *)s->outbox + at, (uint32_t)bytes))
            engine->progress(s->w);
    while (!engine->is_done(s->w, to, *given)) engine->progress(s->w);
}

static void report(const seat *s, const char *what, double us, double bytes)
{
    slowest[s->rank] = us;
    pthread_barrier_wait(&barrier);
    const double most = slowest[0] > slowest[1] ? slowest[0] : slowest[1];
    if (s->rank == 0)
        printf("%s, %-24s %7.2f GB/s out of each\n", s->on_gpu ? "GPU memory " : "host memory",
               what, bytes / most / 1e3);
    pthread_barrier_wait(&barrier);
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void time_puts(seat *s, int rows, uint64_t *given)
{
    double us[ROUNDS];
    char what[64];
    const size_t bytes = (size_t)rows * ROW;
    for (int i = -2; i < ROUNDS; i++) {
        pthread_barrier_wait(&barrier);
        const double begin = now_us();
        put_all(s, bytes, given);
        if (i >= 0) us[i] = now_us() - begin;
    }
    qsort(us, ROUNDS, sizeof *us, by_size);
    snprintf(what, sizeof what, "puts of %d rows", rows);
    report(s, what, us[ROUNDS / 2], (double)(total / bytes * bytes));
}

static __global__ void write_all(uint4 *to, size_t count)
{
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x)
        to[i] = make_uint4(1, 2, 3, (unsigned)i);
}

static __global__ void read_all(const uint4 *from, size_t count, unsigned *sum)
{
    unsigned own = 0;
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        const uint4 q = from[i];
        own += q.x ^ q.y ^ q.z ^ q.w;
    }
    if (own == 1) *sum = own;
}

/* Each warp reads whole pieces of 2 KB, then writes poison back. */
static __global__ void take_all(uint4 *from, size_t count, unsigned *sum)
{
    const size_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const uint4 poison = make_uint4(~0u, ~0u, ~0u, ~0u);
    unsigned own = 0;
    for (size_t i = warp * 128 + threadIdx.x % 32; i + 96 < count;
         i += (size_t)gridDim.x * blockDim.x * 4) {
        uint4 q[4];
        for (int v = 0; v < 4; v++) q[v] = from[i + v * 32];
        for (int v = 0; v < 4; v++) own += q[v].x ^ q[v].y ^ q[v].z ^ q[v].w;
        for (int v = 0; v < 4; v++) from[i + v * 32] = poison;
    }
    if (own == 1) *sum = own;
}

enum { WRITE, READ, TAKE };

static void time_kernel(seat *s, int what)
{
    const bool writes = what == WRITE;
    void *seen = NULL;
    float ms = 0, best = 1e9f;
    unsigned *sum = NULL;
    cudaEvent_t begin, end;
    need(cudaHostGetDevicePointer(&seen, writes ? s->outbox : s->inbox, 0) == cudaSuccess &&
             cudaMalloc((void **)&sum, 4) == cudaSuccess &&
             cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess,
         "what a kernel needs");
    for (int i = 0; i < 5; i++) {
        pthread_barrier_wait(&barrier);
        cudaEventRecord(begin, s->stream);
        if (writes)
            write_all<<<64, 512, 0, s->stream>>>((uint4 *)seen, total / 16);
        else if (what == READ)
            read_all<<<64, 512, 0, s->stream>>>((const uint4 *)seen, total / 16, sum);
        else
            take_all<<<64, 512, 0, s->stream>>>((uint4 *)seen, total / 16, sum);
        cudaEventRecord(end, s->stream);
        need(cudaStreamSynchronize(s->stream) == cudaSuccess, "a kernel");
        cudaEventElapsedTime(&ms, begin, end);
        best = ms < best ? ms : best;
    }
    cudaFree(sum);
    const char *names[] = {"kernels write", "kernels read", "kernels read, poison back"};
    report(s, names[what], best * 1e3, (double)total);
}

static void *run(void *self)
{
    seat *s = (seat *)self;
    uint64_t given = 0;
    const int rows[] = {1, 4, 8, 16, 64};
    open_seat(s);
    for (int n : rows) time_puts(s, n, &given);
    for (int what = WRITE; what <= TAKE && !s->on_gpu; what++) time_kernel(s, what);
    pthread_barrier_wait(&barrier);
    engine->close(s->w);
    return NULL;
}

static void run_all(bool on_gpu)
{
    pthread_t threads[RANKS];
    seat seats[RANKS] = {};
    for (int q = 0; q < RANKS; q++) {
        seats[q].rank = q;
        seats[q].on_gpu = on_gpu;
        need(pthread_create(&threads[q], NULL, run, &seats[q]) == 0, "a thread");
    }
    for (int q = 0; q < RANKS; q++) pthread_join(threads[q], NULL);
}

int main(int argc, char **argv)
{
    if (argc > 1) total = (size_t)atoi(argv[1]) << 20;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
        printf("left out: gpu_net needs a GPU\n");
        return 0;
    }
    void *library = dlopen("libepic_local.so", RTLD_NOW);
    if (library) engine = (const net_engine *)dlsym(library, "epic_net_local");
    if (!engine) {
        fprintf(stderr, "gpu_net: libepic_local.so is not in LD_LIBRARY_PATH\n");
        return 1;
    }
    pthread_barrier_init(&barrier, NULL, RANKS);
    run_all(true);
    run_all(false);
    return 0;
}
