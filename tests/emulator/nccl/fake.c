/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of fake.h. FAKE_VERSION is the version that the library reports. With
 * FAKE_SHORT, the library has no ncclAllGather. */
#include "nccl/fake.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "emulator.h"

#ifndef FAKE_VERSION
#define FAKE_VERSION 22005
#endif
enum { MOST_RANKS = 8 };

/* State that the ranks of a communicator share. Never freed, because ranks close at different
 * times. */
typedef struct world {
    int num_ranks;
    atomic_int is_aborted;
    const void *_Atomic sent[MOST_RANKS]; /* what each rank sends in this all-gather */
    atomic_int begun[MOST_RANKS], copied[MOST_RANKS]; /* numbers of all-gathers */
} world;

struct ncclComm {
    world *world;
    int rank, device, num_gathers;
    fake_behavior behavior;
    atomic_int num_polls;
};

typedef struct gather { /* one all-gather of a rank */
    struct ncclComm *comm;
    const void *send;
    char *recv;
    size_t bytes;
    int number;
    bool in_kernel;
} gather;

#ifndef FAKE_SHORT
static void wait_for(const gather *g, atomic_int *numbers)
{
    for (int q = 0; q < g->comm->world->num_ranks; q++)
        while (numbers[q] < g->number && !g->comm->world->is_aborted) {
            if (g->in_kernel)
                emulator_nap();
            else
                nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
}

/* Publishes this rank's bytes, waits for those of all ranks, copies them, and waits until all
 * ranks have copied. */
static void run_gather(const void *arguments)
{
    const gather *g = arguments;
    if (g->in_kernel && emulator_here->thread > 0) return;
    world *w = g->comm->world;
    const int rank = g->comm->rank;
    w->sent[rank] = g->send;
    w->begun[rank] = g->number;
    wait_for(g, w->begun);
    for (int q = 0; q < w->num_ranks && !w->is_aborted; q++)
        memcpy(g->recv + (size_t)q * g->bytes, w->sent[q], g->bytes);
    if (g->comm->behavior.has_other_data) memset(g->recv + g->bytes, 1, g->bytes);
    w->copied[rank] = g->number;
    wait_for(g, w->copied);
}

int ncclAllGather(const void *send, void *recv, size_t count, int type, struct ncclComm *comm,
                  cudaStream_t stream)
{
    static const char kernel; /* its address identifies the kernel */
    const fake_behavior *b = &comm->behavior;
    if (type != 0) return FAKE_INVALID;
    if (b->gather_result) return b->gather_result;
    const gather g = {comm, send, recv, count, ++comm->num_gathers, !b->waits_in_call};
    if (b->waits_in_call) {
        if (cudaStreamSynchronize(stream) != cudaSuccess) return FAKE_SYSTEM_ERROR;
        run_gather(&g);
        return 0;
    }
    if (emulator_enqueue(&kernel, run_gather, &g, sizeof g, 1, EMULATOR_WARP, 0, stream))
        return FAKE_SYSTEM_ERROR;
    comm->num_polls = b->is_unblocking ? 2 : 0;
    return b->is_unblocking ? FAKE_IN_PROGRESS : 0;
}
#endif

void fake_nccl_behave(struct ncclComm *comm, const fake_behavior *behavior)
{
    comm->behavior = *behavior;
    comm->num_polls = behavior->polls_to_finish;
}

int ncclCommInitAll(struct ncclComm **comms, int num_ranks, const int *devices)
{
    world *w = calloc(1, sizeof *w);
    if (!w || num_ranks > MOST_RANKS) return FAKE_INVALID;
    w->num_ranks = num_ranks;
    for (int r = 0; r < num_ranks; r++) {
        comms[r] = calloc(1, sizeof *comms[r]);
        if (!comms[r]) return FAKE_SYSTEM_ERROR;
        comms[r]->world = w;
        comms[r]->rank = r;
        comms[r]->device = devices ? devices[r] : r;
    }
    return 0;
}

int ncclCommDestroy(struct ncclComm *comm)
{
    free(comm);
    return 0;
}

/* Does not free the communicator, because another thread may use it. */
int ncclCommAbort(struct ncclComm *comm)
{
    comm->world->is_aborted = 1;
    return 0;
}

int ncclGetVersion(int *version)
{
    *version = FAKE_VERSION;
    return 0;
}

const char *ncclGetErrorString(int result)
{
    static const char *const texts[] = {
        "no error",         "unhandled cuda error", "system error", "internal error",
        "invalid argument", "invalid usage",        "remote error", "in progress"};
    return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}

int ncclCommGetAsyncError(struct ncclComm *comm, int *state)
{
    if (comm->num_polls > 0) {
        comm->num_polls--;
        *state = FAKE_IN_PROGRESS;
        return 0;
    }
    *state = comm->behavior.state;
    return 0;
}

int ncclCommCount(const struct ncclComm *comm, int *count)
{
    *count = comm->behavior.num_ranks ? comm->behavior.num_ranks : comm->world->num_ranks;
    return 0;
}

int ncclCommUserRank(const struct ncclComm *comm, int *rank)
{
    *rank = comm->rank;
    return 0;
}

int ncclCommCuDevice(const struct ncclComm *comm, int *device)
{
    *device = comm->device;
    return 0;
}
