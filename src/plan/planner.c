/* SPDX-License-Identifier: Apache-2.0 */
/* Decides where every choice goes, once the expert ids of all ranks are known. A choice is a
 * pair (token, k). All ranks compute the same plan from the same ids, so no rank has to send
 * its result. The steps are:
 *
 * 1. Replace each logical expert by one of its replicas, and drop choices of absent experts.
 * 2. Count the choices of each expert.
 * 3. Decide how many choices each expert keeps, so that every rank stays within its capacity.
 * 4. Compute the first slot of each slab (the contiguous slots of one expert).
 * 5. For each kept choice, in the order (rank, token, k): assign the next slot of its
 * expert. */
#include <string.h>

#include "base/error.h"
#include "plan/plan.h"
#include "rules/sentences.h"

static void count_choices(planner *p)
{
    const plan_header *h = p->header;
    memset(p->count, 0, h->layer.num_experts * sizeof *p->count);
    const int64_t choices = h->total_tokens * h->layer.top_k;
    for (int64_t i = 0; i < choices; i++)
        if (p->ids[i] >= 0) p->count[p->ids[i]]++;
}

/* Numbers the experts of each rank by ascending global id. With EPIC_TREE, also sets
 * position_of: the position of each member's experts in the tree. */
static void number_experts(planner *p)
{
    const plan_header *h = p->header;
    /* used_slots is not in use yet and serves as scratch memory */
    int32_t *num_owned = p->used_slots;
    memset(num_owned, 0, (size_t)h->num_ranks * sizeof *num_owned);
    for (int32_t l = 0; l < h->num_local; l++) p->expert_of[l] = -1;
    for (uint32_t e = 0; e < h->layer.num_experts; e++) {
        p->local[e] = num_owned[p->owner[e]]++;
        if (p->owner[e] == h->rank) p->expert_of[p->local[e]] = (int32_t)e;
    }
    if (h->layer.sum_order != EPIC_TREE) return;
    const uint32_t block = h->layer.num_experts / (uint32_t)h->num_members;
    for (int32_t position = 0; position < h->num_members; position++)
        p->position_of[p->owner[(uint32_t)position * block]] = position;
}

static int32_t min_int32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* The reasons why a choice is dropped.
 *
 * With EPIC_BY_K there are two passes over the choices:
 *
 * 1. judge_choices_by_k() visits the choices in the order of k and decides which choices are
 *    kept. It stores the reason of each drop in `ids`, in the bits above the expert id, which
 *    is less than MAX_EXPERTS.
 * 2. The second pass visits the choices in the order of tokens. It assigns the next slot of the
 *    expert to each kept choice.
 *
 * Without EPIC_BY_K, a single pass in the order of tokens decides and assigns slots. */
enum {
    ID_BITS = MAX_EXPERTS - 1,
    EXPERT_IS_FULL = MAX_EXPERTS,
    RANK_IS_FULL = 2 * MAX_EXPERTS
};

static bool is_priority_by_k(const planner *p)
{
    return p->header->layer.priority == EPIC_BY_K;
}

/* Returns 0 if expert e keeps a choice. If e drops it, returns the reason: EXPERT_IS_FULL if
 * the expert has reached its expert_quota, and RANK_IS_FULL if not. `position` is the number of
 * choices of e before this choice in the order of priority. e keeps the choices with a position
 * below min(num_kept[e], keep_limit[rank of e]). */
static int32_t drop_reason_of(const planner *p, int32_t e, int32_t position)
{
    if (position < min_int32(p->num_kept[e], p->keep_limit[p->owner[e]])) return 0;
    return position >= p->expert_quota[e] ? EXPERT_IS_FULL : RANK_IS_FULL;
}

/* Decides which choices of the group are kept, in the order of EPIC_BY_K: first all choices
 * with k = 0, then those with k = 1, and so on. Stores the reasons of drops in `ids`. */
