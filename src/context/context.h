/* SPDX-License-Identifier: Apache-2.0 */
/* One rank of one group. */
#ifndef EPIC_CONTEXT_H
#define EPIC_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "backend/backend.h"
#include "base/recorder.h"
#include "base/tags.h"

struct exchange;   /* exchange/exchange.h */
struct note_extra; /* exchange/note.h */

/* The step calls of a context, arguments checked: one table for host contexts (steps/steps.h), one
 * for those of device backends (api/device.c), which refuses what its backend does not have. */
typedef struct context_steps {
    epic_result (*plan)(epic_context *ctx, const epic_plan_args *args,
                        const struct note_extra *extra);
    epic_result (*dispatch)(epic_context *ctx, const epic_dispatch_args *args,
                            const struct note_extra *extra);
    epic_result (*plan_dispatch)(epic_context *ctx, const epic_plan_args *plan,
                                 const epic_dispatch_args *dispatch,
                                 const struct note_extra *extra);
    epic_result (*combine)(epic_context *ctx, const epic_combine_args *args);
    epic_result (*dispatch_backward)(epic_context *ctx,
                                     const epic_dispatch_backward_args *args);
    epic_result (*combine_backward)(epic_context *ctx, const epic_combine_backward_args *args,
                                    const struct note_extra *extra);
    epic_result (*sum)(epic_context *ctx, const epic_allreduce_sum_args *args);
    epic_result (*sum_replicas)(epic_context *ctx, const epic_sum_replicas_args *args);
} context_steps;

struct epic_context {
    const epic_backend *backend; /* NULL: never opened */
    epic_group *group;
    const context_steps *steps;
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

/* Makes the sentence of a backend's own library this thread's, and returns `result`. */
epic_result backend_said(const epic_backend *backend, epic_result result);

/* Monotonic nanoseconds. */
uint64_t now_ns(void);

#endif
