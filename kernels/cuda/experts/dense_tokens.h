/* SPDX-License-Identifier: Apache-2.0 */
/* Launchers of experts/dense_tokens.cu and experts/layer_fits.cu, for the host code of
 * src/backend/p2p. This header is plain C. Every launcher enqueues kernels on `stream` and
 * returns the error of the launch. A grid has at most 8 * sms CTAs. */
#ifndef EPIC_CUDA_DENSE_TOKENS_H
#define EPIC_CUDA_DENSE_TOKENS_H

#include "cuda/common/cuda_kernels.h"
#include "rules/layer_tokens.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies topk_idx to choices [num_tokens, top_k], and writes -1 in place of each zero-expert.
 * Dispatch reads `choices`. */
cudaError_t p2p_launch_sent(const layer_tokens *t, int32_t *choices, int sms,
                            cudaStream_t stream);
/* Computes shared_weights [num_tokens] = sigmoid(x w_shared_gate). */
cudaError_t p2p_launch_shared_gate(const layer_tokens *t, int sms, cudaStream_t stream);
/* Replaces d_shared_weights [num_tokens], the gradient of the sigmoid's value, by the gradient
 * of the sigmoid's argument. */
cudaError_t p2p_launch_shared_slope(const layer_tokens *t, int sms, cudaStream_t stream);
/* Writes d_weights = dot(d_out, x) for the choices that are zero-experts. */
cudaError_t p2p_launch_zero_weights(const layer_tokens *t, int sms, cudaStream_t stream);
/* Adds the outputs of the zero-experts and of the shared expert to the rows [num_tokens,
 * hidden] that combine returned. layer_rows has the formula, also for backward. */
cudaError_t p2p_launch_finish(const layer_tokens *t, const layer_rows *rows, int sms,
                              cudaStream_t stream);
/* Loads the kernels at open, so that no later launch has to load them. */
cudaError_t p2p_load_dense_tokens(void);

/* Arguments of p2p_launch_fits(). */
typedef struct p2p_fits_job {
    p2p_self self;
    uint8_t *plan;
    /* [num_local]: the kernel sets them to 0 if the plan does not fit */
    int32_t *expert_rows, *expert_tokens;
    /* largest number of local experts that the layer's memory can hold */
    int32_t num_local;
    /* 1 if the layer uses EPIC_TREE, which requires the same number of tokens on all ranks */
    int32_t tree;
} p2p_fits_job;

/* Checks that a plan fits its layer. If it does not, the kernel marks the plan as failed, and
 * epic_check() then reports a class (b) error. */
cudaError_t p2p_launch_fits(const p2p_fits_job *job, cudaStream_t stream);
cudaError_t p2p_load_fits(void);

#ifdef __cplusplus
}
#endif
#endif
