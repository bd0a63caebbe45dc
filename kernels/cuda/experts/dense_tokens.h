/* SPDX-License-Identifier: Apache-2.0 */
/* Launchers of experts/dense_tokens.cu and experts/layer_fits.cu, for the host code of
 * src/backend/p2p.  Plain C.  All of them enqueue on `stream` and return its error; `sms`
 * limits the CTAs. */
#ifndef EPIC_CUDA_DENSE_TOKENS_H
#define EPIC_CUDA_DENSE_TOKENS_H

#include "cuda/common/cuda_kernels.h"
#include "rules/layer_tokens.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes the ids that dispatch sends: topk_idx without zero-experts, [num_tokens, top_k]. */
cudaError_t p2p_launch_sent(const layer_tokens *t, int32_t *choices, int sms,
                            cudaStream_t stream);
/* shared_weights [num_tokens] = sigmoid(x w_shared_gate). */
cudaError_t p2p_launch_shared_gate(const layer_tokens *t, int sms, cudaStream_t stream);
/* d_shared_weights [num_tokens], in place: from the gradient of the sigmoid to that of its
 * argument. */
cudaError_t p2p_launch_shared_slope(const layer_tokens *t, int sms, cudaStream_t stream);
/* d_weights of zero-experts = dot(d_out, x). */
cudaError_t p2p_launch_zero_weights(const layer_tokens *t, int sms, cudaStream_t stream);
/* Adds zero-experts and the shared expert to rows [num_tokens, hidden] (layer_rows). */
cudaError_t p2p_launch_finish(const layer_tokens *t, const layer_rows *rows, int sms,
                              cudaStream_t stream);
/* Loads the kernels, so that no later launch has to. */
cudaError_t p2p_load_dense_tokens(void);

/* Arguments of p2p_launch_fits(). */
typedef struct p2p_fits_job {
    p2p_self self;
    uint8_t *plan;
    int32_t *expert_rows, *expert_tokens; /* [num_local]: set to 0 if the plan does not fit */
    int32_t num_local;                    /* experts of a rank that the layer has memory for */
    int32_t tree;                         /* 1: EPIC_TREE, which needs equal numbers of tokens
                                             on all ranks */
} p2p_fits_job;

/* Checks that a plan fits its layer; a plan that does not becomes a class (b) error. */
cudaError_t p2p_launch_fits(const p2p_fits_job *job, cudaStream_t stream);
cudaError_t p2p_load_fits(void);

#ifdef __cplusplus
}
#endif
#endif
