/* SPDX-License-Identifier: Apache-2.0 */
/* Implements epic_plan and epic_plan_dispatch on the host.
 *
 * Making a plan is an all-gather and a local computation: every rank sends its expert ids to
 * all ranks, and all ranks compute the same plan from these ids. A rank with few tokens sends
 * its ids inside its op header. The other ranks send their ids after the op headers, in a
 * scatter flow (exchange.h). */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/hash.h"
#include "host_ops/host_ops.h"

typedef struct planning {
    const epic_plan_args *args;
    epic_layer layer;
    plan_tables tables;
    planner planner;
    exchange *x;
    epic_op_header op_header; /* peers read it until x is closed */
} planning;

/* Returns expert id i of the caller's topk_idx, whose elements have 32 or 64 bits. */
static int64_t id_at(const epic_plan_args *args, int64_t i)
{
    return args->index_type == EPIC_I64 ? ((const int64_t *)args->topk_idx)[i]
                                        : ((const int32_t *)args->topk_idx)[i];
}

/* Converts the caller's expert ids to int32. If a choice (element k of a token's top_k ids) has
 * no expert, its id becomes -1. */
static void copy_ids(int32_t *ids, const epic_plan_args *args, const epic_layer *layer)
{
    const int64_t choices = args->num_tokens * layer->top_k;
    for (int64_t i = 0; i < choices; i++) {
        const int64_t id = id_at(args, i);
        ids[i] = id < 0 ? -1 : (int32_t)id;
    }
}

static bool do_ids_fit_header(int64_t num_tokens, const epic_layer *layer)
{
    return num_tokens * layer->top_k * (int64_t)sizeof(int32_t) <= OP_PAYLOAD_BYTES;
}

/* Returns true if an earlier choice of the same token has the same expert as choice i. */
static bool is_duplicate(const epic_plan_args *args, int64_t i, int64_t top_k)
{
    const int64_t id = id_at(args, i);
    for (int64_t j = i - i % top_k; j < i; j++)
        if (id >= 0 && id_at(args, j) == id) return true;
    return false;
}

/* Checks the expert ids, and stores the first error in the op header: an id out of range, or a
 * duplicate in a layer with EPIC_DISTINCT. */
static void op_header_check_ids(epic_op_header *header, const epic_plan_args *args,
                                const epic_layer *layer)
{
    const int64_t k = layer->top_k, choices = args->num_tokens * k;
    const int64_t num_ids = layer_num_ids(layer);
    const bool distinct = (layer->flags & EPIC_DISTINCT) != 0;
    for (int64_t i = 0; i < choices; i++) {
        const int64_t id = id_at(args, i);
        const bool beyond = id >= num_ids;
        if (!beyond && !(distinct && is_duplicate(args, i, k))) continue;
        header->local[LOCAL_ERROR] = beyond ? DATA_EXPERT : DATA_DUPLICATE;
        header->local[LOCAL_ERROR_DETAILS] = i / k;
        header->local[LOCAL_ERROR_DETAILS + 1] = i % k;
        header->local[LOCAL_ERROR_DETAILS + 2] = id;
        header->local[LOCAL_ERROR_DETAILS + 3] = num_ids;
        return;
    }
}

/* Stores hashes of rank_of_expert and logical_of_expert in the op header, so that the ranks can
 * compare them. If a table is invalid, also stores the table's first error in the op header and
 * returns false. */
static bool op_header_set_tables(epic_op_header *header, const epic_context *ctx,
                                 plan_tables *tables, const epic_layer *layer)
{
    const int32_t *ranks = tables->rank_of_expert, *logical = tables->logical_of_expert;
    const size_t bytes = layer->num_experts * sizeof *ranks;
    if (ranks) header->common[COMMON_PLACEMENT] = (int64_t)hash_bytes(ranks, bytes);
    if (logical) header->common[COMMON_REPLICAS] = (int64_t)hash_bytes(logical, bytes);
    uint32_t expert;
    const placement_error wrong = layer_check_placement(layer, ctx->num_ranks, tables, &expert);
    if (wrong) {
        const int32_t owner = layer_owner_of(layer, ctx->num_ranks, tables, expert);
        const data_fault fault = {DATA_PLACEMENT, {expert, owner, wrong, ctx->num_members}};
        op_header_set_fault(header, &fault);
        return false;
    }
    const replicas_error error = replicas_check(layer, ctx->num_ranks, tables);
    const data_fault fault = {DATA_REPLICAS, {error.expert, error.logical, layer->num_logical}};
    if (error.expert >= 0 || error.logical >= 0) op_header_set_fault(header, &fault);
    return header->local[LOCAL_ERROR] == DATA_OK;
}

