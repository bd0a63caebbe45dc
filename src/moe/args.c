/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and checks the arguments of epic_moe_plan, epic_moe_forward and epic_moe_backward.
 * Checks the configuration first (config.c), then shapes, weights and buffer sizes (buffers.c),
 * and last the addresses of arrays (arrays.c). */
#include <string.h>

#include "moe/args.h"

#include "base/error.h"
#include "base/sized.h"
#include "experts/config.h"
#include "plan/plan.h"
#include "rules/convert.h"
#include "rules/sentences.h"

/* Arguments that epic_moe_forward and epic_moe_backward have in common. */
typedef struct call_args {
    const epic_moe *moe;
    const epic_moe_weights *weights;
    epic_const_rows x, y; /* y: the rows of `out` in forward, of d_out in backward */
    const char *y_name;
    const void *saved;
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    const int32_t *rank_of_expert; /* NULL in backward */
    bool backward;
} call_args;

/* Checks that `rows` has as many rows as x, and the same row size. Does not check the row size
 * of an empty matrix {NULL, 0, 0}. */
static epic_result check_rows(const moe_job *j, const char *name, epic_const_rows rows)
{
    const bool is_empty = !rows.data && !rows.num_rows && !rows.row_bytes;
    if (rows.num_rows != j->x.num_rows)
        return epic_fail(EPIC_EINVAL,
                         "%s.num_rows is %lld, x.num_rows is %lld: make them equal", name,
                         (long long)rows.num_rows, (long long)j->x.num_rows);
    if (!is_empty && rows.row_bytes != j->row_bytes)
        return epic_fail(
            EPIC_EINVAL,
            "%s.row_bytes is %lld: it must be %lld, for hidden %lld of moe.experts.row_type",
            name, (long long)rows.row_bytes, (long long)j->row_bytes, (long long)j->hidden);
    if (!rows.data && rows.num_rows)
        return epic_fail(EPIC_EINVAL, "%s.data is NULL: it must point to %lld rows", name,
                         (long long)rows.num_rows);
    return EPIC_OK;
}

static epic_result check_memory(const char *name, const void *memory, int64_t bytes,
                                int64_t needed)
{
    if (!memory || (uintptr_t)memory % 64)
        return epic_fail(EPIC_EINVAL, "%s is at %p: it must be aligned to 64 bytes", name,
                         memory);
    if (bytes < needed)
        return epic_fail(EPIC_EINVAL,
                         "%s_bytes is %lld: it must be at least %lld (epic_moe_memory)", name,
                         (long long)bytes, (long long)needed);
    return EPIC_OK;
}

/* Returns EPIC_EINVAL if a weight is NULL although the layer needs it (`wanted` is true). */
static epic_result check_weight(const char *name, const void *weight, bool wanted)
{
    if (weight || !wanted) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "weights.%s is NULL: the layer needs it", name);
}

/* Checks that scales are set if the weights are E4M3 (`scaled`), and NULL if not. */
static epic_result check_scales(const char *name, const float *scales, bool scaled)
{
    if (!scales == !scaled) return EPIC_OK;
    return epic_fail(
        EPIC_EINVAL,
        scaled
            ? "weights.%s is NULL: weights of type E4M3 need it"
            : "weights.%s is not NULL: it must be NULL unless moe.experts.weight_type is E4M3",
        name);
}

/* Sets j->is_e4m3_backward if the caller of backward passed scales. In this case EPIC_RECOMPUTE
 * is an error, because it would repeat forward with rows and weights of type row_type. */
static epic_result read_e4m3_backward(moe_job *j)
{
    j->is_e4m3_backward = j->is_e4m3 && j->weights.w_gate_up_scales;
    if (!j->is_e4m3_backward || !(j->moe.flags & EPIC_RECOMPUTE)) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "weights.w_gate_up_scales is not NULL: with EPIC_RECOMPUTE, "
                                  "weights in backward must be of moe.experts.row_type");
}

