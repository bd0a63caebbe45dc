/* SPDX-License-Identifier: Apache-2.0 */
/* The oracle's loops over choices: they compute the slot of each choice, and which choices are
 * dropped. */
#include <stdlib.h>

#include "oracles/oracle.h"

void *oracle_zeroed(int64_t count, size_t size)
{
    void *memory = calloc((size_t)count + 1, size);
    if (!memory) abort();
    return memory;
}

/* The choices of each expert, in the order of the group. */
typedef struct lists {
    int64_t *begin;  /* [num_experts + 1] */
    int64_t *choice; /* [all choices] */
    int64_t *place;  /* [all tokens, top_k]: number of earlier choices of the same expert */
} lists;

/* Computes the order in which choices are kept: by ascending k first if the layer asks for
 * it. */
static void find_places(const oracle_plan *p, lists *l)
{
    const int64_t top_k = p->in.layer.top_k;
    const bool by_k = p->in.layer.priority == EPIC_BY_K;
    for (uint32_t e = 0; e < p->in.layer.num_experts; e++) {
        int64_t before = 0;
        for (int64_t k = 0; k < (by_k ? top_k : 1); k++)
            for (int64_t i = l->begin[e]; i < l->begin[e + 1]; i++)
                if (!by_k || l->choice[i] % top_k == k) l->place[l->choice[i]] = before++;
    }
}

static void make_lists(const oracle_plan *p, lists *l)
{
    const int64_t num_experts = p->in.layer.num_experts;
    const int64_t choices = p->total_tokens * p->in.layer.top_k;
    l->begin = oracle_zeroed(num_experts + 1, sizeof *l->begin);
    l->choice = oracle_zeroed(choices, sizeof *l->choice);
    l->place = oracle_zeroed(choices, sizeof *l->place);
    for (int64_t e = 0; e < num_experts; e++) l->begin[e + 1] = l->begin[e] + p->load[e];
    int64_t *count = oracle_zeroed(num_experts, sizeof *count);
    for (int64_t c = 0; c < choices; c++) {
        const int64_t e = p->in.ids[c];
        if (e < 0) continue;
        l->choice[l->begin[e] + count[e]++] = c;
    }
    find_places(p, l);
    free(count);
}

static void free_lists(lists *l)
{
    free(l->begin);
    free(l->choice);
    free(l->place);
}

/* Returns whether expert e computes choices with this id. */
static bool serves(const epic_layer *layer, const int32_t *rank_of, const int32_t *logical_of,
                   int64_t e, int64_t id)
{
    if (rank_of && rank_of[e] < 0) return false;
    return layer->num_logical ? logical_of[e] == id : e == id;
}

void oracle_choose_replicas(const epic_layer *layer, const int32_t *rank_of,
                            const int32_t *logical_of, const int64_t *logical_ids,
                            int64_t choices, int64_t *ids)
{
    int64_t *chosen = oracle_zeroed(layer->num_experts, sizeof *chosen); /* choices so far */
    for (int64_t c = 0; c < choices; c++) {
        const int64_t id = logical_ids[c];
        int64_t replicas = 0, nth = 0;
        ids[c] = id < 0 ? -1 : ORACLE_ABSENT;
        if (id < 0) continue;
        const int64_t before = chosen[id]++;
        for (uint32_t e = 0; e < layer->num_experts; e++)
            replicas += serves(layer, rank_of, logical_of, e, id);
        for (uint32_t e = 0; e < layer->num_experts; e++)
            if (serves(layer, rank_of, logical_of, e, id) && nth++ == before % replicas)
                ids[c] = e;
    }
    free(chosen);
}

/* Returns how many choices an expert keeps at most: expert_capacity, divided among its
 * replicas one by one. */
static int64_t most_of(const oracle_plan *p, int64_t expert)
{
    const epic_layer *layer = &p->in.layer;
    const int32_t *logical_of = p->in.logical_of;
    int64_t before = 0, replicas = 0;
    if (layer->overflow != EPIC_OVERFLOW_DROP || !layer->expert_capacity) return INT64_MAX;
    if (!layer->num_logical) return layer->expert_capacity;
    if (p->in.rank_of[expert] < 0 || logical_of[expert] < 0) return 0; /* has no choices */
    for (uint32_t e = 0; e < layer->num_experts; e++) {
        if (!serves(layer, p->in.rank_of, logical_of, e, logical_of[expert])) continue;
        replicas++;
        before += e < expert;
    }
    int64_t most = 0;
    for (int64_t n = 0; n < layer->expert_capacity; n++) most += n % replicas == before;
    return most;
}

