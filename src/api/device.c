/* SPDX-License-Identifier: Apache-2.0 */
/* The steps of contexts of device backends: the backend's own, or a refusal. */
#include "api/device.h"

#include "base/error.h"
#include "base/hash.h"
#include "exchange/note.h"

static epic_result not_yet(const epic_context *ctx, const char *what)
{
    return epic_fail(EPIC_ENOTSUP, "%s is not there yet on backend \"%s\"; use a host context",
                     what, ctx->backend_name);
}

/* Faults are what a host layer has seen in its data; on a device the kernels look themselves.  The
 * options of a layer go with the tag, whose hash is in the word that the ranks exchange anyway: a
 * device backend uses a tag for nothing else. */
static epic_call with_options(const epic_call *call, const note_extra *extra)
{
    epic_call out = *call;
    if (extra && extra->options && extra->options->hash)
        out.tag = hash_join(out.tag, extra->options->hash);
    return out;
}

static epic_result device_plan(epic_context *ctx, const epic_plan_args *args,
                               const note_extra *extra)
{
    if (!ctx->backend->steps->plan) return not_yet(ctx, "epic_plan");
    epic_plan_args own = *args;
    own.call = with_options(&args->call, extra);
    return backend_said(ctx->backend, ctx->backend->steps->plan(ctx->group, &own));
}

static epic_result device_dispatch(epic_context *ctx, const epic_dispatch_args *args,
                                   const note_extra *extra)
{
    if (!ctx->backend->steps->dispatch) return not_yet(ctx, "epic_dispatch");
    epic_dispatch_args own = *args;
    own.call = with_options(&args->call, extra);
    return backend_said(ctx->backend, ctx->backend->steps->dispatch(ctx->group, &own));
}

static epic_result device_plan_dispatch(epic_context *ctx, const epic_plan_args *plan,
                                        const epic_dispatch_args *dispatch,
                                        const note_extra *extra)
{
    if (!ctx->backend->steps->plan_dispatch) return not_yet(ctx, "epic_plan_dispatch");
    epic_plan_args own = *plan;
    own.call = with_options(&plan->call, extra);
    return backend_said(ctx->backend,
                        ctx->backend->steps->plan_dispatch(ctx->group, &own, dispatch));
}

static epic_result device_combine(epic_context *ctx, const epic_combine_args *args)
{
    if (!ctx->backend->steps->combine) return not_yet(ctx, "epic_combine");
    return backend_said(ctx->backend, ctx->backend->steps->combine(ctx->group, args));
}

static epic_result device_dispatch_backward(epic_context *ctx,
                                            const epic_dispatch_backward_args *args)
{
    if (!ctx->backend->steps->dispatch_backward) return not_yet(ctx, "epic_dispatch_backward");
    return backend_said(ctx->backend, ctx->backend->steps->dispatch_backward(ctx->group, args));
}

static epic_result device_combine_backward(epic_context *ctx,
                                           const epic_combine_backward_args *args,
                                           const note_extra *extra)
{
    if (!ctx->backend->steps->combine_backward) return not_yet(ctx, "epic_combine_backward");
    epic_combine_backward_args own = *args;
    own.call = with_options(&args->call, extra);
    return backend_said(ctx->backend, ctx->backend->steps->combine_backward(ctx->group, &own));
}

static epic_result device_sum(epic_context *ctx, const epic_allreduce_sum_args *args)
{
    if (!ctx->backend->steps->sum) return not_yet(ctx, "epic_allreduce_sum");
    return backend_said(ctx->backend, ctx->backend->steps->sum(ctx->group, args));
}

static epic_result device_sum_replicas(epic_context *ctx, const epic_sum_replicas_args *args)
{
    if (!ctx->backend->steps->sum_replicas) return not_yet(ctx, "epic_sum_replicas");
    return backend_said(ctx->backend, ctx->backend->steps->sum_replicas(ctx->group, args));
}

const context_steps device_steps = {.plan = device_plan,
                                    .dispatch = device_dispatch,
                                    .plan_dispatch = device_plan_dispatch,
                                    .combine = device_combine,
                                    .dispatch_backward = device_dispatch_backward,
                                    .combine_backward = device_combine_backward,
                                    .sum = device_sum,
                                    .sum_replicas = device_sum_replicas};
