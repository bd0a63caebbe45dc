/* SPDX-License-Identifier: Apache-2.0 */
/* Random cases and their truth. */
#include "case.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

#define GARBAGE 0xa5

/* ------------------------------------------------------------------------ random data ---- */

static uint64_t hash(uint64_t a, uint64_t b, uint64_t c, uint64_t d)
{
    uint64_t x = a * 0x9e3779b97f4a7c15ull ^ b * 0xbf58476d1ce4e5b9ull ^
                 c * 0x94d049bb133111ebull ^ d * 0xd6e8feb86659fd93ull;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9ull;
    return x ^ x >> 32;
}

uint64_t draw(uint64_t *state)
{
    return hash(++*state, 1, 2, 3);
}

int64_t between(uint64_t *state, int64_t low, int64_t high)
{
    return low + (int64_t)(draw(state) % (uint64_t)(high - low + 1));
}

/* A number of so many bits that sums round, sometimes one that hurts. */
static float number(uint64_t h, bool hard, uint32_t type)
{
    const float x = (float)((int64_t)(h % (2 << 24)) - (1 << 24)) / (float)(1 << 22);
    if (!hard) return x;
    switch (h >> 40 & 31) {
    case 0:
        return -0.0f;
    case 1:
        return NAN;
    case 2:
        return type == EPIC_F16 ? 6e-8f : 1e-39f;
    case 3:
        return INFINITY;
    case 4:
        return type == EPIC_F16 ? 60000.0f : 3e38f;
    case 5:
        return 0.0f;
    default:
        return x;
    }
}

/* -------------------------------------------------------------------------------- cases ---- */

static void draw_ids(test_case *c, uint64_t *s)
{
    routing *r = &c->r;
    const int64_t experts = r->layer.num_experts, k = r->layer.top_k;
    const int skew = (int)between(s, 0, 3);
    for (int q = 0; q < r->num_ranks; q++) {
        r->ids[q] = malloc((size_t)(r->tokens_of[q] * k + 1) * sizeof **r->ids);
        for (int64_t i = 0; i < r->tokens_of[q] * k; i++) {
            int64_t e = between(s, 0, experts - 1);
            if (skew == 1 && between(s, 0, 9) < 8) e %= experts < 4 ? experts : 4;
            if (skew == 2) e = e * e / experts;
            if (between(s, 0, 9) == 0) e = -1 - between(s, 0, 5);
            r->ids[q][i] = e;
        }
        /* most tokens choose distinct experts, as routers do */
        for (int64_t t = 0; t < r->tokens_of[q] && skew == 3; t++)
            for (int64_t j = 0; j < k; j++)
                r->ids[q][t * k + j] = (r->ids[q][t * k] + experts + j * 7 % experts) % experts;
    }
}

static void draw_layer(test_case *c, uint64_t *s)
{
    routing *r = &c->r;
    epic_layer *l = &r->layer;
    static const uint32_t ks[] = {1, 2, 3, 4, 6, 8, 8, 8, 8, 13, 16, 31, 32, 33, 40, 64};
    static const uint32_t blocks[] = {1, 2, 3, 4, 8, 8, 16, 64, 5, 128};
    const int n = r->num_ranks;
    l->num_experts = (uint32_t)n * blocks[between(s, 0, 9)];
    if (between(s, 0, 29) == 0) l->num_experts = (uint32_t)n * (4096u / (uint32_t)n);
    l->top_k = ks[between(s, 0, 15)];
    l->alignment = between(s, 0, 2) ? 1u << between(s, 0, 7) : (uint32_t)between(s, 1, 20);
    if (between(s, 0, 3) == 0) l->partial_type = EPIC_F32;
    const bool power = (n & (n - 1)) == 0 && (l->num_experts & (l->num_experts - 1)) == 0;
    l->leaves = (uint32_t)n;
    if (power && between(s, 0, 1)) {
        l->sum_order = EPIC_TREE;
        while (l->leaves < l->num_experts && l->leaves < 128u * (unsigned)n && between(s, 0, 1))
            l->leaves *= 2;
    }
    r->owner = malloc(l->num_experts * sizeof *r->owner);
    const uint32_t block = l->num_experts / (uint32_t)n;
    const int turn = (int)between(s, 0, n - 1);
    r->table = between(s, 0, 3) == 0;
    for (uint32_t e = 0; e < l->num_experts; e++) {
        r->owner[e] = (int32_t)(e / block);
        if (r->table && l->sum_order == EPIC_TREE)
            r->owner[e] = (r->owner[e] + turn) % n;
        else if (r->table)
            r->owner[e] = (int32_t)between(s, 0, n - 1);
    }
}

