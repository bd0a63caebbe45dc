/* SPDX-License-Identifier: Apache-2.0 */
/* The layer on the host, between moe.c, which checks arguments, and stages.h, which both
 * paths share. All of these are collective. Numbers are computed on the calling thread. */
#ifndef EPIC_MOE_HOST_H
#define EPIC_MOE_HOST_H

#include "moe/stages.h"

/* Runs epic_moe_forward on checked arguments. */
epic_result moe_host_forward(moe_job *j, const epic_moe_args *a);
/* Runs epic_moe_plan on checked arguments. *slots: number of slots that this rank receives. */
epic_result moe_host_plan(moe_job *j, const epic_moe_args *a, int64_t *slots);
/* Runs epic_moe_backward on checked arguments. */
epic_result moe_host_backward(moe_job *j, const epic_moe_backward_args *a,
                              const epic_moe_gradients *g);

/* Computes the gate value of the shared expert and the expert itself on block b, into
 * work.shared_y. `flags`: 0, or EPIC_RECOMPUTE to compute only what backward reads. */
epic_result moe_host_shared_expert(moe_job *j, int64_t b, uint32_t flags);

/* Writes zeros over the rows of all tokens. */
void moe_zero_rows(const moe_job *j, const epic_rows *rows);

#endif
