/* SPDX-License-Identifier: Apache-2.0 */
/* Checks what the calls of a case have written. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "case_inner.h"

void check_plan(bench *b, const arrays *a)
{
    const routing *r = &b->c.r;
    const oracle_plan *p = r->plan;
    const int me = b->me->rank;
    const size_t experts = r->layer.num_experts;
    const int64_t choices = (int64_t)r->tokens_of[me] * r->layer.top_k;
    int32_t *load = case_download(b, a->load, experts * 4),
            *demand = case_download(b, a->demand, 4);
    int32_t *rows = case_download(b, a->expert_rows, experts * 4);
    int32_t *kept = case_download(b, a->expert_tokens, experts * 4);
    const bool has_i64 = a->expert_rows_i64 != NULL;
    int64_t *rows_i64 = has_i64 ? case_download(b, a->expert_rows_i64, experts * 8) : NULL;
    int64_t *kept_i64 = has_i64 ? case_download(b, a->expert_tokens_i64, experts * 8) : NULL;
    uint8_t *plan = case_download(b, a->plan, a->plan_bytes);
    const device_plan_header *h = (const device_plan_header *)plan;
    const device_plan_layout at = device_plan_layout_of(
        r->num_ranks, b->me->group->config.max_tokens, (int64_t)experts, r->layer.top_k);
    if ((int32_t)h->result != r->result) report_wrong(b, "plan: result is %u", h->result);
    if (*demand != p->demand[me]) report_wrong(b, "plan: demand is %d", *demand);
    for (size_t e = 0; e < experts; e++) {
        const int32_t local = p->local_of[e];
        const int64_t at_rank = (int64_t)me * p->num_local + local;
        if (load[e] != p->load[e]) report_wrong(b, "plan: load of %zu is %d", e, load[e]);
        if (r->owner[e] != me) continue;
        if (kept[local] != (r->result ? 0 : p->expert_tokens[at_rank]))
            report_wrong(b, "plan: expert_tokens of %zu is %d", e, kept[local]);
        if (rows[local] != (r->result ? 0 : p->expert_rows[at_rank]))
            report_wrong(b, "plan: expert_rows of %zu is %d", e, rows[local]);
        if (has_i64 && (kept_i64[local] != (r->result ? 0 : p->expert_tokens[at_rank]) ||
                        rows_i64[local] != (r->result ? 0 : p->expert_rows[at_rank])))
            report_wrong(b, "plan: int64 counts of %zu are %lld, %lld", e,
                         (long long)rows_i64[local], (long long)kept_i64[local]);
    }
    if (r->result == EPIC_OK) {
        if (h->slots_of[me] != p->num_slots[me])
            report_wrong(b, "plan: %d slots", h->slots_of[me]);
        if (memcmp(plan + at.fate, r->slot[me], (size_t)choices * 4))
            report_wrong(b, "plan: fate");
        if (memcmp(plan + at.rank_of, r->rank[me], (size_t)choices * 4))
            report_wrong(b, "plan: rank");
    }
    free(load);
    free(demand);
    free(rows);
    free(kept);
    free(rows_i64);
    free(kept_i64);
    free(plan);
}

typedef struct slots { /* expected contents of a rank's slots */
    uint8_t *rows, *scales;
    float *weights;
    int32_t *experts; /* FLAT only */
} slots;

static void fill_slots(const test_case *c, const slots *s, int value, int64_t count)
{
    const size_t floats = (size_t)(count * case_each(c)) * 4;
    memset(s->rows, value, (size_t)(count * c->recv_bytes));
    memset(s->scales, value, (size_t)(count * c->scale_bytes));
    memset(s->weights, value, floats);
    memset(s->experts, value ? value : 0xff, floats);
}

/* Computes the expected contents of the slots, with padding and tail. */
static void expect_slots(bench *b, const slots *s, bool moves)
{
    const test_case *c = &b->c;
    const routing *r = &c->r;
    const int me = b->me->rank;
    const int64_t have = c->recv_rows[me], used = moves ? r->plan->num_slots[me] : have;
    const bool flat = r->layer.layout == EPIC_FLAT;
    fill_slots(c, s, CASE_GARBAGE, have);
    fill_slots(c, s, 0, c->zero_tail ? have : used);
    if (moves && c->leave_padding && !flat) fill_slots(c, s, CASE_GARBAGE, used);
    for (int q = 0; q < r->num_ranks && moves; q++)
#pragma omp parallel for
        for (int64_t i = 0; i < (int64_t)r->tokens_of[q] * r->layer.top_k; i++) {
            const int64_t slot = r->slot[q][i];
            if (r->rank[q][i] != me) continue;
            received_row(c, q, i / r->layer.top_k, s->rows + slot * c->recv_bytes,
                         s->scales + slot * c->scale_bytes);
            s->weights[place_of_choice(c, q, i)] = choice_weight(c, q, i);
            s->experts[place_of_choice(c, q, i)] = r->plan->local_of[r->ids[q][i]];
        }
}

