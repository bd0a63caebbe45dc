/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that the backends `p2p` and `hosts` share. They create the part of a group that
 * needs no peer, read the waiting times, and allocate device memory. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/p2p/p2p.h"
#include "base/error.h"
#include "base/recorder.h"
#include "cuda/experts/grouped.h"

/* minimum size in bytes of the memory that is allocated for a heap */
#define LEAST_HEAP (4 << 20)
#define MOST_TOKENS (1 << 20) /* largest config.max_tokens */
#define MOST_SMS 65536        /* larger than the number of SMs of any device */
/* Shared memory that a thread block of Hopper may use. The matrix products of experts use 225
 * KB, and the planner up to 209 KB, if choices are dropped or experts have replicas. */
#define LEAST_SHARED_BYTES (227 << 10)

p2p_heap p2p_heap_for(const epic_config *config)
{
    /* EPIC_LEAST_STAGING requests the smallest staging memory. p2p_heap_of() makes room for at
     * least two rows, even if its argument is 1 byte. */
    const bool least = config->staging_bytes == EPIC_LEAST_STAGING;
    return p2p_heap_of(config->num_ranks, config->max_tokens, config->max_row_bytes,
                       least ? 1 : config->staging_bytes,
                       config->max_top_k ? config->max_top_k : DEVICE_MAX_TOP_K);
}

int64_t p2p_staging_bytes(const p2p_heap *at, int64_t num_ranks)
{
    return 2 * (num_ranks - 1) * at->source_bytes;
}

int64_t p2p_heap_bytes(const p2p_heap *at)
{
    return at->bytes > LEAST_HEAP ? at->bytes : LEAST_HEAP;
}

bool p2p_any_device(char *why)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return true;
    (void)cudaGetLastError();
    snprintf(why, 256, "no CUDA device can be used here");
    return false;
}

epic_group *p2p_group_new(const epic_join *join, const p2p_hooks *hooks)
{
    epic_group *g = calloc(1, sizeof *g);
    if (g) g->beats = calloc(1, sizeof *g->beats);
    if (!g || !g->beats) {
        free(g);
        return NULL;
    }
    pthread_mutex_init(&g->waits_lock, NULL);
    g->hooks = hooks;
    g->sm_budget = join->sm_budget;
    g->rank = join->bootstrap->rank;
    g->num_ranks = join->bootstrap->num_ranks;
    g->config = *join->config;
    g->config.num_ranks = (uint32_t)g->num_ranks;
    memcpy(g->peers, join->peers, (size_t)g->num_ranks * sizeof *g->peers);
    g->self.at = p2p_heap_for(&g->config);
    g->lowlat_tokens = P2P_LOWLAT_TOKENS;
    g->self.group_id = join->group_id;
    g->self.max_tokens = g->config.max_tokens;
    g->self.rank = g->rank;
    g->self.num_ranks = g->num_ranks;
    return g;
}

typedef struct pinned_memory {
    p2p_status status; /* kernels report failures and data errors here */
    /* buffers for small copies between host and device */
    uint64_t words[16 + DEVICE_MAX_RANKS];
    p2p_mailbox_words mailbox_words[DEVICE_MAX_RANKS];
    uint64_t gone[DEVICE_MAX_RANKS];
} pinned_memory;

static epic_result make_status(epic_group *g)
{
    void *device = NULL;
    pinned_memory *memory;
    TRY(p2p_cuda(cudaHostAlloc((void **)&memory, sizeof *memory, cudaHostAllocMapped),
                 "host memory"));
    memset(memory, 0, sizeof *memory);
    g->status = &memory->status;
    g->word = memory->words;
    g->mailbox.words = memory->mailbox_words;
    g->mailbox.gone = memory->gone;
    TRY(p2p_cuda(cudaHostGetDevicePointer(&device, g->status, 0), "host memory"));
    g->self.status = device;
    return EPIC_OK;
}

epic_result p2p_check_config(const epic_config *config)
{
    if (config->num_ranks > DEVICE_MAX_RANKS)
        return epic_fail(
            EPIC_ENOTSUP,
            "num_ranks is %u: must be at most %d in backend %s%s; open smaller groups",
            config->num_ranks, DEVICE_MAX_RANKS, HOSTS ? "hosts" : "p2p",
            config->flags & EPIC_CAN_REGROUP ? " with EPIC_CAN_REGROUP" : "");
    if (config->max_tokens > MOST_TOKENS)
        return epic_fail(EPIC_ENOTSUP,
                         "config.max_tokens is %lld: must be at most %d in CUDA contexts; pass "
                         "the tokens in several calls",
                         (long long)config->max_tokens, MOST_TOKENS);
    return EPIC_OK;
}

