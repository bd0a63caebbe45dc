/* SPDX-License-Identifier: Apache-2.0 */
/* Implements epic_router_forward, which chooses top_k experts for each token and computes their
 * weights.
 *
 * The host handles one token after the other (row.h): it computes scores (score_template.h),
 * chooses experts (choose_template.h) and computes their weights (weigh_template.h). On a CUDA
 * context the device backend does all of this. */
#include "base/arrays.h"
#include "base/sized.h"
#include "context/context.h"
#include "router/row.h"
#include "rules/convert.h"
#include "rules/rule.h"

static int64_t token_id(const epic_router_args *args, int64_t token)
{
    const int32_t *narrow = args->token_ids;
    const int64_t *wide = args->token_ids;
    return args->token_id_type == EPIC_I64 ? wide[token] : narrow[token];
}

/* Returns the experts [top_k] of a token if the caller has chosen them, with topk_idx_in or
 * with a table that has one row per token id. Returns NULL if the router chooses the
 * experts. */
static const int32_t *given_row(const epic_router_args *args, const router_job *job,
                                int64_t token)
{
    if (args->topk_idx_in != NULL) return args->topk_idx_in + token * job->router.top_k;
    if (args->token_ids == NULL) return NULL;
    return args->table + token_id(args, token) * job->router.top_k;
}

static epic_result check_table(const epic_router_args *args)
{
    if (args->topk_idx_in != NULL && args->token_ids != NULL)
        return epic_fail(EPIC_EINVAL, "topk_idx_in is not NULL and token_ids is not NULL: pass "
                                      "one of them");
    if ((args->token_ids == NULL) != (args->table == NULL))
        return epic_fail(EPIC_EINVAL, "token_ids is %s and table is %s: pass both or neither",
                         args->token_ids ? "not NULL" : "NULL",
                         args->table ? "not NULL" : "NULL");
    if (args->token_id_type != 0 && args->token_id_type != EPIC_I32 &&
        args->token_id_type != EPIC_I64)
        return epic_fail(EPIC_EINVAL,
                         "token_id_type is %u: it must be EPIC_I32 (or 0) or EPIC_I64",
                         args->token_id_type);
    if (args->table && (args->table_rows < 0 || args->table_rows > INT32_MAX))
        return epic_fail(EPIC_EINVAL, "table_rows is %lld: it must be 0 to 2147483647",
                         (long long)args->table_rows);
    return EPIC_OK;
}

data_fault router_find_fault(const router_job *job, const epic_router_args *args)
{
    const bool is_forced = args->topk_idx_in != NULL;
    if (!is_forced && !args->token_ids) return (data_fault){DATA_OK, {0}};
    for (int64_t t = 0; t < args->num_tokens; t++) {
        const int64_t id = is_forced ? t : token_id(args, t);
        if (!is_forced && (id < 0 || id >= args->table_rows))
            return (data_fault){DATA_TOKEN_ID, {t, id, args->table_rows}};
        const int32_t *row = given_row(args, job, t);
        for (uint32_t k = 0; k < job->router.top_k; k++)
            if (row[k] >= job->num_columns)
                return (data_fault){is_forced ? DATA_FORCED : DATA_TABLE,
                                    {id, k, row[k], job->num_columns}};
    }
    return (data_fault){DATA_OK, {0}};
}

/* Returns an error if router_find_fault() finds an invalid value. Used by calls that involve no
 * other rank. */
static epic_result check_ids(const router_job *job, const epic_router_args *args)
{
    const data_fault fault = router_find_fault(job, args);
    const int64_t *about = fault.about;
    if (fault.error == DATA_TOKEN_ID)
        return epic_fail(
            EPIC_EINVAL,
            "token_ids of token %lld is %lld: it must be an index into the table's %lld "
            "rows",
            (long long)about[0], (long long)about[1], (long long)about[2]);
    if (fault.error == DATA_TABLE)
        return epic_fail(
            EPIC_EINVAL,
            "table row %lld, k %lld, is %lld: it must be below the router's %lld experts",
            (long long)about[0], (long long)about[1], (long long)about[2], (long long)about[3]);
    if (fault.error == DATA_FORCED)
        return epic_fail(EPIC_EINVAL,
                         "topk_idx_in of token %lld, k %lld, is %lld: it must be below the "
                         "router's %lld experts",
                         (long long)about[0], (long long)about[1], (long long)about[2],
                         (long long)about[3]);
    return EPIC_OK;
}

static epic_result check_forward_arrays(const epic_router_args *a, const router_job *job)
{
    const int64_t tokens = a->num_tokens, columns = job->num_columns;
    const int64_t top_k = job->router.top_k;
    const size_t number = (size_t)convert_bytes(job->weights_type);
    const call_array arrays[] = {
        ARRAY_IN(a, logits, tokens * columns, (size_t)convert_bytes(job->type)),
        ARRAY_IN(a, bias, columns, 4),
        ARRAY_IN(a, scale_of_expert, columns, number),
        ARRAY_IN(a, token_ids, tokens, a->token_id_type == EPIC_I64 ? 8 : 4),
        ARRAY_IN(a, table, a->table_rows > 0 ? top_k : 0, 4),
        ARRAY_IN(a, topk_idx_in, tokens * top_k, 4),
        ARRAY_OUT(a, topk_idx, tokens * top_k, 4),
        ARRAY_OUT(a, weights, tokens * top_k, number),
        ARRAY_OUT(a, scores, tokens * columns, number),
        {"workspace", a->workspace, router_job_workspace_bytes(job), 16, true}};
    return CHECK_ARRAYS(arrays);
}

epic_result router_prepare_forward(router_job *job, const epic_router_args *args)
{
    TRY(router_job_init(job, &(router_common){
                                 .router = args->router,
                                 .logits = args->logits,
                                 .num_tokens = args->num_tokens,
                                 .workspace = args->workspace,
                                 .workspace_bytes = args->workspace_bytes,
                                 .type = args->type,
                                 .flags = args->flags,
                             }));
    TRY(router_job_set_weights_type(job, args->weights_type));
    if (args->num_tokens > 0 && (args->topk_idx == NULL || args->weights == NULL))
        return epic_fail(EPIC_EINVAL,
                         "%s is NULL: topk_idx and weights must both point to room for results",
                         args->topk_idx ? "weights" : "topk_idx");
    TRY(check_table(args));
    TRY(check_forward_arrays(args, job));
    job->bias = args->bias;
    job->scale_of_expert = args->scale_of_expert;
    job->on_logits = router_on_logits(&job->router, job->bias != NULL);
    return EPIC_OK;
}

epic_result epic_router_forward_v1(epic_context *ctx, const epic_router_args *args, size_t size)
{
    epic_router_args a;
    router_job job;
    TRY(READ_SIZED(&a, args, size, "args"));
    if (ctx != NULL) TRY(context_check(ctx));
    TRY(router_prepare_forward(&job, &a));
    if (context_on_device(ctx)) {
        a.router = &job.router;
        return CONTEXT_OP(ctx, router_forward, &a);
    }
    TRY(check_ids(&job, &a));

    const router_row_ops *row = router_row_of(&job);
    const int64_t number = convert_bytes(job.weights_type);
    for (int64_t t = 0; t < a.num_tokens; t++) {
        char *weights = (char *)a.weights + t * job.router.top_k * number;
        char *scores = a.scores ? (char *)a.scores + t * job.num_columns * number : NULL;
        row->choose(&job, router_job_logits_row(&job, a.logits, t), given_row(&a, &job, t),
                    a.topk_idx + t * job.router.top_k, weights, scores);
    }
    return EPIC_OK;
}
