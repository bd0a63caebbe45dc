/* SPDX-License-Identifier: Apache-2.0 */
/* Step calls for callers inside, who have looked at data of their own before: the layer. */
#ifndef EPIC_API_H
#define EPIC_API_H

#include "context/context.h"
#include "exchange/op_header.h"

/* The public calls, with what the caller inside adds to the note of the operation: with a fault
 * (host contexts) every rank gets it as its class (b) error, outputs are zeros and the group stays
 * usable; the options of a layer are compared between the ranks. */
epic_result api_plan(epic_context *ctx, const epic_plan_args *args,
                     const op_header_extra *extra);
epic_result api_dispatch(epic_context *ctx, const epic_dispatch_args *args,
                         const op_header_extra *extra);
epic_result api_plan_dispatch(epic_context *ctx, const epic_plan_args *plan,
                              const epic_dispatch_args *dispatch, const op_header_extra *extra);
epic_result api_combine_backward(epic_context *ctx, const epic_combine_backward_args *args,
                                 const op_header_extra *extra);

#endif