/* Checks that all weights are set. `scaled` is true if the weights of the experts are E4M3. */
static epic_result check_weights(const moe_job *j, bool scaled)
{
    const epic_moe_weights *w = &j->weights;
    TRY(check_weight("w_gate", w->w_gate, true));
    TRY(check_weight("w_gate_up", w->w_gate_up, true));
    TRY(check_weight("w_down", w->w_down, true));
    TRY(check_scales("w_gate_up_scales", w->w_gate_up_scales, scaled));
    TRY(check_scales("w_down_scales", w->w_down_scales, scaled));
    TRY(check_weight("shared_gate_up", w->shared_gate_up, j->has_shared));
    TRY(check_weight("shared_down", w->shared_down, j->has_shared));
    if (w->w_shared_gate && !j->has_shared)
        return epic_fail(EPIC_EINVAL, "weights.w_shared_gate is not NULL: it must be NULL if "
                                      "moe.shared is NULL");
    return EPIC_OK;
}

/* If the balance loss is per sequence, checks that this rank has whole sequences. */
static epic_result check_sequences(const moe_job *j)
{
    if (j->tokens % j->sequence_unit == 0) return EPIC_OK;
    return epic_fail(
        EPIC_EINVAL,
        "moe.sequence_tokens is %lld: it must divide the %lld tokens of x.num_rows",
        (long long)j->sequence_unit, (long long)j->tokens);
}

/* Records in j->options which weights the caller passed, so that the ranks can compare this.
 * With EPIC_CHECK_WEIGHTS on the host, also stores a checksum of each weight that must be equal
 * on all ranks. */
static void record_weights(moe_job *j)
{
    const epic_moe_weights *w = &j->weights;
    const bool checked = j->ctx->checks_weights && !j->is_device;
    const int64_t gate = j->columns * j->real_bytes, hidden = j->hidden,
                  inner = j->shared.inner;
    const int64_t width = inner * (j->shared.ungated ? 1 : 2);
    const int64_t shared =
        convert_bytes(j->shared.weight_type ? j->shared.weight_type : j->experts.row_type);
    const struct {
        const void *data;
        int64_t bytes;
    } all[NUM_LAYER_WEIGHTS] = {
        [WEIGHT_W_GATE] = {w->w_gate, hidden * gate},
        [WEIGHT_B_GATE] = {w->b_gate, gate},
        [WEIGHT_BIAS] = {w->bias, j->columns * (int64_t)sizeof *w->bias},
        [WEIGHT_SCALE_OF_EXPERT] = {w->scale_of_expert, gate},
        [WEIGHT_SHARED_GATE_UP] = {w->shared_gate_up, hidden * width * shared},
        [WEIGHT_SHARED_DOWN] = {w->shared_down, inner * hidden * shared},
        [WEIGHT_SHARED_B_GATE_UP] = {w->shared_b_gate_up, width * shared},
        [WEIGHT_SHARED_B_DOWN] = {w->shared_b_down, hidden * shared},
        [WEIGHT_W_SHARED_GATE] = {w->w_shared_gate, hidden * j->real_bytes},
        [WEIGHT_B_GATE_UP] = {w->b_gate_up, 0},
        [WEIGHT_B_DOWN] = {w->b_down, 0}};
    uint32_t words[NUM_LAYER_WEIGHTS];
    for (int i = 0; i < NUM_LAYER_WEIGHTS; i++)
        words[i] =
            layer_options_weight_word(all[i].data, all[i].bytes, checked && all[i].bytes > 0);
    layer_options_set_weights(&j->options, checked, words);
}

static epic_result refuse_on_device(const char *what)
{
    return epic_fail(EPIC_ENOTSUP,
                     "%s is not supported by the layer on CUDA contexts; use a host context",
                     what);
}

static epic_result check_device_support(const moe_job *j)
{
    if (j->has_shared && j->shared.gemm) return refuse_on_device("moe.shared.gemm");
    return EPIC_OK;
}