static int64_t padded(int64_t count, int64_t alignment)
{
    return count % alignment ? count - count % alignment + alignment : count;
}

/* Returns the slots that `rank` needs if expert e keeps its first min(load, limit) choices.
 * If `capped`, an expert keeps no more than its own capacity. */
static int64_t slots_needed(const oracle_plan *p, const lists *l, int rank, bool capped,
                            int64_t limit)
{
    const int64_t top_k = p->in.layer.top_k;
    int64_t slots = 0;
    if (!oracle_is_flat(p)) {
        for (uint32_t e = 0; e < p->in.layer.num_experts; e++) {
            if (p->in.rank_of[e] != rank) continue;
            int64_t kept = p->load[e];
            if (capped && kept > p->most[e]) kept = p->most[e];
            if (kept > limit) kept = limit;
            slots += padded(kept, p->alignment);
        }
        return slots;
    }
    for (int64_t t = 0; t < p->total_tokens; t++) {
        bool comes = false;
        for (int64_t c = t * top_k; c < (t + 1) * top_k; c++)
            if (p->in.ids[c] >= 0 && p->in.rank_of[p->in.ids[c]] == rank &&
                (!capped || l->place[c] < p->most[p->in.ids[c]]) && l->place[c] < limit)
                comes = true;
        slots += comes;
    }
    return slots;
}

/* Finds the largest common limit that fits, by trying all. */
static int64_t common_limit(const oracle_plan *p, const lists *l, int rank)
{
    int64_t c = 0;
    while (slots_needed(p, l, rank, true, c + 1) <= p->in.capacity[rank]) c++;
    return c;
}

static void place_expert_major(oracle_plan *p, const lists *l, int rank, int64_t limit)
{
    int64_t slot = 0;
    for (uint32_t e = 0; e < p->in.layer.num_experts; e++) {
        if (p->in.rank_of[e] != rank) continue;
        const int64_t begin = slot;
        for (int64_t i = l->begin[e]; i < l->begin[e + 1]; i++) {
            const int64_t c = l->choice[i];
            if (p->fate[c] != EPIC_FATE_EXPERT_FULL)
                p->fate[c] = l->place[c] < limit ? (int32_t)slot++ : EPIC_FATE_RANK_FULL;
        }
        const int64_t at = rank * (int64_t)p->num_local + p->local_of[e];
        p->expert_tokens[at] = (int32_t)(slot - begin);
        slot = begin + padded(slot - begin, p->alignment);
        p->expert_rows[at] = (int32_t)(slot - begin);
    }
    p->num_slots[rank] = slot;
}

static void place_flat(oracle_plan *p, const lists *l, int rank, int64_t limit)
{
    const int64_t top_k = p->in.layer.top_k;
    int64_t row = 0;
    for (int64_t t = 0; t < p->total_tokens; t++) {
        bool used = false;
        for (int64_t c = t * top_k; c < (t + 1) * top_k; c++) {
            const int64_t e = p->in.ids[c];
            if (e < 0 || p->in.rank_of[e] != rank || p->fate[c] == EPIC_FATE_EXPERT_FULL)
                continue;
            p->fate[c] = EPIC_FATE_RANK_FULL;
            if (l->place[c] >= limit) continue;
            p->fate[c] = (int32_t)row;
            used = true;
            p->expert_tokens[rank * p->num_local + p->local_of[e]]++;
            p->expert_rows[rank * p->num_local + p->local_of[e]]++;
        }
        row += used;
    }
    p->num_slots[rank] = row;
}

static void mark_expert_full(oracle_plan *p, const lists *l)
{
    for (int64_t c = 0; c < p->total_tokens * p->in.layer.top_k; c++)
        p->fate[c] = p->in.ids[c] == ORACLE_ABSENT          ? EPIC_FATE_ABSENT
                     : p->in.ids[c] < 0                     ? EPIC_FATE_NONE
                     : l->place[c] >= p->most[p->in.ids[c]] ? EPIC_FATE_EXPERT_FULL
                                                            : EPIC_FATE_RANK_FULL;
}

