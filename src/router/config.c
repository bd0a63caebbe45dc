/* SPDX-License-Identifier: Apache-2.0 */
/* Checks the options of the router and lays out its workspace. */
#include "router/config.h"

#include "base/sized.h"
#include "rules/convert.h"
#include "rules/rule.h"

#define MAX_GROUPS 1024
#define MAX_TOP_K 64

static epic_result check_enum(const char *name, uint32_t value, uint32_t last)
{
    if (value > last)
        return epic_fail(EPIC_EINVAL, "router.%s is %u: it must be 0 to %u", name, value, last);
    return EPIC_OK;
}

static epic_result check_sizes(const epic_router *r)
{
    const int64_t columns = (int64_t)r->num_experts + r->zero_experts;
    if (r->num_experts == 0)
        return epic_fail(EPIC_EINVAL, "router.num_experts is 0: it must be 1 or more");
    if (columns > MAX_COLUMNS)
        return epic_fail(
            EPIC_EINVAL,
            "router.num_experts is %u and zero_experts is %u: their sum must be at most %d",
            r->num_experts, r->zero_experts, MAX_COLUMNS);
    if (r->top_k == 0 || r->top_k > MAX_TOP_K || r->top_k > columns)
        return epic_fail(EPIC_EINVAL,
                         "router.top_k is %u: it must be 1 to %d, and at most the %lld experts",
                         r->top_k, MAX_TOP_K, (long long)columns);
    if (r->flags != 0)
        return epic_fail(EPIC_EINVAL, "router.flags is %u: it must be 0", r->flags);
    return EPIC_OK;
}

static epic_result check_rules(const epic_router *r)
{
    TRY(check_enum("score", r->score, EPIC_SCORE_LOGITS));
    TRY(check_enum("group_score", r->group_score, EPIC_GROUP_SUM));
    TRY(check_enum("group_others", r->group_others, EPIC_OTHERS_ZERO));
    TRY(check_enum("weight_rule", r->weight_rule, EPIC_WEIGHT_SPARSEMIXER));
    TRY(check_enum("normalize", r->normalize, EPIC_NORMALIZE_CLAMPED));
    if (!(r->eps >= 0 && r->eps < 1))
        return epic_fail(EPIC_EINVAL, "router.eps is %g: it must be 0 or more, below 1",
                         r->eps);
    if (r->normalize == EPIC_NORMALIZE_CLAMPED && !(r->norm_min > 0))
        return epic_fail(EPIC_EINVAL,
                         "router.norm_min is %g: EPIC_NORMALIZE_CLAMPED needs it above 0",
                         r->norm_min);
    if (!(r->jitter >= 0 && r->jitter < 1))
        return epic_fail(EPIC_EINVAL, "router.jitter is %g: it must be 0 or more, below 1",
                         r->jitter);
    if (r->scale - r->scale != 0)
        return epic_fail(EPIC_EINVAL, "router.scale is %g: it must be finite", r->scale);
    return EPIC_OK;
}

static epic_result check_groups(const epic_router *r)
{
    const uint32_t columns = r->num_experts + r->zero_experts;
    if (r->num_groups == 0) return EPIC_OK;
    if (r->num_groups > MAX_GROUPS || columns % r->num_groups != 0)
        return epic_fail(
            EPIC_EINVAL,
            "router.num_groups is %u: it must divide the %u experts and be at most "
            "%d",
            r->num_groups, columns, MAX_GROUPS);
    if (r->topk_groups == 0 || r->topk_groups > r->num_groups)
        return epic_fail(EPIC_EINVAL, "router.topk_groups is %u: it must be 1 to num_groups %u",
                         r->topk_groups, r->num_groups);
    const uint32_t each = columns / r->num_groups;
    if (r->top_k > r->topk_groups * each)
        return epic_fail(EPIC_EINVAL,
                         "router.top_k is %u: it must be at most %u, as topk_groups %u groups "
                         "have %u experts each; increase topk_groups",
                         r->top_k, r->topk_groups * each, r->topk_groups, each);
    if (r->group_score == EPIC_GROUP_SUM &&
        (r->group_best == 0 || r->group_best > MAX_TOP_K || r->group_best > each))
        return epic_fail(
            EPIC_EINVAL,
            "router.group_best is %u (0 stands for top_k / topk_groups): it must be "
            "1 to %d, and at most the %u experts of a group",
            r->group_best, MAX_TOP_K, each);
    return EPIC_OK;
}

static epic_result read_router(epic_router *out, const epic_router *theirs, size_t size)
{
    TRY(READ_SIZED(out, theirs, size, "router"));
    if (out->scale == 0) out->scale = 1;
    if (out->group_best == 0 && out->topk_groups > 0)
        out->group_best = out->top_k / out->topk_groups;
    TRY(check_sizes(out));
    TRY(check_rules(out));
    return check_groups(out);
}

/* Returns the size of the workspace in bytes. Reserves 8 bytes per element, because
 * epic_router_workspace has no argument for the type. */