/* Returns the maximum number of slots of this rank, or 0 if there is no maximum. The maximum is
 * the smaller of args->capacity and *capacity_limit. If the caller has passed only one of them,
 * the maximum is that one. */
static int64_t read_capacity(const epic_plan_args *args)
{
    if (!args->capacity_limit) return args->capacity;
    const int64_t limit = *args->capacity_limit > 0 ? *args->capacity_limit : 1;
    return args->capacity && args->capacity < limit ? args->capacity : limit;
}

/* Sets p->tables. Fills in the op header: the layer, the hashes of the tables, the first error
 * in this rank's data, and the expert ids if they fit into the header. */
static void plan_fill_header(planning *p, const epic_context *ctx, const op_header_extra *extra)
{
    const epic_plan_args *args = p->args;
    const epic_layer *layer = &p->layer;
    epic_op_header *header = &p->op_header;
    p->tables = (plan_tables){.rank_of_expert = args->rank_of_expert,
                              .logical_of_expert = args->logical_of_expert,
                              .members = context_members(ctx)};
    memset(header, 0, sizeof *header);
    header->common[COMMON_OPERATION] = EPIC_OP_PLAN;
    op_header_set_layer(header, layer);
    header->local[LOCAL_TOKENS] = args->num_tokens;
    header->local[LOCAL_CAPACITY] = read_capacity(args);
    op_header_set_options(header, extra ? extra->options : NULL);
    if (!op_header_set_tables(header, ctx, &p->tables, layer)) return;
    op_header_check_ids(header, args, layer);
    op_header_set_fault(header, extra ? extra->fault : NULL);
    int32_t ids[OP_PAYLOAD_BYTES / sizeof(int32_t)] = {0};
    if (!do_ids_fit_header(args->num_tokens, layer)) return;
    copy_ids(ids, args, layer);
    memcpy(header->bytes, ids, sizeof ids);
}

static int32_t *ids_of_token(planning *p, int rank, int64_t token)
{
    return p->planner.ids + (p->planner.base_of[rank] + token) * (int64_t)p->layer.top_k;
}

/* Callbacks scatter.is_sent and is_received (exchange.h): all members send their ids to all
 * members. */
static bool is_always_sent(void *self, int rank, int64_t item)
{
    (void)self, (void)rank, (void)item;
    return true;
}

static void fill_ids(void *self, int64_t item, int32_t piece, void *entry)
{
    planning *p = self;
    (void)piece;
    memcpy(entry, ids_of_token(p, p->x->rank, item), p->layer.top_k * sizeof(int32_t));
}

/* Callback scatter.read_entry: stores the ids of a token of rank `from`. */
static void read_ids(void *self, int from, int64_t item, int32_t piece, const void *entry)
{
    planning *p = self;
    (void)piece;
    memcpy(ids_of_token(p, from, item), entry, p->layer.top_k * sizeof(int32_t));
}

/* Callback scatter.read_own_item: does nothing, because the ids of this rank's own tokens are
 * already in the planner's array. */
static void skip_own_ids(void *self, int64_t item)
{
    (void)self, (void)item;
}

/* Copies the expert ids in the op headers to the planner. Sets the number of items of the ranks
 * that sent these ids to 0, so that the scatter flow skips them. Returns true if other ranks
 * must still send ids. */
static bool read_header_ids(planning *p)
{
    exchange *x = p->x;
    bool more = false;
    for (int r = 0; r < x->num_ranks; r++) {
        const int64_t tokens = x->items[r];
        const bool is_in_header = do_ids_fit_header(tokens, &p->layer);
        more |= !is_in_header;
        if (!is_in_header) continue;
        memcpy(ids_of_token(p, r, 0), x->headers[r]->bytes,
               (size_t)tokens * p->layer.top_k * sizeof(int32_t));
        x->items[r] = 0;
    }
    return more;
}

/* Copies the expert ids of all ranks to the planner: from the op headers or, for ranks with too
 * many ids for their header, from a scatter flow. */
