/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls for a caller inside the core, the layer (src/moe). */
#ifndef EPIC_API_H
#define EPIC_API_H

#include "context/context.h"
#include "exchange/op_header.h"

/* Each function is the public call of its name, with an addition to its op header. If
 * extra->fault is set (host contexts only), all ranks return it, the outputs are zeros, and
 * the group stays usable. The ranks also compare extra->options. extra may be NULL. */
epic_result api_plan(epic_context *ctx, const epic_plan_args *args,
                     const op_header_extra *extra);
epic_result api_dispatch(epic_context *ctx, const epic_dispatch_args *args,
                         const op_header_extra *extra);
epic_result api_plan_dispatch(epic_context *ctx, const epic_plan_args *plan,
                              const epic_dispatch_args *dispatch, const op_header_extra *extra);
epic_result api_combine_backward(epic_context *ctx, const epic_combine_backward_args *args,
                                 const op_header_extra *extra);

#endif