bool case_moves(const test_case *c)
{
    bool fits = c->r.result == EPIC_OK;
    for (int q = 0; q < c->r.num_ranks; q++) fits &= c->r.plan->num_slots[q] <= c->recv_rows[q];
    return fits;
}

static void check_bytes(bench *b, const char *what, const char *which, const uint8_t *want,
                        const uint8_t *got, int64_t row_bytes)
{
    const size_t bytes = (size_t)(b->c.recv_rows[b->me->rank] * row_bytes);
    size_t i = 0;
    if (!memcmp(want, got, bytes)) return;
    while (want[i] == got[i]) i++;
    report_wrong(b, "%s: %s of slot %zu, byte %zu is %02x, not %02x (%lld slots)", what, which,
                 i / (size_t)row_bytes, i % (size_t)row_bytes, got[i], want[i],
                 (long long)b->c.r.plan->num_slots[b->me->rank]);
}

void check_dispatch(bench *b, const arrays *a, const char *what)
{
    const test_case *c = &b->c;
    const int64_t have = c->recv_rows[b->me->rank], floats = have * case_each(c);
    const size_t bytes = (size_t)(have * c->recv_bytes);
    const size_t scale_bytes = (size_t)(have * c->scale_bytes);
    const slots want = {malloc(bytes + 8), malloc(scale_bytes + 8),
                        malloc((size_t)floats * 4 + 4), malloc((size_t)floats * 4 + 4)};
    const slots got = {case_download(b, a->recv, bytes),
                       case_download(b, a->recv_scales, scale_bytes),
                       case_download(b, a->slot_weights, (size_t)floats * 4),
                       case_download(b, a->recv_expert, (size_t)floats * 4)};
    expect_slots(b, &want, case_moves(c));
    check_bytes(b, what, "row", want.rows, got.rows, c->recv_bytes);
    check_bytes(b, what, "second row", want.scales, got.scales, c->scale_bytes);
    for (int64_t i = 0; i < floats && c->r.layer.layout == EPIC_FLAT && c->seed % 3; i++)
        if (want.experts[i] != got.experts[i]) {
            report_wrong(b, "%s: expert %lld is %d, not %d", what, (long long)i, got.experts[i],
                         want.experts[i]);
            break;
        }
    for (int64_t i = 0; i < floats && c->weighted; i++)
        if (!same_float(want.weights[i], got.weights[i])) {
            report_wrong(b, "%s: weight of slot %lld is %g, not %g", what, (long long)i,
                         got.weights[i], want.weights[i]);
            break;
        }
    for (int i = 0; i < 2; i++) {
        const slots *s = i ? &got : &want;
        free(s->rows);
        free(s->scales);
        free(s->weights);
        free(s->experts);
    }
}

typedef struct summed { /* the rows that a sum adds */
    const test_case *c;
    int rank; /* that owns the tokens */
    bool weighted;
} summed;

static void fetch_row(void *self, int owner, int64_t by, void *row, float *weight)
{
    const summed *m = self;
    const test_case *c = m->c;
    const int64_t top_k = c->r.layer.top_k, first = c->r.plan->first_token[m->rank];
    const bool flat = c->r.layer.layout == EPIC_FLAT;
    int64_t i = flat ? (by - first) * top_k : by - first * top_k;
    while (c->r.rank[m->rank][i] != owner) i++; /* FLAT: a choice of the token on this rank */
    const int64_t slot = c->r.slot[m->rank][i];
    for (int64_t j = 0; j < c->hidden; j++)
        oracle_put(row, c->type, j, slot_element(c, owner, slot, j));
    if (m->weighted) *weight = slot_weight(c, owner, slot);
}

static void check_rows(bench *b, const void *out, bool weighted, const char *what)
{
    const test_case *c = &b->c;
    summed m = {c, b->me->rank, weighted};
    const int64_t tokens = c->r.tokens_of[m.rank], first = c->r.plan->first_token[m.rank];
    uint8_t *got = case_download(b, out, (size_t)(tokens * c->row_bytes));
    uint8_t *want = oracle_zeroed(c->row_bytes, 1);
    for (int64_t t = 0; t < tokens; t += c->sample) {
        const uint8_t *row = got + t * c->row_bytes;
        if (!c->r.result)
            oracle_combine(c->r.plan, first + t, c->type, c->hidden, fetch_row, &m, want, NULL,
                           NULL);
        if (oracle_same(want, row, c->type, c->hidden)) continue;
        int64_t i = 0;
        while (oracle_same(want, row, c->type, i + 1)) i++;
        report_wrong(b, "%s: token %lld element %lld is %.9g, not %.9g", what, (long long)t,
                     (long long)i, oracle_get(row, c->type, i), oracle_get(want, c->type, i));
        break;
    }
    free(want);
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
        report_wrong(b, "dispatch_backward: weight of choice %lld is %g, not %g", (long long)i,
                     got[i], want);
        break;
    }
    free(got);
}