static void judge_choices_by_k(planner *p)
{
    const plan_header *h = p->header;
    const int64_t top_k = h->layer.top_k, choices = h->total_tokens * top_k;
    memset(p->next, 0, h->layer.num_experts * sizeof *p->next);
    for (int64_t k = 0; k < top_k; k++)
        for (int64_t i = k; i < choices; i += top_k) {
            if (p->ids[i] < 0) continue;
            const int32_t e = p->ids[i] & ID_BITS;
            p->ids[i] = e | drop_reason_of(p, e, p->next[e]++);
        }
}

/* Returns true if a choice is kept. `id` is its entry in p->ids. Must be called once for each
 * choice, in the order of tokens and k, because it increments next[] of its expert. */
static bool is_kept(planner *p, int32_t id)
{
    const int32_t e = id & ID_BITS;
    return is_priority_by_k(p) ? id == e : drop_reason_of(p, e, p->next[e]++) == 0;
}

/* For FLAT layers: sets needed[] to the number of rows that each rank needs. A token needs one
 * row on each rank that keeps at least one of its choices. */
static void count_rows(planner *p)
{
    const plan_header *h = p->header;
    const int64_t k = h->layer.top_k;
    if (is_priority_by_k(p)) judge_choices_by_k(p);
    memset(p->next, 0, h->layer.num_experts * sizeof *p->next);
    for (int64_t t = 0; t < h->total_tokens; t++) {
        int32_t seen[MAX_TOP_K];
        int num_seen = 0;
        for (int64_t i = t * k; i < (t + 1) * k; i++) {
            if (p->ids[i] < 0 || !is_kept(p, p->ids[i])) continue;
            const int32_t owner = p->owner[p->ids[i] & ID_BITS];
            int s = 0;
            while (s < num_seen && seen[s] != owner) s++;
            if (s < num_seen) continue;
            seen[num_seen++] = owner;
            p->needed[owner]++;
        }
    }
}

/* Sets needed[] to the number of slots that each rank needs with the current limits: expert e
 * of rank r keeps at most min(num_kept[e], keep_limit[r]) choices. */
static void count_needed_slots(planner *p)
{
    const plan_header *h = p->header;
    memset(p->needed, 0, (size_t)h->num_ranks * sizeof *p->needed);
    if (h->layer.layout == EPIC_FLAT) {
        count_rows(p);
        return;
    }
    for (uint32_t e = 0; e < h->layer.num_experts; e++) {
        const int32_t owner = p->owner[e],
                      num_kept = min_int32(p->num_kept[e], p->keep_limit[owner]);
        p->needed[owner] += round_up(num_kept, h->layer.alignment);
    }
}

/* Returns true if a rank needs more slots than its capacity. A capacity of 0 means no limit. */
static bool is_over(const planner *p, int32_t rank)
{
    return p->capacity[rank] && p->needed[rank] > p->capacity[rank];
}

/* Lowers p->num_kept of the experts on each rank that needs more slots than its capacity. All
 * experts of such a rank get the same keep limit: the largest limit for which the rank has
 * enough slots.
 *
 * A binary search finds the limits of all ranks at the same time, between limit_fits[rank] and
 * limit_fails[rank]. For a rank within its capacity, limit_fits and limit_fails are equal from
 * the start, and num_kept of its experts does not change. */
