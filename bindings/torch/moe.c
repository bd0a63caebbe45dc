/* SPDX-License-Identifier: Apache-2.0 */
/* The operators of the whole layer. They call epic_moe_forward and epic_moe_backward. */
#include "ops.h"
#include "options.h"

/* The inputs that forward and backward have in common. The schemas at the end of this file list
 * them: WEIGHTS first, then NUMBERS. */
typedef struct moe_job {
    epic_layer layer;
    epic_router router;
    epic_experts experts, shared;
    epic_moe moe;
    epic_moe_weights weights;
    call_array x, w_gate, b_gate, bias, w_gate_up, w_down, b_gate_up, b_down;
    call_array shared_gate_up, shared_down, shared_b_gate_up, shared_b_down, w_shared_gate;
    call_array w_gate_up_scales, w_down_scales;
    uint32_t grad_type; /* epic_type of the gradients of the experts' weights; 0: default */
    bool is_backward;
    bool with_routing;       /* forward returns topk_idx and topk_weights */
    bool has_forced_weights; /* backward: forward had topk_weights_in */
} moe_job;

/* Two flags in the argument layer_leaves, next to the flags of epic_moe (options.h). They are
 * not separate arguments, because torch allows at most 64 arguments, and moe_out has 64. */
enum { FORCED_WEIGHTS = 1 << 29, WITH_ROUTING = 1 << 30 };

/* Reads x and the weights of the layer. */
static void read_weights(torch_call *call, moe_job *job)
{
    job->x = call_arg(call, "x", CALL_ROWS, 2);
    const uint32_t gate = job->x.type == EPIC_F64 ? EPIC_F64 : EPIC_F32;
    job->w_gate = call_arg(call, "w_gate", gate, 2);
    job->b_gate = call_arg_or_none(call, "b_gate", gate, 1);
    job->bias = call_arg_or_none(call, "bias", EPIC_F32, 1);
    job->w_gate_up = call_arg(call, "w_gate_up", CALL_MATRIX, 3);
    job->w_down = call_arg(call, "w_down", job->w_gate_up.type, 3);
    job->b_gate_up = call_arg_or_none(call, "b_gate_up", CALL_ROWS, 2);
    job->b_down = call_arg_or_none(call, "b_down", CALL_ROWS, 2);
    job->shared_gate_up = call_arg_or_none(call, "shared_gate_up", CALL_ROWS, 3);
    job->shared_down = call_arg_or_none(call, "shared_down", CALL_ROWS, 3);
    job->shared_b_gate_up = call_arg_or_none(call, "shared_b_gate_up", CALL_ROWS, 2);
    job->shared_b_down = call_arg_or_none(call, "shared_b_down", CALL_ROWS, 2);
    job->w_shared_gate = call_arg_or_none(call, "w_shared_gate", gate, 1);
    job->w_gate_up_scales = call_arg_or_none(call, "w_gate_up_scales", EPIC_F32, 3);
    job->w_down_scales = call_arg_or_none(call, "w_down_scales", EPIC_F32, 3);
    job->weights = (epic_moe_weights){.w_gate = job->w_gate.data,
                                      .b_gate = job->b_gate.data,
                                      .bias = job->bias.data,
                                      .w_gate_up = job->w_gate_up.data,
                                      .w_down = job->w_down.data,
                                      .b_gate_up = job->b_gate_up.data,
                                      .b_down = job->b_down.data,
                                      .shared_gate_up = job->shared_gate_up.data,
                                      .shared_down = job->shared_down.data,
                                      .shared_b_gate_up = job->shared_b_gate_up.data,
                                      .shared_b_down = job->shared_b_down.data,
                                      .w_shared_gate = job->w_shared_gate.data,
                                      .w_gate_up_scales = job->w_gate_up_scales.data,
                                      .w_down_scales = job->w_down_scales.data};
}

