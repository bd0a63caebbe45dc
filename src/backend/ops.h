/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of a device backend: the table of its functions, one per operation. A function
 * launches the kernels of its operation. */
#ifndef EPIC_OPS_H
#define EPIC_OPS_H

#include "backend/backend.h"
#include "backend/seat_set.h"
#include "rules/gate_layout.h"
#include "rules/layer_tokens.h"

struct recorder_page; /* defined in base/recorder.h */

/* Arguments of the four loss functions: the forward and backward pass of the balance loss and
 * of the z-loss. If a field also exists in the public struct of a call, it has the same name
 * and meaning there. */
typedef struct epic_loss_args {
    const epic_router *router;
    const void *logits;
    int64_t num_tokens;
    int64_t total_tokens;
    /* A plan in device memory, or NULL. If set, the kernel reads the number of tokens of all
     * ranks from the plan and ignores total_tokens. */
    const void *plan;
    /* number of tokens per sequence, for a balance loss per sequence (epic_balance_loss_args);
     * 0 for the z-loss */
    int64_t sequence_tokens;
    const int32_t *load;
    const int32_t *topk_idx;
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;          /* the loss, output of the forward pass */
    const float *d_loss; /* gradient of the loss, input of the backward pass */
    void *d_logits;      /* gradient of the logits, output of the backward pass */
    uint32_t type;
    uint32_t loss_type;
    uint32_t grad_type;
    uint32_t flags;
    epic_stream stream;
} epic_loss_args;

/* Arguments of the gate (the dense layer in front of the router), which computes logits = x
 * w_gate + b_gate, and of its backward pass. */
typedef struct epic_gate_args {
    epic_stream stream;
    const void *x; /* [tokens, hidden] of row_type */
    int64_t tokens, hidden, columns;
    /* Maximum number of tokens in a block. A layer in tree order divides its tokens into
     * blocks, whose size does not depend on the number of ranks. The gate chooses the number of
     * split-K slices by `block` and not by `tokens`, so the bits of the result do not depend on
     * the number of ranks. */
    int64_t block;
    /* The number of tokens by which the gate decides between float32 values and bfloat16
     * components (p2p/gate.c). It must not depend on the number of ranks. 0: use `block`. */
    int64_t deciding_tokens;
    /* Backward divides the tokens into these blocks. If blocks.count is 0 or 1, all tokens are
     * one block. */
    gate_blocks blocks;
    const float *w_gate, *b_gate; /* b_gate may be NULL */
    /* [tokens, columns]. Forward: output. Backward: input, the gradient of the logits. */
    float *logits;
    /* workspace of the caller, of gate_forward_bytes() or gate_backward_bytes() bytes
     * (rules/gate_layout.h) */
    void *workspace;
    /* [tokens, hidden] of row_type. Backward adds the gradient of x to it. May be NULL. */
    void *d_x;
    /* [tokens, hidden]: rows that backward adds to d_x together with the gradient of x; may be
     * NULL */
    const void *addend;
    float *d_w_gate, *d_b_gate; /* backward outputs; may be NULL */
    uint32_t row_type;
    uint32_t accumulate; /* 1: add the gradients to d_w_gate and d_b_gate; 0: overwrite them */
    /* For tests. 1: split float32 values into bfloat16 components (p2p/gate.c) for every size
     * of the GEMM. */
    uint32_t always_split;
    /* 1: the way in which the GEMM is computed does not depend on `tokens` or `block` */
    uint32_t is_invariant;
} epic_gate_args;

