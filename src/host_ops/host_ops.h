/* SPDX-License-Identifier: Apache-2.0 */
/* The step calls of host contexts.  Arguments arrive with their pointers and enums checked
 * (check.h) and args->layer complete; what a plan says about shapes is checked here. */
#ifndef EPIC_HOST_OPS_H
#define EPIC_HOST_OPS_H

#include "exchange/exchange.h"
#include "kernels/kernels.h"
#include "plan/plan.h"

epic_result host_plan(epic_context *ctx, const epic_plan_args *args,
                      const op_header_extra *extra);
epic_result host_plan_dispatch(epic_context *ctx, const epic_plan_args *plan,
                               const epic_dispatch_args *dispatch,
                               const op_header_extra *extra);
epic_result host_dispatch(epic_context *ctx, const epic_dispatch_args *args,
                          const op_header_extra *extra);
epic_result host_dispatch_unchecked(epic_context *ctx, const epic_dispatch_args *args);

/* The same in the exchange that made the plan, which it closes, without a bootstrap of its own. */
epic_result host_dispatch_continue(exchange *x, const epic_dispatch_args *args);

/* LOCAL_NEXT_DISPATCH of a plan's note: what the ranks' dispatches must have in common. */
int64_t dispatch_signature(const epic_dispatch_args *args);
epic_result host_combine(epic_context *ctx, const epic_combine_args *args);
epic_result host_dispatch_backward(epic_context *ctx, const epic_dispatch_backward_args *args);
epic_result host_combine_backward(epic_context *ctx, const epic_combine_backward_args *args,
                                  const op_header_extra *extra);
epic_result host_allreduce_sum(epic_context *ctx, const epic_allreduce_sum_args *args);
epic_result host_sum_replicas(epic_context *ctx, const epic_sum_replicas_args *args);

/* host_allreduce_sum with a note that tells more than the sum. */
epic_result host_sum_with_header(epic_context *ctx, const epic_allreduce_sum_args *args,
                                 const epic_op_header *about);

/* Is the plan one of this context?  Damage, or the caller's own fault, is kept for the note (class
 * (b)), as is the rest of `extra` (NULL: nothing). */
typedef struct plan_op {
    plan_view plan; /* of a good plan */
    bool damaged;   /* the plan, or what comes with it, is not to be used */
    epic_op_header note;
} plan_op;

void plan_op_begin(plan_op *s, const epic_context *ctx, uint32_t operation, const void *plan,
                   int64_t plan_bytes, const op_header_extra *extra);
/* With a plan that this very call has made: that it is good needs no proof. */
void plan_op_begin_unchecked(plan_op *s, uint32_t operation, const void *plan);

/* What the ranks' layers must have in common. */
void op_header_set_layer(epic_op_header *note, const epic_layer *layer);

/* Returns EPIC_EINVAL if the complete layer `layer` differs from the one that the plan was made
 * with.  A damaged plan is not compared: the ranks report it together. */
epic_result plan_op_check_layer(const plan_op *s, const epic_layer *layer);

/* EPIC_EINVAL when `rows` has not the rows that the plan has tokens. */
epic_result plan_op_check_tokens(const plan_op *s, const char *name, int64_t num_rows);

/* EPIC_EOVERFLOW, on every rank alike, when a buffer of any rank is smaller than its plan. */
epic_result plan_op_check_slots(const exchange *x, const char *name);

/* The choices of a token of rank `from` (or of one of ours, on the home side). */
static inline const int32_t *plan_slots_of_token(const plan_view *v, int from, int64_t token)
{
    return v->here + (v->base_of[from] + token) * (int64_t)v->header->layer.top_k;
}

static inline bool plan_is_flat(const plan_view *v)
{
    return v->header->layer.layout == EPIC_FLAT;
}

/* Does the expert side have part in token `token` of rank `from`? */
static inline bool plan_receives_token(const plan_view *v, int from, int64_t token)
{
    if (plan_is_flat(v)) return v->row_here[v->base_of[from] + token] >= 0;
    const int32_t *slots = plan_slots_of_token(v, from, token);
    for (uint32_t k = 0; k < v->header->layer.top_k; k++)
        if (slots[k] >= 0) return true;
    return false;
}

/* Does token `token` of ours have a live choice on rank `to`? */
static inline bool plan_sends_token(const plan_view *v, int to, int64_t token)
{
    const int64_t first = token * (int64_t)v->header->layer.top_k;
    for (uint32_t k = 0; k < v->header->layer.top_k; k++)
        if (v->rank_to[first + k] == to && v->fate[first + k] >= 0) return true;
    return false;
}

/* x->items, filled with the tokens of each rank. */
const int64_t *tokens_of(exchange *x, const plan_view *v);

/* A receive array, and what padding and failure do to it. */
typedef struct slot_array {
    void *data;
    int64_t row_bytes;
    int64_t num_rows;
} slot_array;

/* Zeroes the padding of every slab, but for EPIC_LEAVE_PADDING, and with EPIC_ZERO_TAIL what lies
 * past the last one. */
void slot_array_clear_padding(const plan_view *v, const slot_array *a, uint32_t flags);
void slot_array_clear(const slot_array *a);

#endif
