/* SPDX-License-Identifier: Apache-2.0 */
/* Tests which memory can become a window of a CUDA context: of cudaMalloc, of a pool, and of
 * cuMemCreate, between threads and between processes. Dispatch stores the same rows into
 * windows as into ordinary memory. When contexts have closed, no descriptor and no memory is
 * left.
 *
 *   usage: api_window_memory RANKS threads|processes     rank r uses GPU r % GPUs */
#include <cuda_runtime_api.h>
#include <dirent.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "copies.h"
#include "epic/epic.h"
#include "virtual_memory.h"

/* With more tokens than low-latency kernels support, dispatch stores rows into windows. */
enum { MAX_RANKS = 8, TOKENS = 1100, ROW = 256, CONTEXTS = 4, MOST_ALLOCATIONS = 250 };
/* CUDA 12.3 has added CU_MEM_HANDLE_TYPE_FABRIC */
enum { POSIX = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, FABRIC = 8 };
#define GRANULE ((int64_t)2 << 20)

static int num_ranks, num_gpus;
static bool is_threads;
static unsigned port;
static epic_bootstrap bootstraps[MAX_RANKS]; /* of threads */

/* Shared by all ranks, which may be processes. */
static struct shared {
    pthread_barrier_t all;
    char failures[MAX_RANKS][8][600]; /* first failures of each rank, which main() prints */
} * shared;

typedef struct seat {
    epic_context *ctx;
    int rank, failed; /* failed: number of expectations that were not met */
} seat;

static void record_failure(seat *s, int line, const char *condition)
{
    const int number = s->failed++;
    if (number >= 8) return;
    snprintf(shared->failures[s->rank][number], sizeof shared->failures[0][0],
             "line %d: rank %d: not so: %s (%s)", line, s->rank, condition,
             s->ctx ? epic_error(s->ctx) : "closed");
}

