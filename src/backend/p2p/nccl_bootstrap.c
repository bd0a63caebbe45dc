/* SPDX-License-Identifier: Apache-2.0 */
/* Creates a bootstrap from an NCCL communicator that the caller owns.
 *
 * A gather sends its bytes in chunks, with one ncclAllGather per chunk. The chunks have a fixed
 * size, because NCCL's behaviour is undefined if ranks pass different sizes. The header of a
 * chunk shows two errors: the ranks passed different sizes to the gather, or NCCL matched the
 * call with another all-gather of the caller.
 *
 * ncclAllGather itself may wait for a slow rank, because NCCL opens connections at the first
 * collective. The wait for the stream has no deadline either. So a separate thread makes these
 * calls. The caller's thread waits for the result within its time limit and polls
 * ncclCommGetAsyncError. If the limit passes, the thread continues to wait, and frees the state
 * of the bootstrap when NCCL returns, for example because the caller aborts the communicator.
 *
 * Chunks are in pinned host memory, because a copy to pageable memory would make the thread
 * wait inside CUDA. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/p2p/nccl.h"
#include "backend/p2p/p2p.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/time_limit.h"

#define CHUNK_BYTES 4096
/* the bytes "epicnccl", which mark a chunk of a bootstrap */
#define CHUNK_MAGIC 0x6c63636e63697065u
#define NAP_NS 1000000

typedef struct chunk {
    uint64_t magic;
    uint64_t gather; /* index of the gather, from 1 */
    int64_t bytes;   /* size in bytes of the array that the rank passed to the gather */
    int64_t at;      /* offset of this chunk in that array */
    uint8_t data[CHUNK_BYTES - 32];
} chunk;

/* The state of a bootstrap; epic_bootstrap.self points to it. */
typedef struct nccl_bootstrap {
    nccl_functions nccl;
    struct ncclComm *comm;
    int rank, num_ranks, device;
    uint32_t timeout_ms;
    cudaStream_t stream;
    /* pinned memory, [1 + num_ranks]: this rank's chunk, then the chunks of all ranks */
    chunk *on_host;
    chunk *on_device; /* copy of on_host on the device */
    uint64_t num_gathers;
    char sentence[512]; /* error text of the first gather that failed */

    pthread_mutex_t mutex; /* guards everything below */
    pthread_cond_t changed;
    bool is_running; /* true while the thread that calls NCCL sends a chunk */
    bool is_closed; /* true: the caller has closed the bootstrap, and the thread must free it */
    epic_result failed;
    const char *phase; /* name of the NCCL or CUDA function that the thread is calling */
    int nccl_result;
    cudaError_t cuda_result;
} nccl_bootstrap;

static void free_bootstrap(nccl_bootstrap *b)
{
    if (b->on_device) (void)cudaFree(b->on_device);
    if (b->on_host) (void)cudaFreeHost(b->on_host);
    if (b->stream) (void)cudaStreamDestroy(b->stream);
    (void)cudaGetLastError();
    pthread_cond_destroy(&b->changed);
    pthread_mutex_destroy(&b->mutex);
    free(b);
}

static epic_result fail_nccl(const nccl_bootstrap *b, int result, const char *call)
{
    return epic_fail(result == NCCL_REMOTE_ERROR ? EPIC_EPEER : EPIC_EDEVICE,
                     "bootstrap over NCCL: gather %llu: %s failed on rank %d of %d: NCCL "
                     "reports \"%s\"; NCCL_DEBUG=WARN prints more",
                     (unsigned long long)b->num_gathers, call, b->rank, b->num_ranks,
                     b->nccl.get_error_string(result));
}

/* Returns EPIC_ETIMEOUT. NCCL does not report which ranks are missing, so the error text
 * contains the number of finished gathers and the NCCL or CUDA call that waits (`phase`). */
static epic_result fail_late(const nccl_bootstrap *b, const char *phase)
{
    return epic_fail(EPIC_ETIMEOUT,
                     "bootstrap over NCCL: gather %llu: rank %d of %d waited %u ms in %s; NCCL "
                     "does not report which rank is missing; all ranks have finished %llu "
                     "gathers",
                     (unsigned long long)b->num_gathers, b->rank, b->num_ranks, b->timeout_ms,
                     phase, (unsigned long long)b->num_gathers - 1);
}

