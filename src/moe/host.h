/* SPDX-License-Identifier: Apache-2.0 */
/* The layer on the host: host_forward.c, host_backward.c. */
#ifndef EPIC_MOE_HOST_H
#define EPIC_MOE_HOST_H

#include "moe/stages.h"

epic_result moe_host_forward(moe_job *j, const epic_moe_args *a);
epic_result moe_host_plan(moe_job *j, const epic_moe_args *a, int64_t *slots);
epic_result moe_host_backward(moe_job *j, const epic_moe_backward_args *a,
                              const epic_moe_gradients *g);

/* What the shared expert of block b is multiplied by, and the expert; flags: 0, or
 * EPIC_RECOMPUTE for what it saves alone. */
epic_result moe_host_shared_expert(moe_job *j, int64_t b, uint32_t flags);

/* Writes zeros over all rows of the caller's tokens. */
void moe_zero_rows(const moe_job *j, const epic_rows *rows);

#endif
