/* SPDX-License-Identifier: Apache-2.0 */
/* Declares the operations of host contexts, which are built on the flows of
 * exchange/exchange.h.
 *
 * Requires that the public call (src/api) has checked pointers and enums, and has filled in the
 * defaults of args->layer. The functions declared here make the checks that depend on the plan.
 *
 * Every operation is collective and blocks until its rows have arrived. If the data of one rank
 * contains an error, all ranks return this error. `extra` is NULL or contains data for the op
 * header: an error that src/moe found in this rank's data, and the options of the layer. */
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
/* Both functions implement epic_dispatch. host_dispatch_unchecked() does not check the bytes of
 * the plan. It is used if the same public call has made the plan. */
epic_result host_dispatch(epic_context *ctx, const epic_dispatch_args *args,
                          const op_header_extra *extra);
epic_result host_dispatch_unchecked(epic_context *ctx, const epic_dispatch_args *args);

/* Runs the second half of epic_plan_dispatch: sends the rows in the exchange x, in which the
 * plan was made. Sends no new op headers, because the headers of the plan already contain the
 * data that ranks compare for the dispatch. Closes x and returns the result. */
epic_result host_dispatch_continue(exchange *x, const epic_dispatch_args *args);

/* Returns a hash of the arguments of a dispatch that must be equal on all ranks. The hash is
 * never 0. The op header of the plan contains it as LOCAL_NEXT_DISPATCH. */
int64_t dispatch_signature(const epic_dispatch_args *args);

/* Stores in an op header which outputs of a dispatch are in windows, and where in the windows
 * (window_place()). */
void op_header_set_dispatch_windows(epic_op_header *header, epic_context *ctx,
                                    const epic_dispatch_args *args);

epic_result host_combine(epic_context *ctx, const epic_combine_args *args);
epic_result host_dispatch_backward(epic_context *ctx, const epic_dispatch_backward_args *args);
epic_result host_combine_backward(epic_context *ctx, const epic_combine_backward_args *args,
                                  const op_header_extra *extra);
epic_result host_allreduce_sum(epic_context *ctx, const epic_allreduce_sum_args *args);
epic_result host_sum_replicas(epic_context *ctx, const epic_sum_replicas_args *args);

/* Sums like epic_allreduce_sum, and compares about->common between the ranks. For this, the op
 * header of the sum is a copy of `about`. Only the elements that describe the sum itself are
 * replaced in the copy, so they are not compared with the values in about->common. */
epic_result host_sum_with_header(epic_context *ctx, const epic_allreduce_sum_args *args,
                                 const epic_op_header *about);

/* Sums like epic_allreduce_sum, but args->data is an array of `type`, which is EPIC_F32 or
 * EPIC_F64. Does not check the arguments. */
epic_result host_sum_of_type(epic_context *ctx, const epic_allreduce_sum_args *args,
                             uint32_t type);

/* State of an operation that has a plan as argument.
 *
 * plan_op_begin() checks that the bytes are a plan of this context, and prepares the op header.
 * If the plan is damaged or `extra` has an error, the header reports this error, which all
 * ranks then return. */
typedef struct plan_op {
    plan_view plan; /* valid unless `damaged` is true */
    /* true: the plan is damaged or `extra` has an error; `plan` must not be used */
    bool damaged;
    epic_op_header op_header;
} plan_op;

void plan_op_begin(plan_op *s, const epic_context *ctx, uint32_t operation, const void *plan,
                   int64_t plan_bytes, const op_header_extra *extra);
/* Like plan_op_begin(), but does not check the bytes of the plan. Used if the same public call
 * has made the plan. */
void plan_op_begin_unchecked(plan_op *s, uint32_t operation, const void *plan);

/* Copies those fields of a layer that must be equal on all ranks to an op header. */
void op_header_set_layer(epic_op_header *header, const epic_layer *layer);

/* Returns EPIC_EINVAL if `layer`, whose defaults are filled in, differs from the layer of the
 * plan. Returns EPIC_OK for a damaged plan, because the op header reports that error. */
epic_result plan_op_check_layer(const plan_op *s, const epic_layer *layer);

/* Returns EPIC_EINVAL if num_rows, the number of rows of the caller's array `name`, is not the
 * number of tokens in the plan. Returns EPIC_OK for a damaged plan, because the op header
 * reports that error. */
