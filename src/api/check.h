/* SPDX-License-Identifier: Apache-2.0 */
/* Checking the arguments of step calls: pointers, shapes among themselves, enums.  What only a
 * plan can tell is checked by the step. */
#ifndef EPIC_CHECK_H
#define EPIC_CHECK_H

#include "context/context.h"

/* The bytes of a plan: there, and where a plan may lie. */
epic_result check_plan_bytes(const void *plan, int64_t plan_bytes);

/* What a plan takes at most; EPIC_EINVAL: more slots than int32 counts. */
epic_result check_plan_size(const epic_config *config, const epic_layer *layer, int64_t *bytes);

epic_result check_plan_args(const epic_context *ctx, const epic_plan_args *args,
                            const epic_layer *layer);
epic_result check_dispatch_args(const epic_context *ctx, const epic_dispatch_args *args);
epic_result check_combine_args(const epic_context *ctx, const epic_combine_args *args);
epic_result check_dispatch_backward_args(const epic_context *ctx,
                                         const epic_dispatch_backward_args *args);
epic_result check_combine_backward_args(const epic_context *ctx,
                                        const epic_combine_backward_args *args);
epic_result check_sum_args(const epic_context *ctx, const epic_allreduce_sum_args *args);
epic_result check_sum_replicas_args(const epic_sum_replicas_args *args);

#endif
