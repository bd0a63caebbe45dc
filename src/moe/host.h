/* SPDX-License-Identifier: Apache-2.0 */
/* The layer on the host: forward and epic_moe_plan (host_forward.c), and backward
 * (host_backward.c), computed by the calling thread. moe.c has checked the arguments. A
 * collective function must be called on all ranks. */
#ifndef EPIC_MOE_HOST_H
#define EPIC_MOE_HOST_H

#include "moe/stages.h"

/* Implement epic_moe_forward, epic_moe_plan and epic_moe_backward. Collective. moe_host_plan()
 * sets *slots to the number of slots of this rank. */
epic_result moe_host_forward(moe_job *j, const epic_moe_args *a);
epic_result moe_host_plan(moe_job *j, const epic_moe_args *a, int64_t *slots);
epic_result moe_host_backward(moe_job *j, const epic_moe_backward_args *a,
                              const epic_moe_gradients *g);

/* Computes the gate of the shared expert for block b, and writes the output of the shared
 * expert to work.shared_y. With EPIC_RECOMPUTE, computes only the data that backward reads. */
epic_result moe_host_shared_expert(moe_job *j, int64_t b, uint32_t flags);

void moe_zero_rows(const moe_job *j, const epic_rows *rows);

#endif
