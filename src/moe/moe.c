/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls of the layer. Each call checks its arguments (args.c). Then it runs on the
 * host (host_forward.c, host_backward.c) or on a device (device_forward.c,
 * device_backward.c). */
#include "api/config.h"
#include "base/error.h"
#include "base/sized.h"
#include "experts/blas.h"
#include "moe/args.h"
#include "moe/device.h"
#include "moe/host.h"

static void count_memory(moe_job *j, int64_t *saved, int64_t *forward, int64_t *backward)
{
    moe_layout_buffers(j, NULL, NULL, false);
    *saved = j->saved_bytes;
    *forward = j->work_bytes;
    moe_layout_buffers(j, NULL, NULL, true);
    *backward = j->work_bytes;
}

epic_result epic_moe_memory_v1(epic_context *ctx, const epic_config *config, size_t config_size,
                               const epic_moe *moe, size_t moe_size, epic_moe_memory_info *out,
                               size_t size)
{
    epic_config c;
    moe_job j = {0};
    epic_moe_memory_info info = {0};
    TRY(CHECK_PLACE(out, size));
    if (!ctx) TRY(config_read_sizes(&c, config, config_size));
    TRY(config_of_query(&c, &j.is_device, ctx, config, config_size));
    TRY(moe_read_config(&j, &c, ctx ? ctx->num_members : (int32_t)c.num_ranks, moe, moe_size,
                        c.max_tokens));
    count_memory(&j, &info.saved_bytes, &info.forward_bytes, &info.backward_bytes);
    WRITE_SIZED(out, &info, size);
    return EPIC_OK;
}

epic_result epic_moe_forward_v1(epic_context *ctx, const epic_moe_args *args, size_t size)
{
    epic_moe_args a;
    moe_job j;
    TRY(READ_SIZED(&a, args, size, "args"));
    TRY(moe_read_forward_args(&j, ctx, &a, false));
    if (j.is_device) return moe_device_forward(&j, &a);
    experts_blas_enter();
    const epic_result result = moe_host_forward(&j, &a);
    experts_blas_leave();
    return result;
}

epic_result epic_moe_plan_v1(epic_context *ctx, const epic_moe_args *args, size_t size,
                             int64_t *slots)
{
    epic_moe_args a;
    moe_job j;
    TRY(READ_SIZED(&a, args, size, "args"));
    if (!slots)
        return epic_fail(EPIC_EINVAL,
                         "slots is NULL: it must point to room for the number of slots");
    TRY(moe_read_forward_args(&j, ctx, &a, true));
    if (j.is_device) return moe_device_plan(&j, &a, slots);
    experts_blas_enter();
    const epic_result result = moe_host_plan(&j, &a, slots);
    experts_blas_leave();
    return result;
}

epic_result epic_moe_backward_v1(epic_context *ctx, const epic_moe_backward_args *args,
                                 size_t size)
{
    epic_moe_backward_args a;
    epic_moe_gradients gradients = {0};
    moe_job j;
    TRY(READ_SIZED(&a, args, size, "args"));
    if (a.gradients) TRY(READ_SIZED(&gradients, a.gradients, sizeof *a.gradients, "gradients"));
    TRY(moe_read_backward_args(&j, ctx, &a, &gradients));
    if (j.is_device) return moe_device_backward(&j, &a, &gradients);
    experts_blas_enter();
    const epic_result result = moe_host_backward(&j, &a, &gradients);
    experts_blas_leave();
    return result;
}