epic_result p2p_group_device(epic_group *g, p2p_gpu *gpu)
{
    struct cudaDeviceProp properties;
    TRY(p2p_cuda(cudaGetDevice(&g->device), "the current device"));
    TRY(p2p_cuda(cudaGetDeviceProperties(&properties, g->device), "the current device"));
    if (properties.sharedMemPerBlockOptin < LEAST_SHARED_BYTES)
        return epic_fail(
            EPIC_ENOTSUP,
            "device %d (%s): a thread block has at most %zu bytes of shared memory: "
            "must have at least %d, as on H100, H200 and B200; use such a GPU",
            g->device, properties.name, properties.sharedMemPerBlockOptin, LEAST_SHARED_BYTES);
    TRY(p2p_cuda(cudaStreamCreateWithFlags(&g->side, cudaStreamNonBlocking), "a stream"));
    g->bulk = properties.major >= 9;
    memcpy(gpu->device, properties.uuid.bytes, sizeof gpu->device);
    gpu->device_sms = g->device_sms = properties.multiProcessorCount;
    gpu->taken_sms = p2p_budget_taken(g);
    return make_status(g);
}

bool p2p_gpu_fits(const p2p_gpu *gpu)
{
    return gpu->taken_sms >= 0 && gpu->taken_sms <= MOST_SMS;
}

/* Enqueues a memset that sets the bytes [begin, end) of a heap to `value`. */
static epic_result fill_heap(epic_group *g, uint8_t *heap, int64_t begin, int64_t end,
                             int value)
{
    return p2p_cuda(cudaMemsetAsync(heap + begin, value, (size_t)(end - begin), g->side),
                    "clearing the heap");
}

epic_result p2p_heap_clear(epic_group *g, uint8_t *heap)
{
    const p2p_heap *at = &g->self.at;
    const int64_t zeros = p2p_heap_poison(at);
    TRY(fill_heap(g, heap, 0, zeros, 0));
    TRY(fill_heap(g, heap, zeros, at->bytes, 0xff));
    return p2p_cuda(cudaStreamSynchronize(g->side), "clearing the heap");
}

epic_result p2p_heap_renew(epic_group *g)
{
    const p2p_heap *at = &g->self.at;
    uint8_t *heap = g->self.heap[g->rank];
    const int64_t zeros = p2p_heap_poison(at);
    const int64_t times = at->control + (int64_t)offsetof(p2p_control, progress_ns);
    TRY(fill_heap(g, heap, 0, at->gone, 0));
    TRY(fill_heap(g, heap, at->waits, times, 0));
    TRY(fill_heap(g, heap, at->faults, zeros, 0));
    TRY(fill_heap(g, heap, zeros, at->bytes, 0xff));
    return p2p_cuda(cudaStreamSynchronize(g->side), "clearing the heap");
}

void p2p_group_free(epic_group *g)
{
    p2p_budget_give_back(g);
    if (g->status) (void)cudaFreeHost(g->status);
    if (g->side) (void)cudaStreamDestroy(g->side);
    (void)cudaGetLastError();
    free(g->beats);
    pthread_mutex_destroy(&g->waits_lock);
    free(g);
}

uint32_t p2p_epoch(epic_group *g)
{
    uint32_t *epoch = (uint32_t *)(void *)(g->word + 8);
    (void)cudaMemcpyAsync(epoch, g->self.heap[g->rank] + g->self.at.control, sizeof *epoch,
                          cudaMemcpyDefault, g->side);
    (void)cudaStreamSynchronize(g->side);
    return *epoch;
}

const uint64_t *p2p_gone(epic_group *g)
{
    uint64_t *gone = g->word + 16;
    const cudaError_t error =
        cudaMemcpyAsync(gone, p2p_inbox(g) + g->self.at.gone, DEVICE_MAX_RANKS * sizeof *gone,
                        cudaMemcpyDefault, g->side);
    return error == cudaSuccess && cudaStreamSynchronize(g->side) == cudaSuccess ? gone : NULL;
}

/* Copies the waiting times of this rank from the device to g->waits. Another thread may capture
 * a CUDA graph at the same time, so this function sets the relaxed capture mode, which allows
 * the copy. */
