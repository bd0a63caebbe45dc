/* SPDX-License-Identifier: Apache-2.0 */
/* What is done with the logits of one token, in float32 and in float64. */
#ifndef EPIC_ROUTER_ROW_H
#define EPIC_ROUTER_ROW_H

#include "router/config.h"

typedef struct router_row_ops {
    /* Chooses (or takes `given`, [top_k]) and weighs.  scores NULL: not wanted. */
    void (*choose)(const router_job *job, const void *logits, const int32_t *given,
                   int32_t *topk_idx, void *weights, void *scores);

    void (*choose_backward)(const router_job *job, const void *logits, const int32_t *topk_idx,
                            const void *d_weights, void *d_logits);

    /* The sum over the experts of P * load. */
    double (*balance)(const router_job *job, const void *logits, const int32_t *load);

    /* The gradient of `factor` times that. */
    void (*balance_backward)(const router_job *job, const void *logits, const int32_t *load,
                             double factor, void *d_logits);

    /* The square of logsumexp. */
    double (*z_square)(const router_job *job, const void *logits);

    void (*z_backward)(const router_job *job, const void *logits, double factor,
                       void *d_logits);
} router_row_ops;

extern const router_row_ops router_row_ops_f32; /* logits F32, BF16, F16 */
extern const router_row_ops router_row_ops_f64;

static inline const router_row_ops *router_row_of(const router_job *job)
{
    return job->type == EPIC_F64 ? &router_row_ops_f64 : &router_row_ops_f32;
}

#endif
