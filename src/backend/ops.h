/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of a device backend: every operation of a context, as kernel launches. */
#ifndef EPIC_OPS_H
#define EPIC_OPS_H

#include "backend/backend.h"
#include "rules/layer_tokens.h"

/* The arguments of the four loss functions.  Fields that exist in the public structs of these
 * calls have the same names and meanings there. */
typedef struct epic_loss_args {
    const epic_router *router;
    const void *logits;
    int64_t num_tokens;
    int64_t total_tokens;
    /* Device memory of a plan, whose token count of all ranks replaces total_tokens; or NULL. */
    const void *plan;
    int64_t sequence_tokens; /* 0 for the z-loss */
    const int32_t *load;
    const int32_t *topk_idx;
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;          /* output of the forward pass */
    const float *d_loss; /* input of the backward pass */
    void *d_logits;      /* output of the backward pass */
    uint32_t type;
    uint32_t loss_type;
    uint32_t grad_type;
    uint32_t flags;
    epic_stream stream;
} epic_loss_args;

/* The dense layer in front of the router, logits = x w_gate + b_gate, and its backward pass. */
typedef struct epic_gate_args {
    epic_stream stream;
    const void *x; /* [tokens, hidden] of row_type */
    int64_t tokens, hidden, columns;
    int64_t block;                /* tokens in one block of the layer */
    const float *w_gate, *b_gate; /* b_gate may be NULL */
    float *logits;                /* forward: output; backward: its gradient, an input */
    void *workspace;              /* gate_bytes of rules/gate_layout.h */
    void *d_x;                    /* backward: is added to; may be NULL */
    const void *addend;           /* backward: rows that are added to d_x too; may be NULL */
    float *d_w_gate, *d_b_gate;   /* backward outputs; may be NULL */
    uint32_t row_type;
    uint32_t accumulate;   /* 1: add to d_w_gate and d_b_gate */
    uint32_t always_split; /* 1: split BF16 products of any size into pieces; for tests */
    uint32_t reserved;
} epic_gate_args;

/* The operations of a device backend.  Every member is set.
 *
 * Each call launches kernels on the stream of its arguments and returns without waiting for them.
 * The core has checked the arguments.  The functions with the names of public calls take the same
 * arguments as those.  They return EPIC_OK, or an error whose text epic_backend.sentence returns. */
typedef struct epic_ops {
    epic_result (*plan)(epic_group *, const epic_plan_args *);
    epic_result (*dispatch)(epic_group *, const epic_dispatch_args *);
    epic_result (*plan_dispatch)(epic_group *, const epic_plan_args *,
                                 const epic_dispatch_args *);
    epic_result (*combine)(epic_group *, const epic_combine_args *);
    epic_result (*dispatch_backward)(epic_group *, const epic_dispatch_backward_args *);
    epic_result (*combine_backward)(epic_group *, const epic_combine_backward_args *);
    epic_result (*allreduce_sum)(epic_group *, const epic_allreduce_sum_args *);
    epic_result (*sum_replicas)(epic_group *, const epic_sum_replicas_args *);

    /* Router and losses.  The defaults of args->router are filled in.  `factor` multiplies the sum
     * over the tokens; in the backward pass it multiplies d_loss. */
    epic_result (*router_forward)(epic_group *, const epic_router_args *);
    epic_result (*router_backward)(epic_group *, const epic_router_backward_args *);
    epic_result (*balance_loss_forward)(epic_group *, const epic_loss_args *, double factor);
    epic_result (*balance_loss_backward)(epic_group *, const epic_loss_args *, double factor);
    epic_result (*z_loss_forward)(epic_group *, const epic_loss_args *, double factor);
    epic_result (*z_loss_backward)(epic_group *, const epic_loss_args *, double factor);
    epic_result (*bias_update)(epic_group *, const epic_bias_update_args *);

    /* Experts.  The defaults of args->experts are filled in.  If expert_rows is NULL, all slots
     * belong to one expert; the layer's shared expert runs this way. */
    epic_result (*experts_forward)(epic_group *, const epic_experts_args *);
    epic_result (*experts_backward)(epic_group *, const epic_experts_backward_args *);

    /* The members below are the parts of the layer (src/moe) that no public call covers. */
    epic_result (*gate_forward)(epic_group *, const epic_gate_args *);
    epic_result (*gate_backward)(epic_group *, const epic_gate_args *);

    /* Writes to `to` [tokens, top_k] the choices, with -1 in place of each zero-expert. */
    epic_result (*mask_zero_experts)(epic_group *, epic_stream, const layer_tokens *,
                                     int32_t *to);

    /* Computes shared_weights, the factor of the shared expert's output for each token. */
    epic_result (*shared_gate_forward)(epic_group *, epic_stream, const layer_tokens *);

    /* Passes d_shared_weights through the sigmoid in place, and writes or adds the gradient
     * [hidden] of w_shared_gate, which may be NULL.  workspace: experts_tiles_bytes. */
    epic_result (*shared_gate_backward)(epic_group *, epic_stream, const layer_tokens *,
                                        float *gradient, bool accumulate, void *workspace);

    /* Writes d_weights of the choices that are zero-experts. */
    epic_result (*zero_experts_backward)(epic_group *, epic_stream, const layer_tokens *);

    /* Adds the rows that no rank sends: those of the shared expert and of zero-experts. */
    epic_result (*add_local_rows)(epic_group *, epic_stream, const layer_tokens *,
                                  const layer_rows *);

    /* Checks on the device that num_local experts hold a rank's experts of the plan and, with
     * EPIC_TREE, that all ranks have the same number of tokens.  next_data_error() returns what
     * it finds. */
    epic_result (*check_plan_fits)(epic_group *, const epic_plan_args *, uint32_t num_local);

    /* Adds `count` numbers of a type to `to`, or copies them if `replace` is set.  If `from` is
     * NULL, they are zeros. */
    epic_result (*add_array)(epic_group *, epic_stream, void *to, const void *from,
                             int64_t count, uint32_t type, bool replace);

    /* Adds up each row of values [2, n] in the order of a binary tree. */
    epic_result (*sum_trees)(epic_group *, epic_stream, float *values, int64_t n);

    /* Writes the losses, or zeros for NULL, to the outputs of the layer. */
    epic_result (*write_losses)(epic_group *, epic_stream, const float *losses,
                                const epic_moe_args *);

    /* Reads the gradients of the losses from the caller's arguments into d_losses. */
    epic_result (*read_d_losses)(epic_group *, epic_stream, float *d_losses,
                                 const epic_moe_backward_args *);

    /* Returns EPIC_OK, or the failure of the group, which it also writes to *out. */
    epic_result (*poll_failure)(epic_group *, epic_failure_info *out);

    /* Returns the oldest error of the data that was not returned yet, or EPIC_OK. */
    epic_result (*next_data_error)(epic_group *);

    /* Returns the largest number of SMs that one operation uses. */
    uint32_t (*max_sms)(const epic_group *);

    /* Makes all ranks return EPIC_EPEER with the text `why`; it may be NULL. */
    void (*abort)(epic_group *, uint64_t tag, const char *why);
} epic_ops;

#endif