#define CHECK(condition, s)                                            \
    do {                                                               \
        if (!(condition)) record_failure((s), __LINE__, (#condition)); \
    } while (0)

static void print_failures(void)
{
    for (int r = 0; r < num_ranks; r++)
        for (int i = 0; i < 8; i++)
            if (shared->failures[r][i][0]) fprintf(stderr, "%s\n", shared->failures[r][i]);
}

/* A failure after which the peers would wait for this rank. */
static void need(bool good, const char *what, int rank)
{
    if (good) return;
    if (shared) print_failures();
    fprintf(stderr, "rank %d: %s\n", rank, what);
    _exit(1);
}

static virtual_memory make_virtual(const seat *s, int count, int types, int access)
{
    virtual_memory v;
    need(virtual_make(&v, count, 1, types, s->rank % num_gpus, access) == CUDA_SUCCESS,
         "cuMemCreate", s->rank);
    return v;
}

static void free_virtual(seat *s, virtual_memory *v)
{
    CHECK(virtual_free(v) == CUDA_SUCCESS, s);
}

static epic_result add_window(seat *s, void *data, int64_t bytes)
{
    const epic_window_args args = {.bytes = bytes, .data = data};
    epic_window_info window = {0};
    const epic_result result = epic_window_register(s->ctx, &args, &window);
    if (result == EPIC_OK)
        CHECK(window.data == data && window.bytes == bytes && window.is_direct, s);
    return result;
}

/* ------------------------------------------------------------------------------- rows ---- */

typedef struct memory { /* of one dispatch */
    int64_t slots, plan_bytes;
    void *plan, *ids, *tokens, *recv;
    cudaStream_t stream;
} memory;

static void *new_memory(const void *from, size_t bytes)
{
    void *memory = NULL;
    need(cudaMalloc(&memory, bytes) == cudaSuccess &&
             (from ? copy_in(memory, from, bytes) : fill_in(memory, 0, bytes)) == cudaSuccess,
         "memory", -1);
    return memory;
}

static const epic_layer layer = {.num_experts = 24, .top_k = 1};

static memory make_memory(const seat *s, const epic_config *config)
{
    static __thread int32_t ids[TOKENS];
    static __thread unsigned char tokens[TOKENS * ROW];
    memory m = {0};
    for (int i = 0; i < TOKENS; i++) ids[i] = (i * 7 + 5 * s->rank + i / 50) % 24;
    for (int i = 0; i < TOKENS * ROW; i++)
        tokens[i] = (unsigned char)(i * 31 + i / 251 + s->rank * 101);
    need(epic_capacity_bound(config, &layer, &m.slots) == EPIC_OK &&
             epic_plan_bytes(config, &layer, &m.plan_bytes) == EPIC_OK &&
             cudaStreamCreateWithFlags(&m.stream, cudaStreamNonBlocking) == cudaSuccess,
         "sizes", s->rank);
    m.plan = new_memory(NULL, (size_t)m.plan_bytes);
    m.ids = new_memory(ids, sizeof ids);
    m.tokens = new_memory(tokens, sizeof tokens);
    m.recv = new_memory(NULL, (size_t)(m.slots * ROW));
    return m;
}

static void free_memory(seat *s, memory *m)
{
    CHECK(cudaFree(m->plan) == cudaSuccess && cudaFree(m->ids) == cudaSuccess &&
              cudaFree(m->tokens) == cudaSuccess && cudaFree(m->recv) == cudaSuccess &&
              cudaStreamDestroy(m->stream) == cudaSuccess,
          s);
}

/* Makes a plan and dispatches the tokens to `recv`. */
static void dispatch(seat *s, const memory *m, void *recv)
{
    const epic_plan_args plan = {.call.stream = m->stream,
                                 .layer = &layer,
                                 .plan = m->plan,
                                 .plan_bytes = m->plan_bytes,
                                 .topk_idx = m->ids,
                                 .num_tokens = TOKENS,
                                 .capacity = m->slots};
    const epic_dispatch_args rows = {.tokens = {m->tokens, TOKENS, ROW},
                                     .recv = {recv, m->slots, ROW}};
    CHECK(epic_plan_dispatch(s->ctx, &plan, &rows) == EPIC_OK, s);
    CHECK(cudaStreamSynchronize(m->stream) == cudaSuccess, s);
    CHECK(epic_check(s->ctx) == EPIC_OK, s);
}

/* The rows in a window are those in ordinary memory. */
static void test_rows(seat *s, const memory *m, unsigned char *window)
{
    const size_t bytes = (size_t)(m->slots * ROW);
    unsigned char *expected = malloc(bytes), *found = malloc(bytes);
    need(expected && found, "host memory", s->rank);
    /* dispatch does not write the slots that the plan does not use */
    CHECK(fill_in(m->recv, 0xa5, bytes) == cudaSuccess, s);
    CHECK(fill_in(window, 0xa5, bytes) == cudaSuccess, s);
    dispatch(s, m, m->recv);
    dispatch(s, m, window);
    CHECK(cudaMemcpy(expected, m->recv, bytes, cudaMemcpyDeviceToHost) == cudaSuccess, s);
    CHECK(cudaMemcpy(found, window, bytes, cudaMemcpyDeviceToHost) == cudaSuccess, s);
    CHECK(!memcmp(expected, found, bytes), s);
    free(expected);
    free(found);
}

/* ---------------------------------------------------------------------------- refusals ---- */

/* All ranks return the error of rank 1, whose memory is `data`; the others pass good memory. */
static void check_refused(seat *s, void *good, void *data, int64_t bytes, const char *text)
{
    char expected[128];
    snprintf(expected, sizeof expected, "rank 1: %s", text);
    const epic_result result =
        s->rank == 1 ? add_window(s, data, bytes) : add_window(s, good, GRANULE);
    CHECK(result == EPIC_ENOTSUP && strstr(epic_error(s->ctx), expected), s);
    CHECK(epic_check(s->ctx) == EPIC_OK, s); /* the group is not broken */
}

/* Like check_refused(), but the memory is accepted if all ranks are in one process; with
 * `one_gpu`, only if they use one GPU. */
static void check_local(seat *s, void *good, void *data, bool one_gpu, const char *text)
{
    if (!is_threads || (one_gpu && num_gpus > 1 && num_ranks > 1))
        check_refused(s, good, data, GRANULE, text);
    else
        CHECK(add_window(s, s->rank == 1 ? data : good, GRANULE) == EPIC_OK, s);
}

static void test_refused(seat *s, void *good)
{
    virtual_memory no_access = make_virtual(s, 1, POSIX, 0);
    check_refused(s, good, no_access.base, GRANULE, "data is 0x");
    CHECK(strstr(epic_error(s->ctx), "cuMemSetAccess"), s);
    free_virtual(s, &no_access);

    virtual_memory two = make_virtual(s, 2, POSIX, 1);
    check_refused(s, good, two.base + 48, 2 * GRANULE,
                  "bytes is 4194304: must be at most 4194256");
    check_refused(s, good, two.base + two.bytes, GRANULE, "data is 0x"); /* not mapped */
    free_virtual(s, &two);

    void *memory = new_memory(NULL, 1000);
    check_refused(s, good, memory, 64 * GRANULE, "bytes is 134217728: must be at most ");
    CHECK(cudaFree(memory) == cudaSuccess, s);
}

/* Memory that cannot be exported to another process. Two windows are added to the context,
 * which must close before their memory is freed. */
static void test_local(seat *s, void *good, virtual_memory *private, void *of_pool)
{
    check_local(s, good, private->base, false, "data is 0x");
    if (!is_threads)
        CHECK(strstr(epic_error(s->ctx), "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"), s);
    check_local(s, good, of_pool, true, "data is 0x");
    if (!is_threads) CHECK(strstr(epic_error(s->ctx), "cudaMallocAsync"), s);
}

/* The largest number of allocations, and one more. */
static void test_most(seat *s, void *good, virtual_memory *many)
{
    const int64_t most = MOST_ALLOCATIONS * GRANULE;
    check_refused(s, good, many->base, most + 1,
                  "bytes is 524288001: must be at most 524288000");
    CHECK(add_window(s, many->base, most) == EPIC_OK, s);
}

/* Memory with handles of fabrics only. CUDA can make it with NVLink switches and IMEX. */
static void test_fabric(seat *s, virtual_memory *v)
{
    const CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = (CUmemAllocationHandleType)FABRIC,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = s->rank % num_gpus}};
    CUmemGenericAllocationHandle handle;
    if (cuMemCreate(&handle, (size_t)GRANULE, &properties, 0) != CUDA_SUCCESS) return;
    unsigned char exported[64]; /* CUmemFabricHandle */
    const bool works =
        cuMemExportToShareableHandle(exported, handle, properties.requestedHandleTypes, 0) ==
        CUDA_SUCCESS;
    CHECK(cuMemRelease(handle) == CUDA_SUCCESS, s);
    if (!works) return;
    *v = make_virtual(s, 2, FABRIC, 1);
    CHECK(add_window(s, v->base + 256, GRANULE) == EPIC_OK, s);
}

