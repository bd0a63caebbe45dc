/* SPDX-License-Identifier: Apache-2.0 */
/* Draws random cases. */
#include <stdlib.h>
#include <string.h>

#include "case_inner.h"

uint64_t case_hash(uint64_t a, uint64_t b, uint64_t c, uint64_t d)
{
    uint64_t x = a * 0x9e3779b97f4a7c15ull ^ b * 0xbf58476d1ce4e5b9ull ^
                 c * 0x94d049bb133111ebull ^ d * 0xd6e8feb86659fd93ull;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9ull;
    return x ^ x >> 32;
}

uint64_t draw_bits(uint64_t *state)
{
    return case_hash(++*state, 1, 2, 3);
}

int64_t draw_between(uint64_t *state, int64_t low, int64_t high)
{
    return low + (int64_t)(draw_bits(state) % (uint64_t)(high - low + 1));
}

static void draw_ids(test_case *c, uint64_t *s)
{
    routing *r = &c->r;
    const int64_t experts = r->layer.num_experts, k = r->layer.top_k;
    const int skew = (int)draw_between(s, 0, 3);
    for (int q = 0; q < r->num_ranks; q++) {
        r->ids[q] = malloc((size_t)(r->tokens_of[q] * k + 1) * sizeof **r->ids);
        for (int64_t i = 0; i < r->tokens_of[q] * k; i++) {
            int64_t e = draw_between(s, 0, experts - 1);
            if (skew == 1 && draw_between(s, 0, 9) < 8) e %= experts < 4 ? experts : 4;
            if (skew == 2) e = e * e / experts;
            if (draw_between(s, 0, 9) == 0) e = -1 - draw_between(s, 0, 5);
            r->ids[q][i] = e;
        }
        /* most tokens choose distinct experts, as routers do */
        for (int64_t t = 0; t < r->tokens_of[q] && skew == 3; t++)
            for (int64_t j = 0; j < k; j++)
                r->ids[q][t * k + j] = (r->ids[q][t * k] + experts + j * 7 % experts) % experts;
    }
}

static uint32_t top_k_of(uint32_t drawn)
{
    const uint32_t most = team_max_top_k();
    return most && drawn > most ? most : drawn;
}

/* Limits a layer to what the low-latency kernels support. */
static void limit_to_lowlat(epic_layer *l, int num_ranks)
{
    if (l->top_k > 32) l->top_k = 32;
    l->partial_type = 0;
    l->leaves = (uint32_t)num_ranks;
    if (num_ranks > 8) l->sum_order = EPIC_BY_RANK;
}

static int64_t min_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Limits a case to what the low-latency kernels that make the plan support
 * (p2p_can_plan_lowlat). If a limit is 0, because the group has too many ranks for these
 * kernels, the case has one choice per token, or one expert per rank, instead. */
static void limit_to_plain(test_case *c, int64_t max_tokens)
{
    epic_layer *l = &c->r.layer;
    const int64_t n = c->r.num_ranks, groups = n * ((max_tokens + 31) / 32);
    const int64_t block = min_of(P2P_LOWLAT_MASKS / groups, P2P_LOWLAT_EXPERTS) / n;
    c->plain = true;
    const int64_t ids = P2P_LOWLAT_IDS / (n * max_tokens);
    const int64_t most_k = ids / P2P_LOWLAT_LANE_IDS * P2P_LOWLAT_LANE_IDS;
    l->top_k = (uint32_t)min_of(l->top_k, most_k ? most_k : 1);
    l->num_experts = (uint32_t)(n * min_of(l->num_experts / n, block ? block : 1));
    l->layout = EPIC_EXPERT_MAJOR;
    l->sum_order = EPIC_BY_RANK;
}

