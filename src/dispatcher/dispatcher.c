/* SPDX-License-Identifier: Apache-2.0 */
/* The dispatcher: an object that owns the context, the plan and the buffers of one training
 * step. Each dispatch overwrites the results of the previous dispatch. The dispatcher uses only
 * public calls, with one exception: it allocates memory with functions of the backend. */
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/sized.h"
#include "context/context.h"
#include "kernels/kernels.h"

struct epic_dispatcher {
    epic_dispatcher_config config;
    epic_context *ctx;
    bool opened_here; /* true: the dispatcher opened ctx, so epic_dispatcher_close closes it */
    epic_layer layer;
    epic_layer_info sizes;
    int64_t row_bytes; /* size of a token's row in bytes */
    void *plan;
    epic_slots slots;     /* outputs of dispatch */
    epic_slots gradients; /* outputs of combine_backward, in separate memory */
    int64_t num_tokens;   /* number of tokens in the current dispatch; -1: no dispatch yet */
    bool has_weights;
    bool has_d_rows; /* true: combine_backward has succeeded since the last dispatch */
};

/* Allocates 64-byte aligned memory on the context's device. For a host context, allocates host
 * memory. Returns NULL if out of memory. */
static void *allocate_memory(const epic_dispatcher *s, int64_t bytes)
{
    const epic_backend *backend = s->ctx->backend;
    const size_t whole = ((size_t)bytes + 63) / 64 * 64;
    return backend->allocate ? backend->allocate(s->ctx->group, whole)
                             : aligned_alloc(64, whole ? whole : 64);
}

static void release_memory(const epic_dispatcher *s, void *memory)
{
    const epic_backend *backend = s->ctx->backend;
    if (memory == NULL) return;
    if (backend->release)
        backend->release(s->ctx->group, memory);
    else
        free(memory);
}

static bool allocate_slots(const epic_dispatcher *s, epic_slots *out)
{
    *out = (epic_slots){.capacity = s->sizes.capacity,
                        .first_expert = (int32_t)s->sizes.first_expert,
                        .num_local_experts = (int32_t)s->sizes.num_local_experts};
    out->rows = allocate_memory(s, out->capacity * s->row_bytes);
    out->weights = allocate_memory(s, out->capacity * (int64_t)sizeof *out->weights);
    return out->rows != NULL && out->weights != NULL;
}

/* Allocates the plan and all buffers. Returns false if out of memory. In this case
 * epic_dispatcher_close() frees the buffers that were already allocated. */
static bool allocate_all(epic_dispatcher *s)
{
    const int64_t counts = s->sizes.num_local_experts * (int64_t)sizeof(int32_t);
    s->plan = allocate_memory(s, s->sizes.plan_bytes);
    if (s->plan == NULL || !allocate_slots(s, &s->slots)) return false;
    s->slots.expert_rows = allocate_memory(s, counts);
    s->slots.expert_tokens = allocate_memory(s, counts);
    if (s->slots.expert_rows == NULL || s->slots.expert_tokens == NULL) return false;
    s->slots.results = s->slots.rows;
    if (!s->config.gradients) return true;
    s->slots.results = allocate_memory(s, s->sizes.capacity * s->row_bytes);
    if (s->slots.results == NULL || !allocate_slots(s, &s->gradients)) return false;
    s->gradients.results = s->gradients.rows;
    s->gradients.expert_rows = s->slots.expert_rows;
    s->gradients.expert_tokens = s->slots.expert_tokens;
    return true;
}

static void release_all(epic_dispatcher *s)
{
    if (s->slots.results != s->slots.rows) release_memory(s, s->slots.results);
    release_memory(s, s->slots.rows);
    release_memory(s, s->slots.weights);
    release_memory(s, s->slots.expert_rows);
    release_memory(s, s->slots.expert_tokens);
    release_memory(s, s->gradients.rows);
    release_memory(s, s->gradients.weights);
    release_memory(s, s->plan);
}

/* Uses config.ctx if it is set. If not, opens a context that the dispatcher owns. */
static epic_result open_context(epic_dispatcher *s)
{
    const epic_config config = {.max_tokens = s->config.max_tokens,
                                .max_row_bytes = s->row_bytes,
                                .backend = s->config.backend};
    s->ctx = s->config.ctx;
    if (s->ctx != NULL) return context_check(s->ctx);
    s->opened_here = true;
    return epic_open(&s->ctx, NULL, &config);
}

/* Checks those fields of a config that no later call checks. */
static epic_result check_config(const epic_dispatcher_config *c)
{
    if (c->type != EPIC_F32 && c->type != EPIC_BF16 && c->type != EPIC_F16 &&
        c->type != EPIC_F64)
        return epic_fail(EPIC_EINVAL,
                         "config.type is %u: EPIC_F32, EPIC_BF16, EPIC_F16 and EPIC_F64 can be "
                         "added",
                         c->type);
    if (c->hidden < 1) return epic_fail(EPIC_EINVAL, "config.hidden is 0: must be at least 1");
    if (c->gradients > 1)
        return epic_fail(EPIC_EINVAL, "config.gradients is %u: must be 0 or 1", c->gradients);
    return EPIC_OK;
}

