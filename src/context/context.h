/* SPDX-License-Identifier: Apache-2.0 */
/* The context: the state of one rank of one group. A host context has a host backend
 * (backend/transport.h), a device context a device backend (backend/ops.h). */
#ifndef EPIC_CONTEXT_H
#define EPIC_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "backend/ops.h"
#include "backend/seat_set.h"
#include "base/recorder.h"
#include "base/tags.h"

struct exchange;         /* defined in exchange/exchange.h */
struct context_decision; /* defined in context/regroup.c */
struct window_table;     /* defined in exchange/windows.c */

struct epic_context {
    const epic_backend *backend; /* NULL: epic_open failed */
    epic_group *group;
    int32_t rank;
    int32_t num_ranks, num_hosts;
    /* A *seat* is a rank number. `members` is the set of seats whose rank is a member of the
     * group now. The other seats are *vacant*: their ranks have left the group and take part in
     * no operation (docs/internals/members.md). */
    seat_set members;
    int32_t num_members;
    struct context_decision *decision; /* NULL until the first call of epic_regroup */
    uint64_t group_id;
    /* the config, with all defaults filled in; its strings point to `name` and
     * `backend_name` */
    epic_config config;
    char name[64];
    char backend_name[16];
    bool checks_weights;    /* result of config_checks_weights() at open; host contexts only */
    char net[RECORDER_NET]; /* the net to other hosts, as epic_net_name returns it */

    tag_table tags;
    epic_recorder *recorder;
    epic_trace *trace;          /* NULL: no trace; host contexts only */
    struct exchange *exchanges; /* [max_in_flight] one for each op slot; host contexts only */
    /* windows of a host context; NULL: the caller has added no window */
    _Atomic(struct window_table *) windows;
    /* number of bytes of rows that this rank has written into rings (the ring buffers from
     * which peers read rows) */
    _Atomic uint64_t bytes_sent;

    int64_t pid; /* id of the process that opened the context */
    /* result of process_generation() at open; in a forked child the function returns a higher
     * value */
    uint32_t generation;

    _Atomic bool broken;
    /* guards `failure`. After `broken` is set, only epic_regroup changes `failure`, while no
     * other call is running */
    pthread_mutex_t mutex;
    epic_failure_info failure;
};

/* For tests: returns the number of bytes of rows that this rank has written into rings. */
uint64_t epic_context_bytes_sent(const epic_context *ctx);

/* Makes `failure` the failure of the context, unless the context already has a failure. Returns
 * the result code of the context's failure, and sets its text as the error text of this thread.
 * Any thread may call this function. The first thread that locks the mutex sets the failure.
 * The release store of `broken` publishes the failure. */
epic_result context_break(epic_context *ctx, const epic_failure_info *failure);

/* Removes the failure of the context. No other thread may use the context during the call. */
void context_mend(epic_context *ctx);

/* Makes the seats in `members` the members of the group, and all other seats vacant. Each
 * member must call this function with the same set, before its first operation. Returns
 * EPIC_EINVAL if the set lacks this rank's seat, or contains a seat that the group does not
 * have. Returns EPIC_ENOTSUP if the backend does not support vacant seats. */
epic_result context_set_members(epic_context *ctx, const seat_set *members);

/* Writes to *out the memory of a context with this config and backend, without plans. If the
 * backend supports no group with this config, returns the error that epic_open returns. */
epic_result context_memory(epic_memory_info *out, const epic_config *config,
                           const epic_backend *backend);

/* Returns EPIC_OK, or EPIC_ECLOSED if epic_open failed or this process is a forked child. */
epic_result context_check_open(const epic_context *ctx);

/* Returns EPIC_OK, the failure that broke the group, or the error of context_check_open().
 * Every public call that communicates first calls this function. Any thread may call it. */
epic_result context_check(epic_context *ctx);

/* Returns true if combine can sum in two steps: the ranks of each host add up their rows for a
 * token, and send only this sum to the host of the token's home rank.
 *
 * The two steps require GPUs of several hosts and a rank_of_expert of NULL, so that each rank
 * owns a contiguous block of experts. If the result is true, the sum order EPIC_BY_HOSTS means
 * these two steps (layer_choose_order()). */
bool context_relays(const epic_context *ctx, const int32_t *rank_of_expert);

static inline bool context_has_member(const epic_context *ctx, int seat)
{
    return seat_set_has(&ctx->members, seat);
}

/* Returns the members of the group, or NULL if no seat is vacant. */
static inline const seat_set *context_members(const epic_context *ctx)
{
    return ctx->num_members == ctx->num_ranks ? NULL : &ctx->members;
}

/* Returns the index of a seat's member among all members, that is, the rank that the member
 * would have if the group had no vacant seats. */
static inline int context_member_number(const epic_context *ctx, int seat)
{
    return context_members(ctx) ? seat_set_count_below(&ctx->members, seat) : seat;
}

/* Returns true if a device backend runs the operations of this context. Returns false if ctx is
 * NULL or if epic_open has failed to open it. */
static inline bool context_on_device(const epic_context *ctx)
{
    return ctx && ctx->backend && ctx->backend->ops;
}

/* Calls the operation `name` of the context's device backend (backend/ops.h) and returns its
 * result. Copies the error text of a plugin, so that epic_error returns it. */
#define CONTEXT_OP(ctx, name, ...) \
    backend_copy_error((ctx)->backend, (ctx)->backend->ops->name((ctx)->group, __VA_ARGS__))

/* If `result` is an error and the backend is a plugin, copies the plugin's error text to this
 * thread. Returns `result`. */
epic_result backend_copy_error(const epic_backend *backend, epic_result result);

uint64_t now_ns(void);

#endif