static void draw_layer(test_case *c, uint64_t *s, int64_t max_tokens, case_kind kind)
{
    routing *r = &c->r;
    epic_layer *l = &r->layer;
    static const uint32_t ks[] = {1, 2, 3, 4, 6, 8, 8, 8, 8, 13, 16, 31, 32, 33, 40, 64};
    static const uint32_t blocks[] = {1, 2, 3, 4, 8, 8, 16, 64, 5, 128, 200, 512};
    const int n = r->num_ranks;
    l->num_experts = (uint32_t)(n * min_of(blocks[draw_between(s, 0, 11)], 4096 / n));
    if (draw_between(s, 0, 29) == 0) l->num_experts = (uint32_t)n * (4096u / (uint32_t)n);
    l->top_k = top_k_of(ks[draw_between(s, 0, 15)]);
    l->alignment =
        draw_between(s, 0, 2) ? 1u << draw_between(s, 0, 7) : (uint32_t)draw_between(s, 1, 20);
    if (draw_between(s, 0, 3) == 0) l->partial_type = EPIC_F32;
    if (draw_between(s, 0, 3) == 0 || kind == CASE_FLAT_DROPS) l->layout = EPIC_FLAT;
    if (l->layout == EPIC_FLAT) l->alignment = 1;
    const bool power = (n & (n - 1)) == 0 && (l->num_experts & (l->num_experts - 1)) == 0;
    l->leaves = (uint32_t)n;
    if (power && draw_between(s, 0, 1)) {
        l->sum_order = EPIC_TREE;
        while (l->leaves < l->num_experts && l->leaves < 128u * (unsigned)n &&
               draw_between(s, 0, 1))
            l->leaves *= 2;
    }
    if (kind == CASE_LOWLAT || kind == CASE_PLAIN) limit_to_lowlat(l, n);
    if (kind == CASE_PLAIN) limit_to_plain(c, max_tokens);
    r->owner = malloc(l->num_experts * sizeof *r->owner);
    const uint32_t block = l->num_experts / (uint32_t)n;
    const int turn = (int)draw_between(s, 0, n - 1);
    r->table = draw_between(s, 0, 3) == 0 && !c->plain;
    for (uint32_t e = 0; e < l->num_experts; e++) {
        r->owner[e] = (int32_t)(e / block);
        if (r->table && l->sum_order == EPIC_TREE)
            r->owner[e] = (r->owner[e] + turn) % n;
        else if (r->table)
            r->owner[e] = (int32_t)draw_between(s, 0, n - 1);
    }
}

/* Draws replicas. Some logical experts have more than others, and each has at least one. */
static void draw_replicas(test_case *c)
{
    routing *r = &c->r;
    uint64_t state = case_hash(c->seed, 42, 0, 0), *s = &state;
    epic_layer *l = &r->layer;
    if (l->num_experts > P2P_REPLICATED_EXPERTS || c->plain || draw_between(s, 0, 3)) return;
    l->num_logical = (uint32_t)draw_between(s, 1, l->num_experts);
    const int64_t busy = draw_between(s, 1, l->num_logical);
    r->logical = malloc(l->num_experts * sizeof *r->logical);
    for (uint32_t e = 0; e < l->num_experts; e++)
        r->logical[l->num_experts - 1 - e] =
            e < l->num_logical ? (int32_t)e : (int32_t)draw_between(s, 0, busy - 1);
    for (int q = 0; q < r->num_ranks; q++) {
        const int64_t choices = (int64_t)r->tokens_of[q] * l->top_k;
        r->named[q] = malloc((size_t)(choices + 1) * sizeof **r->named);
        for (int64_t i = 0; i < choices; i++) r->named[q][i] = r->ids[q][i] % l->num_logical;
    }
}

/* Makes some experts replicas of nothing. The choices of logical experts without a replica are
 * then dropped. */
static void draw_absent(test_case *c)
{
    routing *r = &c->r;
    uint64_t state = case_hash(c->seed, 43, 0, 0), *s = &state;
    if (!r->logical || draw_between(s, 0, 1)) return;
    const int64_t percent = draw_between(s, 0, 60);
    for (uint32_t e = 0; e < r->layer.num_experts; e++)
        if (draw_between(s, 0, 99) < percent) r->logical[e] = EPIC_ABSENT;
    r->layer.flags |= EPIC_DROP_ABSENT;
}