static void check_quantized(bench *b, const slots *s, int64_t slot, const float *x)
{
    const test_case *c = &b->c;
    uint8_t *q = malloc((size_t)c->hidden), *scales = malloc((size_t)c->scale_bytes);
    oracle_quantize(c->quantize, x, 1, EPIC_F32, c->hidden, q, scales);
    if (memcmp(q, s->rows + slot * c->recv_bytes, (size_t)c->hidden) ||
        memcmp(scales, s->scales + slot * c->scale_bytes, (size_t)c->scale_bytes))
        report_wrong(b, "combine_backward: quantized row of slot %lld", (long long)slot);
    free(q);
    free(scales);
}

/* Checks the row of a slot of the gradient x. */
static void check_scaled(bench *b, const slots *s, int64_t slot, const float *x)
{
    const test_case *c = &b->c;
    if (c->quantize) {
        check_quantized(b, s, slot, x);
        return;
    }
    for (int64_t i = 0; i < c->hidden; i++) {
        const float want = (float)oracle_round(c->type, x[i]);
        const float got = (float)oracle_get(s->rows + slot * c->row_bytes, c->type, i);
        if (same_float(got, want)) continue;
        report_wrong(b, "combine_backward: slot %lld element %lld is %.9g, not %.9g",
                     (long long)slot, (long long)i, got, want);
        break;
    }
}

/* Checks the gradient of one slot. */
static void check_gradient(bench *b, const slots *s, int q, int64_t choice)
{
    const float *dots = s->weights;
    const test_case *c = &b->c;
    const int me = b->me->rank;
    const int64_t slot = c->r.slot[q][choice], t = choice / c->r.layer.top_k;
    const bool flat = c->r.layer.layout == EPIC_FLAT;
    const float w = c->weighted && !flat ? slot_weight(c, me, slot) : 1.0f;
    float *x = malloc((size_t)c->hidden * 4), *y = malloc((size_t)c->hidden * 4);
    float *scaled = malloc((size_t)c->hidden * 4);
    for (int64_t i = 0; i < c->hidden; i++) {
        x[i] = token_element(c, q, t, i);
        y[i] = slot_element(c, me, slot, i);
        scaled[i] = w * x[i];
    }
    check_scaled(b, s, slot, scaled);
    const float want = oracle_dot(x, y, EPIC_F32, c->hidden);
    if (!flat && !same_float(want, dots[slot]))
        report_wrong(b, "combine_backward: dot of slot %lld is %.9g, not %.9g", (long long)slot,
                     dots[slot], want);
    free(x);
    free(y);
    free(scaled);
}

static bool filled_with(const uint8_t *bytes, int64_t count, int value)
{
    for (int64_t i = 0; i < count; i++)
        if (bytes[i] != value) return false;
    return true;
}

static void check_gradients(bench *b, const sums *s)
{
    const test_case *c = &b->c;
    const routing *r = &c->r;
    const int me = b->me->rank;
    const int64_t have = c->recv_rows[me];
    const int64_t row_bytes = c->quantize ? c->recv_bytes : c->row_bytes;
    const int64_t scale_bytes = c->quantize ? c->scale_bytes : 0;
    const slots got = {case_download(b, s->d_rows, (size_t)(have * row_bytes)),
                       case_download(b, s->d_rows_scales, (size_t)(have * scale_bytes)),
                       case_download(b, s->d_weights, (size_t)have * 4), NULL};
    char *used = calloc((size_t)have + 1, 1);
    const int before = b->wrong;
    for (int q = 0; q < r->num_ranks && !r->result; q++)
        for (int64_t i = 0; i < (int64_t)r->tokens_of[q] * r->layer.top_k; i++) {
            if (r->rank[q][i] != me || b->wrong != before) continue;
            used[r->slot[q][i]] = 1;
            if (i / r->layer.top_k % c->sample == 0) check_gradient(b, &got, q, i);
        }
    const int64_t slots = r->result ? have : r->plan->num_slots[me];
    const int padding = c->leave_padding && !r->result ? CASE_GARBAGE : 0;
    const int dot_bytes = r->layer.layout == EPIC_FLAT ? 0 : 4;
    for (int64_t i = 0; i < slots; i++) {
        if (used[i] || (filled_with(got.rows + i * row_bytes, row_bytes, padding) &&
                        filled_with(got.scales + i * scale_bytes, scale_bytes, padding) &&
                        filled_with((uint8_t *)&got.weights[i], dot_bytes, padding)))
            continue;
        report_wrong(b, "combine_backward: padding slot %lld is not %02x", (long long)i,
                     padding);
        break;
    }
    free(got.rows);
    free(got.scales);
    free(got.weights);
    free(used);
}

void check_sums(bench *b, const sums *s)
{
    check_rows(b, s->out, b->c.weighted && b->c.r.layer.layout != EPIC_FLAT, "combine");
    check_rows(b, s->d_tokens, false, "dispatch_backward");
    check_choice_floats(b, s);
    check_gradients(b, s);
}