/* The operations of a device backend. Every member is set, except those whose comment says what
 * NULL means.
 *
 * Each function launches kernels on the stream of its arguments and returns without waiting for
 * them. The caller in libepic.so must have checked the arguments. A function that has the name
 * of a public call takes the arguments of that call. Functions return EPIC_OK or an error.
 * After an error, epic_backend.sentence returns the error text. */
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

    /* Implements epic_window_alloc and, if args->data is set, epic_window_register. Unlike the
     * other functions, it waits for the other ranks. */
    epic_result (*add_window)(epic_group *, const epic_window_args *, epic_window_info *out);

    /* Makes the seats (rank numbers) in `members` the members of the group and all other seats
     * vacant, like epic_transport.set_members. All earlier work of this rank on the device must
     * have ended. NULL: the backend has no vacant seats. */
    void (*set_members)(epic_group *, const seat_set *members);

    /* Functions that change the members of the group (backend/regroup.h). NULL: the members
     * cannot change. */
    const struct epic_regroup_transport *regroup;

    /* Router and losses. Requires that the defaults of args->router are filled in. A loss is
     * `factor` times a sum over the tokens, so the backward pass multiplies d_loss by
     * `factor`. */
    epic_result (*router_forward)(epic_group *, const epic_router_args *);
    epic_result (*router_backward)(epic_group *, const epic_router_backward_args *);
    epic_result (*balance_loss_forward)(epic_group *, const epic_loss_args *, double factor);
    epic_result (*balance_loss_backward)(epic_group *, const epic_loss_args *, double factor);
    epic_result (*z_loss_forward)(epic_group *, const epic_loss_args *, double factor);
    epic_result (*z_loss_backward)(epic_group *, const epic_loss_args *, double factor);
    epic_result (*bias_update)(epic_group *, const epic_bias_update_args *);

    /* Experts. Requires that the defaults of args->experts are filled in. If expert_rows is
     * NULL, all slots belong to one expert. A layer uses this for its shared expert. */
    epic_result (*experts_forward)(epic_group *, const epic_experts_args *);
    epic_result (*experts_backward)(epic_group *, const epic_experts_backward_args *);

    /* The functions from here on are parts of the MoE layer (src/moe), not public calls. */
    epic_result (*gate_forward)(epic_group *, const epic_gate_args *);
    epic_result (*gate_backward)(epic_group *, const epic_gate_args *);

    /* Copies to `to` [tokens, top_k] the expert id of each choice of each token. Replaces each
     * id of a zero-expert (an expert whose output is its input) by -1. */
    epic_result (*mask_zero_experts)(epic_group *, epic_stream, const layer_tokens *,
                                     int32_t *to);

    /* Computes layer_tokens.shared_weights: each token's factor for the shared expert's
     * output. */
    epic_result (*shared_gate_forward)(epic_group *, epic_stream, const layer_tokens *);

    /* Multiplies d_shared_weights by the derivative of the sigmoid, in place. Writes the
     * gradient of w_shared_gate to gradient [hidden], or adds it if `accumulate` is set;
     * gradient may be NULL. workspace has experts_tiles_bytes() bytes. */
    epic_result (*shared_gate_backward)(epic_group *, epic_stream, const layer_tokens *,
                                        float *gradient, bool accumulate, void *workspace);

    /* Writes layer_tokens.d_weights for the choices whose expert is a zero-expert (an expert
     * whose output is its input). The rows of such choices are not sent, so no other operation
     * computes these gradients. */
    epic_result (*zero_experts_backward)(epic_group *, epic_stream, const layer_tokens *);

    /* Adds the rows that never leave this rank to the output: the outputs of the shared expert
     * and of zero-experts. */
    epic_result (*add_local_rows)(epic_group *, epic_stream, const layer_tokens *,
                                  const layer_rows *);

    /* Launches a kernel that checks the plan: no rank may have more than num_local local
     * experts. If a rank has more, next_data_error() later returns the error. */
    epic_result (*check_plan_fits)(epic_group *, const epic_plan_args *, uint32_t num_local);

    /* Adds the array `from` to the array `to`. If `replace` is set, copies `from` to `to`
     * instead. Each array has `count` elements of type `type`. If `from` is NULL, its elements
     * are zeros. */
    epic_result (*add_array)(epic_group *, epic_stream, void *to, const void *from,
                             int64_t count, uint32_t type, bool replace);

    /* Copies `count` elements from device memory to `to`, after all work that is already on the
     * stream. Returns EPIC_ENOTSUP if the stream is being captured. With count 0, the function
     * only checks whether the stream is being captured. */
    epic_result (*read_counts)(epic_group *, epic_stream, const int32_t *from, int64_t count,
                               int32_t *to);

    /* Sums each of the two rows of values [2, n] in the order of a binary tree. Requires that n
     * is a power of two. Writes the two sums to values[0] and values[1]. */
    epic_result (*sum_trees)(epic_group *, epic_stream, float *values, int64_t n);

    /* Writes losses [2] (balance loss, z-loss) and their sum to the loss outputs in the
     * arguments of the layer. Skips outputs that are NULL. If `losses` is NULL, writes
     * zeros. */
    epic_result (*write_losses)(epic_group *, epic_stream, const float *losses,
                                const epic_moe_args *);

    /* Computes d_losses [2], the gradients of the balance loss and of the z-loss, from the
     * gradients that the caller passes to the layer. */
    epic_result (*read_d_losses)(epic_group *, epic_stream, float *d_losses,
                                 const epic_moe_backward_args *);

    /* If the group has failed, returns the result code of the failure and writes the failure to
     * *out. If not, returns EPIC_OK. */
    epic_result (*poll_failure)(epic_group *, epic_failure_info *out);

    /* Returns the oldest unreported error that a kernel has found in the ranks' data, or
     * EPIC_OK if there is none. Returns each error only once. */
    epic_result (*next_data_error)(epic_group *);

    /* Adds to out[r] how long the kernels of this rank have waited for rank r in the operations
     * from `first` to `last` (epic_operation). Copies the times from the device without waiting
     * for kernels. Any thread may call it. Errors: EPIC_EDEVICE. */
    epic_result (*read_waits)(epic_group *, uint32_t first, uint32_t last, epic_wait_info *out);

    /* Starts to copy the waiting times to this page of the flight recorder, in a thread of the
     * backend that runs until epic_backend.leave returns. epic-info reads the page. NULL: no
     * page. */
    void (*record_waits)(epic_group *, struct recorder_page *);

    /* Returns the maximum number of SMs that one operation uses. */
    uint32_t (*max_sms)(const epic_group *);

    /* Breaks the group: all ranks return EPIC_EPEER with the text `why`, which may be NULL. */
    void (*abort)(epic_group *, uint64_t tag, const char *why);
} epic_ops;

#endif