/* Checks the scales of e4m3 weights: one for each block of 128 x 128 elements. */
static void check_scales(torch_call *call, const moe_job *job)
{
    const epic_experts *e = &job->experts;
    const int64_t inner = e->inner, width = e->ungated ? inner : 2 * inner;
    const int64_t rows = e->num_local_experts * (((int64_t)e->hidden + 127) / 128);
    call_check_count(call, "w_gate_up_scales", job->w_gate_up_scales,
                     rows * ((width + 127) / 128));
    call_check_count(call, "w_down_scales", job->w_down_scales, rows * ((inner + 127) / 128));
}

/* Checks the shapes of x and the weights. The core cannot check them, because its arguments
 * contain only the addresses of arrays. */
static void check_weights(torch_call *call, const moe_job *job)
{
    static const char *const shared_names[] = {"shared_gate_up", "shared_down",
                                               "shared_b_gate_up", "shared_b_down"};
    const call_array arrays[] = {job->w_gate_up, job->w_down, job->b_gate_up, job->b_down};
    const call_array shared[] = {job->shared_gate_up, job->shared_down, job->shared_b_gate_up,
                                 job->shared_b_down};
    const int64_t columns = (int64_t)job->router.num_experts + job->router.zero_experts;
    const int64_t hidden = job->experts.hidden;
    call_check_count(call, "x", job->x, job->x.rows * hidden);
    call_check_shape(call, "w_gate", job->w_gate, 2, (int64_t[]){hidden, columns});
    call_check_count(call, "b_gate", job->b_gate, columns);
    call_check_count(call, "bias", job->bias, columns);
    call_check_count(call, "w_shared_gate", job->w_shared_gate, hidden);
    check_mlp(call, &job->experts, arrays, expert_names, job->x.type, job->is_backward);
    if (job->moe.shared != NULL)
        check_mlp(call, &job->shared, shared, shared_names, job->x.type, job->is_backward);
    check_scales(call, job);
}

/* Reads the options of the layer, and then checks the weights with them. */
static void read_numbers(torch_call *call, moe_job *job)
{
    job->moe.balance_coeff = call_float(call);
    job->moe.z_coeff = call_float(call);
    job->moe.sequence_tokens = call_int(call);
    job->moe.capacity = call_int(call);
    uint32_t flags;
    job->layer = read_layer_with_flags(call, &flags);
    job->moe.flags = flags & ~(WITH_ROUTING | FORCED_WEIGHTS);
    job->with_routing = flags & WITH_ROUTING;
    job->has_forced_weights = flags & FORCED_WEIGHTS;
    job->router = read_router(call);
    mlp_types types = {.row = job->x.type, .weight = job->w_gate_up.type};
    job->experts = read_experts(call, &types);
    job->grad_type = types.grad;
    job->shared = read_shared(call, job->experts, job->shared_gate_up.type);
    job->moe.layer = &job->layer;
    job->moe.router = &job->router;
    job->moe.experts = &job->experts;
    job->moe.shared = job->shared.inner != 0 ? &job->shared : NULL;
    check_weights(call, job);
}