/* Drops choices on every rank: its slots suffice for a quarter of the rows that it needs. So
 * the bisection for keep limits has many repetitions. */
static void drop_flat_choices(routing *r)
{
    r->layer.overflow = EPIC_OVERFLOW_DROP;
    for (int q = 0; q < r->num_ranks; q++) r->capacity_of[q] = 1 + r->plan->num_slots[q] / 4;
    solve_routing(r);
}

static void draw_capacity(test_case *c, uint64_t *s, case_kind case_kind)
{
    routing *r = &c->r;
    const int kind = (int)draw_between(s, 0, 9);
    solve_routing(r);
    for (int q = 0; q < r->num_ranks; q++) {
        const int64_t need = r->plan->num_slots[q];
        r->capacity_of[q] = kind == 0 ? 0 : need + draw_between(s, 1, 40);
        c->recv_rows[q] = need + draw_between(s, 0, 1) * draw_between(s, 0, 50);
    }
    if (case_kind == CASE_FLAT_DROPS) {
        drop_flat_choices(r);
        return;
    }
    const bool drops =
        kind >= 1 && kind <= 3 && r->layer.layout == EPIC_EXPERT_MAJOR && !c->plain;
    if (drops) {
        r->layer.overflow = EPIC_OVERFLOW_DROP;
        if (draw_between(s, 0, 1)) r->layer.expert_capacity = (uint32_t)draw_between(s, 1, 30);
        if (case_hash(c->seed, 43, 0, 0) % 2 &&
            r->layer.num_experts * r->layer.top_k <= P2P_BY_K_TALLIES)
            r->layer.priority = EPIC_BY_K;
        for (int q = 0; q < r->num_ranks; q++)
            if (draw_between(s, 0, 1)) r->capacity_of[q] = 1 + r->capacity_of[q] / 2;
    } else if (kind == 4 && draw_between(s, 0, 2) == 0) { /* one rank has too few slots */
        r->capacity_of[draw_between(s, 0, r->num_ranks - 1)] = 1;
    } else if (kind == 5 && draw_between(s, 0, 2) == 0) { /* an invalid id */
        const int q = (int)draw_between(s, 0, r->num_ranks - 1);
        if (r->tokens_of[q]) r->ids[q][0] = r->layer.num_experts + draw_between(s, 0, 3);
        if (r->tokens_of[q] && r->logical) r->named[q][0] = r->layer.num_logical;
    }
    solve_routing(r);
}

static int64_t most_slots(const test_case *c)
{
    int64_t slots = 1;
    for (int q = 0; q < c->r.num_ranks; q++)
        if (c->recv_rows[q] > slots) slots = c->recv_rows[q];
    return slots;
}

/* Widens rows so that scales are whole vectors, if the case stays short. */
static void widen_rows(test_case *c, int64_t max_row_bytes)
{
    const int64_t wide = 512, row_bytes = wide * oracle_type_bytes(c->type);
    if (row_bytes > max_row_bytes || most_slots(c) * wide > 1500000) return;
    c->hidden = wide;
    c->row_bytes = row_bytes;
}

/* Draws second rows: the caller's, or those of quantized rows. Depends on the seed only. */
static void choose_scales(test_case *c, uint64_t kind, int64_t max_row_bytes)
{
    static const int64_t bytes[] = {1, 4, 17, 64, 224, 1040};
    c->quantize = kind % 4 == 0 ? EPIC_QUANTIZE_1X128 : kind % 4 == 1 ? EPIC_QUANTIZE_1X32 : 0;
    if (c->quantize && kind / 4 % 2) widen_rows(c, max_row_bytes);
    const int64_t n = c->hidden;
    c->recv_bytes = c->quantize ? n : c->row_bytes;
    c->scale_bytes = c->quantize == EPIC_QUANTIZE_1X128  ? (n + 127) / 128 * 4
                     : c->quantize == EPIC_QUANTIZE_1X32 ? (n + 31) / 32
                     : kind % 4 == 2                     ? bytes[kind / 4 % 6]
                                                         : 0;
}