static epic_result copy_waits(epic_group *g)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    const uint8_t *from =
        g->self.heap[g->rank] + g->self.at.control + offsetof(p2p_control, waits);
    TRY(p2p_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "the waiting times"));
    cudaError_t error =
        cudaMemcpyAsync(&g->waits, from, sizeof g->waits, cudaMemcpyDefault, g->side);
    if (error == cudaSuccess) error = cudaStreamSynchronize(g->side);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return p2p_cuda(error, "copying the waiting times");
}

/* Implements epic_ops.read_waits. Limits each copied `alone` to the copied `wait`: kernels may
 * add to the times during the copy, so `alone` could be larger than `wait`. */
epic_result p2p_read_waits(epic_group *g, uint32_t first, uint32_t last, epic_wait_info *out)
{
    pthread_mutex_lock(&g->waits_lock);
    const epic_result result = copy_waits(g);
    for (uint32_t i = first; i <= last && result == EPIC_OK; i++)
        for (int q = 0; q < g->num_ranks; q++) {
            const p2p_wait_time *time = &g->waits.times[i][q];
            out[q].num_operations += g->waits.num_operations[i];
            out[q].wait_ns += time->wait * 1024;
            out[q].alone_ns += 1024 * (time->alone < time->wait ? time->alone : time->wait);
        }
    pthread_mutex_unlock(&g->waits_lock);
    return result;
}

void p2p_copy_waits(recorder_page *page, const p2p_status *status)
{
    for (uint32_t i = 0; page && i < P2P_OPERATIONS; i++) {
        atomic_store_explicit(&page->num_operations[i],
                              __atomic_load_n(&status->num_operations[i], __ATOMIC_RELAXED),
                              memory_order_relaxed);
        for (int32_t q = 0; q < page->num_ranks; q++) {
            const p2p_wait_time *time = &status->waits[i][q];
            recorder_set_wait(page, i, q, 1024 * __atomic_load_n(&time->wait, __ATOMIC_RELAXED),
                              1024 * __atomic_load_n(&time->alone, __ATOMIC_RELAXED));
        }
    }
}

void p2p_record_waits(epic_group *g, recorder_page *page)
{
    __atomic_store_n(&g->beats->page, page, __ATOMIC_RELEASE);
}

bool p2p_fetch(void *to, const void *from, size_t bytes, bool *good)
{
    struct cudaPointerAttributes where;
    const bool is_on_device =
        cudaPointerGetAttributes(&where, from) == cudaSuccess &&
        (where.type == cudaMemoryTypeDevice || where.type == cudaMemoryTypeManaged);
    if (is_on_device)
        *good = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, cudaStreamPerThread) ==
                    cudaSuccess &&
                cudaStreamSynchronize(cudaStreamPerThread) == cudaSuccess;
    (void)cudaGetLastError();
    return is_on_device;
}

/* Allocates memory on the group's device (p2p.h), and restores the current CUDA device of the
 * calling thread. */
void *p2p_allocate(epic_group *g, size_t bytes)
{
    int before;
    void *memory = NULL;
    if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(g->device) != cudaSuccess)
        return NULL;
    if (cudaMalloc(&memory, bytes) != cudaSuccess) memory = NULL;
    (void)cudaGetLastError();
    (void)cudaSetDevice(before);
    return memory;
}

/* Frees memory that p2p_allocate() returned. cudaFree() first waits until the kernels that use
 * the memory have ended. */
void p2p_release(epic_group *g, void *memory)
{
    (void)g;
    (void)cudaFree(memory);
}

/* Writes the description of a GPU for epic-info. Returns its length, or 0 on an error. */
static int describe_gpu(char *to, size_t size, int device)
{
    struct cudaDeviceProp gpu;
    if (cudaGetDeviceProperties(&gpu, device) != cudaSuccess) return 0;
    const int sms = gpu.multiProcessorCount;
    return snprintf(to, size,
                    "%sGPU %d: %s, sm_%d%d, %d SMs, of which a context uses up to %d by "
                    "itself, experts on %s",
                    device ? "; " : "", device, gpu.name, gpu.major, gpu.minor, sms,
                    sms < P2P_DEFAULT_SMS ? sms : P2P_DEFAULT_SMS,
                    p2p_gemm_is_built(gpu.major, gpu.minor) ? "tensor cores" : "plain kernels");
}

void p2p_describe(char *to, size_t size)
{
    int count = 0, used = 0;
    *to = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0)
        snprintf(to, size, "no CUDA device can be used here");
    for (int i = 0; i < count && used < (int)size; i++)
        used += describe_gpu(to + used, size - (size_t)used, i);
    (void)cudaGetLastError();
}
