/* SPDX-License-Identifier: Apache-2.0 */
/* Checks a layer, fills in its defaults, and checks a placement of experts. */
#include "base/error.h"
#include "base/sized.h"
#include "plan/plan.h"
#include "rules/sentences.h"

static epic_result layer_error(const char *field, uint32_t value, const char *rule)
{
    return epic_fail(EPIC_EINVAL, "layer.%s is %u: %s", field, value, rule);
}

static bool is_power_of_two(uint32_t n)
{
    return n && !(n & (n - 1));
}

static epic_result check_tree(const epic_layer *l, int32_t num_members)
{
    if (!is_power_of_two(l->leaves))
        return layer_error("leaves", l->leaves,
                           "must be a power of two with EPIC_TREE (0 stands for num_ranks or, "
                           "after epic_regroup, for the number of members)");
    if (l->num_experts % l->leaves)
        return layer_error("leaves", l->leaves, "must divide num_experts");
    if (l->leaves % (uint32_t)num_members)
        return epic_fail(EPIC_EINVAL, SENTENCE_MEMBERS, (long long)l->leaves, num_members);
    return EPIC_OK;
}

epic_result layer_read(epic_layer *out, const epic_layer *layer, size_t size,
                       int32_t num_members)
{
    TRY(READ_SIZED(out, layer, size, "layer"));
    if (out->num_experts < 1 || out->num_experts > MAX_EXPERTS)
        return layer_error("num_experts", out->num_experts, "must be 1 to 65536");
    if (out->num_logical > out->num_experts)
        return layer_error(
            "num_logical", out->num_logical,
            "must be at most num_experts, as each has a replica; 0: no replicas");
    if (out->top_k < 1 || out->top_k > MAX_TOP_K)
        return layer_error("top_k", out->top_k, "must be 1 to 64");
    if (out->alignment > 1u << 20)
        return layer_error("alignment", out->alignment, "must be at most 1048576");
    if (out->layout > EPIC_FLAT)
        return layer_error("layout", out->layout, "must be an epic_layout");
    if (out->overflow > EPIC_OVERFLOW_DROP)
        return layer_error("overflow", out->overflow, "must be an epic_overflow");
    if (out->expert_capacity && out->overflow != EPIC_OVERFLOW_DROP)
        return layer_error("expert_capacity", out->expert_capacity,
                           "must be 0 unless overflow is EPIC_OVERFLOW_DROP");
    if (out->priority > EPIC_BY_K)
        return layer_error("priority", out->priority, "must be an epic_priority");
    if (out->priority && out->overflow != EPIC_OVERFLOW_DROP)
        return layer_error(
            "priority", out->priority,
            "EPIC_BY_K needs overflow EPIC_OVERFLOW_DROP: without it nothing is dropped");
    if (out->sum_order > EPIC_BY_HOSTS)
        return layer_error("sum_order", out->sum_order, "must be an epic_sum_order");
    if (out->leaves && out->sum_order != EPIC_TREE)
        return layer_error("leaves", out->leaves, "must be 0 unless sum_order is EPIC_TREE");
    if (out->partial_type != EPIC_BYTES && out->partial_type != EPIC_F32)
        return layer_error("partial_type", out->partial_type,
                           "must be 0 (the rows' type) or EPIC_F32");
    if (out->flags & ~(uint32_t)(EPIC_DISTINCT | EPIC_DROP_ABSENT))
        return layer_error("flags", out->flags,
                           "must have no bits other than EPIC_DISTINCT and EPIC_DROP_ABSENT");
    if (!out->alignment || out->layout == EPIC_FLAT) out->alignment = 1;
    if (out->sum_order != EPIC_TREE) return EPIC_OK;
    if (!out->leaves) out->leaves = (uint32_t)num_members;
    return check_tree(out, num_members);
}

void layer_choose_order(epic_layer *layer, int32_t num_ranks, bool relayed)
{
    epic_layer tree = *layer;
    if (layer->sum_order != EPIC_BY_HOSTS) return;
    layer->sum_order = EPIC_BY_RANK;
    tree.sum_order = EPIC_TREE;
    tree.leaves = (uint32_t)num_ranks;
    if (relayed && is_power_of_two(tree.leaves) && tree.num_experts % tree.leaves == 0)
        *layer = tree;
}

int32_t layer_owner_of(const epic_layer *layer, int32_t num_ranks, const plan_tables *tables,
                       uint32_t expert)
{
    const uint32_t ranks = (uint32_t)num_ranks;
    if (tables->rank_of_expert) return tables->rank_of_expert[expert];
    return (int32_t)(expert / ((layer->num_experts + ranks - 1) / ranks));
}

/* With EPIC_TREE the experts are divided into one block per member. Returns true if expert e is
 * placed correctly. If e is the first expert of its block, the rank of e must not own the first
 * expert of an earlier block. If e is not the first, its rank must own the first expert of the
 * block. */
static bool is_in_own_block(const epic_layer *layer, int32_t num_ranks,
                            const plan_tables *tables, uint32_t e)
{
    const int32_t num_members = tables->members ? seat_set_count(tables->members) : num_ranks;
    const uint32_t block = layer->num_experts / (uint32_t)num_members, first = e - e % block;
    const int32_t rank = layer_owner_of(layer, num_ranks, tables, e);
    if (layer_owner_of(layer, num_ranks, tables, first) != rank) return false;
    for (uint32_t f = e % block ? e : 0; f < first; f += block)
        if (layer_owner_of(layer, num_ranks, tables, f) == rank) return false;
    return true;
}

static uint32_t find_no_rank(const epic_layer *layer, int32_t num_ranks,
                             const int32_t *rank_of_expert)
{
    uint32_t e = 0;
    while (e < layer->num_experts && (uint32_t)rank_of_expert[e] < (uint32_t)num_ranks) e++;
    return e;
}

placement_error layer_check_placement(const epic_layer *layer, int32_t num_ranks,
                                      const plan_tables *tables, uint32_t *expert)
{
    const bool is_tree = layer->sum_order == EPIC_TREE;
    const bool may_be_absent = layer->num_logical || layer->flags & EPIC_DROP_ABSENT;
    const seat_set *members = tables->members;
    uint32_t *e = expert;
    *e = layer->num_experts;
    if (tables->rank_of_expert) *e = find_no_rank(layer, num_ranks, tables->rank_of_expert);
    if (*e < layer->num_experts) return PLACEMENT_NO_RANK;
    if (!members && !(is_tree && tables->rank_of_expert)) return PLACEMENT_OK;
    for (*e = 0; *e < layer->num_experts; ++*e) {
        const int32_t rank = layer_owner_of(layer, num_ranks, tables, *e);
        const bool is_vacant = members && !seat_set_has(members, rank);
        if (is_vacant && !is_tree && !may_be_absent) return PLACEMENT_VACANT;
        if (is_tree && (is_vacant || !is_in_own_block(layer, num_ranks, tables, *e)))
            return PLACEMENT_TREE;
    }
    return PLACEMENT_OK;
}