/* ---------------------------------------------------------------------------- contexts ---- */

/* A rank that counts has a descriptor itself, which another thread must not count. */
static int count_descriptors(void)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    int count = 0;
    pthread_mutex_lock(&mutex);
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder)) count++;
    if (folder) closedir(folder);
    pthread_mutex_unlock(&mutex);
    return count;
}

static void open_context(seat *s, const epic_config *config)
{
    const epic_tcp tcp = {
        .rank = s->rank, .num_ranks = num_ranks, .port = port, .timeout_ms = 30000};
    epic_bootstrap bootstrap;
    if (!is_threads)
        need(epic_bootstrap_tcp(&bootstrap, &tcp) == EPIC_OK, epic_error(NULL), s->rank);
    need(epic_open(&s->ctx, is_threads ? &bootstraps[s->rank] : &bootstrap, config) == EPIC_OK,
         epic_error(NULL), s->rank);
    if (!is_threads) epic_bootstrap_close(&bootstrap);
}

/* Opens a context, adds windows, and closes it. `index`: the number of contexts before. */
static void run_context(seat *s, int index)
{
    const epic_config config = {.max_tokens = TOKENS,
                                .max_row_bytes = ROW,
                                .num_ranks = (uint32_t)num_ranks,
                                .max_sms = 4,
                                .timeout_ms = 100000,
                                .backend = "p2p"};
    open_context(s, &config);
    memory m = make_memory(s, &config);
    virtual_memory one = make_virtual(s, 2, POSIX, 1), many = {0}, fabric = {0};
    virtual_memory private = make_virtual(s, 1, CU_MEM_HANDLE_TYPE_NONE, 1);
    void *allocation = new_memory(NULL, (size_t)(m.slots * ROW) + 4096), *of_pool = NULL;
    need(cudaMallocAsync(&of_pool, (size_t)GRANULE, m.stream) == cudaSuccess &&
             cudaStreamSynchronize(m.stream) == cudaSuccess,
         "cudaMallocAsync", s->rank);

    /* A window that crosses the border of two allocations, and ends at an odd byte. One rank
     * has memory of cudaMalloc, and another none. */
    unsigned char *window = one.base + GRANULE - 512 * (1 + s->rank);
    if (s->rank == 1) window = (unsigned char *)allocation + 256;
    CHECK(add_window(s, window, m.slots * ROW + 1) == EPIC_OK, s);
    CHECK(add_window(s, s->rank == 0 ? one.base : NULL, s->rank == 0 ? GRANULE : 0) == EPIC_OK,
          s);
    test_rows(s, &m, window);
    test_fabric(s, &fabric);
    if (num_ranks > 1) {
        test_refused(s, one.base);
        test_local(s, one.base, &private, of_pool);
    }
    if (num_ranks > 1 && index == 0) {
        many = make_virtual(s, MOST_ALLOCATIONS + 1, POSIX, 1);
        test_most(s, one.base, &many);
    }
    test_rows(s, &m, window);

    epic_close(s->ctx);
    s->ctx = NULL;
    free_virtual(s, &one);
    free_virtual(s, &private);
    if (many.base) free_virtual(s, &many);
    if (fabric.base) free_virtual(s, &fabric);
    free_memory(s, &m);
    CHECK(cudaFree(allocation) == cudaSuccess, s);
    CHECK(cudaFreeAsync(of_pool, NULL) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess,
          s);
}