static void draw_capacity(test_case *c, uint64_t *s)
{
    routing *r = &c->r;
    const int kind = (int)between(s, 0, 9);
    solve_routing(r);
    for (int q = 0; q < r->num_ranks; q++) {
        const int64_t need = r->slots_of[q];
        r->capacity_of[q] = kind == 0 ? 0 : need + between(s, 1, 40);
        c->recv_rows[q] = need + between(s, 0, 1) * between(s, 0, 50);
        free(r->slot[q]);
        free(r->rank[q]);
    }
    free(r->load);
    free(r->kept);
    free(r->begin);
    if (kind == 1 || kind == 2 || kind == 3) {
        r->layer.overflow = EPIC_OVERFLOW_DROP;
        if (between(s, 0, 1)) r->layer.expert_capacity = (uint32_t)between(s, 1, 30);
        for (int q = 0; q < r->num_ranks; q++)
            if (between(s, 0, 1)) r->capacity_of[q] = 1 + r->capacity_of[q] / 2;
    } else if (kind == 4 && between(s, 0, 2) == 0) { /* one rank has too little */
        r->capacity_of[between(s, 0, r->num_ranks - 1)] = 1;
    } else if (kind == 5 && between(s, 0, 2) == 0) { /* an id that is none */
        const int q = (int)between(s, 0, r->num_ranks - 1);
        if (r->tokens_of[q]) r->ids[q][0] = r->layer.num_experts + between(s, 0, 3);
    }
    solve_routing(r);
}

/* Narrower rows where there are many, so that cases stay short. */
static void shrink(test_case *c)
{
    int64_t slots = 1;
    for (int q = 0; q < c->r.num_ranks; q++)
        if (c->recv_rows[q] > slots) slots = c->recv_rows[q];
    while (c->hidden > 8 && slots * c->hidden > 1500000) c->hidden = c->hidden / 3 + 1;
    c->row_bytes = c->hidden * type_bytes(c->type);
}

void draw_case(test_case *c, uint64_t seed, int num_ranks, int64_t max_tokens,
               int64_t max_row_bytes)
{
    uint64_t state = seed * 1000003, *s = &state;
    static const uint32_t types[] = {EPIC_BF16, EPIC_F16, EPIC_F32};
    memset(c, 0, sizeof *c);
    c->seed = seed;
    c->r.num_ranks = num_ranks;
    c->type = types[between(s, 0, 2)];
    c->hard = between(s, 0, 1);
    c->weighted = between(s, 0, 2) > 0;
    c->fused = between(s, 0, 1);
    c->wide = between(s, 0, 3) == 0;
    c->zero_tail = between(s, 0, 4) == 0;
    c->sample = 1;
    draw_layer(c, s);
    const int64_t limit =
        4096 / c->r.layer.top_k < max_tokens ? 4096 / c->r.layer.top_k : max_tokens;
    const int64_t most = between(s, 0, 3) ? between(s, 0, limit / 6) : between(s, 0, limit);
    for (int q = 0; q < num_ranks; q++) {
        c->r.tokens_of[q] = (int32_t)between(s, 0, most);
        if (between(s, 0, 5) == 0) c->r.tokens_of[q] = 0;
    }
    static const int64_t hiddens[] = {1, 7, 8, 64, 100, 128, 256, 520, 512, 1024, 1032, 1792};
    c->hidden = hiddens[between(s, 0, 11)];
    if (c->hidden * type_bytes(c->type) > max_row_bytes)
        c->hidden = max_row_bytes / type_bytes(c->type);
    c->row_bytes = c->hidden * type_bytes(c->type);
    if (between(s, 0, 4) == 0) c->offset = type_bytes(c->type);
    draw_ids(c, s);
    draw_capacity(c, s);
    shrink(c);
}