/* Narrows rows if there are many, so that cases stay short. */
static void narrow_rows(test_case *c)
{
    const int64_t slots = most_slots(c);
    while (c->hidden > 8 && slots * c->hidden > 1500000) c->hidden = c->hidden / 3 + 1;
    c->row_bytes = c->hidden * oracle_type_bytes(c->type);
}

/* Returns the largest number of tokens that uses low-latency kernels in such a context. */
static int32_t lowlat_tokens_in(int64_t max_tokens)
{
    return max_tokens < MOST_CASE_TOKENS ? TEAM_LOWLAT_TOKENS : P2P_LOWLAT_TOKENS;
}

/* Gives one rank more tokens than the low-latency kernels support, and the others few. */
static void mix_small_and_large(test_case *c, int64_t max_tokens)
{
    uint64_t state = case_hash(c->seed, 44, 0, 0), *s = &state;
    epic_layer *l = &c->r.layer;
    const int n = c->r.num_ranks;
    const int32_t few = lowlat_tokens_in(max_tokens);
    if (n == 1 || max_tokens <= few || draw_between(s, 0, 5)) return;
    const uint32_t block = (uint32_t)draw_between(s, 1, 8);
    l->num_experts = (uint32_t)n * block;
    l->top_k = top_k_of((uint32_t)draw_between(s, 1, 8));
    l->layout = EPIC_EXPERT_MAJOR;
    l->sum_order = EPIC_BY_RANK;
    l->leaves = (uint32_t)n;
    c->r.table = false;
    free(c->r.owner);
    c->r.owner = malloc(l->num_experts * sizeof *c->r.owner);
    for (uint32_t e = 0; e < l->num_experts; e++) c->r.owner[e] = (int32_t)(e / block);
    const int many = (int)draw_between(s, 0, n - 1);
    for (int q = 0; q < n; q++)
        c->r.tokens_of[q] =
            (int32_t)(q == many ? draw_between(s, few + 1, max_tokens)
                                : draw_between(s, 0, draw_between(s, 0, 1) ? few : 3));
}

void draw_case(test_case *c, uint64_t seed, int num_ranks, int64_t max_tokens,
               int64_t max_row_bytes, case_kind kind)
{
    uint64_t state = seed * 1000003, *s = &state;
    static const uint32_t types[] = {EPIC_BF16, EPIC_F16, EPIC_F32};
    memset(c, 0, sizeof *c);
    c->seed = seed;
    c->r.num_ranks = num_ranks;
    c->type = types[draw_between(s, 0, 2)];
    c->hard = draw_between(s, 0, 1);
    c->weighted = draw_between(s, 0, 2) > 0;
    c->fused = draw_between(s, 0, 1);
    c->wide = draw_between(s, 0, 3) == 0;
    c->zero_tail = draw_between(s, 0, 4) == 0;
    c->leave_padding = case_hash(seed, 40, 0, 0) % 4 == 0;
    c->sample = 1;
    draw_layer(c, s, max_tokens, kind);
    const int64_t limit =
        4096 / c->r.layer.top_k < max_tokens ? 4096 / c->r.layer.top_k : max_tokens;
    const int64_t most =
        draw_between(s, 0, 3) ? draw_between(s, 0, limit / 6) : draw_between(s, 0, limit);
    for (int q = 0; q < num_ranks; q++) {
        c->r.tokens_of[q] = (int32_t)draw_between(s, 0, most);
        if (draw_between(s, 0, 5) == 0) c->r.tokens_of[q] = 0;
    }
    if (kind != CASE_FLAT_DROPS) mix_small_and_large(c, max_tokens);
    static const int64_t hiddens[] = {1, 7, 8, 64, 100, 128, 256, 520, 512, 1024, 1032, 1792};
    c->hidden = hiddens[draw_between(s, 0, 11)];
    if (c->hidden * oracle_type_bytes(c->type) > max_row_bytes)
        c->hidden = max_row_bytes / oracle_type_bytes(c->type);
    c->row_bytes = c->hidden * oracle_type_bytes(c->type);
    if (draw_between(s, 0, 4) == 0) c->offset = (int)oracle_type_bytes(c->type);
    draw_ids(c, s);
    draw_replicas(c);
    draw_absent(c);
    draw_capacity(c, s, kind);
    narrow_rows(c);
    const bool no_strings = HOSTS && c->plain; /* backend hosts has no such kernel */
    choose_scales(c, no_strings ? 3 : case_hash(seed, 41, 0, 0), max_row_bytes);
    if (c->scale_bytes > max_row_bytes) c->scale_bytes = max_row_bytes;
}