/* With EPIC_INVARIANT on a device, checks that all arrays are aligned to 16 bytes. For arrays
 * that are not aligned, EPIC would use kernels without tensor cores, and the bits of the
 * results would differ. */
static epic_result check_alignment(const moe_job *j, const void *y, const char *y_name)
{
    const epic_moe_weights *w = &j->weights;
    const struct {
        const char *name;
        const void *data;
    } all[] = {{"x", j->x.data},
               {y_name, y},
               {"weights.w_gate", w->w_gate},
               {"weights.w_gate_up", w->w_gate_up},
               {"weights.w_down", w->w_down},
               {"weights.shared_gate_up", w->shared_gate_up},
               {"weights.shared_down", w->shared_down}};
    if (!j->is_device || !j->is_invariant) return EPIC_OK;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if ((uintptr_t)all[i].data % 16)
            return epic_fail(EPIC_EINVAL,
                             "%s is at %p: with EPIC_INVARIANT it must be aligned to 16 bytes",
                             all[i].name, all[i].data);
    return EPIC_OK;
}

/* Reads and checks the arguments that forward and backward have in common, and lays out the
 * buffers. */
static epic_result read_call(moe_job *j, epic_context *ctx, const epic_call *call,
                             const call_args *c)
{
    if (!ctx) return epic_fail(EPIC_EINVAL, "ctx is NULL: it must be a context from epic_open");
    TRY(context_check(ctx));
    *j = (moe_job){
        .ctx = ctx, .call = *call, .x = c->x, .is_device = ctx->backend->transport == NULL};
    TRY(READ_SIZED(&j->weights, c->weights, sizeof *c->weights, "weights"));
    if (c->x.num_rows < 0 || c->x.num_rows > ctx->config.max_tokens)
        return epic_fail(
            EPIC_EINVAL,
            "x.num_rows is %lld: must be 0 to config.max_tokens %lld; open with more",
            (long long)c->x.num_rows, (long long)ctx->config.max_tokens);
    TRY(moe_read_config(j, &ctx->config, ctx->num_members, c->moe, sizeof *c->moe,
                        c->x.num_rows));
    /* layer_choose_order() may replace EPIC_BY_HOSTS by EPIC_TREE with one leaf per rank.
     * moe_read_config() has already set this rank's number of blocks to 1, which is correct in
     * this case too. */
    layer_choose_order(&j->layer, ctx->num_ranks, context_relays(ctx, c->rank_of_expert));
    TRY(check_rows(j, "x", c->x));
    TRY(check_rows(j, c->y_name, c->y));
    j->x = c->x;
    j->x.row_bytes = j->row_bytes;
    TRY(check_sequences(j));
    if (c->backward) TRY(read_e4m3_backward(j));
    TRY(check_weights(j, c->backward ? j->is_e4m3_backward : j->is_e4m3));
    if (j->weights.w_shared_gate) j->shared.weighting = EPIC_WEIGHT_EARLY;
    if (j->is_device) TRY(check_device_support(j));
    TRY(check_alignment(j, c->y.data, c->y_name));
    moe_layout_buffers(j, c->saved, c->workspace, c->backward);
    record_weights(j);
    TRY(check_memory("saved", c->saved, c->saved_bytes, j->saved_bytes));
    return check_memory("workspace", c->workspace, c->workspace_bytes, j->work_bytes);
}

static epic_result check_loss_type(const moe_job *j, uint32_t type)
{
    if (type == 0 || type == EPIC_F32 || (type == EPIC_F64 && j->is_f64)) return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     "loss_type is %u: it must be EPIC_F32 (or 0), or EPIC_F64 with F64 rows",
                     type);
}

/* Checks that no rank owns more than num_local_experts experts, because expert_rows has only
 * this many elements. epic_plan later checks the ranks in rank_of_expert, so that all ranks
 * return the error. */
