/* SPDX-License-Identifier: Apache-2.0 */
/* The exported symbols behind the calls of epic.h.  Programs include epic.h, which includes
 * this file.  Bindings of other languages call the symbols directly.
 *
 * A symbol has the arguments of its call.  Each struct is followed by the size that it has in
 * the caller's header:
 *   - If this size is smaller than in the library, the library uses zeros for the missing
 *     fields.
 *   - If it is larger, the fields that the library does not know must be zero.
 *   - If it is smaller than the first version of the struct, the library refuses it.
 *
 * Structs inside other structs (layer, router, experts, moe, weights, gradients) never change
 * for a symbol.  If one of them grows, the symbols that take it get a new version number, and
 * the old symbols remain.  docs/reference/abi.md has the rules. */
#ifndef EPIC_ABI_H
#define EPIC_ABI_H

#include "epic/epic.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Enums that are passed as arguments or returned must have 32 bits, in programs and in the
 * library. */
#ifdef __cplusplus
#define EPIC_CHECK_ENUM(type) \
    static_assert(sizeof(type) == 4, #type " has no 32 bits: compile without -fshort-enums")
#else
#define EPIC_CHECK_ENUM(type) \
    _Static_assert(sizeof(type) == 4, #type " has no 32 bits: compile without -fshort-enums")
#endif
EPIC_CHECK_ENUM(epic_result);
EPIC_CHECK_ENUM(epic_type);
EPIC_CHECK_ENUM(epic_flag);
EPIC_CHECK_ENUM(epic_layout);
EPIC_CHECK_ENUM(epic_overflow);
EPIC_CHECK_ENUM(epic_sum_order);
EPIC_CHECK_ENUM(epic_priority);
EPIC_CHECK_ENUM(epic_quantize);
EPIC_CHECK_ENUM(epic_score);
EPIC_CHECK_ENUM(epic_group_score);
EPIC_CHECK_ENUM(epic_group_others);
EPIC_CHECK_ENUM(epic_weight_rule);
EPIC_CHECK_ENUM(epic_normalize);
EPIC_CHECK_ENUM(epic_activation);
EPIC_CHECK_ENUM(epic_weighting);
EPIC_CHECK_ENUM(epic_gemm_pass);
EPIC_CHECK_ENUM(epic_operation);
#undef EPIC_CHECK_ENUM

EPIC_API epic_result epic_dispatcher_open_v1(epic_dispatcher **out,
                                             const epic_dispatcher_config *config, size_t size);
EPIC_API epic_result epic_dispatcher_dispatch_v1(epic_dispatcher *dispatcher,
                                                 const void *tokens, const int32_t *topk_idx,
                                                 const float *weights, int64_t num_tokens,
                                                 epic_slots *out, size_t size);
EPIC_API epic_result epic_dispatcher_combine_backward_v1(epic_dispatcher *dispatcher,
                                                         const void *d_out, epic_slots *out,
                                                         size_t size);
EPIC_API epic_result epic_open_v1(epic_context **out, const epic_bootstrap *bootstrap,
                                  const epic_config *config, size_t size);
EPIC_API epic_result epic_layer_sizes_v1(epic_context *ctx, const epic_layer *layer,
                                         size_t layer_size, epic_layer_info *out,
                                         size_t out_size);
EPIC_API epic_result epic_plan_v1(epic_context *ctx, const epic_plan_args *args, size_t size);
EPIC_API epic_result epic_dispatch_v1(epic_context *ctx, const epic_dispatch_args *args,
                                      size_t size);
EPIC_API epic_result epic_plan_dispatch_v1(epic_context *ctx, const epic_plan_args *plan,
                                           size_t plan_size, const epic_dispatch_args *dispatch,
                                           size_t dispatch_size);
EPIC_API epic_result epic_combine_v1(epic_context *ctx, const epic_combine_args *args,
                                     size_t size);
EPIC_API epic_result epic_dispatch_backward_v1(epic_context *ctx,
                                               const epic_dispatch_backward_args *args,
                                               size_t size);
EPIC_API epic_result epic_combine_backward_v1(epic_context *ctx,
                                              const epic_combine_backward_args *args,
                                              size_t size);
EPIC_API epic_result epic_allreduce_sum_v1(epic_context *ctx,
                                           const epic_allreduce_sum_args *args, size_t size);
EPIC_API epic_result epic_sum_replicas_v1(epic_context *ctx, const epic_sum_replicas_args *args,
                                          size_t size);
EPIC_API epic_result epic_window_alloc_v1(epic_context *ctx, const epic_window_args *args,
                                          size_t size, epic_window_info *out, size_t out_size);
EPIC_API epic_result epic_window_register_v1(epic_context *ctx, const epic_window_args *args,
                                             size_t size, epic_window_info *out,
                                             size_t out_size);
EPIC_API epic_result epic_router_workspace_v1(const epic_router *router, size_t size,
                                              int64_t *bytes);
EPIC_API epic_result epic_router_forward_v1(epic_context *ctx, const epic_router_args *args,
                                            size_t size);
EPIC_API epic_result epic_router_backward_v1(epic_context *ctx,
                                             const epic_router_backward_args *args,
                                             size_t size);
EPIC_API epic_result epic_balance_loss_forward_v1(epic_context *ctx,
                                                  const epic_balance_loss_args *args,
                                                  size_t size);
EPIC_API epic_result epic_balance_loss_backward_v1(epic_context *ctx,
                                                   const epic_balance_loss_backward_args *args,
                                                   size_t size);
EPIC_API epic_result epic_z_loss_forward_v1(epic_context *ctx, const epic_z_loss_args *args,
                                            size_t size);
EPIC_API epic_result epic_z_loss_backward_v1(epic_context *ctx,
                                             const epic_z_loss_backward_args *args,
                                             size_t size);
EPIC_API epic_result epic_bias_update_v1(epic_context *ctx, const epic_bias_update_args *args,
                                         size_t size);
EPIC_API epic_result epic_experts_memory_v1(epic_context *ctx, const epic_config *config,
                                            size_t config_size, const epic_experts *experts,
                                            size_t experts_size, int64_t num_slots,
                                            epic_experts_memory_info *out, size_t out_size);
EPIC_API epic_result epic_experts_forward_v1(epic_context *ctx, const epic_experts_args *args,
                                             size_t size);
EPIC_API epic_result epic_experts_backward_v1(epic_context *ctx,
                                              const epic_experts_backward_args *args,
                                              size_t size);
EPIC_API epic_result epic_moe_memory_v1(epic_context *ctx, const epic_config *config,
                                        size_t config_size, const epic_moe *moe,
                                        size_t moe_size, epic_moe_memory_info *out,
                                        size_t out_size);
EPIC_API epic_result epic_moe_plan_v1(epic_context *ctx, const epic_moe_args *args, size_t size,
                                      int64_t *slots);
EPIC_API epic_result epic_moe_forward_v1(epic_context *ctx, const epic_moe_args *args,
                                         size_t size);
EPIC_API epic_result epic_moe_backward_v1(epic_context *ctx, const epic_moe_backward_args *args,
                                          size_t size);
EPIC_API epic_result epic_bootstrap_tcp_v1(epic_bootstrap *out, const epic_tcp *tcp,
                                           size_t size);
EPIC_API epic_result epic_plan_bytes_v1(const epic_config *config, size_t config_size,
                                        const epic_layer *layer, size_t layer_size,
                                        int64_t *bytes);
EPIC_API epic_result epic_capacity_bound_v1(const epic_config *config, size_t config_size,
                                            const epic_layer *layer, size_t layer_size,
                                            int64_t *slots);
EPIC_API epic_result epic_memory_v1(const epic_config *config, size_t config_size,
                                    const epic_layer *layer, size_t layer_size,
                                    epic_memory_info *out, size_t out_size);
EPIC_API epic_result epic_plan_read_v1(const void *plan, int64_t plan_bytes,
                                       epic_plan_info *out, size_t size);
EPIC_API epic_result epic_failure_v1(const epic_context *ctx, epic_failure_info *out,
                                     size_t size);
EPIC_API epic_result epic_waits_v1(const epic_context *ctx, uint32_t operation,
                                   epic_wait_info *out, int32_t num_ranks, size_t size);
EPIC_API epic_result epic_regroup_v1(epic_context *ctx, const epic_regroup_args *args,
                                     size_t size, epic_members_info *out, size_t out_size);
EPIC_API epic_result epic_members_v1(const epic_context *ctx, epic_members_info *out,
                                     size_t size);

static inline epic_result epic_dispatcher_open(epic_dispatcher **out,
                                               const epic_dispatcher_config *config)
{
    return epic_dispatcher_open_v1(out, config, sizeof *config);
}

static inline epic_result epic_dispatcher_dispatch(epic_dispatcher *dispatcher,
                                                   const void *tokens, const int32_t *topk_idx,
                                                   const float *weights, int64_t num_tokens,
                                                   epic_slots *out)
{
    return epic_dispatcher_dispatch_v1(dispatcher, tokens, topk_idx, weights, num_tokens, out,
                                       sizeof *out);
}

static inline epic_result epic_dispatcher_combine_backward(epic_dispatcher *dispatcher,
                                                           const void *d_out, epic_slots *out)
{
    return epic_dispatcher_combine_backward_v1(dispatcher, d_out, out, sizeof *out);
}

static inline epic_result epic_open(epic_context **out, const epic_bootstrap *bootstrap,
                                    const epic_config *config)
{
    return epic_open_v1(out, bootstrap, config, sizeof *config);
}

static inline epic_result epic_layer_sizes(epic_context *ctx, const epic_layer *layer,
                                           epic_layer_info *out)
{
    return epic_layer_sizes_v1(ctx, layer, sizeof *layer, out, sizeof *out);
}

static inline epic_result epic_plan(epic_context *ctx, const epic_plan_args *args)
{
    return epic_plan_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_dispatch(epic_context *ctx, const epic_dispatch_args *args)
{
    return epic_dispatch_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_plan_dispatch(epic_context *ctx, const epic_plan_args *plan,
                                             const epic_dispatch_args *dispatch)
{
    return epic_plan_dispatch_v1(ctx, plan, sizeof *plan, dispatch, sizeof *dispatch);
}

static inline epic_result epic_combine(epic_context *ctx, const epic_combine_args *args)
{
    return epic_combine_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_dispatch_backward(epic_context *ctx,
                                                 const epic_dispatch_backward_args *args)
{
    return epic_dispatch_backward_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_combine_backward(epic_context *ctx,
                                                const epic_combine_backward_args *args)
{
    return epic_combine_backward_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_allreduce_sum(epic_context *ctx,
                                             const epic_allreduce_sum_args *args)
{
    return epic_allreduce_sum_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_sum_replicas(epic_context *ctx,
                                            const epic_sum_replicas_args *args)
{
    return epic_sum_replicas_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_window_alloc(epic_context *ctx, const epic_window_args *args,
                                            epic_window_info *out)
{
    return epic_window_alloc_v1(ctx, args, sizeof *args, out, sizeof *out);
}

static inline epic_result epic_window_register(epic_context *ctx, const epic_window_args *args,
                                               epic_window_info *out)
{
    return epic_window_register_v1(ctx, args, sizeof *args, out, sizeof *out);
}

static inline epic_result epic_router_workspace(const epic_router *router, int64_t *bytes)
{
    return epic_router_workspace_v1(router, sizeof *router, bytes);
}

static inline epic_result epic_router_forward(epic_context *ctx, const epic_router_args *args)
{
    return epic_router_forward_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_router_backward(epic_context *ctx,
                                               const epic_router_backward_args *args)
{
    return epic_router_backward_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_balance_loss_forward(epic_context *ctx,
                                                    const epic_balance_loss_args *args)
{
    return epic_balance_loss_forward_v1(ctx, args, sizeof *args);
}

static inline epic_result
epic_balance_loss_backward(epic_context *ctx, const epic_balance_loss_backward_args *args)
{
    return epic_balance_loss_backward_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_z_loss_forward(epic_context *ctx, const epic_z_loss_args *args)
{
    return epic_z_loss_forward_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_z_loss_backward(epic_context *ctx,
                                               const epic_z_loss_backward_args *args)
{
    return epic_z_loss_backward_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_bias_update(epic_context *ctx, const epic_bias_update_args *args)
{
    return epic_bias_update_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_experts_memory(epic_context *ctx, const epic_config *config,
                                              const epic_experts *experts, int64_t num_slots,
                                              epic_experts_memory_info *out)
{
    return epic_experts_memory_v1(ctx, config, sizeof *config, experts, sizeof *experts,
                                  num_slots, out, sizeof *out);
}

static inline epic_result epic_experts_forward(epic_context *ctx, const epic_experts_args *args)
{
    return epic_experts_forward_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_experts_backward(epic_context *ctx,
                                                const epic_experts_backward_args *args)
{
    return epic_experts_backward_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_moe_memory(epic_context *ctx, const epic_config *config,
                                          const epic_moe *moe, epic_moe_memory_info *out)
{
    return epic_moe_memory_v1(ctx, config, sizeof *config, moe, sizeof *moe, out, sizeof *out);
}

static inline epic_result epic_moe_plan(epic_context *ctx, const epic_moe_args *args,
                                        int64_t *slots)
{
    return epic_moe_plan_v1(ctx, args, sizeof *args, slots);
}

static inline epic_result epic_moe_forward(epic_context *ctx, const epic_moe_args *args)
{
    return epic_moe_forward_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_moe_backward(epic_context *ctx,
                                            const epic_moe_backward_args *args)
{
    return epic_moe_backward_v1(ctx, args, sizeof *args);
}

static inline epic_result epic_bootstrap_tcp(epic_bootstrap *out, const epic_tcp *tcp)
{
    return epic_bootstrap_tcp_v1(out, tcp, sizeof *tcp);
}

static inline epic_result epic_plan_bytes(const epic_config *config, const epic_layer *layer,
                                          int64_t *bytes)
{
    return epic_plan_bytes_v1(config, sizeof *config, layer, sizeof *layer, bytes);
}

static inline epic_result epic_capacity_bound(const epic_config *config,
                                              const epic_layer *layer, int64_t *slots)
{
    return epic_capacity_bound_v1(config, sizeof *config, layer, sizeof *layer, slots);
}

static inline epic_result epic_memory(const epic_config *config, const epic_layer *layer,
                                      epic_memory_info *out)
{
    return epic_memory_v1(config, sizeof *config, layer, sizeof *layer, out, sizeof *out);
}

static inline epic_result epic_plan_read(const void *plan, int64_t plan_bytes,
                                         epic_plan_info *out)
{
    return epic_plan_read_v1(plan, plan_bytes, out, sizeof *out);
}

static inline epic_result epic_failure(const epic_context *ctx, epic_failure_info *out)
{
    return epic_failure_v1(ctx, out, sizeof *out);
}

static inline epic_result epic_waits(const epic_context *ctx, uint32_t operation,
                                     epic_wait_info *out, int32_t num_ranks)
{
    return epic_waits_v1(ctx, operation, out, num_ranks, sizeof *out);
}

static inline epic_result epic_regroup(epic_context *ctx, const epic_regroup_args *args,
                                       epic_members_info *out)
{
    return epic_regroup_v1(ctx, args, sizeof *args, out, sizeof *out);
}

static inline epic_result epic_members(const epic_context *ctx, epic_members_info *out)
{
    return epic_members_v1(ctx, out, sizeof *out);
}

#ifdef __cplusplus
}
#endif
#endif
