/* SPDX-License-Identifier: Apache-2.0 */
/* Launchers of experts/dense_tokens.cu and experts/layer_fits.cu, for the host code of
 * src/backend/p2p. Plain C. A zero-expert is an expert whose output is its input, so its rows
 * are never sent. Every launcher enqueues kernels on `stream`, with at most 8 * sms CTAs, and
 * returns the error of the launch. */
#ifndef EPIC_CUDA_DENSE_TOKENS_H
#define EPIC_CUDA_DENSE_TOKENS_H

#include "cuda/common/cuda_kernels.h"
#include "rules/layer_tokens.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies topk_idx to choices [num_tokens, top_k], with -1 in place of each zero-expert, to
 * which dispatch then sends no rows. */
cudaError_t p2p_launch_sent(const layer_tokens *t, int32_t *choices, int sms,
                            cudaStream_t stream);
/* Computes the weight of the shared expert for each token: shared_weights [num_tokens] =
 * sigmoid(dot(x, w_shared_gate)). */
cudaError_t p2p_launch_shared_gate(const layer_tokens *t, int sms, cudaStream_t stream);
/* Replaces d_shared_weights [num_tokens], the gradient of shared_weights, by the gradient of
 * dot(x, w_shared_gate), in place. */
cudaError_t p2p_launch_shared_slope(const layer_tokens *t, int sms, cudaStream_t stream);
/* Computes the gradients of the weights of zero-experts (whose output is weight * x): d_weights
 * = dot(d_out, x). Other elements of d_weights stay unchanged. */
cudaError_t p2p_launch_zero_weights(const layer_tokens *t, int sms, cudaStream_t stream);
/* Adds the outputs of the zero-experts and of the shared expert to the rows [num_tokens,
 * hidden] that combine returned. In backward, adds the gradients of their inputs to the
 * gradient rows instead. layer_rows (src/rules/layer_tokens.h) has the formulas. */
cudaError_t p2p_launch_finish(const layer_tokens *t, const layer_rows *rows, int sms,
                              cudaStream_t stream);
/* Loads the kernels on the current device at open, so that no later launch has to load them. */
cudaError_t p2p_load_dense_tokens(void);

/* Arguments of p2p_launch_fits(), which checks that a plan fits its layer. */
typedef struct p2p_fits_job {
    p2p_self self;
    uint8_t *plan;
    /* outputs [num_local]: zero if the plan does not fit, so that no rows are processed */
    int32_t *expert_rows, *expert_tokens;
    /* the layer's memory has space for this many experts per rank */
    int32_t num_local;
} p2p_fits_job;

/* Enqueues the check that a plan fits its layer. If the plan does not fit, the kernel sets the
 * plan's result to an error, and epic_check() later returns a class (b) error. */
cudaError_t p2p_launch_fits(const p2p_fits_job *job, cudaStream_t stream);
cudaError_t p2p_load_fits(void);

#ifdef __cplusplus
}
#endif
#endif