static epic_result exchange_ids(planning *p)
{
    const scatter s = {
        .self = p,
        .items = p->x->items,
        .split = exchange_split_rows(p->x, true, p->layer.top_k * (int64_t)sizeof(int32_t), 0),
        .is_sent = is_always_sent,
        .is_received = is_always_sent,
        .fill_entry = fill_ids,
        .read_entry = read_ids,
        .read_own_item = skip_own_ids};
    copy_ids(ids_of_token(p, p->x->rank, 0), p->args, &p->layer);
    return read_header_ids(p) ? scatter_run(p->x, &s) : EPIC_OK;
}

/* Writes the outputs of epic_plan: the load of each expert, the number of rows and the number
 * of tokens of each local expert, and the demand. If `result` is an error, the numbers of rows
 * and tokens are 0. */
static void write_counts(planning *p, epic_result result)
{
    const epic_plan_args *args = p->args;
    const planner *q = &p->planner;
    for (int32_t l = 0; l < q->header->num_local; l++) {
        const bool flat = p->layer.layout == EPIC_FLAT;
        const int32_t padded =
            flat ? q->slab_count[l] : q->slab_begin[l + 1] - q->slab_begin[l];
        const int32_t rows = result ? 0 : padded, tokens = result ? 0 : q->slab_count[l];
        if (args->expert_rows) args->expert_rows[l] = rows;
        if (args->expert_tokens) args->expert_tokens[l] = tokens;
        if (args->expert_rows_i64) args->expert_rows_i64[l] = rows;
        if (args->expert_tokens_i64) args->expert_tokens_i64[l] = tokens;
    }
    if (args->load && q->absent_load == args->load)
        for (uint32_t e = 0; e < p->layer.num_experts; e++) args->load[e] += q->count[e];
    else if (args->load)
        memcpy(args->load, q->count, p->layer.num_experts * sizeof *args->load);
    if (args->logical_load) planner_add_logical_load(q, args->logical_load);
    if (args->demand) *args->demand = (int32_t)q->header->demand;
}

/* Zeroes the output in which the planner counts the choices of absent experts (experts that no
 * member owns): logical_load in a layer with replicas, and `load` in a layer without replicas
 * if ranks have left the group. write_counts() adds the choices of all other experts. */
static void clear_absent_load(planning *p)
{
    const epic_layer *layer = &p->layer;
    const uint32_t num_ids = layer_num_ids(layer);
    if (layer->num_logical)
        p->planner.absent_load = p->args->logical_load;
    else if (p->planner.members)
        p->planner.absent_load = p->args->load;
    if (p->planner.absent_load)
        memset(p->planner.absent_load, 0, num_ids * sizeof *p->planner.absent_load);
}

/* Makes a plan without slots. Called if the data of any rank contains an error. The lengths of
 * the caller's output arrays depend on the placement of the experts, so the plan still needs a
 * placement. The placement is this rank's rank_of_expert or, if the error is in rank_of_expert,
 * the default placement. */
static void make_empty_plan(planning *p)
{
    const exchange *x = p->x;
    plan_tables tables = {.rank_of_expert = p->args->rank_of_expert,
                          .members = context_members(x->ctx)};
    if (exchange_local_field(x, x->rank, LOCAL_ERROR) == DATA_PLACEMENT)
        tables.rank_of_expert = NULL;
    for (int r = 0; r < x->num_ranks; r++)
        x->items[r] = exchange_local_field(x, r, LOCAL_TOKENS);
    planner_begin(&p->planner, p->args->plan, &p->layer, x->rank, x->num_ranks, x->items,
                  &tables);
    const int64_t choices = p->planner.header->total_tokens * p->layer.top_k;
    for (int64_t i = 0; i < choices; i++) p->planner.ids[i] = -1;
    memset(p->planner.capacity, 0, (size_t)x->num_ranks * sizeof *p->planner.capacity);
    clear_absent_load(p);
    planner_finish(&p->planner);
    p->planner.header->capacity = exchange_local_field(x, x->rank, LOCAL_CAPACITY);
    write_counts(p, EPIC_EINVAL);
}

static epic_result make_plan(planning *p)
{
    exchange *x = p->x;
    for (int r = 0; r < x->num_ranks; r++)
        x->items[r] = exchange_local_field(x, r, LOCAL_TOKENS);
    planner_begin(&p->planner, p->args->plan, &p->layer, x->rank, x->num_ranks, x->items,
                  &p->tables);
    for (int r = 0; r < x->num_ranks; r++)
        p->planner.capacity[r] = exchange_local_field(x, r, LOCAL_CAPACITY);
    TRY(exchange_ids(p));
    clear_absent_load(p);
    const epic_result result = planner_finish(&p->planner);
    write_counts(p, result);
    return result;
}

