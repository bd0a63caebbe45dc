/* SPDX-License-Identifier: Apache-2.0 */
/* Step calls for callers inside, who have looked at data of their own before: the layer. */
#ifndef EPIC_API_H
#define EPIC_API_H

#include "context/context.h"
#include "exchange/note.h"

/* As the public calls, on host contexts, but with a fault (NULL: none) every rank gets it as its
 * class (b) error: outputs are zeros, the group stays usable. */
epic_result api_plan(epic_context *ctx, const epic_plan_args *args, const data_fault *fault);
epic_result api_plan_dispatch(epic_context *ctx, const epic_plan_args *plan,
                              const epic_dispatch_args *dispatch, const data_fault *fault);
epic_result api_combine_backward(epic_context *ctx, const epic_combine_backward_args *args,
                                 const data_fault *fault);

#endif