/* Full size: what the benchmark runs. */
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
                    e = between(s, 0, 255);
                    again = false;
                    for (int j = 0; j < k; j++) again |= c->r.ids[q][t * 8 + j] == e;
                } while (again);
                c->r.ids[q][t * 8 + k] = e;
            }
    }
    solve_routing(&c->r);
    for (int q = 0; q < num_ranks; q++)
        c->recv_rows[q] = c->r.capacity_of[q] = c->r.slots_of[q] + 3;
}

/* What every rank can compute of every other. */
static void token_row(const test_case *c, int rank, int64_t token, uint8_t *row)
{
    const uint64_t kind = hash(c->seed, 50, (uint64_t)rank, (uint64_t)token) % 6;
    if (c->hard && kind == 0) {
        memset(row, 0xff, (size_t)c->row_bytes);
        return;
    }
    for (int64_t i = 0; i < c->row_bytes; i += 8) {
        uint64_t word = hash(c->seed, 51 + (uint64_t)rank, (uint64_t)token, (uint64_t)i);
        if (c->hard && kind < 3 && word % 16 == 0)
            word = word & 256 ? 0x7fff7fffffffffffull : 0xffffffff7fffffffull;
        memcpy(row + i, &word, (size_t)(c->row_bytes - i < 8 ? c->row_bytes - i : 8));
    }
}

static float choice_weight(const test_case *c, int rank, int64_t choice)
{
    const uint64_t h = hash(c->seed, 60, (uint64_t)rank, (uint64_t)choice);
    float x = (float)(h % 1000) / 333.0f - 1.0f;
    const uint32_t nan = 0xffffffffu;
    if (c->hard && h >> 32 & 15) return x;
    if (c->hard) memcpy(&x, &nan, 4);
    return x;
}

static float slot_weight(const test_case *c, int rank, int64_t slot)
{
    const uint64_t h = hash(c->seed, 61, (uint64_t)rank, (uint64_t)slot);
    if (c->hard && (h >> 32) % 16 == 0) return -0.0f;
    return (float)(h % 1000) / 333.0f - 1.0f;
}

static float slot_element(const test_case *c, int rank, int64_t slot, int64_t i)
{
    const uint64_t h = hash(c->seed, 70 + (uint64_t)rank, (uint64_t)slot, (uint64_t)i);
    return round_to(number(h, c->hard, c->type), c->type);
}

static float token_element(const test_case *c, int rank, int64_t token, int64_t i)
{
    const uint64_t h = hash(c->seed, 80 + (uint64_t)rank, (uint64_t)token, (uint64_t)i);
    return round_to(number(h, c->hard, c->type), c->type);
}

/* --------------------------------------------------------------------------- one rank ---- */

static void *take(bench *b, size_t bytes, int offset)
{
    const size_t at = (b->used + 255) / 256 * 256;
    b->used = at + bytes + 256;
    if (b->used > b->arena_bytes) {
        fprintf(stderr, "arena too small\n");
        exit(1);
    }
    CHECK_CUDA(cudaMemsetAsync(b->arena + at, GARBAGE, bytes + 256, b->me->stream));
    return b->arena + at + offset;
}

static void *upload(bench *b, const void *from, size_t bytes, int offset)
{
    void *to = take(b, bytes, offset);
    CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, b->me->stream));
    CHECK_CUDA(cudaStreamSynchronize(b->me->stream));
    return to;
}

static void *download(bench *b, const void *from, size_t bytes)
{
    void *to = malloc(bytes + 1);
    /* a copy that waits for a kernel would keep the other threads from launching theirs */
    CHECK_CUDA(cudaStreamSynchronize(b->me->stream));
    CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, b->me->stream));
    CHECK_CUDA(cudaStreamSynchronize(b->me->stream));
    return to;
}

void wrong(bench *b, const char *format, ...)
{
    char text[256];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    const epic_layer *l = &b->c.r.layer;
    if (b->wrong++ < 3)
        fprintf(
            stderr,
            "seed %llu rank %d of %d: %s (T %d E %u k %u align %u type %u hidden %lld off %d "
            "hard %d weighted %d fused %d table %d drop %u tree %u leaves %u part %u result "
            "%d)\n",
            (unsigned long long)b->c.seed, b->me->rank, b->me->num_ranks, text,
            b->c.r.tokens_of[b->me->rank], l->num_experts, l->top_k, l->alignment, b->c.type,
            (long long)b->c.hidden, b->c.offset, b->c.hard, b->c.weighted, b->c.fused,
            b->c.r.table, l->overflow, l->sum_order, l->leaves, l->partial_type, b->c.r.result);
}

