/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and checks the arguments of the layer's public calls. If a check fails, the call
 * returns before it has written or sent anything. */
#ifndef EPIC_MOE_ARGS_H
#define EPIC_MOE_ARGS_H

#include "moe/moe.h"

/* Reads and checks the arguments of epic_moe_forward or, if `planning` is true, of
 * epic_moe_plan, and fills in *j. Replaces a row_bytes of 0 in *a by its default. Returns
 * EPIC_EINVAL for an invalid argument, and EPIC_ENOTSUP for options that this context does not
 * support. */
epic_result moe_read_forward_args(moe_job *j, epic_context *ctx, epic_moe_args *a,
                                  bool planning);

/* Reads and checks the arguments of epic_moe_backward, and fills in *j. *g contains the
 * addresses of the caller's arrays for gradients. Returns the same errors as
 * moe_read_forward_args(). */
epic_result moe_read_backward_args(moe_job *j, epic_context *ctx, epic_moe_backward_args *a,
                                   const epic_moe_gradients *g);

/* Check that every array of a call is aligned, and that no output overlaps another array.
 * Return EPIC_OK or EPIC_EINVAL. The operations inside the layer check the arrays too, but at
 * that time peers already wait for this rank, so an error would break the group. */
epic_result moe_check_forward_arrays(const moe_job *j, const epic_moe_args *a);
epic_result moe_check_backward_arrays(const moe_job *j, const epic_moe_backward_args *a,
                                      const epic_moe_gradients *g);

#endif