static void drop_choices(planner *p)
{
    const plan_header *h = p->header;
    const uint32_t num_experts = h->layer.num_experts;
    for (int32_t r = 0; r < h->num_ranks; r++) {
        p->limit_fits[r] = is_over(p, r) ? 0 : INT32_MAX;
        p->limit_fails[r] = p->limit_fits[r];
    }
    for (uint32_t e = 0; e < num_experts; e++)
        if (p->num_kept[e] > p->limit_fails[p->owner[e]])
            p->limit_fails[p->owner[e]] = p->num_kept[e];
    for (;;) {
        bool open = false;
        for (int32_t r = 0; r < h->num_ranks; r++) {
            p->keep_limit[r] = p->limit_fits[r] + (p->limit_fails[r] - p->limit_fits[r]) / 2;
            open |= p->limit_fails[r] - p->limit_fits[r] > 1;
        }
        if (!open) break;
        count_needed_slots(p);
        for (int32_t r = 0; r < h->num_ranks; r++)
            *(is_over(p, r) ? &p->limit_fails[r] : &p->limit_fits[r]) = p->keep_limit[r];
    }
    for (uint32_t e = 0; e < num_experts; e++)
        p->num_kept[e] = min_int32(p->num_kept[e], p->limit_fits[p->owner[e]]);
}

/* Decides how many choices each expert keeps (p->num_kept), and sets the demand of this rank
 * (plan.h). With EPIC_OVERFLOW_DROP, limits num_kept so that no expert exceeds expert_capacity
 * and no rank exceeds its capacity. Without EPIC_OVERFLOW_DROP, returns EPIC_EOVERFLOW if a
 * rank needs more slots than its capacity. */
static epic_result decide_num_kept(planner *p)
{
    plan_header *h = p->header;
    const epic_layer *layer = &h->layer;
    memcpy(p->num_kept, p->count, layer->num_experts * sizeof *p->num_kept);
    for (int32_t r = 0; r < h->num_ranks; r++) p->keep_limit[r] = INT32_MAX;
    count_needed_slots(p);
    h->demand = p->needed[h->rank];
    h->capacity = p->capacity[h->rank];
    if (layer->overflow == EPIC_OVERFLOW_DROP) {
        for (uint32_t e = 0; e < layer->num_experts; e++)
            p->num_kept[e] = min_int32(p->num_kept[e], p->expert_quota[e]);
        if (layer->expert_capacity) count_needed_slots(p);
        drop_choices(p);
        return EPIC_OK;
    }
    for (int32_t r = 0; r < h->num_ranks; r++)
        if (is_over(p, r))
            return epic_fail(EPIC_EOVERFLOW, SENTENCE_CAPACITY, r, (long long)p->capacity[r],
                             (long long)p->needed[r]);
    return EPIC_OK;
}

/* Computes the first slot of each expert's slab, and slab_begin and slab_count of this rank. */
static void place_slabs(planner *p)
{
    plan_header *h = p->header;
    memset(p->used_slots, 0, (size_t)h->num_ranks * sizeof *p->used_slots);
    for (uint32_t e = 0; e < h->layer.num_experts; e++) {
        const int32_t owner = p->owner[e], local = p->local[e];
        p->begin[e] = p->used_slots[owner];
        p->used_slots[owner] += (int32_t)round_up(p->num_kept[e], h->layer.alignment);
        if (owner != h->rank) continue;
        p->slab_count[local] = p->num_kept[e];
        if (h->layer.layout == EPIC_EXPERT_MAJOR)
            p->slab_begin[local + 1] = p->used_slots[owner];
    }
    if (h->layer.layout == EPIC_FLAT) return;
    h->num_slots = p->used_slots[h->rank];
    for (int32_t l = 0; l < h->num_local; l++)
        if (p->expert_of[l] < 0) p->slab_begin[l + 1] = (int32_t)h->num_slots;
}

/* The targets of a token's choices: slot[k] is the slot of choice k on rank rank[k], or an
 * EPIC_FATE value if the choice is not sent. */
typedef struct choices {
    int32_t slot[MAX_TOP_K];
    int32_t rank[MAX_TOP_K];
} choices;

/* Returns the EPIC_FATE value of a dropped choice of expert e. `id` is the entry of the choice
 * in p->ids. Increments next[e], except with EPIC_BY_K, because with EPIC_BY_K next[e] counts
 * only kept choices. */
