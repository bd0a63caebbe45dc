/* SPDX-License-Identifier: Apache-2.0 */
/* A bootstrap whose ranks are threads of one process. All ranks share one hub, the memory
 * through which they exchange bytes. In a gather each rank stores its arguments in the hub and
 * waits. The last rank that arrives copies the bytes for all ranks and wakes them. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/time_limit.h"

typedef struct hub hub;

/* One rank's entry in the hub: the `self` of its epic_bootstrap. */
typedef struct member {
    hub *hub;
    int32_t rank;
    /* true: the rank waits in a gather, whose arguments are in the fields after this one */
    bool arrived;
    const void *mine;
    char *all;
    size_t bytes;
} member;

struct hub {
    pthread_mutex_t mutex; /* guards everything below */
    pthread_cond_t changed;
    int32_t num_ranks;
    /* number of members that have not closed; the last member that closes frees the hub */
    int32_t num_open;
    int32_t num_arrived;
    /* how many calls of this gather came from a second thread of a rank whose first thread was
     * already waiting */
    int32_t num_duplicate_calls;
    uint32_t timeout_ms;
    uint64_t finished;
    /* EPIC_OK, or the error of an earlier gather, which every later gather returns */
    epic_result broken;
    char sentence[512];
    bool *gone; /* [num_ranks]: true for ranks that have closed their bootstrap */
    member members[];
};

/* Marks the hub as broken with this thread's last error. Wakes all ranks. Returns `result`. */
static epic_result break_hub(hub *h, epic_result result)
{
    h->broken = result;
    snprintf(h->sentence, sizeof h->sentence, "%s", epic_sentence());
    pthread_cond_broadcast(&h->changed);
    return result;
}

static epic_result fail_again(const hub *h)
{
    return epic_fail(h->broken, "%s", h->sentence);
}

/* Marks the hub as broken because ranks have closed their bootstrap, and wakes all ranks. Does
 * not change the error text of this thread, because the caller may not have read the text of an
 * earlier failure yet. */
static void break_gone(hub *h)
{
    char names[256];
    epic_bootstrap_list_ranks(names, sizeof names, h->gone, h->num_ranks);
    h->broken = EPIC_EPEER;
    snprintf(h->sentence, sizeof h->sentence,
             "gather %llu: %s closed this bootstrap of threads",
             (unsigned long long)h->finished + 1, names);
    pthread_cond_broadcast(&h->changed);
}

static epic_result check_bytes(hub *h, const member *m)
{
    for (int32_t r = 0; r < h->num_ranks; r++) {
        const member *other = &h->members[r];
        if (!other->arrived || other->bytes == m->bytes) continue;
        return break_hub(h,
                         epic_fail(EPIC_EMISMATCH,
                                   "gather %llu: bytes is %zu on rank %d and %zu on rank %d: "
                                   "must be equal on all ranks",
                                   (unsigned long long)h->finished + 1, other->bytes, r,
                                   m->bytes, m->rank));
    }
    return EPIC_OK;
}

/* Copies the bytes of all ranks to all ranks, and wakes them. Called by the last rank that
 * arrives. At that time all other ranks wait, so their buffers are valid. */
static void finish_gather(hub *h)
{
    for (int32_t to = 0; to < h->num_ranks; to++) {
        const size_t bytes = h->members[to].bytes;
        for (int32_t from = 0; from < h->num_ranks && bytes > 0; from++)
            memmove(h->members[to].all + (size_t)from * bytes, h->members[from].mine, bytes);
    }
    for (int32_t r = 0; r < h->num_ranks; r++) h->members[r].arrived = false;
    h->num_arrived = 0;
    h->finished++;
    pthread_cond_broadcast(&h->changed);
}

static epic_result fail_late(hub *h)
{
    char names[256];
    bool *missing = calloc((size_t)h->num_ranks, sizeof *missing);
    if (missing == NULL) return break_hub(h, epic_fail(EPIC_ETIMEOUT, "ranks did not join"));
    for (int32_t r = 0; r < h->num_ranks; r++) missing[r] = !h->members[r].arrived;
    epic_bootstrap_list_ranks(names, sizeof names, missing, h->num_ranks);
    free(missing);
    return break_hub(
        h, epic_fail(EPIC_ETIMEOUT,
                     "gather %llu: %s did not join this bootstrap of threads "
                     "within %u ms%s",
                     (unsigned long long)h->finished + 1, names, h->timeout_ms,
                     h->num_duplicate_calls > 0 ? ", and another rank joined twice" : ""));
}

