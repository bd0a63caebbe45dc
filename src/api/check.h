/* SPDX-License-Identifier: Apache-2.0 */
/* Checks the arguments of public calls: pointers, shapes, enums, overlapping arrays. The rules
 * that depend on the contents of a plan are checked later, by the operations.
 *
 * Each function returns EPIC_OK or EPIC_EINVAL. It returns EPIC_ENOTSUP if the backend cannot
 * add values of the caller's type. A function that returns an error also sets the error text
 * that epic_error() returns. No check reads the contents of the caller's arrays. Any thread may
 * call these functions. */
#ifndef EPIC_CHECK_H
#define EPIC_CHECK_H

#include "context/context.h"

/* Checks the address and the alignment of a plan's bytes. Does not read the bytes. */
epic_result check_plan_bytes(const void *plan, int64_t plan_bytes);

/* Sets *bytes to the maximum size in bytes of a plan of this layer. Returns EPIC_EINVAL if the
 * number of slots does not fit into int32. */
epic_result check_plan_size(const epic_config *config, const epic_layer *layer, int64_t *bytes);

/* Each of these functions checks the arguments of one public call. Requires that the caller has
 * filled in the defaults: row_bytes of matrices without rows, and all fields of the layer. */
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
/* Checks the arguments of epic_window_register (`registers` is true) or of
 * epic_window_alloc. */
epic_result check_window_args(const epic_window_args *args, bool registers);

#endif
