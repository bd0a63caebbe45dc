/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the experts of a token. row_template.h includes this file.
 *
 * A column is an expert or a zero-expert (config.h). Its *value* is its score, plus its bias if
 * the router has one (auxiliary-loss-free balancing, arXiv 2408.15664). The top_k columns with
 * the largest values are chosen, the largest first. If values are equal, the lower column comes
 * first. NaN comes last.
 *
 * If num_groups is not 0, the columns form groups of equal size, and only the topk_groups
 * groups with the best scores are kept (group-limited routing, arXiv 2412.19437). The score of
 * a group is its largest value, or the sum of its group_best largest values. By default,
 * columns of other groups cannot be chosen. With EPIC_OTHERS_ZERO columns of other groups can
 * be chosen, with the value 0. */

/* Compares column A with value a and column B with value b, where B has the lower index.
 * Returns true if A is chosen before B. Returns false for equal values, because then the column
 * with the lower index is chosen first. */
static inline bool is_above(REAL a, REAL b)
{
    return a > b || (b != b && a == a);
}

/* Inserts column i into `out`, the sorted list of the `found` best columns so far, if v[i] is
 * among the k largest values. Returns the new length. */
static inline int insert_best(int32_t *out, int found, int k, const REAL *v, int64_t i)
{
    if (found == k && !is_above(v[i], v[out[k - 1]])) return found;
    int position = found < k ? found++ : k - 1;
    for (; position > 0 && is_above(v[i], v[out[position - 1]]); position--)
        out[position] = out[position - 1];
    out[position] = (int32_t)i;
    return found;
}

/* Writes the columns of the k largest values of v [n] to `out`, the largest first. The columns
 * form blocks of `block` columns. Leaves out block b if is_kept_group[b] is 0. is_kept_group
 * may be NULL. */
static void select_best(int32_t *out, int k, const REAL *v, int64_t n,
                        const uint8_t *is_kept_group, int64_t block)
{
    int found = 0;
    for (int64_t first = 0; first < n; first += block)
        if (is_kept_group == NULL || is_kept_group[first / block])
            for (int64_t i = first; i < first + block; i++)
                found = insert_best(out, found, k, v, i);
}

/* Returns the score of a group of columns: its largest value or, with EPIC_GROUP_SUM, the sum
 * of its group_best largest values. v [n] contains the values of the group. `order` is scratch
 * memory for 64 elements. */
static REAL score_group(const epic_router *r, const REAL *v, int64_t n, int32_t *order)
{
    const int m = r->group_score == EPIC_GROUP_SUM ? (int)r->group_best : 1;
    REAL sum = 0;
    select_best(order, m, v, n, NULL, n);
    for (int i = 0; i < m; i++) sum += v[order[i]];
    return sum;
}

/* Sets job->is_kept_group to 1 for the topk_groups groups with the best scores, and to 0 for
 * the other groups. */
static void keep_groups(const router_job *job, const REAL *v)
{
    const epic_router *r = &job->router;
    const int64_t each = job->num_columns / r->num_groups;
    REAL *group = job->spare;
    for (int64_t g = 0; g < r->num_groups; g++)
        group[g] = score_group(r, v + g * each, each, job->order);
    select_best(job->order, (int)r->topk_groups, group, r->num_groups, NULL, r->num_groups);
    memset(job->is_kept_group, 0, r->num_groups);
    for (uint32_t i = 0; i < r->topk_groups; i++) job->is_kept_group[job->order[i]] = 1;
}

/* Chooses experts with group-limited routing. With EPIC_OTHERS_ZERO, sets the values v of all
 * groups that are not kept to 0. */
static void select_in_groups(const router_job *job, REAL *v, int32_t *topk_idx)
{
    const epic_router *r = &job->router;
    const int64_t each = job->num_columns / r->num_groups;
    const int k = (int)r->top_k;
    keep_groups(job, v);
    if (router_others_out(r, job->on_logits)) {
        select_best(topk_idx, k, v, job->num_columns, job->is_kept_group, each);
        return;
    }
    for (int64_t g = 0; g < r->num_groups; g++)
        for (int64_t i = g * each; i < (g + 1) * each && !job->is_kept_group[g]; i++) v[i] = 0;
    select_best(topk_idx, k, v, job->num_columns, NULL, job->num_columns);
}

/* Chooses the experts of a token by their values or, with job->on_logits, by their logits. */
static void select_experts(const router_job *job, int32_t *topk_idx)
{
    const int64_t n = job->num_columns;
    const REAL *from = job->on_logits ? job->logits : job->scores;
    REAL *v = job->values;
    for (int64_t i = 0; i < n; i++) v[i] = from[i];
    if (job->bias != NULL)
        for (int64_t i = 0; i < n; i++) v[i] += (REAL)job->bias[i];
    if (job->router.num_groups > 0)
        select_in_groups(job, v, topk_idx);
    else
        select_best(topk_idx, (int)job->router.top_k, v, n, NULL, n);
}