static int run_rank(int rank)
{
    seat s = {.rank = rank};
    size_t free_bytes[CONTEXTS] = {0}, total;
    int descriptors[CONTEXTS];
    need(cudaSetDevice(rank % num_gpus) == cudaSuccess, "the GPU", rank);
    for (int i = 0; i < CONTEXTS; i++) {
        pthread_barrier_wait(&shared->all);
        run_context(&s, i);
        pthread_barrier_wait(&shared->all);
        descriptors[i] = count_descriptors();
        CHECK(cudaMemGetInfo(&free_bytes[i], &total) == cudaSuccess, &s);
        pthread_barrier_wait(&shared->all);
    }
    CHECK(descriptors[CONTEXTS - 1] == descriptors[1], &s);
    /* Free memory is not checked, because other programs may use the GPU. A context that leaks
     * a window keeps at least the memory of one allocation. */
    printf("rank %d: %d, then %d descriptors; %zu, then %zu bytes free\n", rank, descriptors[1],
           descriptors[CONTEXTS - 1], free_bytes[1], free_bytes[CONTEXTS - 1]);
    return s.failed != 0;
}

static void *run_thread(void *self)
{
    const epic_bootstrap *bootstrap = self;
    return run_rank(bootstrap->rank) ? self : NULL;
}

static int run_threads(void)
{
    pthread_t threads[MAX_RANKS];
    int failed = epic_bootstrap_threads(bootstraps, num_ranks, 20000) != EPIC_OK;
    for (int r = 0; r < num_ranks && !failed; r++)
        pthread_create(&threads[r], NULL, run_thread, &bootstraps[r]);
    for (int r = 0; r < num_ranks; r++) {
        void *result;
        pthread_join(threads[r], &result);
        failed |= result != NULL;
    }
    return failed;
}

/* The parent process makes no CUDA call before it forks. */
static int run_processes(void)
{
    int failed = 0, status;
    for (int r = 0; r < num_ranks; r++)
        if (fork() == 0) {
            if (cudaGetDeviceCount(&num_gpus) != cudaSuccess || !num_gpus) _exit(77);
            const int result = run_rank(r);
            fflush(NULL);
            _exit(result);
        }
    while (wait(&status) > 0) failed |= status != 0;
    return failed;
}

int main(int argc, char **argv)
{
    pthread_barrierattr_t attributes;
    if (argc < 3) return 2;
    num_ranks = atoi(argv[1]);
    is_threads = !strcmp(argv[2], "threads");
    if (num_ranks < 1 || num_ranks > MAX_RANKS) return 2;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    port = 20000 + (unsigned)getpid() % 20000;
    void *memory =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 1;
    shared = memory;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->all, &attributes, (unsigned)num_ranks);
    if (is_threads && (cudaGetDeviceCount(&num_gpus) != cudaSuccess || !num_gpus)) return 77;
    const int failed = is_threads ? run_threads() : run_processes();
    printf("memory of windows, %d ranks, %s: %s\n", num_ranks, argv[2],
           failed ? "WRONG" : "good");
    fflush(stdout);
    print_failures();
    return failed;
}
