/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and checks the arguments of the layer's calls.  A call that fails here has written and
 * sent nothing. */
#ifndef EPIC_MOE_ARGS_H
#define EPIC_MOE_ARGS_H

#include "moe/moe.h"

/* Reads and checks the arguments of epic_moe_forward, or of epic_moe_plan if `planning`, and
 * fills in *j.  Sets widths of rows that the caller left 0.  Returns EPIC_EINVAL for an invalid
 * argument and EPIC_ENOTSUP for a combination that this context does not support. */
epic_result moe_read_forward_args(moe_job *j, epic_context *ctx, epic_moe_args *a,
                                  bool planning);

/* Like moe_read_forward_args(), for epic_moe_backward.  `g`: the caller's gradients. */
epic_result moe_read_backward_args(moe_job *j, epic_context *ctx, epic_moe_backward_args *a,
                                   const epic_moe_gradients *g);

/* Checks that every array of a call is aligned and that outputs overlap nothing.  The calls inside
 * check their own arrays again, but by then peers already wait for this rank.  EPIC_EINVAL. */
epic_result moe_check_forward_arrays(const moe_job *j, const epic_moe_args *a);
epic_result moe_check_backward_arrays(const moe_job *j, const epic_moe_backward_args *a,
                                      const epic_moe_gradients *g);

#endif