/* If the context has a trace, writes this rank's expert ids to the trace, which the tool
 * epic-trace reads. */
static void trace_ids(const planning *p)
{
    const trace_record record = {.tag = p->x->tag,
                                 .sequence = p->x->sequence,
                                 .plan = {.num_tokens = p->args->num_tokens,
                                          .top_k = p->layer.top_k,
                                          .num_experts = layer_num_ids(&p->layer),
                                          .alignment = p->layer.alignment}};
    trace_plan(p->x->ctx->trace, record, p->args->topk_idx, p->args->index_type);
}

/* Returns true if plan_run() has written a plan when it returns `result`. If `result` is an
 * error, the plan has no slots and contains this error. */
static bool is_plan_written(epic_result result)
{
    return result == EPIC_OK || result == EPIC_EINVAL || result == EPIC_EOVERFLOW;
}

/* Runs epic_plan until the plan is written. In epic_plan_dispatch, `next` is the dispatch that
 * follows in the same call. In epic_plan, `next` is NULL. Sets p->x to the exchange, which the
 * caller must close. If no exchange could be opened, p->x is NULL. */
static epic_result plan_run(planning *p, epic_context *ctx, const op_header_extra *extra,
                            const epic_dispatch_args *next)
{
    const epic_plan_args *args = p->args;
    plan_fill_header(p, ctx, extra);
    if (next) p->op_header.local[LOCAL_NEXT_DISPATCH] = dispatch_signature(next);
    if (next) op_header_set_dispatch_windows(&p->op_header, ctx, next);
    const uint64_t bytes = (uint64_t)(args->num_tokens * p->layer.top_k) * sizeof(int32_t);
    epic_result result =
        exchange_open(&p->x, ctx, EPIC_OP_PLAN, &args->call, &p->op_header, bytes);
    if (!p->x) return result;
    if (result == EPIC_OK)
        result = make_plan(p);
    else
        make_empty_plan(p);
    const uint64_t id =
        hash_join(hash_join(hash_join(ctx->group_id, p->x->tag), p->x->sequence), 1) | 1;
    if (is_plan_written(result)) planner_seal(&p->planner, id, ctx->group_id, result);
    if (is_plan_written(result) && result != EPIC_EINVAL) trace_ids(p);
    return result;
}

epic_result host_plan(epic_context *ctx, const epic_plan_args *args,
                      const op_header_extra *extra)
{
    planning p = {.args = args, .layer = *args->layer};
    const epic_result result = plan_run(&p, ctx, extra, NULL);
    return p.x ? exchange_close(p.x, result) : result;
}

/* Returns true if the dispatches of all ranks have the same signature (hash of the arguments),
 * so that dispatch can run in the exchange of the plan. If the signatures differ, dispatch
 * sends op headers of its own. Comparing these op headers finds the argument that differs. */
static bool do_all_continue(const exchange *x)
{
    for (int r = 0; r < x->num_ranks; r++)
        if (context_has_member(x->ctx, r) &&
            exchange_local_field(x, r, LOCAL_NEXT_DISPATCH) !=
                exchange_local_field(x, x->rank, LOCAL_NEXT_DISPATCH))
            return false;
    return true;
}

epic_result host_plan_dispatch(epic_context *ctx, const epic_plan_args *args,
                               const epic_dispatch_args *dispatch, const op_header_extra *extra)
{
    planning p = {.args = args, .layer = *args->layer};
    epic_result result = plan_run(&p, ctx, extra, dispatch);
    if (!p.x) return result;
    if (result == EPIC_OK && do_all_continue(p.x)) return host_dispatch_continue(p.x, dispatch);
    result = exchange_close(p.x, result);
    if (!is_plan_written(result)) return result;
    if (result == EPIC_OK) return host_dispatch_unchecked(ctx, dispatch);
    char why[512];
    snprintf(why, sizeof why, "%s", epic_sentence());
    /* the plan has no slots, so this dispatch moves no rows and zeroes the outputs */
    TRY(host_dispatch_unchecked(ctx, dispatch));
    return epic_fail(result, "%s", why);
}