/* ------------------------------------------------------------------------------- forms ---- */

/* rows at any address, aligned to 16 bytes, or consisting of whole pieces */
enum { ANYWHERE, ALIGNED, WHOLE };
/* second rows: none, those of the caller, or scales of quantized rows */
enum { ALONE, JOINED, QUANTIZED };
/* sum order and layout; with SUM_LEAVES each rank has several leaves of the tree */
enum { SUM_BY_RANK, SUM_FLAT, SUM_TREE, SUM_LEAVES };

/* Rank 0 has more tokens than the low-latency kernels support, if the context allows it. Other
 * ranks have the same number or few tokens. */
static int32_t form_tokens(uint64_t *s, int rank, int64_t max_tokens)
{
    if (max_tokens > TEAM_LOWLAT_TOKENS && (rank == 0 || draw_between(s, 0, 1)))
        return TEAM_LOWLAT_TOKENS + (int32_t)draw_between(s, 1, 12);
    return (int32_t)(draw_between(s, 0, 9) ? draw_between(s, 0, 12)
                                           : TEAM_LOWLAT_TOKENS * 3 / 4 + 1);
}

static void form_layer(test_case *c, uint64_t *s, int sums)
{
    static const uint32_t blocks[] = {1, 2, 4, 8, 16};
    routing *r = &c->r;
    epic_layer *l = &r->layer;
    const uint32_t n = (uint32_t)r->num_ranks, block = blocks[draw_between(s, 0, 4)];
    l->num_experts = n * block;
    l->top_k = top_k_of((uint32_t)draw_between(s, 1, 3));
    l->alignment = sums == SUM_FLAT ? 1 : 1u << draw_between(s, 0, 4);
    l->layout = sums == SUM_FLAT ? EPIC_FLAT : EPIC_EXPERT_MAJOR;
    l->sum_order = sums >= SUM_TREE && (n & (n - 1)) == 0 ? EPIC_TREE : EPIC_BY_RANK;
    l->leaves = n;
    if (sums == SUM_LEAVES && l->sum_order == EPIC_TREE) {
        l->leaves = n << draw_between(s, 1, 3);
        if (l->num_experts < l->leaves) l->num_experts = l->leaves;
        l->top_k = top_k_of((uint32_t)draw_between(s, 2, 8));
    }
    r->owner = malloc(l->num_experts * sizeof *r->owner);
    for (uint32_t e = 0; e < l->num_experts; e++)
        r->owner[e] = (int32_t)(e / (l->num_experts / n));
}

static void form_rows(test_case *c, uint64_t *s, int rows, int scales)
{
    static const int64_t hiddens[] = {100, 520, 1024}, bytes[] = {17, 20, 224};
    c->hidden = hiddens[rows] / (rows == WHOLE && c->type == EPIC_F32 ? 2 : 1);
    c->row_bytes = c->hidden * oracle_type_bytes(c->type);
    if (rows == ANYWHERE) c->offset = (int)oracle_type_bytes(c->type);
    if (scales == QUANTIZED)
        c->quantize = draw_between(s, 0, 1) ? EPIC_QUANTIZE_1X128 : EPIC_QUANTIZE_1X32;
    c->recv_bytes = c->quantize ? c->hidden : c->row_bytes;
    c->scale_bytes = scales == ALONE                      ? 0
                     : scales == JOINED                   ? bytes[rows]
                     : c->quantize == EPIC_QUANTIZE_1X128 ? (c->hidden + 127) / 128 * 4
                                                          : (c->hidden + 31) / 32;
}

