/* SPDX-License-Identifier: Apache-2.0 */
/* Calls whose context is on a device: its backend does them. */
#ifndef EPIC_ROUTER_DEVICE_H
#define EPIC_ROUTER_DEVICE_H

#include "base/error.h"
#include "context/context.h"

/* Is this a context of a device backend? */
static inline bool router_on_device(const epic_context *ctx)
{
    return ctx != NULL && ctx->backend != NULL && ctx->backend->steps != NULL;
}

static inline epic_result router_not_yet(const epic_context *ctx, const char *what)
{
    return epic_fail(EPIC_ENOTSUP, "%s is not there yet on backend \"%s\"; use host memory",
                     what, ctx->backend_name);
}

#define ROUTER_STEP(ctx, name, ...)                                             \
    ((ctx)->backend->steps->name                                                \
         ? backend_said((ctx)->backend,                                         \
                        (ctx)->backend->steps->name((ctx)->group, __VA_ARGS__)) \
         : router_not_yet((ctx), "epic_" #name))

#endif
