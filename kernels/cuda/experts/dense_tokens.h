/* SPDX-License-Identifier: Apache-2.0 */
/* How the kernels of experts/dense_tokens.cu and experts/layer_fits.cu are launched.  Plain C. */
#ifndef EPIC_CUDA_DENSE_TOKENS_H
#define EPIC_CUDA_DENSE_TOKENS_H

#include "cuda/common/cuda_kernels.h"
#include "rules/layer_tokens.h"

#ifdef __cplusplus
extern "C" {
#endif

cudaError_t p2p_launch_sent(const layer_tokens *t, int32_t *choices, int sms,
                            cudaStream_t stream);
cudaError_t p2p_launch_shared_gate(const layer_tokens *t, int sms, cudaStream_t stream);
cudaError_t p2p_launch_shared_slope(const layer_tokens *t, int sms, cudaStream_t stream);
cudaError_t p2p_launch_zero_weights(const layer_tokens *t, int sms, cudaStream_t stream);
cudaError_t p2p_launch_finish(const layer_tokens *t, const layer_rows *rows, int sms,
                              cudaStream_t stream);
cudaError_t p2p_load_dense_tokens(void);

typedef struct p2p_fits_job { /* does the layer fit the plan that has been made? */
    p2p_self self;
    uint8_t *plan;
    int32_t *expert_rows, *expert_tokens; /* [num_local]: become zeros if not */
    int32_t num_local;                    /* experts that the layer has room for on a rank */
    int32_t tree;                         /* EPIC_TREE: as many tokens on every rank */
} p2p_fits_job;

cudaError_t p2p_launch_fits(const p2p_fits_job *job, cudaStream_t stream);
cudaError_t p2p_load_fits(void);

#ifdef __cplusplus
}
#endif
#endif