static int32_t fate_of(planner *p, int32_t e, int32_t id)
{
    const bool by_k = is_priority_by_k(p);
    const int32_t verdict = by_k ? id - e : drop_reason_of(p, e, p->next[e]);
    p->next[e] += !by_k;
    return verdict == EXPERT_IS_FULL ? EPIC_FATE_EXPERT_FULL : EPIC_FATE_RANK_FULL;
}

/* Decides where the choices of one token go, and stores the result in *c. In a FLAT layer, a
 * value of c->slot[k] that is not negative only means that choice k is kept: share_rows()
 * replaces this value by the token's row. */
static void place_token(planner *p, const int32_t *ids, choices *c)
{
    for (uint32_t k = 0; k < p->header->layer.top_k; k++) {
        c->rank[k] = -1;
        c->slot[k] = ids[k]; /* if negative, this is the fate */
        if (ids[k] < 0) continue;
        const int32_t e = ids[k] & ID_BITS, position = p->next[e];
        c->rank[k] = p->owner[e];
        if (ids[k] == e && position < p->num_kept[e]) {
            c->slot[k] = p->begin[e] + position;
            p->next[e]++;
        } else {
            c->slot[k] = fate_of(p, e, ids[k]);
        }
    }
}

/* For FLAT layers: assigns rows to the kept choices of a token. The kept choices that go to the
 * same rank share one row, the next free row of that rank. */
static void share_rows(planner *p, choices *c)
{
    for (uint32_t k = 0; k < p->header->layer.top_k; k++) {
        if (c->slot[k] < 0) continue;
        uint32_t first = 0;
        while (c->rank[first] != c->rank[k] || c->slot[first] < 0) first++;
        c->slot[k] = first < k ? c->slot[first] : p->used_slots[c->rank[k]]++;
    }
}

/* Stores the fate of each choice of a token of this rank, and counts the fates in the
 * header. */
static void record_fates(planner *p, int64_t token, const choices *c)
{
    plan_header *h = p->header;
    const uint32_t top_k = h->layer.top_k;
    for (uint32_t k = 0; k < top_k; k++) {
        const int32_t slot = c->slot[k];
        p->fate[token * top_k + k] = slot;
        p->rank_to[token * top_k + k] = c->rank[k];
        h->num_kept += slot >= 0;
        h->num_none += slot == EPIC_FATE_NONE;
        h->num_expert_full += slot == EPIC_FATE_EXPERT_FULL;
        h->num_rank_full += slot == EPIC_FATE_RANK_FULL;
    }
}

/* Places a token of another rank: replaces the id of each choice that goes to `rank` (this
 * rank) by the choice's slot. Replaces all other ids by -1. Also increments next[] of the
 * experts on other ranks, so that later choices get the correct positions. */
static void place_foreign_token(planner *p, int32_t *ids, uint32_t top_k, int32_t rank)
{
    for (uint32_t k = 0; k < top_k; k++) {
        const int32_t e = ids[k] & ID_BITS;
        int32_t slot = -1;
        if (ids[k] == e && p->next[e] < p->num_kept[e]) {
            const int32_t position = p->next[e]++;
            if (p->owner[e] == rank) slot = p->begin[e] + position;
        } else if (ids[k] >= 0) {
            fate_of(p, e, ids[k]);
        }
        ids[k] = slot;
    }
}

/* Returns true if place_all_kept() can be used: the layout is EXPERT_MAJOR and the plan keeps
 * every choice that has an expert. */
static bool is_nothing_dropped(const planner *p)
{
    bool all = p->header->layer.layout == EPIC_EXPERT_MAJOR;
    for (uint32_t e = 0; e < p->header->layer.num_experts; e++)
        all &= p->num_kept[e] == p->count[e];
    return all;
}

/* Returns the next free slot of expert e on its rank, or -1 if e is negative. Updates
 * first_free [num_experts], the first free slot of each slab. */
