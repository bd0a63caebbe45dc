/* SPDX-License-Identifier: Apache-2.0 */
/* The operators of the router and of the losses. They involve no other rank, so tracers such as
 * torch.compile need not keep them in order. On GPUs they need a group, whose context they
 * use. */
#include "ops.h"
#include "options.h"

/* Returns the workspace for the router's functions in the core. */
static call_array router_workspace(torch_call *call, const epic_router *router)
{
    if (call->failed) return (call_array){0};
    int64_t bytes;
    call_check_result(call, epic_router_workspace(router, &bytes));
    return call_workspace(call, bytes);
}

/* Checks that the logits have a column for each expert and zero-expert. */
static void check_columns(torch_call *call, call_array logits, const epic_router *router)
{
    const int64_t columns = (int64_t)router->num_experts + router->zero_experts;
    if (logits.columns != columns)
        call_fail(call, EPIC_EINVAL, "logits has %lld columns: must have %lld",
                  (long long)logits.columns, (long long)columns);
}

/* Returns the type of weights and losses: float64 for float64 logits, else float32. */
static uint32_t wide_type(call_array logits)
{
    return logits.type == EPIC_F64 ? EPIC_F64 : EPIC_F32;
}

/* ---------------------------------------------------------------------------- router ---- */

static void op_route(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("route", stack, num_results);
    const call_array logits = call_arg(&call, "logits", CALL_ROWS, 2);
    const call_array bias = call_arg_or_none(&call, "bias", EPIC_F32, 1);
    const call_array ids = call_arg_or_none(&call, "token_ids", CALL_INDEX, 1);
    const call_array table = call_arg_or_none(&call, "table", EPIC_I32, 2);
    const call_array forced = call_arg_or_none(&call, "topk_idx_in", EPIC_I32, 2);
    const epic_call where = call_enter_local(&call);
    const epic_router router = read_router(&call);
    check_columns(&call, logits, &router);
    call_check_count(&call, "bias", bias, logits.columns);
    call_check_count(&call, "token_ids", ids, logits.rows);
    call_check_count(&call, "table", table, table.rows * router.top_k);
    call_check_count(&call, "topk_idx_in", forced, logits.rows * router.top_k);
    const call_array workspace = router_workspace(&call, &router);
    const call_array chosen =
        call_result(&call, "topk_idx", EPIC_I32, logits.rows, router.top_k);
    const call_array weights =
        call_result(&call, "weights", wide_type(logits), logits.rows, router.top_k);
    const epic_router_args args = {.call = where,
                                   .router = &router,
                                   .logits = logits.data,
                                   .num_tokens = logits.rows,
                                   .bias = bias.data,
                                   .token_ids = ids.data,
                                   .table = table.data,
                                   .table_rows = table.rows,
                                   .workspace = workspace.data,
                                   .workspace_bytes = workspace.bytes,
                                   .topk_idx = chosen.data,
                                   .weights = weights.data,
                                   .type = logits.type,
                                   .weights_type = weights.type,
                                   .token_id_type = ids.type,
                                   .topk_idx_in = forced.data};
    if (!call.failed) call_check_result(&call, epic_router_forward(call.use.ctx, &args));
    call_end(&call);
}

static void op_route_backward(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("route_backward", stack, num_results);
    const call_array logits = call_arg(&call, "logits", CALL_ROWS, 2);
    const call_array chosen = call_arg(&call, "topk_idx", EPIC_I32, 2);
    const call_array d_weights = call_arg(&call, "d_weights", CALL_FLOAT, 2);
    const epic_call where = call_enter_local(&call);
    const epic_router router = read_router(&call);
    check_columns(&call, logits, &router);
    call_check_count(&call, "topk_idx", chosen, logits.rows * router.top_k);
    call_check_count(&call, "d_weights", d_weights, logits.rows * router.top_k);
    const call_array workspace = router_workspace(&call, &router);
    const call_array d_logits =
        call_result(&call, "d_logits", logits.type, logits.rows, logits.columns);
    const epic_router_backward_args args = {.call = where,
                                            .router = &router,
                                            .logits = logits.data,
                                            .num_tokens = logits.rows,
                                            .topk_idx = chosen.data,
                                            .d_weights = d_weights.data,
                                            .workspace = workspace.data,
                                            .workspace_bytes = workspace.bytes,
                                            .d_logits = d_logits.data,
                                            .type = logits.type,
                                            .weights_type = d_weights.type};
    if (!call.failed) call_check_result(&call, epic_router_backward(call.use.ctx, &args));
    call_end(&call);
}

/* ---------------------------------------------------------------------------- losses ---- */

/* Inputs of the four loss operators. `out` is the result: in forward the loss, in backward the
 * gradient of the logits. */
typedef struct loss_job {
    torch_call call;
    epic_call where;
    epic_router router;
    call_array logits, load, chosen, d_loss, out, workspace;
    int64_t total_tokens, sequence_tokens;
    double coeff;
} loss_job;

/* Reads the inputs of a loss operator and makes its result. */
static void read_loss(loss_job *job, bool is_balance, bool is_backward)
{
    torch_call *call = &job->call;
    job->logits = call_arg(call, "logits", CALL_ROWS, 2);
    if (is_balance) {
        job->load = call_arg_or_none(call, "load", EPIC_I32, 1);
        job->chosen = call_arg_or_none(call, "topk_idx", EPIC_I32, 2);
    }
    if (is_backward) job->d_loss = call_arg_or_none(call, "d_loss", EPIC_F32, 1);
    job->total_tokens = call_int(call);
    if (is_balance) job->sequence_tokens = call_int(call);
    job->coeff = call_float(call);
    job->where = call_enter_local(call);
    job->router = read_router(call);
    check_columns(call, job->logits, &job->router);
    call_check_count(call, "load", job->load, job->router.num_experts);
    call_check_count(call, "topk_idx", job->chosen, job->logits.rows * job->router.top_k);
    call_check_count(call, "d_loss", job->d_loss, 1);
    job->workspace = router_workspace(call, &job->router);
    job->out = is_backward ? call_result(call, "d_logits", job->logits.type, job->logits.rows,
                                         job->logits.columns)
                           : call_result(call, "loss", wide_type(job->logits), 1, -1);
}