static bool must(bench *b, epic_result result, const char *what)
{
    if (result == EPIC_OK) return true;
    wrong(b, "%s: %s", what, epic_error(NULL));
    return false;
}

static bool same_float(float a, float b)
{
    return (isnan(a) && isnan(b)) || !memcmp(&a, &b, 4);
}

void make_inputs(bench *b, arrays *a)
{
    const test_case *c = &b->c;
    const routing *r = &c->r;
    const int me = b->me->rank;
    const int64_t tokens = r->tokens_of[me], choices = tokens * r->layer.top_k;
    int32_t *narrow = malloc((size_t)choices * 4 + 4);
    float *weights = malloc((size_t)choices * 4 + 4);
    uint8_t *rows = malloc((size_t)(tokens * c->row_bytes) + 8);
    for (int64_t i = 0; i < choices; i++) {
        narrow[i] = (int32_t)r->ids[me][i];
        weights[i] = choice_weight(c, me, i);
    }
#pragma omp parallel for
    for (int64_t t = 0; t < tokens; t++) token_row(c, me, t, rows + t * c->row_bytes);
    const size_t experts = r->layer.num_experts * sizeof(int32_t);
    a->plan_bytes = device_plan_bytes(r->num_ranks, b->me->group->config.max_tokens,
                                      r->layer.num_experts, r->layer.top_k);
    a->plan = take(b, a->plan_bytes, 0);
    a->ids = c->wide ? upload(b, r->ids[me], (size_t)choices * 8, 0)
                     : upload(b, narrow, (size_t)choices * 4, 0);
    a->table = r->table ? upload(b, r->owner, experts, 0) : NULL;
    a->expert_rows = take(b, experts, 0);
    a->expert_tokens = take(b, experts, 0);
    a->load = take(b, experts, 0);
    a->demand = take(b, 4, 0);
    a->tokens = upload(b, rows, (size_t)(tokens * c->row_bytes), c->offset);
    a->weights = upload(b, weights, (size_t)choices * 4, 0);
    a->recv = take(b, (size_t)(c->recv_rows[me] * c->row_bytes), c->offset);
    a->slot_weights = take(b, (size_t)c->recv_rows[me] * 4, 0);
    free(narrow);
    free(weights);
    free(rows);
}

static epic_plan_args plan_args(bench *b, const arrays *a)
{
    const routing *r = &b->c.r;
    return (epic_plan_args){.call = b->call,
                            .layer = &r->layer,
                            .plan = a->plan,
                            .plan_bytes = a->plan_bytes,
                            .topk_idx = a->ids,
                            .num_tokens = r->tokens_of[b->me->rank],
                            .rank_of_expert = a->table,
                            .capacity = r->capacity_of[b->me->rank],
                            .index_type = b->c.wide ? EPIC_I64 : EPIC_I32,
                            .expert_rows = a->expert_rows,
                            .expert_tokens = a->expert_tokens,
                            .load = a->load,
                            .demand = a->demand};
}

static epic_dispatch_args dispatch_args(bench *b, const arrays *a)
{
    const test_case *c = &b->c;
    const int me = b->me->rank;
    return (epic_dispatch_args){.call = b->call,
                                .plan = a->plan,
                                .plan_bytes = a->plan_bytes,
                                .tokens = {a->tokens, c->r.tokens_of[me], c->row_bytes},
                                .recv = {a->recv, c->recv_rows[me], c->row_bytes},
                                .weights = c->weighted ? a->weights : NULL,
                                .slot_weights = c->weighted ? a->slot_weights : NULL,
                                .flags = c->zero_tail ? EPIC_ZERO_TAIL : 0};
}

