/* SPDX-License-Identifier: Apache-2.0 */
/* Checks on the host that `saved` still contains the data that forward wrote, because damaged
 * data would cause wrong gradients, or accesses outside of arrays. */
#include "base/error.h"
#include "moe/stages.h"
#include "plan/plan.h"

/* Compares expert_rows and expert_tokens in `saved` with the plan in `saved`. If they differ,
 * stores the first difference in *fault and returns true. For a local expert that is not in the
 * plan, both counts must be 0. */
static bool find_bad_count(const moe_job *j, const plan_view *plan, data_fault *fault)
{
    const int64_t planned = plan->header->num_local;
    for (int64_t l = 0; l < j->experts.num_local_experts; l++) {
        const bool there = l < planned;
        const int32_t rows = there ? plan->slab_begin[l + 1] - plan->slab_begin[l] : 0;
        const int32_t tokens = there ? plan->slab_count[l] : 0;
        const bool good_rows = j->saved.expert_rows[l] == rows;
        if (good_rows && j->saved.expert_tokens[l] == tokens) continue;
        const int32_t value = good_rows ? j->saved.expert_tokens[l] : j->saved.expert_rows[l];
        *fault =
            (data_fault){DATA_SAVED_PART, {good_rows ? SAVED_COUNT : SAVED_ROWS, l, value}};
        return true;
    }
    return false;
}

/* Searches topk_idx in `saved` for an expert id that is out of range. If it finds one, stores
 * the first such id in *fault and returns true. Negative ids are valid and mean that a choice
 * has no expert. */
static bool find_bad_choice(const moe_job *j, data_fault *fault)
{
    for (int64_t i = 0; i < j->tokens * j->top_k; i++) {
        if (j->saved.topk_idx[i] < j->columns) continue;
        *fault = (data_fault){DATA_SAVED_PART, {SAVED_CHOICE, i, j->saved.topk_idx[i]}};
        return true;
    }
    return false;
}

epic_result moe_check_saved(const moe_job *j, data_fault *fault)
{
    plan_view plan;
    const int64_t total = *j->saved.total_tokens;
    *fault = (data_fault){DATA_OK, {0}};
    if (total == -1) fault->error = DATA_SAVED;
    if (total == -1 || plan_check(&plan, j->saved.plan, j->plan_bytes, 0, 0, 0) != PLAN_OK)
        return EPIC_OK;
    if (plan.header->num_tokens != j->tokens)
        return epic_fail(EPIC_EINVAL, "x.num_rows is %lld: it must be %lld, as in forward",
                         (long long)j->tokens, (long long)plan.header->num_tokens);
    if (plan.header->total_tokens != total)
        *fault = (data_fault){DATA_SAVED_PART, {SAVED_TOKENS, 0, total}};
    else if (!find_bad_count(j, &plan, fault))
        find_bad_choice(j, fault);
    return EPIC_OK;
}
