/* SPDX-License-Identifier: Apache-2.0 */
/* Expected results of the GPU tests: routing and arithmetic of all ranks in plain loops. */
#include "oracles/routing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

__extension__ typedef _Float16 float16;

static int64_t round_up_to(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static int64_t slots_with(const routing *r, int rank, int64_t most)
{
    int64_t slots = 0;
    if (r->layer.layout == EPIC_FLAT) return r->rows_of[rank];
    for (uint32_t e = 0; e < r->layer.num_experts; e++)
        if (r->owner[e] == rank)
            slots += round_up_to(r->kept[e] < most ? r->kept[e] : most, r->layer.alignment);
    return slots;
}

/* FLAT: returns the row of the i-th choice, one per token and rank, or -1 if an earlier choice
 * has this row. */
static int64_t next_row(const routing *r, int q, int64_t i, const int64_t *rows)
{
    const int64_t k = r->layer.top_k, e = r->ids[q][i];
    for (int64_t j = i / k * k; j < i; j++) {
        const int64_t before = r->ids[q][j];
        if (before >= 0 && before < r->layer.num_experts && r->owner[before] == r->owner[e])
            return -1;
    }
    return rows[r->owner[e]];
}

static void count_rows(const routing *r, int64_t *rows)
{
    for (int q = 0; q < r->num_ranks; q++)
        for (int64_t i = 0; i < (int64_t)r->tokens_of[q] * r->layer.top_k; i++) {
            const int64_t e = r->ids[q][i];
            if (e >= 0 && e < r->layer.num_experts && next_row(r, q, i, rows) >= 0)
                rows[r->owner[e]]++;
        }
}

static void count_choices(routing *r)
{
    for (int q = 0; q < r->num_ranks; q++)
        for (int64_t i = 0; i < (int64_t)r->tokens_of[q] * r->layer.top_k; i++) {
            if (r->ids[q][i] >= r->layer.num_experts)
                r->result = EPIC_EINVAL;
            else if (r->ids[q][i] >= 0)
                r->load[r->ids[q][i]]++;
        }
}

/* Returns the largest number of choices that an expert keeps by expert_capacity. Replicas share
 * it. */
static int64_t quota_of(const routing *r, int64_t expert)
{
    int64_t replicas = 0, before = 0;
    for (uint32_t e = 0; r->logical && e < r->layer.num_experts; e++) {
        replicas += r->logical[e] == r->logical[expert];
        before += r->logical[e] == r->logical[expert] && e < expert;
    }
    if (!replicas) return r->layer.expert_capacity;
    return (r->layer.expert_capacity + replicas - 1 - before) / replicas;
}

static void limit_kept(routing *r)
{
    const bool drop = r->layer.overflow == EPIC_OVERFLOW_DROP;
    for (uint32_t e = 0; e < r->layer.num_experts; e++) r->kept[e] = r->load[e];
    for (int q = 0; q < r->num_ranks; q++) r->demand_of[q] = slots_with(r, q, INT32_MAX);
    for (uint32_t e = 0; e < r->layer.num_experts && drop; e++)
        if (r->layer.expert_capacity && r->kept[e] > quota_of(r, e))
            r->kept[e] = (int32_t)quota_of(r, e);
    for (int q = 0; q < r->num_ranks; q++) {
        const int64_t capacity = r->capacity_of[q];
        if (!capacity || slots_with(r, q, INT32_MAX) <= capacity) continue;
        if (!drop) {
            if (r->result == EPIC_OK) r->result = EPIC_EOVERFLOW;
            continue;
        }
        int64_t most = 0;
        while (slots_with(r, q, most + 1) <= capacity) most++;
        for (uint32_t e = 0; e < r->layer.num_experts; e++)
            if (r->owner[e] == q && r->kept[e] > most) r->kept[e] = (int32_t)most;
    }
}

static void place_rows(routing *r)
{
    for (int q = 0; q < r->num_ranks; q++)
        for (int64_t i = 0; i < (int64_t)r->tokens_of[q] * r->layer.top_k; i++) {
            const int64_t e = r->ids[q][i], k = r->layer.top_k;
            r->slot[q][i] = EPIC_FATE_NONE;
            r->rank[q][i] = -1;
            if (e < 0 || r->result != EPIC_OK) continue;
            r->rank[q][i] = r->owner[e];
            if (next_row(r, q, i, r->slots_of) >= 0) {
                r->slot[q][i] = (int32_t)r->slots_of[r->owner[e]]++;
                continue;
            }
            int64_t j = i / k * k;
            while (r->rank[q][j] != r->owner[e]) j++;
            r->slot[q][i] = r->slot[q][j];
        }
    if (r->result == EPIC_OK) return;
    memcpy(r->slots_of, r->rows_of, sizeof r->slots_of);
}

/* Sets `slot` to the position of each choice in the order in which its expert keeps choices. */
static void number_choices(routing *r)
{
    const int64_t top_k = r->layer.top_k;
    const bool by_k = r->layer.priority == EPIC_BY_K;
    int32_t *next = calloc(r->layer.num_experts, sizeof *next);
    for (int64_t k = 0; k < (by_k ? top_k : 1); k++)
        for (int q = 0; q < r->num_ranks; q++)
            for (int64_t i = 0; i < (int64_t)r->tokens_of[q] * top_k; i++)
                if (r->ids[q][i] >= 0 && r->ids[q][i] < r->layer.num_experts &&
                    (!by_k || i % top_k == k))
                    r->slot[q][i] = next[r->ids[q][i]]++;
    free(next);
}

static void place_choices(routing *r)
{
    const int k = (int)r->layer.top_k;
    int32_t *next = calloc(r->layer.num_experts, sizeof *next);
    number_choices(r);
    for (uint32_t e = 0; e < r->layer.num_experts; e++) {
        r->begin[e] = (int32_t)r->slots_of[r->owner[e]];
        r->slots_of[r->owner[e]] += round_up_to(r->kept[e], r->layer.alignment);
    }
    for (int q = 0; q < r->num_ranks; q++)
        for (int64_t i = 0; i < (int64_t)r->tokens_of[q] * k; i++) {
            const int64_t e = r->ids[q][i];
            const int32_t nth = r->slot[q][i];
            r->slot[q][i] = EPIC_FATE_NONE;
            r->rank[q][i] = -1;
            if (e < 0 || r->result != EPIC_OK) continue;
            const bool full = r->layer.overflow == EPIC_OVERFLOW_DROP &&
                              r->layer.expert_capacity && nth >= quota_of(r, e);
            if (nth < r->kept[e]) {
                r->slot[q][i] = r->begin[e] + next[e]++;
                r->rank[q][i] = r->owner[e];
            } else {
                r->slot[q][i] = full ? EPIC_FATE_EXPERT_FULL : EPIC_FATE_RANK_FULL;
            }
        }
    free(next);
}

void choose_experts(routing *r)
{
    const int64_t experts = r->layer.num_experts;
    int32_t *turn = malloc((size_t)experts * sizeof *turn); /* replica of the next choice */
    if (!r->logical) {
        free(turn);
        return;
    }
    for (int64_t l = 0; l < r->layer.num_logical; l++) turn[l] = -1;
    for (int q = 0; q < r->num_ranks; q++)
        for (int64_t i = 0; i < (int64_t)r->tokens_of[q] * r->layer.top_k; i++) {
            const int64_t l = r->named[q][i];
            r->ids[q][i] = l < 0 ? l : l + experts; /* no expert, or an id that is too large */
            if (l < 0 || l >= r->layer.num_logical) continue;
            do turn[l] = (int32_t)((turn[l] + 1) % experts);
            while (r->logical[turn[l]] != l);
            r->ids[q][i] = turn[l];
        }
    free(turn);
}

void solve_routing(routing *r)
{
    const size_t experts = r->layer.num_experts;
    r->load = calloc(experts, 4);
    r->kept = calloc(experts, 4);
    r->begin = calloc(experts, 4);
    r->result = EPIC_OK;
    for (int q = 0; q < r->num_ranks; q++) {
        const size_t choices = (size_t)r->tokens_of[q] * r->layer.top_k + 1;
        r->slot[q] = malloc(choices * 4);
        r->rank[q] = malloc(choices * 4);
        r->slots_of[q] = r->rows_of[q] = 0;
    }
    count_choices(r);
    count_rows(r, r->rows_of);
    limit_kept(r);
    if (r->layer.layout == EPIC_FLAT)
        place_rows(r);
    else
        place_choices(r);
}

void free_routing(routing *r)
{
    for (int q = 0; q < r->num_ranks; q++) {
        free(r->ids[q]);
        free(r->named[q]);
        free(r->slot[q]);
        free(r->rank[q]);
    }
    free(r->owner);
    free(r->logical);
    free(r->load);
    free(r->kept);
    free(r->begin);
    memset(r, 0, sizeof *r);
}

/* ---------------------------------------------------------------------------- elements ---- */

int type_bytes(uint32_t type)
{
    return type == EPIC_F32 ? 4 : 2;
}

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

float get_element(const void *row, int64_t i, uint32_t type)
{
    uint16_t half;
    float x;
    float16 h;
    if (type == EPIC_F32) {
        memcpy(&x, (const char *)row + i * 4, 4);
        return x;
    }
    memcpy(&half, (const char *)row + i * 2, 2);
    if (type == EPIC_BF16) return from_bits((uint32_t)half << 16);
    memcpy(&h, &half, 2);
    return (float)h;
}

static uint16_t bf16_of(float x)
{
    const uint32_t bits = bits_of(x);
    if (isnan(x)) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void put_element(void *row, int64_t i, uint32_t type, float x)
{
    uint16_t half;
    if (type == EPIC_F32) {
        memcpy((char *)row + i * 4, &x, 4);
        return;
    }
    const float16 h = (float16)x;
    memcpy(&half, &h, 2);
    if (type == EPIC_BF16) half = bf16_of(x);
    memcpy((char *)row + i * 2, &half, 2);
}

float round_to(float x, uint32_t type)
{
    char element[4];
    put_element(element, 0, type, x);
    return get_element(element, 0, type);
}

/* -------------------------------------------------------------------------------- sums ---- */

typedef struct node {
    bool there;
    float sum;
} node;

static node add_nodes(node a, node b, uint32_t type)
{
    if (!a.there) return b;
    if (!b.there) return a;
    return (node){true, round_to(a.sum + b.sum, type)};
}

/* Computes the partial sum of the choices whose expert is in [first, first + count). */
static node partial_sum(const routing *r, int rank, int32_t token, int64_t i, uint32_t type,
                        const expert_rows *rows, int owner, int64_t first, int64_t count)
{
    const int k = (int)r->layer.top_k;
    node n = {false, 0};
    for (int c = 0; c < k; c++) {
        const int64_t at = (int64_t)token * k + c, e = r->ids[rank][at];
        if (r->rank[rank][at] != owner || e < first || e >= first + count) continue;
        const int64_t slot = r->slot[rank][at];
        const float w = rows->weight(rows->self, owner, slot);
        const float x = rows->element(rows->self, owner, slot, i);
        if (n.there)
            n.sum = fmaf(w, x, n.sum);
        else
            n.sum = w * x;
        n.there = true;
        /* with FLAT there is one row for all choices */
        if (r->layer.layout == EPIC_FLAT) break;
    }
    n.sum = round_to(n.sum, type);
    return n;
}

static node tree_sum(const routing *r, int rank, int32_t token, int64_t i, uint32_t type,
                     const expert_rows *rows, int64_t leaf, int64_t leaves, int64_t all)
{
    const int64_t block = r->layer.num_experts / all;
    if (leaves == 1)
        return partial_sum(r, rank, token, i, type, rows, r->owner[leaf * block], leaf * block,
                           block);
    return add_nodes(
        tree_sum(r, rank, token, i, type, rows, leaf, leaves / 2, all),
        tree_sum(r, rank, token, i, type, rows, leaf + leaves / 2, leaves / 2, all), type);
}

float combined_number(const routing *r, int rank, int32_t token, int64_t i, uint32_t type,
                      const expert_rows *rows)
{
    const uint32_t part = r->layer.partial_type ? r->layer.partial_type : type;
    if (r->layer.sum_order == EPIC_TREE) {
        /* the leaves of a rank are in the row */
        const bool flat = r->layer.layout == EPIC_FLAT;
        const int64_t leaves = flat ? r->num_ranks : (int64_t)r->layer.leaves;
        const node n = tree_sum(r, rank, token, i, part, rows, 0, leaves, leaves);
        return n.there ? n.sum : 0.0f;
    }
    node total = {false, 0};
    for (int q = 0; q < r->num_ranks; q++)
        total = add_nodes(
            total, partial_sum(r, rank, token, i, part, rows, q, 0, r->layer.num_experts),
            EPIC_F32);
    return total.there ? total.sum : 0.0f;
}
