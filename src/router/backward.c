/* SPDX-License-Identifier: Apache-2.0 */
/* Implements epic_router_backward, which computes the gradients of the logits and of
 * scale_of_expert from the gradients of the weights. The choice of experts has no gradient. The
 * formulas are in weigh_template.h and score_template.h. */
#include <string.h>

#include "base/arrays.h"
#include "base/sized.h"
#include "context/context.h"
#include "router/row.h"
#include "rules/convert.h"

static epic_result check_backward_arrays(const epic_router_backward_args *a,
                                         const router_job *job)
{
    const int64_t tokens = a->num_tokens, columns = job->num_columns;
    const int64_t top_k = job->router.top_k;
    const size_t number = (size_t)convert_bytes(job->weights_type);
    const call_array arrays[] = {
        ARRAY_IN(a, logits, tokens * columns, (size_t)convert_bytes(job->type)),
        ARRAY_IN(a, topk_idx, tokens * top_k, 4),
        ARRAY_IN(a, scale_of_expert, columns, number),
        ARRAY_IN(a, d_weights, tokens * top_k, number),
        ARRAY_OUT(a, d_scale_of_expert, columns, number),
        ARRAY_OUT(a, d_logits, tokens * columns, (size_t)convert_bytes(job->grad_type)),
        {"workspace", a->workspace, router_job_workspace_bytes(job), 16, true}};
    return CHECK_ARRAYS(arrays);
}

static epic_result prepare_backward(router_job *job, const epic_context *ctx,
                                    const epic_router_backward_args *args)
{
    TRY(router_job_init(job, &(router_common){
                                 .router = args->router,
                                 .logits = args->logits,
                                 .num_tokens = args->num_tokens,
                                 .workspace = args->workspace,
                                 .workspace_bytes = args->workspace_bytes,
                                 .type = args->type,
                                 .flags = args->flags,
                                 .known_flags = EPIC_ACCUMULATE,
                             }));
    TRY(router_job_set_weights_type(job, args->weights_type));
    TRY(router_job_set_grad_type(job, args->grad_type));
    if (args->d_scale_of_expert != NULL && args->scale_of_expert == NULL)
        return epic_fail(EPIC_EINVAL, "scale_of_expert is NULL: d_scale_of_expert needs it");
    job->scale_of_expert = args->scale_of_expert;
    if (args->num_tokens > 0 &&
        (args->topk_idx == NULL || args->d_weights == NULL || args->d_logits == NULL))
        return epic_fail(EPIC_EINVAL,
                         "%s is NULL: topk_idx, d_weights and d_logits must not be NULL",
                         !args->topk_idx    ? "topk_idx"
                         : !args->d_weights ? "d_weights"
                                            : "d_logits");
    TRY(check_backward_arrays(args, job));
    if (context_on_device(ctx)) return EPIC_OK;
    return router_check_ids(job, args->topk_idx, args->num_tokens);
}

static void store_scale_gradient(const router_job *job, void *d_scale_of_expert)
{
    float *narrow = d_scale_of_expert;
    double *wide = d_scale_of_expert;
    for (int64_t e = 0; e < job->num_columns; e++) {
        const double sum = job->scale_sums[e];
        if (job->weights_type == EPIC_F64)
            wide[e] = (job->accumulate ? wide[e] : 0) + sum;
        else
            narrow[e] = (float)((job->accumulate ? (double)narrow[e] : 0) + sum);
    }
}

epic_result epic_router_backward_v1(epic_context *ctx, const epic_router_backward_args *args,
                                    size_t size)
{
    epic_router_backward_args a;
    router_job job;
    TRY(READ_SIZED(&a, args, size, "args"));
    if (ctx != NULL) TRY(context_check(ctx));
    TRY(prepare_backward(&job, ctx, &a));
    if (context_on_device(ctx)) {
        a.router = &job.router;
        return CONTEXT_OP(ctx, router_backward, &a);
    }

    const router_row_ops *row = router_row_of(&job);
    const int64_t number = convert_bytes(job.weights_type);
    memset(job.scale_sums, 0, (size_t)job.num_columns * sizeof *job.scale_sums);
    for (int64_t t = 0; t < a.num_tokens; t++)
        row->choose_backward(&job, router_job_logits_row(&job, a.logits, t),
                             a.topk_idx + t * job.router.top_k,
                             (const char *)a.d_weights + t * job.router.top_k * number,
                             router_job_d_logits_row(&job, a.d_logits, t));
    if (a.d_scale_of_expert) store_scale_gradient(&job, a.d_scale_of_expert);
    return EPIC_OK;
}