static int64_t workspace_bytes(const epic_router *r)
{
    const size_t columns = (size_t)r->num_experts + r->zero_experts;
    return (int64_t)(LOSS_RUNS * sizeof(double) +
                     columns * (5 * sizeof(double) + sizeof(int32_t)) + r->num_groups);
}

epic_result epic_router_workspace_v1(const epic_router *router, size_t size, int64_t *bytes)
{
    epic_router ours;
    if (!bytes)
        return epic_fail(EPIC_EINVAL, "bytes is NULL: must point to memory for the result");
    *bytes = 0;
    TRY(read_router(&ours, router, size));
    *bytes = workspace_bytes(&ours);
    return EPIC_OK;
}

static epic_result check_type(const char *name, uint32_t type)
{
    if (convert_bytes(type) == 0)
        return epic_fail(EPIC_EINVAL, "%s is %u: it must be EPIC_F32, BF16, F16 or F64", name,
                         type);
    return EPIC_OK;
}

static epic_result check_common(const router_job *job, const router_common *common)
{
    const int64_t needed = workspace_bytes(&job->router);
    TRY(check_type("type", job->type));
    if (common->num_tokens < 0 || common->num_tokens > INT32_MAX)
        return epic_fail(EPIC_EINVAL, "num_tokens is %lld: it must be 0 to 2147483647",
                         (long long)common->num_tokens);
    if (common->logits == NULL && common->num_tokens > 0)
        return epic_fail(EPIC_EINVAL,
                         "logits is NULL: it must point to the logits of %lld tokens",
                         (long long)common->num_tokens);
    if (common->workspace == NULL || common->workspace_bytes < needed)
        return epic_fail(
            EPIC_EINVAL, "workspace has %zu bytes%s: it must have %zu (epic_router_workspace)",
            common->workspace_bytes, common->workspace ? "" : " and is NULL", needed);
    if ((common->flags & ~common->known_flags) != 0)
        return epic_fail(EPIC_EINVAL, "flags is %u: it must have no bits except %u",
                         common->flags, common->known_flags);
    return EPIC_OK;
}

static void layout_workspace(router_job *job, void *workspace)
{
    const int64_t n = job->num_columns;
    job->runs = workspace;
    double *numbers = job->runs + LOSS_RUNS;
    job->logits = numbers;
    job->scores = numbers + n;
    job->values = numbers + 2 * n;
    job->spare = numbers + 3 * n;
    job->scale_sums = numbers + 4 * n;
    job->order = (int32_t *)(numbers + 5 * n);
    job->is_kept_group = (uint8_t *)(job->order + n);
}

epic_result router_job_init(router_job *job, const router_common *common)
{
    *job = (router_job){.type = common->type};
    TRY(read_router(&job->router, common->router, sizeof(epic_router)));
    job->num_columns = (int64_t)job->router.num_experts + job->router.zero_experts;
    TRY(check_common(job, common));
    job->accumulate = (common->flags & EPIC_ACCUMULATE) != 0;
    layout_workspace(job, common->workspace);
    return EPIC_OK;
}

epic_result router_job_set_weights_type(router_job *job, uint32_t weights_type)
{
    job->weights_type = weights_type ? weights_type : EPIC_F32;
    if (job->weights_type != EPIC_F32 &&
        !(job->weights_type == EPIC_F64 && job->type == EPIC_F64))
        return epic_fail(EPIC_EINVAL,
                         "weights_type is %u: it must be EPIC_F32 (or 0), or EPIC_F64 with F64 "
                         "logits",
                         weights_type);
    return EPIC_OK;
}

epic_result router_job_set_grad_type(router_job *job, uint32_t grad_type)
{
    job->grad_type = grad_type ? grad_type : job->type;
    if (job->grad_type != job->type && job->grad_type != EPIC_F32)
        return epic_fail(EPIC_EINVAL,
                         "grad_type is %u: it must be the logits' type (%s, or 0) or EPIC_F32",
                         grad_type, convert_name(job->type));
    return EPIC_OK;
}

int64_t router_job_workspace_bytes(const router_job *job)
{
    return (int64_t)workspace_bytes(&job->router);
}

const void *router_job_logits_row(const router_job *job, const void *logits, int64_t token)
{
    return (const char *)logits + token * job->num_columns * convert_bytes(job->type);
}

void *router_job_d_logits_row(const router_job *job, void *d_logits, int64_t token)
{
    return (char *)d_logits + token * job->num_columns * convert_bytes(job->grad_type);
}

epic_result router_check_ids(const router_job *job, const int32_t *topk_idx, int64_t num_tokens)
{
    const int64_t top_k = job->router.top_k;
    for (int64_t i = 0; i < num_tokens * top_k; i++)
        if (topk_idx[i] >= job->num_columns)
            return epic_fail(EPIC_EINVAL,
                             "topk_idx of token %lld, k %lld, is %d: it must be below the "
                             "router's %lld experts",
                             (long long)(i / top_k), (long long)(i % top_k), topk_idx[i],
                             (long long)job->num_columns);
    return EPIC_OK;
}