static void set_phase(nccl_bootstrap *b, const char *phase)
{
    pthread_mutex_lock(&b->mutex);
    b->phase = phase;
    pthread_mutex_unlock(&b->mutex);
}

static bool has_failed(nccl_bootstrap *b)
{
    pthread_mutex_lock(&b->mutex);
    const bool failed = b->failed != EPIC_OK;
    pthread_mutex_unlock(&b->mutex);
    return failed;
}

/* Calls ncclAllGather. If the communicator is non-blocking, waits until NCCL has enqueued the
 * kernel or until the caller's thread has failed. */
static int gather_chunks(nccl_bootstrap *b)
{
    int result = b->nccl.all_gather(&b->on_device[0], &b->on_device[1], CHUNK_BYTES, NCCL_INT8,
                                    b->comm, b->stream);
    while (result == NCCL_IN_PROGRESS && !has_failed(b)) {
        nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
        if (b->nccl.comm_get_async_error(b->comm, &result) != NCCL_SUCCESS) break;
    }
    return result;
}

/* Copies this rank's chunk to the device, gathers the chunks of all ranks, and copies them to
 * the host. Returns when the copies have finished. */
static void move_chunks(nccl_bootstrap *b)
{
    const size_t all = (size_t)b->num_ranks * CHUNK_BYTES;
    b->nccl_result = NCCL_SUCCESS;
    b->cuda_result = cudaSetDevice(b->device);
    if (b->cuda_result == cudaSuccess)
        b->cuda_result = cudaMemcpyAsync(&b->on_device[0], &b->on_host[0], CHUNK_BYTES,
                                         cudaMemcpyHostToDevice, b->stream);
    if (b->cuda_result != cudaSuccess) return;
    set_phase(b, "ncclAllGather");
    b->nccl_result = gather_chunks(b);
    if (b->nccl_result != NCCL_SUCCESS) return;
    set_phase(b, "the kernel of ncclAllGather");
    b->cuda_result = cudaMemcpyAsync(&b->on_host[1], &b->on_device[1], all,
                                     cudaMemcpyDeviceToHost, b->stream);
    if (b->cuda_result == cudaSuccess) b->cuda_result = cudaStreamSynchronize(b->stream);
}

static void *run_thread(void *self)
{
    nccl_bootstrap *b = self;
    move_chunks(b);
    pthread_mutex_lock(&b->mutex);
    b->is_running = false;
    const bool is_closed = b->is_closed;
    pthread_cond_signal(&b->changed);
    pthread_mutex_unlock(&b->mutex);
    if (is_closed) free_bootstrap(b);
    return NULL;
}

static epic_result start_thread(nccl_bootstrap *b)
{
    pthread_t thread;
    b->is_running = true;
    b->phase = "cudaMemcpyAsync";
    if (pthread_create(&thread, NULL, run_thread, b) == 0) {
        pthread_detach(thread);
        return EPIC_OK;
    }
    b->is_running = false;
    return epic_fail(EPIC_ENOMEM, "bootstrap over NCCL: no memory for a thread");
}

/* Waits until the thread that calls NCCL has finished. Returns the thread's error, an error of
 * the communicator, or EPIC_ETIMEOUT. Polls the communicator without holding the mutex. */
