/* SPDX-License-Identifier: Apache-2.0 */
/* Implements replicas of logical experts: checks the table of replicas, chooses a replica for
 * each choice (a token and one of its top_k experts), and divides expert_capacity among the
 * replicas. */
#include <string.h>

#include "plan/plan.h"

/* Sets bit l of `has` to 1 if logical expert l has a replica on a member, and to 0 if not. */
static void find_on_members(const epic_layer *layer, int32_t num_ranks,
                            const plan_tables *tables, uint64_t *has)
{
    memset(has, 0, MAX_EXPERTS / 8);
    for (uint32_t e = 0; e < layer->num_experts; e++) {
        const int32_t logical = tables->logical_of_expert[e];
        if (logical == EPIC_ABSENT) continue;
        if (seat_set_has(tables->members, layer_owner_of(layer, num_ranks, tables, e)))
            has[logical / 64] |= (uint64_t)1 << logical % 64;
    }
}

replicas_error replicas_check(const epic_layer *layer, int32_t num_ranks, plan_tables *tables)
{
    uint64_t has[MAX_EXPERTS / 64];
    const uint32_t num_logical = layer->num_logical;
    const int32_t *logical_of_expert = tables->logical_of_expert;
    if (!logical_of_expert) return (replicas_error){-1, -1};
    memset(has, 0, sizeof has);
    for (uint32_t e = 0; e < layer->num_experts; e++) {
        const int32_t logical = logical_of_expert[e];
        if ((uint32_t)logical >= num_logical) {
            if (logical != EPIC_ABSENT) return (replicas_error){e, logical};
            tables->has_absent = true;
            continue;
        }
        has[logical / 64] |= (uint64_t)1 << logical % 64;
    }
    if (tables->members) find_on_members(layer, num_ranks, tables, has);
    for (uint32_t l = 0; l < num_logical && !(layer->flags & EPIC_DROP_ABSENT); l++)
        if (!(has[l / 64] >> l % 64 & 1)) return (replicas_error){-1, l};
    return (replicas_error){-1, -1};
}

/* Links the replicas of each logical expert in a circular list, so that its choices are
 * assigned to the replicas round-robin. Leaves out experts that are replicas of no logical
 * expert, and experts on vacant seats. Sets turn[logical] to the replica for the next choice,
 * or to -1 if the list is empty. Sets after[expert] to the next replica in the list. Requires
 * that `turn` and `after` are parts of the planner's workspace that are not in use yet. Returns
 * true if the list of every logical expert has a replica.
 *
 * The compiler makes one copy of the function for each value of has_absent (true: some experts
 * may be on vacant seats), so that the usual case has no test per expert. */
static inline __attribute__((always_inline)) bool link_replicas(const planner *p, int32_t *turn,
                                                                int32_t *after, bool has_absent)
{
    const epic_layer *layer = &p->header->layer;
    int32_t *last = p->num_kept;
    memset(turn, 0xff, layer->num_logical * sizeof *turn);
    for (int32_t e = (int32_t)layer->num_experts - 1; e >= 0; e--) {
        const int32_t logical = p->logical_of[e];
        if (has_absent && logical < 0) continue;
        if (turn[logical] < 0) last[logical] = e;
        after[e] = turn[logical];
        turn[logical] = e;
    }
    bool all = true;
    for (uint32_t l = 0; l < layer->num_logical; l++)
        if (turn[l] >= 0)
            after[last[l]] = turn[l];
        else
            all = false;
    return all;
}

/* Replaces the ids of choices whose expert is absent by EPIC_FATE_ABSENT, and counts the
 * choices whose ids it replaces. `turn` is the array that link_replicas() has filled in, or
 * NULL if the layer has no replicas. */
static void drop_absent(planner *p, const int32_t *turn)
{
    plan_header *h = p->header;
    const int64_t top_k = h->layer.top_k, first = p->base_of[h->rank] * top_k;
    for (int64_t i = 0; i < h->total_tokens * top_k; i++) {
        const int32_t id = p->ids[i];
        if (id < 0) continue;
        if (turn ? turn[id] >= 0 : seat_set_has(p->members, p->owner[id])) continue;
        p->ids[i] = EPIC_FATE_ABSENT;
        if (p->absent_load) p->absent_load[id]++;
        h->num_absent += i >= first && i < first + h->num_tokens * top_k;
    }
}

void planner_choose_replicas(planner *p)
{
    const plan_header *h = p->header;
    int32_t *turn = p->next, *after = p->begin;
    if (!h->layer.num_logical) {
        if (p->members) drop_absent(p, NULL);
        return;
    }
    const bool all = p->has_absent ? link_replicas(p, turn, after, true)
                                   : link_replicas(p, turn, after, false);
    if (!all) drop_absent(p, turn);
    const int64_t choices = h->total_tokens * h->layer.top_k;
    for (int64_t i = 0; i < choices; i++) {
        if (p->ids[i] < 0) continue;
        int32_t *next = &turn[p->ids[i]];
        p->ids[i] = *next;
        *next = after[*next];
    }
}

void planner_add_logical_load(const planner *p, int32_t *logical_load)
{
    const uint32_t num_experts = p->header->layer.num_experts;
    if (!p->has_absent)
        for (uint32_t e = 0; e < num_experts; e++)
            logical_load[p->logical_of[e]] += p->count[e];
    else
        for (uint32_t e = 0; e < num_experts; e++)
            if (p->logical_of[e] >= 0) logical_load[p->logical_of[e]] += p->count[e];
}

/* Sets p->expert_quota (plan.h). If a logical expert has r replicas, its choice n goes to
 * replica n % r. The logical expert keeps its choices 0 to capacity - 1. (capacity + r - 1 - i)
 * / r of these choices go to replica i. */
void planner_deal_capacity(planner *p)
{
    const epic_layer *layer = &p->header->layer;
    const uint32_t capacity = layer->expert_capacity;
    const int32_t whole = capacity && capacity < INT32_MAX ? (int32_t)capacity : INT32_MAX;
    int32_t *replicas = p->next, *seen = p->begin;
    for (uint32_t e = 0; e < layer->num_experts; e++) p->expert_quota[e] = whole;
    if (!layer->num_logical || whole == INT32_MAX) return;
    memset(replicas, 0, layer->num_logical * sizeof *replicas);
    memset(seen, 0, layer->num_logical * sizeof *seen);
    for (uint32_t e = 0; e < layer->num_experts; e++)
        if (p->logical_of[e] >= 0) replicas[p->logical_of[e]]++;
    for (uint32_t e = 0; e < layer->num_experts; e++) {
        const int32_t logical = p->logical_of[e];
        if (logical < 0) continue;
        const int32_t r = replicas[logical];
        p->expert_quota[e] = (int32_t)(((int64_t)capacity + r - 1 - seen[logical]++) / r);
    }
}
