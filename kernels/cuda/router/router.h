/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments ("jobs") and launchers of the kernels of the router and its losses, for the host
 * code of src/backend/p2p. This header is plain C. A *column* is one logit of a token. It
 * belongs to an expert or to a zero-expert (an expert that returns its input as output). A
 * *choice* is a token and one of its top_k experts. All arrays are in device memory of this
 * rank. Every launcher enqueues on `stream` and returns the error of the launch. */
#ifndef EPIC_CUDA_ROUTER_H
#define EPIC_CUDA_ROUTER_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "epic/epic.h"

#define P2P_MAX_COLUMNS 4096 /* maximum number of columns of logits */

#ifdef __cplusplus
extern "C" {
#endif

/* The logits [num_tokens, columns] and the options of the router. */
typedef struct p2p_router_rows {
    epic_router router; /* the caller's options, with defaults filled in */
    const void *logits;
    int64_t num_tokens;
    int32_t columns; /* number of logits per token: num_experts + zero_experts */
    /* epic_type of the logits */
    uint32_t type;
    float eps, norm_min, scale; /* the options of `router` with these names, as float32 */
    uint32_t pad;
} p2p_router_rows;

/* Arguments of router forward. epic_router_args describes the arrays. */
typedef struct p2p_router_job {
    p2p_router_rows rows;
    /* [columns]: bias of the router, which is added to the scores when experts are chosen, but
     * not when weights are computed; NULL: no bias */
    const float *bias;
    /* [columns]: the weights of expert e are multiplied by element e; NULL: no factors */
    const float *scale_of_expert;
    /* [num_tokens]: token t gets the experts in row token_ids[t] of `table` [table_rows,
     * top_k]. If token_ids and topk_idx_in are both NULL, the kernel chooses experts by their
     * scores. */
    const void *token_ids;
    const int32_t *table;
    int64_t table_rows;
    /* [num_tokens, top_k]: the experts that the caller has chosen (token_ids is then NULL), or
     * NULL */
    const int32_t *topk_idx_in;
    int32_t *topk_idx; /* output [num_tokens, top_k]: the chosen experts */
    float *weights;    /* output [num_tokens, top_k]: weights of the choices */
    float *scores; /* output [num_tokens, columns]; NULL: the caller does not need the scores */
    int32_t has_int64_ids; /* 1: token_ids are int64; 0: int32 */
    /* 1: experts are compared by their logits, which have the same order as the scores */
    int32_t on_logits;
} p2p_router_job;

/* Arguments of router backward, which computes the gradient of the logits. */
typedef struct p2p_router_backward_job {
    p2p_router_rows rows;
    const int32_t *topk_idx; /* [num_tokens, top_k]: the chosen experts, from forward */
    /* [columns]: the weights of expert e are multiplied by element e; NULL: no factors */
    const float *scale_of_expert;
    const float *d_weights;   /* [num_tokens, top_k]: gradient of the weights */
    void *d_logits;           /* output [num_tokens, columns] of grad_type */
    float *d_scale_of_expert; /* output [columns]; NULL: not computed */
    uint32_t grad_type;       /* epic_type of d_logits */
    int32_t accumulate;       /* 1: add the gradients to the outputs; 0: overwrite them */
} p2p_router_backward_job;

/* Arguments of the balance loss or of the z-loss, forward and backward. */
typedef struct p2p_loss_job {
    p2p_router_rows rows;
    /* balance loss over all tokens: [num_experts]: for each expert, the number of choices that
     * have this expert */
    const int32_t *load;
    /* balance loss by sequences: [num_tokens, top_k]: the chosen experts */
    const int32_t *topk_idx;
    int64_t sequence_tokens; /* number of tokens per sequence; 0: the loss is over all tokens */
    double factor;           /* factor by which the sum over the tokens is multiplied */
    /* A plan, or NULL. With a plan, the kernel divides `factor` by the number of tokens of all
     * ranks, which the plan contains. */
    const void *plan;
    /* how many times the kernel divides `factor` by this number: 1 or 2 */
    int32_t num_divisions;
    int32_t pad;
    const float *d_loss; /* backward: [1]: gradient of the loss; NULL: the gradient is 1 */
    /* [LOSS_RUNS]: workspace for the sum of each run of consecutive tokens */
    double *runs;
    void *loss;                    /* forward: output [1] of loss_type */
    void *d_logits;                /* backward: output [num_tokens, columns] of grad_type */
    uint32_t loss_type, grad_type; /* epic_type of loss, and of d_logits */
    int32_t accumulate;            /* 1: add the gradients to d_logits; 0: overwrite d_logits */
    int32_t is_z_loss;             /* 1: z-loss; 0: balance loss */
} p2p_loss_job;

/* These functions launch the kernels of the router and of the losses. p2p_launch_bias_update()
 * lowers the `bias` [num_experts] of experts whose `load` is above the mean, and raises it for
 * experts whose `load` is below the mean. */
cudaError_t p2p_launch_router(const p2p_router_job *job, cudaStream_t stream);
cudaError_t p2p_launch_router_backward(const p2p_router_backward_job *job, cudaStream_t stream);
cudaError_t p2p_launch_loss(const p2p_loss_job *job, cudaStream_t stream);
cudaError_t p2p_launch_loss_backward(const p2p_loss_job *job, cudaStream_t stream);
cudaError_t p2p_launch_bias_update(float *bias, const int32_t *load, int64_t num_experts,
                                   float rate, cudaStream_t stream);

/* These functions load the kernels on the current device when a context is opened, so that no
 * later launch has to load them. */
cudaError_t p2p_load_router(void);
cudaError_t p2p_load_router_backward(void);
cudaError_t p2p_load_loss(void);

#ifdef __cplusplus
}
#endif
#endif