void draw_form(test_case *c, uint64_t seed, int form, int num_ranks, int64_t max_tokens)
{
    static const uint32_t types[] = {EPIC_BF16, EPIC_F16, EPIC_F32};
    uint64_t state = seed * 1000003, *s = &state;
    const int rows = form % 3, type = form / 3 % 3, sums = form / 9 % 4;
    memset(c, 0, sizeof *c);
    c->seed = seed;
    c->r.num_ranks = num_ranks;
    c->type = types[type];
    c->fused = true; /* this call makes a plan and uses it */
    c->sample = 1;
    c->hard = draw_between(s, 0, 1);
    c->weighted = draw_between(s, 0, 3) > 0;
    c->wide = draw_between(s, 0, 3) == 0;
    c->zero_tail = draw_between(s, 0, 3) == 0;
    c->leave_padding = draw_between(s, 0, 3) == 0;
    form_layer(c, s, sums);
    for (int q = 0; q < num_ranks; q++) c->r.tokens_of[q] = form_tokens(s, q, max_tokens);
    form_rows(c, s, rows, (rows + type + 2 * sums) % 3);
    draw_ids(c, s);
    solve_routing(&c->r);
    for (int q = 0; q < num_ranks; q++) {
        c->r.capacity_of[q] = (int32_t)(c->r.plan->num_slots[q] + draw_between(s, 0, 9));
        c->recv_rows[q] = c->r.plan->num_slots[q] + draw_between(s, 0, 9);
    }
}

/* Draws a case of full size, like those of the benchmark. */
void draw_big(test_case *c, uint64_t seed, int num_ranks, int64_t max_tokens)
{
    uint64_t state = seed * 1000003, *s = &state;
    memset(c, 0, sizeof *c);
    c->seed = seed;
    c->r.num_ranks = num_ranks;
    c->type = EPIC_BF16;
    c->hidden = 7168;
    c->row_bytes = c->hidden * 2;
    c->weighted = c->fused = true;
    c->sample = 97;
    c->hard = seed % 2;
    epic_layer *l = &c->r.layer;
    l->num_experts = 256;
    l->top_k = 8;
    l->alignment = 128;
    l->leaves = (uint32_t)num_ranks;
    l->sum_order =
        seed / 2 % 2 && (num_ranks & (num_ranks - 1)) == 0 ? EPIC_TREE : EPIC_BY_RANK;
    c->r.owner = malloc(256 * sizeof *c->r.owner);
    for (int e = 0; e < 256; e++) c->r.owner[e] = e / (256 / num_ranks);
    for (int q = 0; q < num_ranks; q++) c->r.tokens_of[q] = (int32_t)max_tokens;
    for (int q = 0; q < num_ranks; q++) {
        c->r.ids[q] = malloc((size_t)max_tokens * 8 * sizeof **c->r.ids);
        for (int64_t t = 0; t < max_tokens; t++)
            for (int k = 0; k < 8; k++) {
                int64_t e;
                bool again;
                do {
                    e = draw_between(s, 0, 255);
                    again = false;
                    for (int j = 0; j < k; j++) again |= c->r.ids[q][t * 8 + j] == e;
                } while (again);
                c->r.ids[q][t * 8 + k] = e;
            }
    }
    solve_routing(&c->r);
    for (int q = 0; q < num_ranks; q++)
        c->recv_rows[q] = c->r.capacity_of[q] = c->r.plan->num_slots[q] + 3;
    choose_scales(c,
                  seed % 3 == 0   ? 3
                  : seed % 3 == 1 ? 18
                                  : 0,
                  0); /* no second rows, 224 bytes, or 1x128 */
}