static epic_result check_placement(const moe_job *j, const int32_t *rank_of_expert)
{
    const uint32_t experts = j->layer.num_experts, ranks = (uint32_t)j->ctx->num_ranks;
    uint32_t most = (experts + ranks - 1) / ranks;
    if (!rank_of_expert && experts % ranks)
        return epic_fail(EPIC_EINVAL,
                         "rank_of_expert is NULL: num_ranks %u does not divide "
                         "moe.layer.num_experts %u, so it must be a table",
                         ranks, experts);
    for (uint32_t r = 0; rank_of_expert && r < ranks; r++) {
        uint32_t count = 0;
        if (!context_has_member(j->ctx, (int)r)) continue;
        for (uint32_t e = 0; e < experts; e++) count += rank_of_expert[e] == (int32_t)r;
        if (count > most) most = count;
    }
    if (j->experts.num_local_experts >= most) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, SENTENCE_ROOM, (long long)j->experts.num_local_experts,
                     (long long)most);
}

/* With EPIC_INVARIANT, checks that all replicas of a logical expert belong to one leaf of the
 * sum tree. The other tokens influence which replica computes a token's choice. If the replicas
 * were in several leaves, the other tokens would therefore also change the order in which
 * combine adds the token's rows. Ignores invalid entries, which epic_plan reports. */
static epic_result check_replicas(const moe_job *j, const int32_t *logical_of_expert)
{
    uint64_t seen[MAX_EXPERTS / 64]; /* logical experts of the leaves before the current one */
    if (!j->is_invariant || !logical_of_expert) return EPIC_OK;
    const uint32_t experts = j->layer.num_experts, logical = j->layer.num_logical;
    const uint32_t of_leaf = experts / j->layer.leaves;
    memset(seen, 0, sizeof seen);
    for (uint32_t begin = 0; begin < experts; begin += of_leaf) {
        for (uint32_t e = begin; e < begin + of_leaf; e++) {
            const uint32_t id = (uint32_t)logical_of_expert[e];
            if (id < logical && seen[id / 64] >> id % 64 & 1)
                return epic_fail(EPIC_EINVAL,
                                 "logical_of_expert: expert %u is a replica of logical expert "
                                 "%u, which also has a replica in another leaf: with "
                                 "EPIC_INVARIANT all its replicas must be in one leaf (%u "
                                 "consecutive experts); set a smaller moe.layer.leaves, or "
                                 "EPIC_TREE without EPIC_INVARIANT",
                                 e, id, of_leaf);
        }
        for (uint32_t e = begin; e < begin + of_leaf; e++) {
            const uint32_t id = (uint32_t)logical_of_expert[e];
            if (id < logical) seen[id / 64] |= (uint64_t)1 << id % 64;
        }
    }
    return EPIC_OK;
}

/* Checks the routing that the caller forces. Forced weights are allowed only with forced ids.
 * Forced ids are not allowed together with token_ids or a table. */
static epic_result check_forced(const epic_moe_args *a)
{
    if (a->topk_weights_in && !a->topk_idx_in)
        return epic_fail(EPIC_EINVAL, "topk_weights_in is not NULL and topk_idx_in is NULL: "
                                      "pass the ids of these weights too");
    if (a->topk_idx_in && (a->token_ids || a->table))
        return epic_fail(EPIC_EINVAL,
                         "topk_idx_in is not NULL and %s is not NULL: pass one of "
                         "them",
                         a->token_ids ? "token_ids" : "table");
    return EPIC_OK;
}

