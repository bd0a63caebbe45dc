/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of a device backend: every operation of a context, as kernel launches. */
#ifndef EPIC_OPS_H
#define EPIC_OPS_H

#include "backend/backend.h"
#include "rules/layer_tokens.h"

/* The arguments of the four loss calls, in one. */
typedef struct epic_loss {
    const epic_router *router;
    const void *logits;
    int64_t num_tokens;
    int64_t total_tokens;
    /* On devices: it counts the tokens of all ranks; NULL: total_tokens does. */
    const void *plan;
    int64_t sequence_tokens; /* z-loss: 0 */
    const int32_t *load;
    const int32_t *topk_idx;
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;          /* forward */
    const float *d_loss; /* backward */
    void *d_logits;      /* backward */
    uint32_t type;
    uint32_t loss_type;
    uint32_t grad_type;
    uint32_t flags;
    epic_stream stream;
} epic_loss;

/* The dense part of a layer on a device: logits = x w_gate + b_gate, and back. */
typedef struct epic_gate {
    epic_stream stream;
    const void *x; /* [tokens, hidden] of row_type */
    int64_t tokens, hidden, columns;
    int64_t block;                /* tokens of a block of the layer */
    const float *w_gate, *b_gate; /* b_gate NULL: none */
    float *logits;                /* forward: out; backward: the gradient that comes in */
    void *workspace;              /* gate_bytes */
    void *d_x;                    /* backward: added to; NULL: not wanted, as the two below */
    const void *also;             /* added to d_x, too; NULL: none */
    float *d_w_gate, *d_b_gate;
    uint32_t row_type;
    uint32_t accumulate; /* 1: to d_w_gate and d_b_gate */
    uint32_t in_pieces;  /* 1: of BF16 rows also small products are.  For tests */
    uint32_t pad;
} epic_gate;

/* The operations of a device backend; every member is set.  Arguments arrive checked, and those of
 * public calls as the public functions of the same names take them. */
typedef struct epic_ops {
    epic_result (*plan)(epic_group *, const epic_plan_args *);
    epic_result (*dispatch)(epic_group *, const epic_dispatch_args *);
    epic_result (*plan_dispatch)(epic_group *, const epic_plan_args *,
                                 const epic_dispatch_args *);
    epic_result (*combine)(epic_group *, const epic_combine_args *);
    epic_result (*dispatch_backward)(epic_group *, const epic_dispatch_backward_args *);
    epic_result (*combine_backward)(epic_group *, const epic_combine_backward_args *);
    epic_result (*sum)(epic_group *, const epic_allreduce_sum_args *);
    epic_result (*sum_replicas)(epic_group *, const epic_sum_replicas_args *);
    /* Router and losses: args->router has its defaults filled in; factor is what the sum over
     * tokens (backward: also d_loss) is multiplied by. */
    epic_result (*router_forward)(epic_group *, const epic_router_args *);
    epic_result (*router_backward)(epic_group *, const epic_router_backward_args *);
    epic_result (*balance_loss_forward)(epic_group *, const epic_loss *, double factor);
    epic_result (*balance_loss_backward)(epic_group *, const epic_loss *, double factor);
    epic_result (*z_loss_forward)(epic_group *, const epic_loss *, double factor);
    epic_result (*z_loss_backward)(epic_group *, const epic_loss *, double factor);
    epic_result (*bias_update)(epic_group *, const epic_bias_update_args *);
    /* args->experts has its defaults filled in, grad_type too. */
    epic_result (*experts_forward)(epic_group *, const epic_experts_args *);
    epic_result (*experts_backward)(epic_group *, const epic_experts_backward_args *);
    /* What the layer does beside the calls above.  Experts without expert_rows there: all slots are
     * one expert's. */
    epic_result (*gate)(epic_group *, const epic_gate *);
    epic_result (*gate_backward)(epic_group *, const epic_gate *);
    /* Zero-experts and the shared expert's gate: choices without zero-experts; what it is
     * multiplied by; d_shared_weights, in place, and the gradient [hidden] of w_shared_gate (NULL:
     * not wanted; workspace: experts_tiles_bytes); d_weights of zero-experts; rows added up. */
    epic_result (*sent_choices)(epic_group *, epic_stream, const layer_tokens *, int32_t *to);
    epic_result (*shared_gate)(epic_group *, epic_stream, const layer_tokens *);
    epic_result (*shared_gate_backward)(epic_group *, epic_stream, const layer_tokens *,
                                        float *gradient, bool accumulate, void *workspace);
    epic_result (*zero_weights)(epic_group *, epic_stream, const layer_tokens *);
    epic_result (*finish)(epic_group *, epic_stream, const layer_tokens *, const layer_rows *);
    /* Notices if the plan has more experts on a rank than the layer has room for, or, with
     * EPIC_TREE, unequal numbers of tokens. */
    epic_result (*fits)(epic_group *, const epic_plan_args *, uint32_t num_local);
    /* to += from (replace: =; from NULL: zeros), numbers of a type; sums of [2, n] in trees; the few
     * numbers of losses, as kernels/cuda/experts/grouped.h has them */
    epic_result (*add)(epic_group *, epic_stream, void *to, const void *from, int64_t count,
                       uint32_t type, bool replace);
    epic_result (*trees)(epic_group *, epic_stream, float *values, int64_t n);
    epic_result (*give_losses)(epic_group *, epic_stream, const float *losses,
                               const epic_moe_args *);
    epic_result (*take_losses)(epic_group *, epic_stream, float *d_losses,
                               const epic_moe_backward_args *);
    epic_result (*check)(epic_group *, epic_failure_info *out); /* what broke the group */
    epic_result (*notice)(epic_group *); /* the oldest class (b) error not yet returned */
    uint32_t (*max_sms)(const epic_group *);
    void (*abort)(epic_group *, uint64_t tag, const char *why);
} epic_ops;

#endif