void check_plan(bench *b, const arrays *a)
{
    const routing *r = &b->c.r;
    const int me = b->me->rank;
    const size_t experts = r->layer.num_experts;
    const int64_t choices = (int64_t)r->tokens_of[me] * r->layer.top_k;
    int32_t *load = download(b, a->load, experts * 4), *demand = download(b, a->demand, 4);
    int32_t *rows = download(b, a->expert_rows, experts * 4);
    int32_t *kept = download(b, a->expert_tokens, experts * 4);
    uint8_t *plan = download(b, a->plan, a->plan_bytes);
    const device_plan_header *h = (const device_plan_header *)plan;
    const device_plan_layout at = device_plan_layout_of(
        r->num_ranks, b->me->group->config.max_tokens, (int64_t)experts, r->layer.top_k);
    if ((int32_t)h->result != r->result) wrong(b, "plan: result is %u", h->result);
    if (memcmp(load, r->load, experts * 4)) wrong(b, "plan: load");
    if (*demand != r->demand_of[me]) wrong(b, "plan: demand is %d", *demand);
    int local = 0;
    for (size_t e = 0; e < experts; e++) {
        if (r->owner[e] != me) continue;
        const int32_t want = r->result ? 0 : r->kept[e];
        const uint32_t align = r->layer.alignment;
        if (kept[local] != want) wrong(b, "plan: expert_tokens of %zu is %d", e, kept[local]);
        if (rows[local] != (int32_t)((uint32_t)(want + (int)align - 1) / align * align))
            wrong(b, "plan: expert_rows of %zu is %d", e, rows[local]);
        local++;
    }
    if (r->result == EPIC_OK) {
        if (h->slots_of[me] != r->slots_of[me]) wrong(b, "plan: %d slots", h->slots_of[me]);
        if (memcmp(plan + at.fate, r->slot[me], (size_t)choices * 4)) wrong(b, "plan: fate");
        if (memcmp(plan + at.rank_of, r->rank[me], (size_t)choices * 4)) wrong(b, "plan: rank");
    }
    free(load);
    free(demand);
    free(rows);
    free(kept);
    free(plan);
}

/* Rows and weights that this rank's slots should hold; pads and tails as they should be. */
static void expect_slots(bench *b, uint8_t *rows, float *weights, bool moves)
{
    const test_case *c = &b->c;
    const routing *r = &c->r;
    const int me = b->me->rank;
    const int64_t have = c->recv_rows[me], slots = moves ? r->slots_of[me] : have;
    memset(rows, GARBAGE, (size_t)(have * c->row_bytes));
    memset(weights, GARBAGE, (size_t)have * 4);
    const int64_t zeros = c->zero_tail ? have : slots;
    memset(rows, 0, (size_t)(zeros * c->row_bytes));
    memset(weights, 0, (size_t)zeros * 4);
    for (int q = 0; q < r->num_ranks && moves; q++)
#pragma omp parallel for
        for (int64_t i = 0; i < (int64_t)r->tokens_of[q] * r->layer.top_k; i++) {
            if (r->rank[q][i] != me) continue;
            token_row(c, q, i / r->layer.top_k, rows + r->slot[q][i] * c->row_bytes);
            weights[r->slot[q][i]] = choice_weight(c, q, i);
        }
}

bool case_moves(const test_case *c)
{
    bool fits = c->r.result == EPIC_OK;
    for (int q = 0; q < c->r.num_ranks; q++) fits &= c->r.slots_of[q] <= c->recv_rows[q];
    return fits;
}

void check_dispatch(bench *b, const arrays *a, const char *what)
{
    const test_case *c = &b->c;
    const int me = b->me->rank;
    const size_t bytes = (size_t)(c->recv_rows[me] * c->row_bytes);
    uint8_t *want = malloc(bytes + 8), *got = download(b, a->recv, bytes);
    float *weights = malloc((size_t)c->recv_rows[me] * 4 + 4);
    float *weights_got = download(b, a->slot_weights, (size_t)c->recv_rows[me] * 4);
    expect_slots(b, want, weights, case_moves(c));
    if (memcmp(want, got, bytes)) {
        size_t i = 0;
        while (want[i] == got[i]) i++;
        wrong(b, "%s: slot %zu byte %zu is %02x, not %02x (%lld slots)", what,
              i / (size_t)c->row_bytes, i % (size_t)c->row_bytes, got[i], want[i],
              (long long)c->r.slots_of[me]);
    }
    for (int64_t i = 0; i < c->recv_rows[me] && c->weighted; i++)
        if (!same_float(weights[i], weights_got[i])) {
            wrong(b, "%s: weight of slot %lld is %g, not %g", what, (long long)i,
                  weights_got[i], weights[i]);
            break;
        }
    free(want);
    free(got);
    free(weights);
    free(weights_got);
}