/* Initialize the fields that the argument structs of the losses have in common. */
#define LOSS_FIELDS(job)                                                                       \
    .call = (job).where, .router = &(job).router, .logits = (job).logits.data,                 \
    .num_tokens = (job).logits.rows, .total_tokens = (job).total_tokens, .coeff = (job).coeff, \
    .workspace = (job).workspace.data, .workspace_bytes = (job).workspace.bytes,               \
    .type = (job).logits.type
#define BALANCE_FIELDS(job)                                            \
    .sequence_tokens = (job).sequence_tokens, .load = (job).load.data, \
    .topk_idx = (job).chosen.data

/* Stores the error of the core, if there is one, and ends the call. */
static void end_loss(loss_job *job, epic_result result)
{
    call_check_result(&job->call, result);
    call_end(&job->call);
}

static void op_balance_loss(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    loss_job job = {.call = call_begin("balance_loss", stack, num_results)};
    read_loss(&job, true, false);
    const epic_balance_loss_args args = {LOSS_FIELDS(job), BALANCE_FIELDS(job),
                                         .loss = job.out.data, .loss_type = job.out.type};
    end_loss(&job,
             job.call.failed ? EPIC_OK : epic_balance_loss_forward(job.call.use.ctx, &args));
}

static void op_balance_loss_backward(torch_value *stack, uint64_t num_arguments,
                                     uint64_t num_results)
{
    (void)num_arguments;
    loss_job job = {.call = call_begin("balance_loss_backward", stack, num_results)};
    read_loss(&job, true, true);
    const epic_balance_loss_backward_args args = {LOSS_FIELDS(job), BALANCE_FIELDS(job),
                                                  .d_loss = job.d_loss.data,
                                                  .d_logits = job.out.data};
    end_loss(&job,
             job.call.failed ? EPIC_OK : epic_balance_loss_backward(job.call.use.ctx, &args));
}

static void op_z_loss(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    loss_job job = {.call = call_begin("z_loss", stack, num_results)};
    read_loss(&job, false, false);
    const epic_z_loss_args args = {LOSS_FIELDS(job), .loss = job.out.data,
                                   .loss_type = job.out.type};
    end_loss(&job, job.call.failed ? EPIC_OK : epic_z_loss_forward(job.call.use.ctx, &args));
}

static void op_z_loss_backward(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    loss_job job = {.call = call_begin("z_loss_backward", stack, num_results)};
    read_loss(&job, false, true);
    const epic_z_loss_backward_args args = {LOSS_FIELDS(job), .d_loss = job.d_loss.data,
                                            .d_logits = job.out.data};
    end_loss(&job, job.call.failed ? EPIC_OK : epic_z_loss_backward(job.call.use.ctx, &args));
}

/* ---------------------------------------------------------------- update of the bias ---- */

/* Implements the operator epic::bias_update_, which changes the bias in place. */
static void op_bias_update_(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("bias_update", stack, num_results);
    const call_array bias = call_arg_written(&call, "bias", EPIC_F32, 1);
    const call_array load = call_arg(&call, "load", EPIC_I32, 1);
    const double rate = call_float(&call);
    const epic_call where = call_enter_local(&call);
    call_check_count(&call, "load", load, bias.count);
    const epic_bias_update_args args = {.call = where,
                                        .bias = bias.data,
                                        .load = load.data,
                                        .num_experts = bias.count,
                                        .rate = (float)rate};
    if (!call.failed) call_check_result(&call, epic_bias_update(call.use.ctx, &args));
    call_end(&call);
}

/* --------------------------------------------------------------------------- schemas ---- */

#define BALANCE "(Tensor logits, Tensor? load, Tensor? topk_idx"
#define BALANCE_NUMBERS \
    ", SymInt total_tokens, SymInt sequence_tokens, float coeff, int group" ROUTER_SCHEMA
#define Z_NUMBERS ", SymInt total_tokens, float coeff, int group" ROUTER_SCHEMA
#define LOSS ") -> (Tensor loss)"
#define D_LOGITS ") -> (Tensor d_logits)"

static const torch_op ops[] = {
    OP(route,
       "(Tensor logits, Tensor? bias, Tensor? token_ids, Tensor? table, "
       "Tensor? topk_idx_in, int group" ROUTER_SCHEMA ") -> (Tensor topk_idx, Tensor weights)"),
    OP(route_backward,
       "(Tensor logits, Tensor topk_idx, Tensor d_weights, int group" ROUTER_SCHEMA
       ") -> (Tensor d_logits)"),
    OP(balance_loss, BALANCE BALANCE_NUMBERS LOSS),
    OP(balance_loss_backward, BALANCE ", Tensor? d_loss" BALANCE_NUMBERS D_LOGITS),
    OP(z_loss, "(Tensor logits" Z_NUMBERS LOSS),
    OP(z_loss_backward, "(Tensor logits, Tensor? d_loss" Z_NUMBERS D_LOGITS),
    OP(bias_update_, "(Tensor(a!) bias, Tensor load, float rate, int group) -> ()"),
};

torch_ops router_ops(void)
{
    return OPS_OF(ops);
}
