/* SPDX-License-Identifier: Apache-2.0 */
/* What the calls of a case must have written. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "case_inner.h"

void check_plan(bench *b, const arrays *a)
{
    const routing *r = &b->c.r;
    const int me = b->me->rank;
    const size_t experts = r->layer.num_experts;
    const int64_t choices = (int64_t)r->tokens_of[me] * r->layer.top_k;
    int32_t *load = case_download(b, a->load, experts * 4),
            *demand = case_download(b, a->demand, 4);
    int32_t *rows = case_download(b, a->expert_rows, experts * 4);
    int32_t *kept = case_download(b, a->expert_tokens, experts * 4);
    uint8_t *plan = case_download(b, a->plan, a->plan_bytes);
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

static int32_t local_of(const routing *r, int32_t expert)
{
    int32_t local = 0;
    for (int32_t e = 0; e < expert; e++) local += r->owner[e] == r->owner[expert];
    return local;
}

/* Rows and weights that this rank's slots should hold; pads and tails as they should be. */
static void expect_slots(bench *b, uint8_t *rows, float *weights, int32_t *experts, bool moves)
{
    const test_case *c = &b->c;
    const routing *r = &c->r;
    const int me = b->me->rank;
    const int64_t have = c->recv_rows[me], slots = moves ? r->slots_of[me] : have;
    const int64_t each = case_each(c);
    memset(rows, CASE_GARBAGE, (size_t)(have * c->row_bytes));
    memset(weights, CASE_GARBAGE, (size_t)(have * each) * 4);
    memset(experts, CASE_GARBAGE, (size_t)(have * each) * 4);
    const int64_t zeros = c->zero_tail ? have : slots;
    memset(rows, 0, (size_t)(zeros * c->row_bytes));
    memset(weights, 0, (size_t)(zeros * each) * 4);
    memset(experts, 0xff, (size_t)(zeros * each) * 4);
    for (int q = 0; q < r->num_ranks && moves; q++)
#pragma omp parallel for
        for (int64_t i = 0; i < (int64_t)r->tokens_of[q] * r->layer.top_k; i++) {
            if (r->rank[q][i] != me) continue;
            token_row(c, q, i / r->layer.top_k, rows + r->slot[q][i] * c->row_bytes);
            weights[place_of_choice(c, q, i)] = choice_weight(c, q, i);
            experts[place_of_choice(c, q, i)] = local_of(r, (int32_t)r->ids[q][i]);
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
    uint8_t *want = malloc(bytes + 8), *got = case_download(b, a->recv, bytes);
    const int64_t floats = c->recv_rows[me] * case_each(c);
    float *weights = malloc((size_t)floats * 4 + 4);
    int32_t *experts = malloc((size_t)floats * 4 + 4);
    float *weights_got = case_download(b, a->slot_weights, (size_t)floats * 4);
    int32_t *experts_got = case_download(b, a->recv_expert, (size_t)floats * 4);
    expect_slots(b, want, weights, experts, case_moves(c));
    if (memcmp(want, got, bytes)) {
        size_t i = 0;
        while (want[i] == got[i]) i++;
        wrong(b, "%s: slot %zu byte %zu is %02x, not %02x (%lld slots)", what,
              i / (size_t)c->row_bytes, i % (size_t)c->row_bytes, got[i], want[i],
              (long long)c->r.slots_of[me]);
    }
    for (int64_t i = 0; i < floats && c->r.layer.layout == EPIC_FLAT && c->seed % 3; i++)
        if (experts[i] != experts_got[i]) {
            wrong(b, "%s: expert %lld is %d, not %d", what, (long long)i, experts_got[i],
                  experts[i]);
            break;
        }
    for (int64_t i = 0; i < floats && c->weighted; i++)
        if (!same_float(weights[i], weights_got[i])) {
            wrong(b, "%s: weight of slot %lld is %g, not %g", what, (long long)i,
                  weights_got[i], weights[i]);
            break;
        }
    free(want);
    free(got);
    free(weights);
    free(weights_got);
    free(experts);
    free(experts_got);
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

static void check_rows(bench *b, const void *out, bool weighted, const char *what)
{
    const test_case *c = &b->c;
    const int me = b->me->rank;
    const int64_t tokens = c->r.tokens_of[me];
    const expert_rows rows = {element_of, weighted ? weight_of : one, c};
    uint8_t *got = case_download(b, out, (size_t)(tokens * c->row_bytes));
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
    float *got = case_download(b, s->choice_floats, (size_t)choices * 4);
    for (int64_t i = 0; i < choices; i++) {
        const int owner = c->r.rank[me][i];
        const float want =
            owner < 0 ? 0.0f : choice_weight(c, owner, place_of_choice(c, me, i) + 1000000);
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
    const bool flat = c->r.layer.layout == EPIC_FLAT;
    const float w = c->weighted && !flat ? slot_weight(c, me, slot) : 1.0f;
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
    if (!flat && !same_float(want, dots[slot]))
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
    uint8_t *rows = case_download(b, s->d_rows, (size_t)(have * c->row_bytes));
    float *dots = case_download(b, s->d_weights, (size_t)have * 4);
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
            if (rows[i * c->row_bytes + j] ||
                (dots[i] != 0.0f && c->r.layer.layout != EPIC_FLAT)) {
                wrong(b, "combine_backward: padding slot %lld is not zero", (long long)i);
                i = slots;
                break;
            }
    free(rows);
    free(dots);
    free(used);
}

void check_sums(bench *b, const sums *s)
{
    check_rows(b, s->out, b->c.weighted && b->c.r.layer.layout != EPIC_FLAT, "combine");
    check_rows(b, s->d_tokens, false, "dispatch_backward");
    check_choice_floats(b, s);
    check_gradients(b, s);
}

void test_sum(bench *b)
{
    const int n = b->me->num_ranks, me = b->me->rank;
    uint64_t s = b->c.seed * 77;
    const int64_t count = between(&s, 0, 3000);
    const bool tree = (n & (n - 1)) == 0 && between(&s, 0, 1);
    float *x = calloc((size_t)count + 1, 4);
    for (int64_t i = 0; i < count; i++)
        case_put((uint8_t *)x, i, EPIC_F32,
                 case_number(case_hash(b->c.seed, 90 + (uint64_t)me, (uint64_t)i, 0), true,
                             EPIC_F32) *
                     1.37f);
    float *data = case_upload(b, x, (size_t)count * 4, 4);
    const epic_sum_args args = {.call = b->call,
                                .data = data,
                                .count = count,
                                .order = tree ? EPIC_TREE : EPIC_BY_RANK};
    if (!case_must(b, p2p_steps.sum(b->me->group, &args), "sum")) return;
    float *got = case_download(b, data, (size_t)count * 4);
    for (int64_t i = 0; i < count; i++) {
        float y[ORACLE_RANKS] = {0};
        for (int q = 0; q < n; q++)
            y[q] = case_number(case_hash(b->c.seed, 90 + (uint64_t)q, (uint64_t)i, 0), true,
                               EPIC_F32) *
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
