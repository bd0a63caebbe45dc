/* SPDX-License-Identifier: Apache-2.0 */
/* The four loss calls, each with valid arguments, for tests that call all of them. */
#ifndef EPIC_TESTS_LOSSES_H
#define EPIC_TESTS_LOSSES_H

#include "epic/epic.h"

typedef struct loss_args {
    epic_call call;
    const epic_router *router;
    const void *logits;
    int64_t num_tokens;
    int64_t total_tokens;
    int64_t sequence_tokens;
    const int32_t *load;
    const int32_t *topk_idx;
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;
    const float *d_loss;
    void *d_logits;
    uint32_t type;
    uint32_t loss_type;
    uint32_t grad_type;
    uint32_t flags;
} loss_args;

typedef epic_result loss_call(epic_context *ctx, const loss_args *a);

static inline epic_result balance_loss_forward(epic_context *ctx, const loss_args *a)
{
    const epic_balance_loss_args args = {.call = a->call,
                                         .router = a->router,
                                         .logits = a->logits,
                                         .num_tokens = a->num_tokens,
                                         .total_tokens = a->total_tokens,
                                         .sequence_tokens = a->sequence_tokens,
                                         .load = a->load,
                                         .topk_idx = a->topk_idx,
                                         .coeff = a->coeff,
                                         .workspace = a->workspace,
                                         .workspace_bytes = a->workspace_bytes,
                                         .loss = a->loss,
                                         .type = a->type,
                                         .loss_type = a->loss_type};
    return epic_balance_loss_forward(ctx, &args);
}

static inline epic_result balance_loss_backward(epic_context *ctx, const loss_args *a)
{
    const epic_balance_loss_backward_args args = {.call = a->call,
                                                  .router = a->router,
                                                  .logits = a->logits,
                                                  .num_tokens = a->num_tokens,
                                                  .total_tokens = a->total_tokens,
                                                  .sequence_tokens = a->sequence_tokens,
                                                  .load = a->load,
                                                  .topk_idx = a->topk_idx,
                                                  .coeff = a->coeff,
                                                  .workspace = a->workspace,
                                                  .workspace_bytes = a->workspace_bytes,
                                                  .d_loss = a->d_loss,
                                                  .d_logits = a->d_logits,
                                                  .type = a->type,
                                                  .grad_type = a->grad_type,
                                                  .flags = a->flags};
    return epic_balance_loss_backward(ctx, &args);
}

static inline epic_result z_loss_forward(epic_context *ctx, const loss_args *a)
{
    const epic_z_loss_args args = {.call = a->call,
                                   .router = a->router,
                                   .logits = a->logits,
                                   .num_tokens = a->num_tokens,
                                   .total_tokens = a->total_tokens,
                                   .coeff = a->coeff,
                                   .workspace = a->workspace,
                                   .workspace_bytes = a->workspace_bytes,
                                   .loss = a->loss,
                                   .type = a->type,
                                   .loss_type = a->loss_type};
    return epic_z_loss_forward(ctx, &args);
}

static inline epic_result z_loss_backward(epic_context *ctx, const loss_args *a)
{
    const epic_z_loss_backward_args args = {.call = a->call,
                                            .router = a->router,
                                            .logits = a->logits,
                                            .num_tokens = a->num_tokens,
                                            .total_tokens = a->total_tokens,
                                            .coeff = a->coeff,
                                            .workspace = a->workspace,
                                            .workspace_bytes = a->workspace_bytes,
                                            .d_loss = a->d_loss,
                                            .d_logits = a->d_logits,
                                            .type = a->type,
                                            .grad_type = a->grad_type,
                                            .flags = a->flags};
    return epic_z_loss_backward(ctx, &args);
}

#endif
