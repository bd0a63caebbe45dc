/* SPDX-License-Identifier: Apache-2.0 */
/* Router and losses: turns checked arguments into kernel launches. The kernels run on this rank
 * alone and wait for no peer. */
#include "cuda/router/router.h"
#include "backend/p2p/p2p.h"
#include "backend/p2p/ranges.h"
#include "base/error.h"
#include "rules/rule.h"

static cudaStream_t stream_of(epic_stream stream)
{
    return (cudaStream_t)stream;
}

/* Checks the router's arguments. Writes the arguments that all router kernels need to *out. */
static epic_result fill_router_rows(epic_group *g, p2p_router_rows *out,
                                    const epic_router *router, const void *logits,
                                    int64_t num_tokens, uint32_t type)
{
    TRY(p2p_check_group(g));
    const uint32_t columns = router->num_experts + router->zero_experts;
    if (columns > P2P_MAX_COLUMNS)
        return epic_fail(EPIC_ENOTSUP,
                         "router.num_experts and zero_experts are %u: must be at most %d "
                         "in CUDA contexts",
                         columns, P2P_MAX_COLUMNS);
    if (type == EPIC_F64)
        return epic_fail(EPIC_ENOTSUP, "type is EPIC_F64: must be another type in CUDA "
                                       "contexts; use host memory for float64");
    if (num_tokens > INT32_MAX)
        return epic_fail(EPIC_ENOTSUP,
                         "num_tokens is %lld: must be at most %d in CUDA contexts",
                         (long long)num_tokens, INT32_MAX);
    *out = (p2p_router_rows){.router = *router,
                             .logits = logits,
                             .num_tokens = num_tokens,
                             .columns = (int32_t)columns,
                             .type = type,
                             .eps = (float)router->eps,
                             .norm_min = (float)router->norm_min,
                             .scale = (float)router->scale};
    return EPIC_OK;
}

/* Returns EPIC_ENOTSUP for EPIC_WEIGHT_SPARSEMIXER, which only the host supports. */
static epic_result check_weights(const epic_router *router)
{
    if (router->weight_rule == EPIC_WEIGHT_SPARSEMIXER)
        return epic_fail(EPIC_ENOTSUP, "router.weight_rule EPIC_WEIGHT_SPARSEMIXER is not "
                                       "supported in CUDA contexts; use host memory");
    return EPIC_OK;
}

/* Returns the type of the gradients. The default (grad_type 0) is the type of the logits. */
static uint32_t grad_type_of(const p2p_router_rows *rows, uint32_t grad_type)
{
    return grad_type ? grad_type : rows->type;
}

epic_result p2p_router_forward(epic_group *group, const epic_router_args *args)
{
    P2P_RANGE("epic_router_forward");
    p2p_router_job job = {.bias = args->bias,
                          .scale_of_expert = args->scale_of_expert,
                          .token_ids = args->token_ids,
                          .table = args->table,
                          .table_rows = args->table_rows,
                          .topk_idx_in = args->topk_idx_in,
                          .topk_idx = args->topk_idx,
                          .weights = args->weights,
                          .scores = args->scores,
                          .has_int64_ids = args->token_id_type == EPIC_I64,
                          .on_logits = router_on_logits(args->router, args->bias != NULL)};
    TRY(check_weights(args->router));
    TRY(fill_router_rows(group, &job.rows, args->router, args->logits, args->num_tokens,
                         args->type));
    return p2p_cuda(p2p_launch_router(&job, stream_of(args->call.stream)),
                    "launching the router");
}

epic_result p2p_router_backward(epic_group *group, const epic_router_backward_args *args)
{
    P2P_RANGE("epic_router_backward");
    p2p_router_backward_job job = {.topk_idx = args->topk_idx,
                                   .scale_of_expert = args->scale_of_expert,
                                   .d_weights = args->d_weights,
                                   .d_logits = args->d_logits,
                                   .d_scale_of_expert = args->d_scale_of_expert,
                                   .accumulate = (args->flags & EPIC_ACCUMULATE) != 0};
    TRY(check_weights(args->router));
    TRY(fill_router_rows(group, &job.rows, args->router, args->logits, args->num_tokens,
                         args->type));
    job.grad_type = grad_type_of(&job.rows, args->grad_type);
    return p2p_cuda(p2p_launch_router_backward(&job, stream_of(args->call.stream)),
                    "launching the router's backward");
}

/* Fills in *job, the arguments of a loss kernel, from the arguments of the call. `z` is true
 * for the z-loss and false for the balance loss. The loss is `factor` times a sum over the
 * tokens (backend/ops.h). */
static epic_result fill_loss(epic_group *g, p2p_loss_job *job, const epic_loss_args *args,
                             double factor, bool z)
{
    *job = (p2p_loss_job){.load = args->load,
                          .topk_idx = args->topk_idx,
                          .sequence_tokens = args->sequence_tokens,
                          .factor = factor,
                          .plan = args->plan,
                          .num_divisions = z || args->sequence_tokens ? 1 : 2,
                          .d_loss = args->d_loss,
                          .runs = args->workspace,
                          .loss = args->loss,
                          .d_logits = args->d_logits,
                          .loss_type = args->loss_type,
                          .accumulate = (args->flags & EPIC_ACCUMULATE) != 0,
                          .is_z_loss = z};
    TRY(fill_router_rows(g, &job->rows, args->router, args->logits, args->num_tokens,
                         args->type));
    job->grad_type = grad_type_of(&job->rows, args->grad_type);
    return EPIC_OK;
}

static epic_result loss_forward(epic_group *group, const epic_loss_args *args, double factor,
                                bool z)
{
    p2p_loss_job job;
    TRY(fill_loss(group, &job, args, factor, z));
    return p2p_cuda(p2p_launch_loss(&job, stream_of(args->stream)), "launching a loss");
}

static epic_result loss_backward(epic_group *group, const epic_loss_args *args, double factor,
                                 bool z)
{
    p2p_loss_job job;
    TRY(fill_loss(group, &job, args, factor, z));
    return p2p_cuda(p2p_launch_loss_backward(&job, stream_of(args->stream)),
                    "launching a loss's backward");
}

epic_result p2p_balance_loss_forward(epic_group *group, const epic_loss_args *args,
                                     double factor)
{
    P2P_RANGE("epic_balance_loss_forward");
    return loss_forward(group, args, factor, false);
}

epic_result p2p_balance_loss_backward(epic_group *group, const epic_loss_args *args,
                                      double factor)
{
    P2P_RANGE("epic_balance_loss_backward");
    return loss_backward(group, args, factor, false);
}

epic_result p2p_z_loss_forward(epic_group *group, const epic_loss_args *args, double factor)
{
    P2P_RANGE("epic_z_loss_forward");
    return loss_forward(group, args, factor, true);
}

epic_result p2p_z_loss_backward(epic_group *group, const epic_loss_args *args, double factor)
{
    P2P_RANGE("epic_z_loss_backward");
    return loss_backward(group, args, factor, true);
}

epic_result p2p_bias_update(epic_group *group, const epic_bias_update_args *args)
{
    P2P_RANGE("epic_bias_update");
    TRY(p2p_check_group(group));
    return p2p_cuda(p2p_launch_bias_update(args->bias, args->load, args->num_experts,
                                           args->rate, stream_of(args->call.stream)),
                    "launching the bias update");
}