/* Opens the context, computes the sizes and allocates the buffers. If one of these steps fails,
 * the caller must close s. */
static epic_result set_up_dispatcher(epic_dispatcher *s)
{
    TRY(check_config(&s->config));
    s->row_bytes = (int64_t)s->config.hidden * (int64_t)epic_type_bytes(s->config.type);
    s->layer = (epic_layer){.num_experts = s->config.num_experts,
                            .top_k = s->config.top_k,
                            .sum_order = EPIC_BY_HOSTS,
                            .alignment = s->config.alignment};
    TRY(open_context(s));
    if (s->row_bytes > s->ctx->config.max_row_bytes)
        return epic_fail(EPIC_EINVAL,
                         "config.hidden is %u: its rows have %lld bytes, and config.ctx was "
                         "opened with max_row_bytes %lld; open it with wider rows",
                         s->config.hidden, (long long)s->row_bytes,
                         (long long)s->ctx->config.max_row_bytes);
    TRY(epic_layer_sizes(s->ctx, &s->layer, &s->sizes));
    if (s->layer.num_experts % (uint32_t)s->ctx->num_ranks)
        return epic_fail(EPIC_EINVAL,
                         "config.num_experts is %u: num_ranks %d does not divide it; use "
                         "epic_plan with rank_of_expert",
                         s->layer.num_experts, s->ctx->num_ranks);
    if (allocate_all(s)) return EPIC_OK;
    return epic_fail(EPIC_ENOMEM,
                     "no memory for %lld slots of %lld bytes and a plan of %lld bytes; lower "
                     "config.max_tokens, or use epic_plan with a capacity",
                     (long long)s->sizes.capacity, (long long)s->row_bytes,
                     (long long)s->sizes.plan_bytes);
}

epic_result epic_dispatcher_open_v1(epic_dispatcher **out, const epic_dispatcher_config *config,
                                    size_t size)
{
    if (out == NULL)
        return epic_fail(EPIC_EINVAL, "out is NULL: must point to a dispatcher pointer");
    *out = NULL;
    epic_dispatcher *s = calloc(1, sizeof *s);
    if (s == NULL) return epic_fail(EPIC_ENOMEM, "no memory for a dispatcher");
    s->num_tokens = -1;
    epic_result result = READ_SIZED(&s->config, config, size, "config");
    if (result == EPIC_OK) result = set_up_dispatcher(s);
    if (result == EPIC_OK) {
        *out = s;
        return EPIC_OK;
    }
    /* Abort the group. If this rank did not, a peer that has opened its dispatcher would wait
     * for this rank in the peer's first call. */
    char why[512];
    snprintf(why, sizeof why, "%s", epic_sentence());
    if (s->opened_here && s->ctx != NULL && s->ctx->backend != NULL)
        epic_abort(s->ctx, s->config.tag, why);
    epic_dispatcher_close(s);
    return epic_fail(result, "%s", why);
}

void epic_dispatcher_close(epic_dispatcher *dispatcher)
{
    if (dispatcher == NULL) return;
    if (dispatcher->ctx != NULL && dispatcher->ctx->backend != NULL) release_all(dispatcher);
    if (dispatcher->opened_here) epic_close(dispatcher->ctx);
    free(dispatcher);
}

epic_context *epic_dispatcher_context(const epic_dispatcher *dispatcher)
{
    return dispatcher != NULL ? dispatcher->ctx : NULL;
}

/* Checks the dispatcher that the caller passed. `gradients` is true for the backward calls,
 * which need config.gradients. */
static epic_result check_dispatcher(const epic_dispatcher *s, bool gradients)
{
    if (s == NULL)
        return epic_fail(EPIC_EINVAL,
                         "dispatcher is NULL: must be one from epic_dispatcher_open");
    if (gradients && !s->config.gradients)
        return epic_fail(EPIC_EINVAL,
                         "config.gradients was 0 when the dispatcher was opened: open it "
                         "with 1 to have the backward calls");
    return EPIC_OK;
}

/* Checks that a dispatch has succeeded, because combine and the backward calls use its plan. */
static epic_result check_in_progress(const epic_dispatcher *s, bool gradients)
{
    TRY(check_dispatcher(s, gradients));
    if (s->num_tokens >= 0) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "there is no dispatch: call epic_dispatcher_dispatch first");
}

static epic_call call_of(const epic_dispatcher *s)
{
    return (epic_call){.stream = s->config.stream, .tag = s->config.tag};
}

static epic_rows rows_of(const epic_dispatcher *s, void *data, int64_t num_rows)
{
    return (epic_rows){data, num_rows, s->row_bytes};
}

static epic_const_rows const_rows_of(const epic_dispatcher *s, const void *data,
                                     int64_t num_rows)
{
    return (epic_const_rows){data, num_rows, s->row_bytes};
}