static epic_result wait_for_thread(nccl_bootstrap *b, time_limit *limit)
{
    epic_result result = EPIC_OK;
    pthread_mutex_lock(&b->mutex);
    while (b->is_running && result == EPIC_OK) {
        int state = NCCL_SUCCESS;
        const int ms = time_limit_look(limit);
        if (ms == 0) {
            result = fail_late(b, b->phase);
            break;
        }
        const struct timespec until = clock_in_ns(ms * 1000000ll);
        pthread_cond_timedwait(&b->changed, &b->mutex, &until);
        if (!b->is_running) break;
        pthread_mutex_unlock(&b->mutex);
        const int called = b->nccl.comm_get_async_error(b->comm, &state);
        pthread_mutex_lock(&b->mutex);
        /* the thread has finished in the meantime, and its own result is more precise */
        if (!b->is_running) break;
        if (called != NCCL_SUCCESS) state = called;
        if (state != NCCL_SUCCESS && state != NCCL_IN_PROGRESS)
            result = fail_nccl(b, state, "the communicator");
    }
    b->failed = result;
    pthread_mutex_unlock(&b->mutex);
    TRY(result);
    if (b->nccl_result != NCCL_SUCCESS) return fail_nccl(b, b->nccl_result, "ncclAllGather");
    return p2p_cuda(b->cuda_result, "bootstrap over NCCL");
}

static epic_result check_chunks(const nccl_bootstrap *b)
{
    const chunk *mine = &b->on_host[0];
    for (int r = 0; r < b->num_ranks; r++) {
        const chunk *c = &b->on_host[1 + r];
        if (c->magic != CHUNK_MAGIC)
            return epic_fail(EPIC_EMISMATCH,
                             "bootstrap over NCCL: gather %llu: rank %d was in another "
                             "collective of the communicator: all ranks must call the same "
                             "functions in the same order",
                             (unsigned long long)b->num_gathers, r);
        if (c->gather != mine->gather || c->at != mine->at || c->bytes != mine->bytes)
            return epic_fail(EPIC_EMISMATCH,
                             "bootstrap over NCCL: gather %llu on rank %d and %llu on rank %d: "
                             "bytes is %lld and %lld: must be equal on all ranks; install the "
                             "same EPIC on every rank",
                             (unsigned long long)mine->gather, b->rank,
                             (unsigned long long)c->gather, r, (long long)mine->bytes,
                             (long long)c->bytes);
    }
    return EPIC_OK;
}

/* Runs one gather: sends `mine` [bytes], and receives `all` [num_ranks, bytes]. Sends at least
 * one chunk, so that a gather of 0 bytes waits for all ranks, too. */
static epic_result run_gather(nccl_bootstrap *b, const uint8_t *mine, uint8_t *all,
                              int64_t bytes)
{
    const int64_t most = sizeof b->on_host->data;
    time_limit limit = time_limit_begin(b->timeout_ms, NULL);
    int64_t at = 0;
    do {
        const size_t part = (size_t)(bytes - at < most ? bytes - at : most);
        b->on_host[0] = (chunk){CHUNK_MAGIC, b->num_gathers, bytes, at, {0}};
        if (part > 0) memcpy(b->on_host[0].data, mine + at, part);
        TRY(start_thread(b));
        TRY(wait_for_thread(b, &limit));
        TRY(check_chunks(b));
        for (int r = 0; r < b->num_ranks && part > 0; r++)
            memcpy(all + r * bytes + at, b->on_host[1 + r].data, part);
        at += most;
    } while (at < bytes);
    return EPIC_OK;
}

/* Implements epic_bootstrap.gather. After a failure every later call returns the same error. */
static epic_result gather_bytes(void *self, const void *mine, void *all, int64_t bytes)
{
    nccl_bootstrap *b = self;
    if (b->failed) return epic_fail(b->failed, "%s", b->sentence);
    b->num_gathers++;
    const epic_result result = run_gather(b, mine, all, bytes);
    if (result == EPIC_OK) return EPIC_OK;
    pthread_mutex_lock(&b->mutex);
    b->failed = result;
    pthread_mutex_unlock(&b->mutex);
    epic_fit_text(b->sentence, sizeof b->sentence, epic_sentence());
    return result;
}

static void close_bootstrap(void *self)
{
    nccl_bootstrap *b = self;
    pthread_mutex_lock(&b->mutex);
    b->is_closed = true;
    const bool is_running = b->is_running;
    pthread_mutex_unlock(&b->mutex);
    if (!is_running) free_bootstrap(b);
}