static float element_of(const void *self, int rank, int64_t slot, int64_t i)
{
    return slot_element(self, rank, slot, i);
}

static float weight_of(const void *self, int rank, int64_t slot)
{
    return slot_weight(self, rank, slot);
}

static float one(const void *self, int rank, int64_t slot)
{
    (void)self;
    (void)rank;
    (void)slot;
    return 1.0f;
}

/* A caller's NaN is all ones: what staging holds while nobody has written there. */
static void put_input(uint8_t *row, int64_t i, uint32_t type, float x)
{
    const size_t bytes = (size_t)type_bytes(type);
    if (isnan(x))
        memset(row + (size_t)i * bytes, 0xff, bytes);
    else
        put_element(row, i, type, x);
}

void make_sums(bench *b, sums *s)
{
    const test_case *c = &b->c;
    const int me = b->me->rank;
    const int64_t slots = c->recv_rows[me], tokens = c->r.tokens_of[me];
    uint8_t *rows = malloc((size_t)(slots * c->row_bytes) + 8);
    float *weights = malloc((size_t)slots * 4 + 4), *floats = malloc((size_t)slots * 4 + 4);
#pragma omp parallel for
    for (int64_t i = 0; i < slots; i++) {
        for (int64_t j = 0; j < c->hidden; j++)
            put_input(rows + i * c->row_bytes, j, c->type, slot_element(c, me, i, j));
        weights[i] = slot_weight(c, me, i);
        floats[i] = choice_weight(c, me, i + 1000000);
    }
    s->num_rows = slots;
    s->rows = upload(b, rows, (size_t)(slots * c->row_bytes), c->offset);
    s->weights = upload(b, weights, (size_t)slots * 4, 0);
    s->floats = upload(b, floats, (size_t)slots * 4, 0);
    s->out = take(b, (size_t)(tokens * c->row_bytes), c->offset);
    s->d_tokens = take(b, (size_t)(tokens * c->row_bytes), c->offset);
    s->d_rows = take(b, (size_t)(slots * c->row_bytes), c->offset);
    s->d_weights = take(b, (size_t)slots * 4, 0);
    s->choice_floats = take(b, (size_t)tokens * c->r.layer.top_k * 4, 0);
    free(rows);
    free(weights);
    free(floats);
    rows = malloc((size_t)(tokens * c->row_bytes) + 8);
#pragma omp parallel for
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < c->hidden; i++)
            put_input(rows + t * c->row_bytes, i, c->type, token_element(c, me, t, i));
    s->d_out = upload(b, rows, (size_t)(tokens * c->row_bytes), c->offset);
    free(rows);
}

static void check_rows(bench *b, const void *out, bool weighted, const char *what)
{
    const test_case *c = &b->c;
    const int me = b->me->rank;
    const int64_t tokens = c->r.tokens_of[me];
    const expert_rows rows = {element_of, weighted ? weight_of : one, c};
    uint8_t *got = download(b, out, (size_t)(tokens * c->row_bytes));
    for (int64_t t = 0; t < tokens; t += c->sample)
        for (int64_t i = 0; i < c->hidden; i++) {
            const float want =
                c->r.result
                    ? 0.0f
                    : round_to(combined(&c->r, me, (int32_t)t, i, c->type, &rows), c->type);
            const float x = get_element(got + t * c->row_bytes, i, c->type);
            if (same_float(x, want)) continue;
            wrong(b, "%s: token %lld element %lld is %.9g, not %.9g", what, (long long)t,
                  (long long)i, x, want);
            t = tokens;
            break;
        }
    free(got);
}

static void check_choice_floats(bench *b, const sums *s)
{
    const test_case *c = &b->c;
    const int me = b->me->rank;
    const int64_t choices = (int64_t)c->r.tokens_of[me] * c->r.layer.top_k;
    float *got = download(b, s->choice_floats, (size_t)choices * 4);
    for (int64_t i = 0; i < choices; i++) {
        const int owner = c->r.rank[me][i];
        const float want =
            owner < 0 ? 0.0f : choice_weight(c, owner, c->r.slot[me][i] + 1000000);
        if (same_float(got[i], want)) continue;
        wrong(b, "dispatch_backward: weight of choice %lld is %g, not %g", (long long)i, got[i],
              want);
        break;
    }
    free(got);
}