epic_result moe_read_forward_args(moe_job *j, epic_context *ctx, epic_moe_args *a,
                                  bool planning)
{
    const uint32_t allowed = planning ? 0 : EPIC_PLANNED;
    const call_args c = {.moe = a->moe,
                         .weights = a->weights,
                         .x = a->x,
                         .y = planning ? a->x : epic_rows_as_const(a->out),
                         .y_name = "out",
                         .saved = a->saved,
                         .saved_bytes = a->saved_bytes,
                         .workspace = a->workspace,
                         .workspace_bytes = a->workspace_bytes,
                         .rank_of_expert = a->rank_of_expert};
    TRY(read_call(j, ctx, &a->call, &c));
    if (!planning) a->out.row_bytes = j->row_bytes;
    TRY(check_forced(a));
    TRY(moe_check_forward_arrays(j, a));
    if (a->flags & ~allowed)
        return epic_fail(EPIC_EINVAL, "flags is 0x%x: it must have no bits except 0x%x",
                         a->flags, allowed);
    if (a->reserved)
        return epic_fail(EPIC_EINVAL, "reserved fields must be zero: one is %u", a->reserved);
    if (planning && j->capacity != EPIC_CAPACITY_EXACT)
        return epic_fail(EPIC_EINVAL,
                         "moe.capacity is %lld: epic_moe_plan counts the slots itself, with "
                         "EPIC_CAPACITY_EXACT",
                         (long long)j->capacity);
    if (!planning && !(a->flags & EPIC_PLANNED) && j->capacity == EPIC_CAPACITY_EXACT)
        return epic_fail(EPIC_EINVAL, "moe.capacity is 0, EPIC_CAPACITY_EXACT: call "
                                      "epic_moe_plan first, then with EPIC_PLANNED");
    TRY(check_loss_type(j, a->loss_type));
    /* tables in device memory are checked by the kernels that make the plan */
    if (!j->is_device) TRY(check_replicas(j, a->logical_of_expert));
    if (j->is_device && a->rank_of_expert) return EPIC_OK;
    return check_placement(j, a->rank_of_expert);
}

epic_result moe_read_backward_args(moe_job *j, epic_context *ctx, epic_moe_backward_args *a,
                                   const epic_moe_gradients *g)
{
    const call_args c = {.moe = a->moe,
                         .weights = a->weights,
                         .x = a->x,
                         .y = a->d_out,
                         .y_name = "d_out",
                         .saved = a->saved,
                         .saved_bytes = a->saved_bytes,
                         .workspace = a->workspace,
                         .workspace_bytes = a->workspace_bytes,
                         .backward = true};
    TRY(read_call(j, ctx, &a->call, &c));
    a->d_out.row_bytes = j->row_bytes;
    j->grad_type = a->grad_type;
    TRY(experts_read_grad_type(&j->grad_type, j->experts.row_type, j->is_device));
    TRY(moe_check_backward_arrays(j, a, g));
    if (a->d_x.data || !j->tokens) {
        TRY(check_rows(j, "d_x", epic_rows_as_const(a->d_x)));
        a->d_x.row_bytes = j->row_bytes;
        TRY(check_alignment(j, a->d_x.data, "d_x"));
    }
    if (g->scale_of_expert && !j->weights.scale_of_expert)
        return epic_fail(EPIC_EINVAL,
                         "gradients.scale_of_expert is not NULL: it must be NULL if "
                         "weights.scale_of_expert is NULL");
    if (a->d_topk_weights_in && !(a->flags & EPIC_FORCED_WEIGHTS))
        return epic_fail(EPIC_EINVAL, "d_topk_weights_in is not NULL: it must be NULL, unless "
                                      "flags has EPIC_FORCED_WEIGHTS");
    if (a->flags & ~(uint32_t)(EPIC_ACCUMULATE | EPIC_FORCED_WEIGHTS))
        return epic_fail(EPIC_EINVAL,
                         "flags is 0x%x: it must have no bits except EPIC_ACCUMULATE and "
                         "EPIC_FORCED_WEIGHTS",
                         a->flags);
    if (a->reserved)
        return epic_fail(EPIC_EINVAL, "reserved fields must be zero: one is %u", a->reserved);
    return check_loss_type(j, a->loss_type);
}
