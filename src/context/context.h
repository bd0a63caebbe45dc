/* SPDX-License-Identifier: Apache-2.0 */
/* One rank of one group. */
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
    const epic_backend *backend; /* NULL: never opened */
    epic_group *group;
    int32_t rank;
    int32_t num_ranks, num_hosts;
    uint64_t group_id;
    epic_config config; /* defaults filled in; its strings are the two below */
    char name[64];
    char backend_name[16];
    bool checks_weights;    /* EPIC_CHECK_WEIGHTS; host contexts */
    char net[RECORDER_NET]; /* what rows take to other hosts; "": the backend says nothing */

    tag_table tags;
    epic_recorder *recorder;
    epic_trace *trace;          /* NULL: nobody asked for one; host contexts */
    struct exchange *exchanges; /* [max_in_flight], one for each cell; host contexts */
    _Atomic uint64_t bytes_sent;

    int64_t pid;         /* of the process that opened it, */
    uint32_t generation; /* and what process_generation said there */

    _Atomic bool broken;
    pthread_mutex_t mutex; /* guards failure until broken is set */
    epic_failure_info failure;
};

/* Bytes of rows that this rank has put into lanes; for tests. */
uint64_t epic_context_bytes_sent(const epic_context *ctx);

/* Makes `failure` the context's, unless it has one, and returns it with its sentence. */
epic_result context_break(epic_context *ctx, const epic_failure_info *failure);

/* What a context holds besides its group: itself, tags, flight recorder, operations. */
int64_t context_bytes(const epic_config *config, bool host);

/* EPIC_OK, or the failure that broke the group; EPIC_ECLOSED for one that never opened, and for
 * its parent's in a forked child. */
epic_result context_check(epic_context *ctx);

/* Of EPIC_BY_HOSTS: are its ranks the GPUs of several hosts, with blocks of experts? */
bool context_relays(const epic_context *ctx, const int32_t *rank_of_expert);

/* Does a device backend run the operations of this context?  No for NULL and for a context that
 * never opened. */
static inline bool context_on_device(const epic_context *ctx)
{
    return ctx && ctx->backend && ctx->backend->ops;
}

/* Calls operation `name` of the context's device backend (backend/ops.h). */
#define CONTEXT_OP(ctx, name, ...) \
    backend_copy_error((ctx)->backend, (ctx)->backend->ops->name((ctx)->group, __VA_ARGS__))

/* Makes the sentence of a backend's own library this thread's, and returns `result`. */
epic_result backend_copy_error(const epic_backend *backend, epic_result result);

/* Monotonic nanoseconds. */
uint64_t now_ns(void);

#endif
