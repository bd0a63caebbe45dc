/* SPDX-License-Identifier: Apache-2.0 */
/* The operations of host contexts, on top of src/exchange.
 *
 * The public calls (src/api) have checked pointers and enums, and args->layer is complete.
 * The functions here check what depends on the plan. Each of them is collective, blocks
 * until its rows have moved, and returns the same error on all ranks for an error of the
 * data. */
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

/* Dispatches in the exchange that made the plan, without op headers of its own, and closes
 * it. */
epic_result host_dispatch_continue(exchange *x, const epic_dispatch_args *args);

/* Returns a hash of what all ranks' dispatches must have in common. It is
 * LOCAL_NEXT_DISPATCH of the plan's op header and never 0. */
int64_t dispatch_signature(const epic_dispatch_args *args);
epic_result host_combine(epic_context *ctx, const epic_combine_args *args);
epic_result host_dispatch_backward(epic_context *ctx, const epic_dispatch_backward_args *args);
epic_result host_combine_backward(epic_context *ctx, const epic_combine_backward_args *args,
                                  const op_header_extra *extra);
epic_result host_allreduce_sum(epic_context *ctx, const epic_allreduce_sum_args *args);
epic_result host_sum_replicas(epic_context *ctx, const epic_sum_replicas_args *args);

/* Like host_allreduce_sum(), but compares the other elements of the op header `about` too. */
epic_result host_sum_with_header(epic_context *ctx, const epic_allreduce_sum_args *args,
                                 const epic_op_header *about);

/* The start of an operation that uses a plan. plan_op_begin() checks that the plan is one of
 * this context. Damage, or the error in `extra`, goes into the op header, so that all ranks
 * return it. extra may be NULL. */
typedef struct plan_op {
    plan_view plan; /* valid unless `damaged` */
    bool damaged;   /* the plan or other data of this rank must not be used */
    epic_op_header note;
} plan_op;

void plan_op_begin(plan_op *s, const epic_context *ctx, uint32_t operation, const void *plan,
                   int64_t plan_bytes, const op_header_extra *extra);
/* Like plan_op_begin(), but does not check the plan, because this very call has made it. */
void plan_op_begin_unchecked(plan_op *s, uint32_t operation, const void *plan);

/* Writes the fields of a layer that must be equal on all ranks. */
void op_header_set_layer(epic_op_header *note, const epic_layer *layer);

/* Returns EPIC_EINVAL if the complete layer `layer` differs from the layer of the plan. It
 * does not compare a damaged plan, which all ranks report together. */
epic_result plan_op_check_layer(const plan_op *s, const epic_layer *layer);

/* Returns EPIC_EINVAL if num_rows is not the number of tokens of the plan. */
epic_result plan_op_check_tokens(const plan_op *s, const char *name, int64_t num_rows);

/* Returns EPIC_EOVERFLOW on all ranks if the buffer of any rank has fewer rows than its plan
 * has slots. */
epic_result plan_op_check_slots(const exchange *x, const char *name);

/* Returns the slots [top_k] of a token of rank `from` on this rank. */
static inline const int32_t *plan_slots_of_token(const plan_view *v, int from, int64_t token)
{
    return v->here + (v->base_of[from] + token) * (int64_t)v->header->layer.top_k;
}

static inline bool plan_is_flat(const plan_view *v)
{
    return v->header->layer.layout == EPIC_FLAT;
}

/* Returns whether this rank has a slot or row of a token of rank `from`. */
static inline bool plan_receives_token(const plan_view *v, int from, int64_t token)
{
    if (plan_is_flat(v)) return v->row_here[v->base_of[from] + token] >= 0;
    const int32_t *slots = plan_slots_of_token(v, from, token);
    for (uint32_t k = 0; k < v->header->layer.top_k; k++)
        if (slots[k] >= 0) return true;
    return false;
}

/* Returns whether a token of this rank has a slot or row on rank `to`. */
static inline bool plan_sends_token(const plan_view *v, int to, int64_t token)
{
    const int64_t first = token * (int64_t)v->header->layer.top_k;
    for (uint32_t k = 0; k < v->header->layer.top_k; k++)
        if (v->rank_to[first + k] == to && v->fate[first + k] >= 0) return true;
    return false;
}

/* Fills x->items with the number of tokens of each rank and returns it. */
const int64_t *tokens_of(exchange *x, const plan_view *v);

/* An output with one row for each slot. */
typedef struct slot_array {
    void *data;
    int64_t row_bytes;
    int64_t num_rows;
} slot_array;

/* slot_array_clear_padding writes zeros to the padding of every slab, unless
 * EPIC_LEAVE_PADDING is set, and to the rows behind the last slab if EPIC_ZERO_TAIL is set.
 * slot_array_clear writes zeros to all rows. Both accept an array without data. */
void slot_array_clear_padding(const plan_view *v, const slot_array *a, uint32_t flags);
void slot_array_clear(const slot_array *a);

#endif