/* Copies *slots to the caller's struct of `size` bytes, which may have fewer fields if the
 * caller was compiled with an older header. */
static epic_result write_slots(const epic_slots *slots, epic_slots *out, size_t size)
{
    TRY(CHECK_PLACE(out, size));
    WRITE_SIZED(out, slots, size);
    return EPIC_OK;
}

epic_result epic_dispatcher_dispatch_v1(epic_dispatcher *dispatcher, const void *tokens,
                                        const int32_t *topk_idx, const float *weights,
                                        int64_t num_tokens, epic_slots *out, size_t size)
{
    TRY(check_dispatcher(dispatcher, false));
    epic_slots slots = dispatcher->slots;
    if (weights == NULL) slots.weights = NULL;
    TRY(write_slots(&slots, out, size));
    const epic_plan_args plan = {.call = call_of(dispatcher),
                                 .layer = &dispatcher->layer,
                                 .plan = dispatcher->plan,
                                 .plan_bytes = dispatcher->sizes.plan_bytes,
                                 .topk_idx = topk_idx,
                                 .num_tokens = num_tokens,
                                 .capacity = dispatcher->sizes.capacity,
                                 .expert_rows = dispatcher->slots.expert_rows,
                                 .expert_tokens = dispatcher->slots.expert_tokens};
    const epic_dispatch_args dispatch = {
        .tokens = const_rows_of(dispatcher, tokens, num_tokens),
        .recv = rows_of(dispatcher, dispatcher->slots.rows, dispatcher->sizes.capacity),
        .weights = weights,
        .slot_weights = weights != NULL ? dispatcher->slots.weights : NULL};
    dispatcher->num_tokens = -1;
    dispatcher->has_d_rows = false;
    TRY(epic_plan_dispatch(dispatcher->ctx, &plan, &dispatch));
    dispatcher->num_tokens = num_tokens;
    dispatcher->has_weights = weights != NULL;
    return EPIC_OK;
}

epic_result epic_dispatcher_combine(epic_dispatcher *dispatcher, void *out)
{
    TRY(check_in_progress(dispatcher, false));
    const epic_combine_args args = {
        .call = call_of(dispatcher),
        .layer = &dispatcher->layer,
        .plan = dispatcher->plan,
        .plan_bytes = dispatcher->sizes.plan_bytes,
        .rows =
            const_rows_of(dispatcher, dispatcher->slots.results, dispatcher->sizes.capacity),
        .out = rows_of(dispatcher, out, dispatcher->num_tokens),
        .slot_weights = dispatcher->has_weights ? dispatcher->slots.weights : NULL,
        .type = dispatcher->config.type};
    return epic_combine(dispatcher->ctx, &args);
}

epic_result epic_dispatcher_combine_backward_v1(epic_dispatcher *dispatcher, const void *d_out,
                                                epic_slots *out, size_t size)
{
    TRY(check_in_progress(dispatcher, true));
    TRY(write_slots(&dispatcher->gradients, out, size));
    const epic_combine_backward_args args = {
        .call = call_of(dispatcher),
        .layer = &dispatcher->layer,
        .plan = dispatcher->plan,
        .plan_bytes = dispatcher->sizes.plan_bytes,
        .d_out = const_rows_of(dispatcher, d_out, dispatcher->num_tokens),
        .rows =
            const_rows_of(dispatcher, dispatcher->slots.results, dispatcher->sizes.capacity),
        .d_rows = rows_of(dispatcher, dispatcher->gradients.rows, dispatcher->sizes.capacity),
        .slot_weights = dispatcher->has_weights ? dispatcher->slots.weights : NULL,
        .d_slot_weights = dispatcher->gradients.weights,
        .type = dispatcher->config.type};
    TRY(epic_combine_backward(dispatcher->ctx, &args));
    dispatcher->has_d_rows = true;
    return EPIC_OK;
}

epic_result epic_dispatcher_dispatch_backward(epic_dispatcher *dispatcher, void *d_tokens,
                                              float *d_weights)
{
    TRY(check_in_progress(dispatcher, true));
    if (!dispatcher->has_d_rows)
        return epic_fail(EPIC_EINVAL, "the slots have no gradients: "
                                      "call epic_dispatcher_combine_backward first");
    const epic_dispatch_backward_args args = {
        .call = call_of(dispatcher),
        .layer = &dispatcher->layer,
        .plan = dispatcher->plan,
        .plan_bytes = dispatcher->sizes.plan_bytes,
        .d_recv = const_rows_of(dispatcher, dispatcher->gradients.results,
                                dispatcher->sizes.capacity),
        .d_tokens = rows_of(dispatcher, d_tokens, dispatcher->num_tokens),
        .d_slot_weights = d_weights != NULL ? dispatcher->gradients.weights : NULL,
        .d_weights = d_weights,
        .type = dispatcher->config.type};
    return epic_dispatch_backward(dispatcher->ctx, &args);
}
