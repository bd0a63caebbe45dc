/* SPDX-License-Identifier: Apache-2.0 */
/* Declares variants of public calls for src/moe, the part of the library that implements whole
 * MoE layers. In contrast to the public calls, these variants can add data to the op header. */
#ifndef EPIC_API_H
#define EPIC_API_H

#include "context/context.h"
#include "exchange/op_header.h"

/* Each function api_X works like the public call epic_X. If `extra` is not NULL, api_X also
 * adds the data in *extra to its op header. extra->fault may be set only in host contexts. If
 * any rank sets it, all ranks return this error, the outputs are zeros, and the group stays
 * usable. If extra->options differs between ranks, all ranks return EPIC_EMISMATCH. */
epic_result api_plan(epic_context *ctx, const epic_plan_args *args,
                     const op_header_extra *extra);
epic_result api_dispatch(epic_context *ctx, const epic_dispatch_args *args,
                         const op_header_extra *extra);
epic_result api_plan_dispatch(epic_context *ctx, const epic_plan_args *plan,
                              const epic_dispatch_args *dispatch, const op_header_extra *extra);
epic_result api_combine_backward(epic_context *ctx, const epic_combine_backward_args *args,
                                 const op_header_extra *extra);

#endif