/* If the initialization of the communicator is non-blocking, waits until it is done. */
static epic_result wait_until_ready(const nccl_bootstrap *b)
{
    time_limit limit = time_limit_begin(b->timeout_ms, NULL);
    for (;;) {
        int state = NCCL_SUCCESS;
        const int called = b->nccl.comm_get_async_error(b->comm, &state);
        if (called != NCCL_SUCCESS) state = called;
        if (state == NCCL_SUCCESS) return EPIC_OK;
        if (state != NCCL_IN_PROGRESS)
            return epic_fail(state == NCCL_INVALID_ARGUMENT ? EPIC_EINVAL : EPIC_EDEVICE,
                             "bootstrap over NCCL: comm is in the state \"%s\": must be a "
                             "communicator without an error; abort it and create another one",
                             b->nccl.get_error_string(state));
        if (time_limit_look(&limit) == 0)
            return epic_fail(EPIC_ETIMEOUT,
                             "bootstrap over NCCL: after %u ms NCCL has not finished to "
                             "initialize comm",
                             b->timeout_ms);
        time_limit_nap(&limit, 1);
    }
}

static epic_result read_comm(nccl_bootstrap *b)
{
    int device = -1;
    int result = b->nccl.comm_count(b->comm, &b->num_ranks);
    if (result == NCCL_SUCCESS) result = b->nccl.comm_user_rank(b->comm, &b->rank);
    if (result == NCCL_SUCCESS) result = b->nccl.comm_cu_device(b->comm, &b->device);
    if (result != NCCL_SUCCESS)
        return epic_fail(EPIC_EINVAL,
                         "bootstrap over NCCL: comm is invalid: NCCL reports \"%s\"; pass a "
                         "communicator that is not destroyed",
                         b->nccl.get_error_string(result));
    if (b->num_ranks > EPIC_MAX_RANKS)
        return epic_fail(EPIC_EINVAL,
                         "bootstrap over NCCL: comm has %d ranks: must be at most %d; split it "
                         "with ncclCommSplit",
                         b->num_ranks, EPIC_MAX_RANKS);
    TRY(p2p_cuda(cudaGetDevice(&device), "bootstrap over NCCL: the current device"));
    if (device != b->device)
        return epic_fail(
            EPIC_EINVAL,
            "bootstrap over NCCL: the current device is %d: must be %d, the device "
            "of comm; call cudaSetDevice(%d) first",
            device, b->device, b->device);
    return EPIC_OK;
}

static epic_result allocate_chunks(nccl_bootstrap *b)
{
    const size_t bytes = (1 + (size_t)b->num_ranks) * CHUNK_BYTES;
    _Static_assert(sizeof(chunk) == CHUNK_BYTES, "a chunk has another size");
    TRY(p2p_cuda(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking),
                 "bootstrap over NCCL: a stream"));
    TRY(p2p_cuda(cudaHostAlloc((void **)&b->on_host, bytes, cudaHostAllocMapped),
                 "bootstrap over NCCL: host memory"));
    return p2p_cuda(cudaMalloc((void **)&b->on_device, bytes),
                    "bootstrap over NCCL: device memory");
}

epic_result p2p_bootstrap_nccl(epic_bootstrap *out, const void *native, uint32_t timeout_ms)
{
    nccl_functions nccl;
    pthread_condattr_t attributes;
    TRY(nccl_find(&nccl));
    nccl_bootstrap *b = calloc(1, sizeof *b);
    if (!b) return epic_fail(EPIC_ENOMEM, "no memory for a bootstrap");
    b->nccl = nccl;
    b->comm = (struct ncclComm *)(uintptr_t)native;
    b->timeout_ms = timeout_ms;
    pthread_mutex_init(&b->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&b->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    epic_result result = wait_until_ready(b);
    if (result == EPIC_OK) result = read_comm(b);
    if (result == EPIC_OK) result = allocate_chunks(b);
    if (result != EPIC_OK) {
        free_bootstrap(b);
        return result;
    }
    *out = (epic_bootstrap){.rank = b->rank,
                            .num_ranks = b->num_ranks,
                            .gather = gather_bytes,
                            .close = close_bootstrap,
                            .self = b};
    return EPIC_OK;
}