static void fill_slots(oracle_plan *p)
{
    const int64_t top_k = p->in.layer.top_k;
    for (int r = 0; r < p->in.num_ranks; r++) {
        p->filled_by[r] = oracle_zeroed(p->num_slots[r], sizeof **p->filled_by);
        for (int64_t s = 0; s < p->num_slots[r]; s++) p->filled_by[r][s] = -1;
    }
    for (int64_t c = 0; c < p->total_tokens * top_k; c++)
        if (p->fate[c] >= 0)
            p->filled_by[p->in.rank_of[p->in.ids[c]]][p->fate[c]] =
                oracle_is_flat(p) ? c / top_k : c;
}

static void decide(oracle_plan *p, const lists *l)
{
    const epic_layer *layer = &p->in.layer;
    const bool drops = layer->overflow == EPIC_OVERFLOW_DROP;
    mark_expert_full(p, l);
    for (int r = 0; r < p->in.num_ranks; r++) {
        p->demand[r] = slots_needed(p, l, r, false, INT64_MAX);
        if (!drops && p->in.capacity[r] && p->demand[r] > p->in.capacity[r])
            p->result = EPIC_EOVERFLOW;
    }
    for (int r = 0; r < p->in.num_ranks && p->result == EPIC_OK; r++) {
        int64_t limit = INT64_MAX;
        if (p->in.capacity[r] && slots_needed(p, l, r, true, INT64_MAX) > p->in.capacity[r])
            limit = common_limit(p, l, r);
        if (oracle_is_flat(p))
            place_flat(p, l, r, limit);
        else
            place_expert_major(p, l, r, limit);
    }
}

static void number_experts(oracle_plan *p)
{
    const epic_layer *layer = &p->in.layer;
    p->local_of = oracle_zeroed(layer->num_experts, sizeof *p->local_of);
    for (int r = 0; r < p->in.num_ranks; r++) {
        int count = 0;
        for (uint32_t e = 0; e < layer->num_experts; e++)
            if (p->in.rank_of[e] == r) p->local_of[e] = count++;
        if (count > p->num_local) p->num_local = count;
    }
}

oracle_plan *oracle_plan_new(const oracle_input *in)
{
    oracle_plan *p = oracle_zeroed(1, sizeof *p);
    const int ranks = in->num_ranks;
    const epic_layer *layer = &in->layer;
    p->in = *in;
    p->alignment = layer->alignment && layer->layout != EPIC_FLAT ? layer->alignment : 1;
    p->leaves = layer->leaves ? (int64_t)layer->leaves : ranks;
    p->first_token = oracle_zeroed(ranks + 1, sizeof *p->first_token);
    for (int r = 0; r < ranks; r++)
        p->first_token[r + 1] = p->first_token[r] + in->tokens_of[r];
    p->total_tokens = p->first_token[ranks];
    number_experts(p);
    p->load = oracle_zeroed(layer->num_experts, sizeof *p->load);
    for (int64_t c = 0; c < p->total_tokens * layer->top_k; c++)
        if (in->ids[c] >= 0) p->load[in->ids[c]]++;
    p->most = oracle_zeroed(layer->num_experts, sizeof *p->most);
    for (uint32_t e = 0; e < layer->num_experts; e++) p->most[e] = most_of(p, e);
    p->fate = oracle_zeroed(p->total_tokens * layer->top_k, sizeof *p->fate);
    p->num_slots = oracle_zeroed(ranks, sizeof *p->num_slots);
    p->demand = oracle_zeroed(ranks, sizeof *p->demand);
    p->expert_rows = oracle_zeroed(ranks * (int64_t)p->num_local, sizeof *p->expert_rows);
    p->expert_tokens = oracle_zeroed(ranks * (int64_t)p->num_local, sizeof *p->expert_tokens);
    p->filled_by = oracle_zeroed(ranks, sizeof *p->filled_by);
    lists l;
    make_lists(p, &l);
    decide(p, &l);
    fill_slots(p);
    free_lists(&l);
    return p;
}

void oracle_plan_free(oracle_plan *p)
{
    if (!p) return;
    for (int r = 0; r < p->in.num_ranks; r++) free(p->filled_by[r]);
    void *const parts[] = {p->first_token,   p->local_of,         p->load,   p->most,
                           p->fate,          p->num_slots,        p->demand, p->expert_rows,
                           p->expert_tokens, (void *)p->filled_by};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) free(parts[i]);
    free(p);
}