static void op_moe(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("moe", stack, num_results);
    moe_job job = {0};
    call_order_token(&call);
    read_weights(&call, &job);
    const call_array ids = call_arg_or_none(&call, "token_ids", CALL_INDEX, 1);
    const call_array table = call_arg_or_none(&call, "table", EPIC_I32, 2);
    const call_array ranks = call_arg_or_none(&call, "rank_of_expert", EPIC_I32, 1);
    const call_array logical = call_arg_or_none(&call, "logical_of_expert", EPIC_I32, 1);
    const uint32_t type = job.x.type == EPIC_F64 ? EPIC_F64 : EPIC_F32;
    const call_array forced = call_arg_or_none(&call, "topk_idx_in", EPIC_I32, 2);
    const call_array forced_weights = call_arg_or_none(&call, "topk_weights_in", type, 2);
    const call_array limit = call_arg_or_none(&call, "capacity_limit", EPIC_I32, 0);
    const int64_t saved_bytes = call_int(&call), workspace_bytes = call_int(&call);
    const epic_call where = call_enter(&call);
    read_numbers(&call, &job);
    call_check_count(&call, "token_ids", ids, job.x.rows);
    call_check_count(&call, "table", table, table.rows * job.router.top_k);
    call_check_count(&call, "rank_of_expert", ranks, job.layer.num_experts);
    call_check_count(&call, "logical_of_expert", logical, job.layer.num_experts);
    call_check_count(&call, "topk_idx_in", forced, job.x.rows * job.router.top_k);
    call_check_count(&call, "topk_weights_in", forced_weights, job.x.rows * job.router.top_k);
    epic_moe_args args = {.call = where,
                          .moe = &job.moe,
                          .weights = &job.weights,
                          .x = call_const_rows(job.x),
                          .token_ids = ids.data,
                          .token_id_type = ids.type,
                          .table = table.data,
                          .table_rows = table.rows,
                          .rank_of_expert = ranks.data,
                          .logical_of_expert = logical.data,
                          .loss_type = type,
                          .topk_idx_in = forced.data,
                          .topk_weights_in = forced_weights.data,
                          .capacity_limit = limit.data};
    args.out = call_rows(call_result_like(&call, "out", job.x.type, job.x));
    args.loss = call_result(&call, "loss", type, 1, -1).data;
    args.load = call_result(&call, "load", EPIC_I32, job.layer.num_experts, -1).data;
    args.demand = call_result(&call, "demand", EPIC_I32, 1, -1).data;
    const call_array logical_load =
        call_result(&call, "logical_load", EPIC_I32, job.layer.num_logical, -1);
    if (job.layer.num_logical != 0) args.logical_load = logical_load.data;
    if (job.with_routing) {
        const int64_t rows = job.x.rows, top_k = job.router.top_k;
        args.topk_idx_out = call_result(&call, "topk_idx", EPIC_I32, rows, top_k).data;
        args.topk_weights_out = call_result(&call, "topk_weights", type, rows, top_k).data;
    } else {
        call_no_result(&call, "topk_idx");
        call_no_result(&call, "topk_weights");
    }
    const call_array saved = call_memory(&call, "saved", saved_bytes);
    const call_array workspace = call_workspace(&call, workspace_bytes);
    args.saved = saved.data;
    args.saved_bytes = saved.bytes;
    args.workspace = workspace.data;
    args.workspace_bytes = workspace.bytes;
    if (!call.failed) call_check_result(&call, epic_moe_forward(call.use.ctx, &args));
    call_end(&call);
}