/* The gradient of one slot. */
static void check_gradient(bench *b, const uint8_t *rows, const float *dots, int q,
                           int64_t choice)
{
    const test_case *c = &b->c;
    const int me = b->me->rank;
    const int64_t slot = c->r.slot[q][choice], t = choice / c->r.layer.top_k;
    const float w = c->weighted ? slot_weight(c, me, slot) : 1.0f;
    float *x = malloc((size_t)c->hidden * 4), *y = malloc((size_t)c->hidden * 4);
    for (int64_t i = 0; i < c->hidden; i++) {
        x[i] = token_element(c, q, t, i);
        y[i] = slot_element(c, me, slot, i);
        const float want = round_to(w * x[i], c->type);
        const float got = get_element(rows + slot * c->row_bytes, i, c->type);
        if (same_float(got, want)) continue;
        wrong(b, "combine_backward: slot %lld element %lld is %.9g, not %.9g", (long long)slot,
              (long long)i, got, want);
        break;
    }
    const float want = dot_in_order(x, y, c->hidden);
    if (!same_float(want, dots[slot]))
        wrong(b, "combine_backward: dot of slot %lld is %.9g, not %.9g", (long long)slot,
              dots[slot], want);
    free(x);
    free(y);
}

static void check_gradients(bench *b, const sums *s)
{
    const test_case *c = &b->c;
    const routing *r = &c->r;
    const int me = b->me->rank;
    const int64_t have = c->recv_rows[me];
    uint8_t *rows = download(b, s->d_rows, (size_t)(have * c->row_bytes));
    float *dots = download(b, s->d_weights, (size_t)have * 4);
    char *used = calloc((size_t)have + 1, 1);
    const int before = b->wrong;
    for (int q = 0; q < r->num_ranks && !r->result; q++)
        for (int64_t i = 0; i < (int64_t)r->tokens_of[q] * r->layer.top_k; i++) {
            if (r->rank[q][i] != me || b->wrong != before) continue;
            used[r->slot[q][i]] = 1;
            if (i / r->layer.top_k % c->sample == 0) check_gradient(b, rows, dots, q, i);
        }
    const int64_t slots = r->result ? have : r->slots_of[me];
    for (int64_t i = 0; i < slots; i++)
        for (int64_t j = 0; j < c->row_bytes && !used[i]; j++)
            if (rows[i * c->row_bytes + j] || dots[i] != 0.0f) {
                wrong(b, "combine_backward: padding slot %lld is not zero", (long long)i);
                i = slots;
                break;
            }
    free(rows);
    free(dots);
    free(used);
}

bool call_plan(bench *b, const arrays *a)
{
    const epic_plan_args args = plan_args(b, a);
    return must(b, p2p_steps.plan(b->me->group, &args), "plan");
}

bool call_dispatch(bench *b, const arrays *a)
{
    const epic_dispatch_args args = dispatch_args(b, a);
    return must(b, p2p_steps.dispatch(b->me->group, &args), "dispatch");
}

bool call_plan_dispatch(bench *b, const arrays *a)
{
    const epic_plan_args plan = plan_args(b, a);
    const epic_dispatch_args dispatch = dispatch_args(b, a);
    return must(b, p2p_steps.plan_dispatch(b->me->group, &plan, &dispatch), "plan_dispatch");
}

bool call_combine(bench *b, const arrays *a, const sums *s)
{
    const test_case *c = &b->c;
    const epic_combine_args args = {.call = b->call,
                                    .plan = a->plan,
                                    .plan_bytes = a->plan_bytes,
                                    .rows = {s->rows, s->num_rows, c->row_bytes},
                                    .out = {s->out, c->r.tokens_of[b->me->rank], c->row_bytes},
                                    .slot_weights = c->weighted ? s->weights : NULL,
                                    .type = c->type};
    return must(b, p2p_steps.combine(b->me->group, &args), "combine");
}