/* Returns an error to the second of two threads that use the bootstrap of the same rank. The
 * gather continues with the first thread. */
static epic_result fail_duplicate_call(hub *h, const member *m)
{
    h->num_duplicate_calls++;
    return epic_fail(
        EPIC_EINVAL,
        "gather %llu: another thread is rank %d of this bootstrap of threads: each "
        "thread must use the bootstrap of its own rank",
        (unsigned long long)h->finished + 1, m->rank);
}

/* Takes part in a gather with the arguments in `call`. Requires that the caller holds the
 * mutex. Releases the mutex while it waits. */
static epic_result gather_locked(hub *h, member *m, const member *call)
{
    if (h->broken == EPIC_OK && h->num_open < h->num_ranks) break_gone(h);
    if (h->broken != EPIC_OK) return fail_again(h);
    TRY(check_bytes(h, call));
    /* Copy single fields. A copy of all of *call would also write m->hub and m->rank, which a
     * second thread that uses this rank by mistake may read without the mutex. */
    m->arrived = true;
    m->mine = call->mine;
    m->all = call->all;
    m->bytes = call->bytes;
    h->num_arrived++;

    const uint64_t number = h->finished;
    time_limit limit = time_limit_begin(h->timeout_ms, NULL);
    if (h->num_arrived == h->num_ranks) finish_gather(h);
    while (h->finished == number) {
        if (h->broken != EPIC_OK) return fail_again(h);
        const int ms = time_limit_look(&limit);
        if (ms == 0) return fail_late(h);
        const struct timespec until = clock_in_ns(ms * 1000000ll);
        pthread_cond_timedwait(&h->changed, &h->mutex, &until);
    }
    return EPIC_OK;
}

static epic_result threads_gather(void *self, const void *mine, void *all, int64_t bytes)
{
    member *m = self;
    hub *h = m->hub;
    TRY(epic_bootstrap_check(mine, all, bytes));
    const member call = {h, m->rank, true, mine, all, (size_t)bytes};
    pthread_mutex_lock(&h->mutex);
    const bool is_twice = m->arrived && h->broken == EPIC_OK;
    const epic_result result =
        is_twice ? fail_duplicate_call(h, m) : gather_locked(h, m, &call);
    pthread_mutex_unlock(&h->mutex);
    return result;
}

static void free_hub(hub *h)
{
    pthread_cond_destroy(&h->changed);
    pthread_mutex_destroy(&h->mutex);
    free(h->gone);
    free(h);
}

static void close_member(void *self)
{
    member *m = self;
    hub *h = m->hub;
    pthread_mutex_lock(&h->mutex);
    h->gone[m->rank] = true;
    if (h->num_arrived > 0 && h->broken == EPIC_OK) break_gone(h);
    const bool last = --h->num_open == 0;
    pthread_mutex_unlock(&h->mutex);
    if (last) free_hub(h);
}

static epic_result open_hub(hub **out, int32_t num_ranks, uint32_t timeout_ms)
{
    pthread_condattr_t attributes;
    const size_t ranks = (size_t)num_ranks;
    hub *h = calloc(1, sizeof *h + ranks * sizeof h->members[0]);
    bool *gone = calloc(ranks, sizeof *gone);
    if (h == NULL || gone == NULL) {
        free(gone);
        free(h);
        return epic_fail(EPIC_ENOMEM, "no memory for a bootstrap of %d threads", num_ranks);
    }
    h->gone = gone;
    h->num_ranks = num_ranks;
    h->num_open = num_ranks;
    h->timeout_ms = timeout_ms > 0 ? timeout_ms : BOOTSTRAP_TIMEOUT_MS;
    pthread_mutex_init(&h->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&h->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    *out = h;
    return EPIC_OK;
}

epic_result epic_bootstrap_threads(epic_bootstrap *out, int32_t num_ranks, uint32_t timeout_ms)
{
    hub *h = NULL;
    if (out == NULL) return epic_fail(EPIC_EINVAL, "out is NULL: pass an array of num_ranks");
    if (num_ranks < 1 || num_ranks > BOOTSTRAP_MAX_RANKS)
        return epic_fail(EPIC_EINVAL, "num_ranks is %d: must be from 1 to %d", num_ranks,
                         BOOTSTRAP_MAX_RANKS);
    TRY(open_hub(&h, num_ranks, timeout_ms));
    for (int32_t r = 0; r < num_ranks; r++) {
        h->members[r] = (member){.hub = h, .rank = r};
        out[r] = (epic_bootstrap){r, num_ranks, threads_gather, close_member, &h->members[r]};
    }
    return EPIC_OK;
}