static void op_moe_backward(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("moe_backward", stack, num_results);
    moe_job job = {.is_backward = true};
    call_order_token(&call);
    read_weights(&call, &job);
    const uint32_t type = job.x.type == EPIC_F64 ? EPIC_F64 : EPIC_F32;
    const call_array saved = call_arg(&call, "saved", CALL_U8, 1);
    const call_array d_out = call_arg(&call, "d_out", job.x.type, 2);
    const call_array d_loss = call_arg(&call, "d_loss", type, 1);
    const int64_t workspace_bytes = call_int(&call);
    const epic_call where = call_enter(&call);
    read_numbers(&call, &job);
    const uint32_t narrow = job.grad_type != 0 ? job.grad_type : type;
    call_check_count(&call, "d_loss", d_loss, 1);
    epic_moe_gradients gradients = {0};
    epic_moe_backward_args args = {.call = where,
                                   .moe = &job.moe,
                                   .weights = &job.weights,
                                   .x = call_const_rows(job.x),
                                   .d_out = call_const_rows(d_out),
                                   .gradients = &gradients,
                                   .saved = saved.data,
                                   .saved_bytes = saved.bytes,
                                   .d_loss = d_loss.data,
                                   .loss_type = type,
                                   .grad_type = narrow};
    args.d_x = call_rows(call_result_like(&call, "d_x", job.x.type, job.x));
    gradients.w_gate = call_result_like(&call, "d_w_gate", type, job.w_gate).data;
    gradients.b_gate = call_result_like(&call, "d_b_gate", type, job.b_gate).data;
    gradients.w_gate_up = call_result_like(&call, "d_w_gate_up", narrow, job.w_gate_up).data;
    gradients.w_down = call_result_like(&call, "d_w_down", narrow, job.w_down).data;
    gradients.b_gate_up = call_result_like(&call, "d_b_gate_up", narrow, job.b_gate_up).data;
    gradients.b_down = call_result_like(&call, "d_b_down", narrow, job.b_down).data;
    gradients.shared_gate_up =
        call_result_like(&call, "d_shared_gate_up", type, job.shared_gate_up).data;
    gradients.shared_down =
        call_result_like(&call, "d_shared_down", type, job.shared_down).data;
    gradients.shared_b_gate_up =
        call_result_like(&call, "d_shared_b_gate_up", type, job.shared_b_gate_up).data;
    gradients.shared_b_down =
        call_result_like(&call, "d_shared_b_down", type, job.shared_b_down).data;
    gradients.w_shared_gate =
        call_result_like(&call, "d_w_shared_gate", type, job.w_shared_gate).data;
    if (job.has_forced_weights) {
        args.flags = EPIC_FORCED_WEIGHTS;
        args.d_topk_weights_in =
            call_result(&call, "d_topk_weights_in", type, job.x.rows, job.router.top_k).data;
    } else {
        call_no_result(&call, "d_topk_weights_in");
    }
    const call_array workspace = call_workspace(&call, workspace_bytes);
    args.workspace = workspace.data;
    args.workspace_bytes = workspace.bytes;
    if (!call.failed) call_check_result(&call, epic_moe_backward(call.use.ctx, &args));
    call_end(&call);
}

#define WEIGHTS                                                                        \
    "(Tensor(a!) order_token, Tensor x, Tensor w_gate, Tensor? b_gate, Tensor? bias, " \
    "Tensor w_gate_up, Tensor w_down, Tensor? b_gate_up, Tensor? b_down, "             \
    "Tensor? shared_gate_up, Tensor? shared_down, Tensor? shared_b_gate_up, "          \
    "Tensor? shared_b_down, Tensor? w_shared_gate, Tensor? w_gate_up_scales, "         \
    "Tensor? w_down_scales"
#define NUMBERS                                                                          \
    ", int group, int tag, float balance_coeff, float z_coeff, SymInt sequence_tokens, " \
    "SymInt capacity" LAYER_SCHEMA ROUTER_SCHEMA EXPERTS_SCHEMA SHARED_SCHEMA

static const torch_op ops[] = {
    OP(moe, WEIGHTS ", Tensor? token_ids, Tensor? table, Tensor? rank_of_expert, "
                    "Tensor? logical_of_expert, Tensor? topk_idx_in, Tensor? topk_weights_in, "
                    "Tensor? capacity_limit, SymInt saved_bytes, SymInt workspace_bytes" NUMBERS
                    ") -> (Tensor out, Tensor loss, Tensor load, Tensor demand, "
                    "Tensor logical_load, Tensor topk_idx, Tensor topk_weights, Tensor saved)"),
    OP(moe_backward,
       WEIGHTS ", Tensor saved, Tensor d_out, Tensor d_loss, "
               "SymInt workspace_bytes" NUMBERS
               ") -> (Tensor d_x, Tensor d_w_gate, Tensor d_b_gate, Tensor d_w_gate_up, "
               "Tensor d_w_down, Tensor d_b_gate_up, Tensor d_b_down, Tensor d_shared_gate_up, "
               "Tensor d_shared_down, Tensor d_shared_b_gate_up, Tensor d_shared_b_down, "
               "Tensor d_w_shared_gate, Tensor d_topk_weights_in)"),
};

torch_ops moe_ops(void)
{
    return OPS_OF(ops);
}