epic_result plan_op_check_tokens(const plan_op *s, const char *name, int64_t num_rows);

/* Returns EPIC_EOVERFLOW if the slot buffer of any rank has fewer rows than that rank's plan
 * has slots. Reads all op headers, so all ranks return the same result. `name` is the name of
 * the buffer in the error text. */
epic_result plan_op_check_slots(const exchange *x, const char *name);

/* Returns an array [top_k] for one token of rank `from`. Element k is the slot of choice k on
 * this rank (in a FLAT layer: the local expert of choice k), or -1 if choice k has no slot on
 * this rank. */
static inline const int32_t *plan_slots_of_token(const plan_view *v, int from, int64_t token)
{
    return v->slot_or_expert + (v->base_of[from] + token) * (int64_t)v->header->layer.top_k;
}

static inline bool plan_is_flat(const plan_view *v)
{
    return v->header->layer.layout == EPIC_FLAT;
}

/* Returns true if this rank has a slot (FLAT: a row) of a token of rank `from`. */
static inline bool plan_receives_token(const plan_view *v, int from, int64_t token)
{
    if (plan_is_flat(v)) return v->row_of[v->base_of[from] + token] >= 0;
    const int32_t *slots = plan_slots_of_token(v, from, token);
    for (uint32_t k = 0; k < v->header->layer.top_k; k++)
        if (slots[k] >= 0) return true;
    return false;
}

/* Returns true if a token of this rank has a slot (FLAT: a row) on rank `to`. */
static inline bool plan_sends_token(const plan_view *v, int to, int64_t token)
{
    const int64_t first = token * (int64_t)v->header->layer.top_k;
    for (uint32_t k = 0; k < v->header->layer.top_k; k++)
        if (v->rank_to[first + k] == to && v->fate[first + k] >= 0) return true;
    return false;
}

/* Returns the lowest k for which choice k of a token of this rank has a slot on rank `to`.
 * Requires that the token has such a choice. */
static inline uint32_t plan_choice_on(const plan_view *v, int to, int64_t token)
{
    const int64_t first = token * (int64_t)v->header->layer.top_k;
    uint32_t k = 0;
    while (v->rank_to[first + k] != to || v->fate[first + k] < 0) k++;
    return k;
}

/* Returns the only slot (FLAT: the row) that a token of this rank has on rank `to`. Returns -1
 * if the token has no slot or several slots on rank `to`. */
static inline int32_t plan_only_slot_on(const plan_view *v, int to, int64_t token)
{
    const int64_t first = token * (int64_t)v->header->layer.top_k;
    int32_t slot = -1;
    for (uint32_t k = 0; k < v->header->layer.top_k; k++) {
        if (v->rank_to[first + k] != to || v->fate[first + k] < 0) continue;
        if (slot >= 0 && !plan_is_flat(v)) return -1;
        slot = v->fate[first + k];
    }
    return slot;
}

/* Returns true if a token of rank `from` has exactly one slot (FLAT: its row) on this rank. In
 * this case plan_only_slot_on() returns this slot on rank `from`. */
static inline bool plan_has_only_slot(const plan_view *v, int from, int64_t token)
{
    if (plan_is_flat(v)) return v->row_of[v->base_of[from] + token] >= 0;
    const int32_t *slots = plan_slots_of_token(v, from, token);
    uint32_t count = 0;
    for (uint32_t k = 0; k < v->header->layer.top_k; k++) count += slots[k] >= 0;
    return count == 1;
}

/* Writes the number of tokens of each rank to x->items [num_ranks], and returns x->items. */
const int64_t *tokens_of(exchange *x, const plan_view *v);

/* An output with one row per slot. */
typedef struct slot_array {
    void *data;
    int64_t row_bytes;
    int64_t num_rows;
} slot_array;

/* Both functions set rows of an output to zero, and do nothing if a->data is NULL.
 * slot_array_clear() zeroes all rows. slot_array_clear_padding() zeroes the padding slots of
 * every slab, unless flags has EPIC_LEAVE_PADDING. If flags has EPIC_ZERO_TAIL,
 * slot_array_clear_padding() zeroes the tail (the rows after the last slab). */
void slot_array_clear_padding(const plan_view *v, const slot_array *a, uint32_t flags);
void slot_array_clear(const slot_array *a);

#endif