bool call_dispatch_backward(bench *b, const arrays *a, const sums *s)
{
    const test_case *c = &b->c;
    const epic_dispatch_backward_args args = {
        .call = b->call,
        .plan = a->plan,
        .plan_bytes = a->plan_bytes,
        .d_recv = {s->rows, s->num_rows, c->row_bytes},
        .d_tokens = {s->d_tokens, c->r.tokens_of[b->me->rank], c->row_bytes},
        .d_slot_weights = s->floats,
        .d_weights = s->choice_floats,
        .type = c->type};
    return must(b, p2p_steps.dispatch_backward(b->me->group, &args), "dispatch_backward");
}

bool call_combine_backward(bench *b, const arrays *a, const sums *s)
{
    const test_case *c = &b->c;
    const epic_combine_backward_args args = {
        .call = b->call,
        .plan = a->plan,
        .plan_bytes = a->plan_bytes,
        .d_out = {s->d_out, c->r.tokens_of[b->me->rank], c->row_bytes},
        .rows = {s->rows, s->num_rows, c->row_bytes},
        .d_rows = {s->d_rows, s->num_rows, c->row_bytes},
        .slot_weights = c->weighted ? s->weights : NULL,
        .d_slot_weights = s->d_weights,
        .type = c->type};
    return must(b, p2p_steps.combine_backward(b->me->group, &args), "combine_backward");
}

void check_sums(bench *b, const sums *s)
{
    check_rows(b, s->out, b->c.weighted, "combine");
    check_rows(b, s->d_tokens, false, "dispatch_backward");
    check_choice_floats(b, s);
    check_gradients(b, s);
}

static void dirty(bench *b, void *to, int64_t bytes)
{
    CHECK_CUDA(cudaMemsetAsync(to, GARBAGE, (size_t)bytes, b->me->stream));
}

void dirty_received(bench *b, const arrays *a)
{
    const int64_t rows = b->c.recv_rows[b->me->rank];
    dirty(b, a->recv, rows * b->c.row_bytes);
    dirty(b, a->slot_weights, rows * 4);
}

void dirty_sums(bench *b, const sums *s)
{
    const int64_t tokens = b->c.r.tokens_of[b->me->rank];
    dirty(b, s->out, tokens * b->c.row_bytes);
    dirty(b, s->d_tokens, tokens * b->c.row_bytes);
    dirty(b, s->choice_floats, tokens * b->c.r.layer.top_k * 4);
    dirty(b, s->d_rows, s->num_rows * b->c.row_bytes);
    dirty(b, s->d_weights, s->num_rows * 4);
}

void test_sum(bench *b)
{
    const int n = b->me->num_ranks, me = b->me->rank;
    uint64_t s = b->c.seed * 77;
    const int64_t count = between(&s, 0, 3000);
    const bool tree = (n & (n - 1)) == 0 && between(&s, 0, 1);
    float *x = calloc((size_t)count + 1, 4);
    for (int64_t i = 0; i < count; i++)
        put_input((uint8_t *)x, i, EPIC_F32,
                  number(hash(b->c.seed, 90 + (uint64_t)me, (uint64_t)i, 0), true, EPIC_F32) *
                      1.37f);
    float *data = upload(b, x, (size_t)count * 4, 4);
    const epic_sum_args args = {.call = b->call,
                                .data = data,
                                .count = count,
                                .order = tree ? EPIC_TREE : EPIC_BY_RANK};
    if (!must(b, p2p_steps.sum(b->me->group, &args), "sum")) return;
    float *got = download(b, data, (size_t)count * 4);
    for (int64_t i = 0; i < count; i++) {
        float y[ORACLE_RANKS] = {0};
        for (int q = 0; q < n; q++)
            y[q] = number(hash(b->c.seed, 90 + (uint64_t)q, (uint64_t)i, 0), true, EPIC_F32) *
                   1.37f;
        for (int d = 1; d < n && tree; d *= 2)
            for (int q = 0; q + d < n; q += 2 * d) y[q] += y[q + d];
        for (int q = 1; q < n && !tree; q++) y[0] += y[q];
        if (same_float(got[i], y[0])) continue;
        wrong(b, "sum: element %lld is %g, not %g", (long long)i, got[i], y[0]);
        break;
    }
    free(x);
    free(got);
}