static int32_t next_free_slot(int32_t *first_free, int32_t e)
{
    return e < 0 ? -1 : first_free[e]++;
}

static int32_t slot_if_local(const planner *p, int32_t e, int32_t slot)
{
    return e >= 0 && p->owner[e] == p->header->rank ? slot : -1;
}

/* Handles the choices p->ids[begin .. end) of other ranks' tokens: replaces the id of each
 * choice by the choice's slot if the choice goes to this rank, and by -1 if not. */
static void place_all_kept_foreign(planner *p, int32_t *first_free, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++) {
        const int32_t e = p->ids[i];
        p->ids[i] = slot_if_local(p, e, next_free_slot(first_free, e));
    }
}

/* Places all choices of a plan that drops no choice, which is the usual case. This is faster
 * than place_choices(), which checks for each choice whether it is kept. */
static void place_all_kept(planner *p)
{
    plan_header *h = p->header;
    const int64_t k = h->layer.top_k, begin = p->base_of[h->rank] * k;
    const int64_t count = h->num_tokens * k;
    int32_t *first_free = p->next; /* next is not in use here and serves as scratch memory */
    memcpy(first_free, p->begin, h->layer.num_experts * sizeof *first_free);
    place_all_kept_foreign(p, first_free, 0, begin);
    for (int64_t i = 0; i < count; i++) {
        const int32_t e = p->ids[begin + i], slot = next_free_slot(first_free, e);
        p->fate[i] = e < 0 ? e : slot;
        p->rank_to[i] = e < 0 ? -1 : p->owner[e];
        p->ids[begin + i] = slot_if_local(p, e, slot);
        h->num_none += e < 0;
    }
    h->num_kept = count - h->num_none;
    h->num_none -= h->num_absent;
    place_all_kept_foreign(p, first_free, begin + count, h->total_tokens * k);
}

/* Places all choices in the order (rank, token, k). Replaces p->ids by slots on this rank
 * (FLAT: by local experts), and stores the fates of this rank's own choices. */
static void place_choices(planner *p)
{
    plan_header *h = p->header;
    const bool flat = h->layer.layout == EPIC_FLAT;
    const uint32_t top_k = h->layer.top_k;
    if (is_nothing_dropped(p)) {
        place_all_kept(p);
        return;
    }
    if (is_priority_by_k(p)) judge_choices_by_k(p);
    memset(p->next, 0, h->layer.num_experts * sizeof *p->next);
    if (flat) memset(p->used_slots, 0, (size_t)h->num_ranks * sizeof *p->used_slots);
    for (int64_t t = 0; t < h->total_tokens; t++) {
        int32_t *ids = p->ids + t * top_k;
        const int64_t own = t - p->base_of[h->rank];
        const bool is_own = own >= 0 && own < h->num_tokens;
        choices c;
        if (!is_own && !flat) {
            place_foreign_token(p, ids, top_k, h->rank);
            continue;
        }
        place_token(p, ids, &c);
        if (flat) {
            share_rows(p, &c);
            p->row_of[t] = -1;
        }
        for (uint32_t k = 0; k < top_k; k++) {
            const bool mine = c.rank[k] == h->rank && c.slot[k] >= 0;
            if (flat && mine) p->row_of[t] = c.slot[k];
            ids[k] = !mine ? -1 : flat ? p->local[ids[k]] : c.slot[k];
        }
        if (is_own) record_fates(p, own, &c);
    }
    if (flat) h->num_slots = p->used_slots[h->rank];
}

epic_result planner_finish(planner *p)
{
    planner_choose_replicas(p);
    planner_deal_capacity(p);
    count_choices(p);
    number_experts(p);
    const epic_result result = decide_num_kept(p);
    if (result != EPIC_OK)
        memset(p->num_kept, 0, p->header->layer.num_experts * sizeof *p->num_kept);
    place_slabs(p);
    place_choices(p);
    return result;
}
