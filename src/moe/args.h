/* SPDX-License-Identifier: Apache-2.0 */
/* Checks the arguments of the layer's calls, before anything is written or sent. */
#ifndef EPIC_MOE_ARGS_H
#define EPIC_MOE_ARGS_H

#include "moe/moe.h"

/* Reads and checks the arguments of epic_moe_forward, or with `planning` of epic_moe_plan, into
 * *j.  Fills in row widths that the caller left 0.  EPIC_EINVAL, EPIC_ENOTSUP. */
epic_result moe_read_forward_args(moe_job *j, epic_context *ctx, epic_moe_args *a,
                                  bool planning);

/* The same for epic_moe_backward. */
epic_result moe_read_backward_args(moe_job *j, epic_context *ctx, epic_moe_backward_args *a,
                                   const epic_moe_gradients *g);

/* Does every array of the call lie where it may?  EPIC_EINVAL. */
epic_result moe_check_forward_arrays(const moe_job *j, const epic_moe_args *a);
epic_result moe_check_backward_arrays(const moe_job *j, const epic_moe_backward_args *a,
                                      const epic_moe_gradients *g);

#endif
