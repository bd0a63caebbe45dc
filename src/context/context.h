/* SPDX-License-Identifier: Apache-2.0 */
/* The context: one rank of one group. All folders above it share this struct. */
#ifndef EPIC_CONTEXT_H
#define EPIC_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "backend/ops.h"
#include "base/recorder.h"
#include "base/tags.h"

struct exchange; /* exchange/exchange.h */

struct epic_context {
    const epic_backend *backend; /* NULL: the context never opened */
    epic_group *group;
    int32_t rank;
    int32_t num_ranks, num_hosts;
    uint64_t group_id;
    epic_config config; /* defaults filled in; its strings are the next two fields */
    char name[64];
    char backend_name[16];
    bool checks_weights;    /* EPIC_CHECK_WEIGHTS; host contexts only */
    char net[RECORDER_NET]; /* the net to other hosts, as epic_net_name returns it */

    tag_table tags;
    epic_recorder *recorder;
    epic_trace *trace;          /* NULL: no trace; host contexts only */
    struct exchange *exchanges; /* [max_in_flight] one for each op slot; host contexts only */
    _Atomic uint64_t bytes_sent;

    int64_t pid;         /* the process that opened the context */
    uint32_t generation; /* process_generation() of that process */

    _Atomic bool broken;
    pthread_mutex_t mutex; /* guards `failure` until `broken` is set */
    epic_failure_info failure;
};

/* Returns the bytes of rows that this rank has written into lanes. Tests use it. */
uint64_t epic_context_bytes_sent(const epic_context *ctx);

/* Makes `failure` the failure of the context, unless it has one. Returns the result of the
 * context's failure with its sentence. Any thread may call it. */
epic_result context_break(epic_context *ctx, const epic_failure_info *failure);

/* Returns the host memory of a context without its group: itself, tags, flight recorder,
 * exchanges. */
int64_t context_bytes(const epic_config *config, bool host);

/* Returns EPIC_OK, or the failure that broke the group. Returns EPIC_ECLOSED for a context
 * that never opened, and in a forked child for a context of its parent. */
epic_result context_check(epic_context *ctx);

/* Returns whether EPIC_BY_HOSTS stands for an order by hosts: the ranks are GPUs of several
 * hosts, and the experts are in contiguous blocks. */
bool context_relays(const epic_context *ctx, const int32_t *rank_of_expert);

/* Returns whether a device backend runs the operations of this context. False for NULL and
 * for a context that never opened. */
static inline bool context_on_device(const epic_context *ctx)
{
    return ctx && ctx->backend && ctx->backend->ops;
}

/* Calls operation `name` of the context's device backend (backend/ops.h) and returns its
 * result. An error text becomes the one that epic_error returns. */
#define CONTEXT_OP(ctx, name, ...) \
    backend_copy_error((ctx)->backend, (ctx)->backend->ops->name((ctx)->group, __VA_ARGS__))

/* Copies the error sentence of a backend's own library to this thread, if `result` is an
 * error. Returns `result`. */
epic_result backend_copy_error(const epic_backend *backend, epic_result result);

/* Returns monotonic nanoseconds. */
uint64_t now_ns(void);

#endif
