/* SPDX-License-Identifier: Apache-2.0 */
/* Declares two tables of the functions that compute the router for one token (row_template.h):
 * one table for float32 and one for float64. */
#ifndef EPIC_ROUTER_ROW_H
#define EPIC_ROUTER_ROW_H

#include "router/config.h"

typedef struct router_row_ops {
    /* Chooses top_k experts, and writes their ids to topk_idx and their weights to weights. If
     * `given` [top_k] is not NULL, copies these ids and does not choose. If `scores`
     * [num_columns] is not NULL, writes the scores of all columns to it. */
    void (*choose)(const router_job *job, const void *logits, const int32_t *given,
                   int32_t *topk_idx, void *weights, void *scores);

    /* Computes d_logits [num_columns] from d_weights [top_k]. Adds the gradient of
     * scale_of_expert to job->scale_sums. */
    void (*choose_backward)(const router_job *job, const void *logits, const int32_t *topk_idx,
                            const void *d_weights, void *d_logits);

    /* Returns the token's part of the balance loss: the sum over experts of the expert's router
     * probability times its load. */
    double (*balance)(const router_job *job, const void *logits, const int32_t *load);

    /* Writes the gradient of factor * balance() to d_logits. With EPIC_ACCUMULATE, adds it to
     * d_logits instead. */
    void (*balance_backward)(const router_job *job, const void *logits, const int32_t *load,
                             double factor, void *d_logits);

    double (*z_square)(const router_job *job, const void *logits);

    /* Writes the gradient of factor * z_square() to d_logits. With EPIC_ACCUMULATE, adds it to
     * d_logits instead. */
    void (*z_backward)(const router_job *job, const void *logits, double factor,
                       void *d_logits);
} router_row_ops;

extern const router_row_ops router_row_ops_f32; /* for logits of type F32, BF16 and F16 */
extern const router_row_ops router_row_ops_f64; /* for logits of type F64 */

/* Returns the table for the type of the logits. */
static inline const router_row_ops *router_row_of(const router_job *job)
{
    return job->type == EPIC_F64 ? &router_row_ops_f64 : &router_row_ops_f32;
}

#endif
