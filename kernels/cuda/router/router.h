/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of router and losses: what they are given, and how they are launched.  Plain C.
 * They talk to no peer; a warp works on one token. */
#ifndef EPIC_CUDA_ROUTER_H
#define EPIC_CUDA_ROUTER_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "epic/epic.h"

#define P2P_MAX_COLUMNS 4096 /* of logits */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct p2p_router_rows { /* the logits, and what every kernel knows */
    epic_router router;          /* defaults filled in */
    const void *logits;
    int64_t num_tokens;
    int32_t columns; /* num_experts + zero_experts */
    uint32_t type;
    float eps, norm_min, scale; /* the router's */
    uint32_t pad;
} p2p_router_rows;

typedef struct p2p_router_job {
    p2p_router_rows rows;
    const float *bias;
    const float *scale_of_expert; /* NULL: 1 */
    const void *token_ids;        /* NULL: choose */
    const int32_t *table;
    int64_t table_rows;
    int32_t *topk_idx;
    float *weights;
    float *scores;
    int32_t wide; /* token_ids are int64 */
    int32_t on_logits;
} p2p_router_job;

typedef struct p2p_router_backward_job {
    p2p_router_rows rows;
    const int32_t *topk_idx;
    const float *scale_of_expert; /* NULL: 1 */
    const float *d_weights;
    void *d_logits;
    float *d_scale_of_expert; /* NULL: not wanted */
    uint32_t grad_type;
    int32_t accumulate;
} p2p_router_backward_job;

typedef struct p2p_loss_job {
    p2p_router_rows rows;
    const int32_t *load;     /* balance: sequence_tokens 0 */
    const int32_t *topk_idx; /* balance: else */
    int64_t sequence_tokens;
    double factor;
    const void *plan; /* the factor is divided by the tokens that this plan counts, */
    int32_t powers;   /* so many times; NULL: it is what it is */
    int32_t pad;
    const float *d_loss; /* NULL: 1 */
    double *runs;        /* [LOSS_RUNS] */
    void *loss;
    void *d_logits;
    uint32_t loss_type, grad_type;
    int32_t accumulate;
    int32_t z; /* the z-loss; else balance */
} p2p_loss_job;

cudaError_t p2p_launch_router(const p2p_router_job *job, cudaStream_t stream);
cudaError_t p2p_launch_router_backward(const p2p_router_backward_job *job, cudaStream_t stream);
cudaError_t p2p_launch_loss(const p2p_loss_job *job, cudaStream_t stream);
cudaError_t p2p_launch_loss_backward(const p2p_loss_job *job, cudaStream_t stream);
cudaError_t p2p_launch_bias_update(float *bias, const int32_t *load, int64_t num_experts,
                                   float rate, cudaStream_t stream);

cudaError_t p2p_load_router(void);
cudaError_t p2p_load_router_backward(void);
cudaError_t p2p_load_loss(void);

#ifdef __cplusplus
}
#endif
#endif
