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

/* Copies topk_idx to choices [num_tokens, top_k]. Each zero-expert becomes -1, so that dispatch
 * sends no row to it. */
cudaError_t p2p_launch_sent(const layer_tokens *t, int32_t *choices, int sms,
                            cudaStream_t stream);
/* Computes the weight of the shared expert for each token: shared_weights [num_tokens] =
 * sigmoid(dot(x, w_shared_gate)). */
cudaError_t p2p_launch_shared_gate(const layer_tokens *t, int sms, cudaStream_t stream);
/* On entry, d_shared_weights [num_tokens] is the gradient of shared_weights. Replaces it, in
 * place, by the gradient of dot(x, w_shared_gate). */
cudaError_t p2p_launch_shared_slope(const layer_tokens *t, int sms, cudaStream_t stream);
/* Computes the gradients of the weights of zero-experts: d_weights = dot(d_out, x), because
 * their output is weight * x. Other elements of d_weights stay unchanged. */
cudaError_t p2p_launch_zero_weights(const layer_tokens *t, int sms, cudaStream_t stream);
/* Adds the outputs of the zero-experts and of the shared expert to the rows [num_tokens,
 * hidden] that combine returned. In backward, adds the gradients of the inputs of these experts
 * to the gradient rows instead. layer_rows (src/rules/layer_tokens.h) has the formulas. */
cudaError_t p2p_launch_finish(const layer_tokens *t, const layer_rows *rows, int sms,
                              cudaStream_t stream);
/* Loads the kernels on the current device when a context is opened, so that no later launch has
 * to load them. */
cudaError_t p2p_load_dense_tokens(void);

/* Arguments of p2p_launch_fits(), which checks that a plan fits its layer. */
typedef struct p2p_fits_job {
    p2p_self self;
    uint8_t *plan;
    /* outputs [num_local]; they become zeros if the plan does not fit, so that no rows are
     * processed */
    int32_t *expert_rows, *expert_tokens;
    /* maximum number of experts per rank for which the layer's memory has space */
    int32_t num_local;
} p2p_fits_job;

/* Enqueues the check that a plan fits its layer. If the plan does not fit, the kernel sets the
 * plan's result to an error, and epic_check() later returns a class (b) error (epic.h). */
cudaError_t p2p_launch_fits(const p2p_fits_job *job, cudaStream_t stream);
cudaError_t p2p_load_fits(void);

#ifdef __cplusplus
}
#endif
#endif
