/* SPDX-License-Identifier: Apache-2.0 */
/* The phases that add rows: combine, dispatch_backward and the sum. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "suite_case.h"

static unsigned char *at(epic_rows rows, int64_t i)
{
    return (unsigned char *)rows.data + i * rows.row_bytes;
}

/* The rows to add: those of combine, with weights, or those of dispatch_backward. */
typedef struct summed {
    const seat *s;
    enum world_stream stream;
    uint32_t type;
    int64_t n;
    bool weighted;
} summed;

/* Returns a number that identifies a row by its meaning and not by its place, so it is equal
 * for any num_ranks. With FLAT a row stands for a token on a rank. */
static int64_t ident(const summed *m, int rank, int64_t by)
{
    return oracle_is_flat(m->s->w->plan) ? by * RUN_MAX_RANKS + rank : by;
}

static void fetch(void *self, int rank, int64_t by, void *row, float *weight)
{
    const summed *m = self;
    world_row(m->s->w, m->stream, ident(m, rank, by), m->type, m->n, row);
    if (m->weighted) *weight = world_weight(m->s->w, m->stream, by);
}

/* Makes the slots. Padding and the tail hold NaN, because combine must not read them. */
static epic_rows make_slots(const summed *m, seat *s, int64_t room)
{
    epic_rows rows = case_rows(s, room, m->n * oracle_type_bytes(m->type));
    if (rows.data) memset(rows.data, 0xff, (size_t)(room * rows.row_bytes));
    for (int64_t slot = 0; slot < s->num_slots && slot < room; slot++) {
        const int64_t by = s->w->plan->filled_by[s->rank][slot];
        if (by >= 0)
            world_row(s->w, m->stream, ident(m, s->rank, by), m->type, m->n, at(rows, slot));
    }
    return rows;
}

/* Checks every token's row: its bits and, for ordinary numbers, its value. */
static void check_sums(const summed *m, epic_rows out)
{
    const seat *s = m->s;
    const oracle_plan *p = s->w->alone ? s->w->alone : s->w->plan;
    const bool value = !s->w->wild;
    int64_t wrong_bits = 0, wrong_values = 0;
    unsigned char *right = malloc((size_t)out.row_bytes);
    double *truth = malloc((size_t)m->n * sizeof *truth);
    double *bound = malloc((size_t)m->n * sizeof *bound);
    for (int64_t t = 0; t < s->num_tokens; t++) {
        oracle_combine(p, s->first_token + t, m->type, m->n, fetch, (void *)m, right,
                       value ? truth : NULL, bound);
        wrong_bits += !oracle_same(right, at(out, t), m->type, m->n);
        for (int64_t i = 0; value && i < m->n; i++)
            wrong_values += !(fabs(oracle_get(at(out, t), m->type, i) - truth[i]) <= bound[i]);
    }
    CHECK_EQ(wrong_bits, 0);
    CHECK_EQ(wrong_values, 0);
    free(right);
    free(truth);
    free(bound);
}

static int choose_short(seat *s, run_random *common)
{
    const int rank = (int)run_below(common, s->w->num_ranks);
    return run_chance(common, 4) && s->w->plan->num_slots[rank] > 0 ? rank : -1;
}

static bool fails(const seat *s, int short_rank)
{
    return short_rank >= 0 && s->w->plan->result == EPIC_OK;
}

static uint32_t type_needs(uint32_t type)
{
    return type == EPIC_F64 ? SUITE_F64 : 0;
}

static epic_result call_combine(seat *s, const epic_combine_args *args)
{
    epic_combine_args a = *args;
    a.plan = case_lend(s, a.plan);
    a.rows = case_lend_const_rows(s, a.rows);
    a.out = case_lend_rows(s, a.out);
    a.slot_weights = case_lend(s, a.slot_weights);
    return case_return(s, epic_combine(s->ctx, &a), type_needs(a.type));
}

void case_combine(seat *s, run_random *common)
{
    const bool flat = oracle_is_flat(s->w->plan);
    summed m = {.s = s, .stream = STREAM_ROWS, .type = case_type(common, true)};
    m.n = case_hidden(s, common, m.type);
    case_choose_shift(s, common, m.type, false);
    m.weighted = !flat && run_chance(common, 70);
    const int short_rank = choose_short(s, common);
    const int64_t more = run_below(common, 4);
    const int64_t room = s->num_slots + (s->rank == short_rank ? -1 : more);
    epic_rows weights = {0};
    if (m.weighted) {
        weights = case_rows(s, room + 1, 4);
        memset(weights.data, 0xff, (size_t)(room + 1) * 4);
    }
    for (int64_t slot = 0; m.weighted && slot < s->num_slots && slot < room; slot++) {
        const int64_t c = s->w->plan->filled_by[s->rank][slot];
        if (c >= 0) ((float *)weights.data)[slot] = world_weight(s->w, STREAM_ROWS, c);
    }
    epic_combine_args a = {.call = case_call(s),
                           .layer = &s->w->layer,
                           .plan = s->plan,
                           .plan_bytes = s->plan_bytes,
                           .rows = epic_rows_as_const(make_slots(&m, s, room)),
                           .slot_weights = weights.data,
                           .type = m.type};
    a.out = case_rows(s, s->num_tokens, a.rows.row_bytes);
    case_nap(s);
    const epic_result result = call_combine(s, &a);
    if (!case_lacks(type_needs(a.type))) {
        case_refused(s, result, fails(s, short_rank) ? EPIC_EOVERFLOW : EPIC_OK);
        if (result || s->w->plan->result)
            CHECK(case_zero(a.out.data, s->num_tokens * a.out.row_bytes));
        else
            check_sums(&m, a.out);
    }
    case_drop(s);
}

/* Makes one float per slot, or with FLAT one per live choice of a row; NaN elsewhere. */
static epic_rows make_slot_gradients(seat *s, int64_t room)
{
    const oracle_plan *p = s->w->plan;
    const int64_t top_k = s->w->layer.top_k, per_row = oracle_is_flat(p) ? top_k : 1;
    epic_rows rows = case_rows(s, room * per_row + 1, 4);
    float *values = rows.data;
    memset(values, 0xff, (size_t)(room * per_row + 1) * 4);
    for (int64_t slot = 0; slot < s->num_slots && slot < room; slot++) {
        const int64_t by = p->filled_by[s->rank][slot];
        if (!oracle_is_flat(p)) {
            if (by >= 0) values[slot] = world_weight(s->w, STREAM_D_RECV, by);
            continue;
        }
        int64_t place = slot * top_k;
        for (int64_t c = by * top_k; c < (by + 1) * top_k; c++)
            if (p->fate[c] >= 0 && s->w->rank_of[s->w->ids[c]] == s->rank)
                values[place++] = world_weight(s->w, STREAM_D_RECV, c);
    }
    return rows;
}

static void check_weight_gradients(const seat *s, const float *d_weights, bool cleared)
{
    const int64_t top_k = s->w->layer.top_k;
    int64_t wrong = 0;
    for (int64_t i = 0; i < s->num_tokens * top_k; i++) {
        const int64_t c = s->first_token * top_k + i;
        float right = 0;
        if (!cleared && s->w->plan->fate[c] >= 0) right = world_weight(s->w, STREAM_D_RECV, c);
        wrong += memcmp(&right, &d_weights[i], 4) != 0;
    }
    CHECK_EQ(wrong, 0);
}

static epic_result call_dispatch_backward(seat *s, const epic_dispatch_backward_args *args)
{
    epic_dispatch_backward_args a = *args;
    a.plan = case_lend(s, a.plan);
    a.d_recv = case_lend_const_rows(s, a.d_recv);
    a.d_tokens = case_lend_rows(s, a.d_tokens);
    a.d_slot_weights = case_lend(s, a.d_slot_weights);
    a.d_weights = case_lend(s, a.d_weights);
    return case_return(s, epic_dispatch_backward(s->ctx, &a), type_needs(a.type));
}

void case_dispatch_backward(seat *s, run_random *common)
{
    summed m = {.s = s, .stream = STREAM_D_RECV, .type = case_type(common, true)};
    m.n = case_hidden(s, common, m.type);
    case_choose_shift(s, common, m.type, false);
    const int short_rank = choose_short(s, common);
    const int64_t more = run_below(common, 4);
    const int64_t room = s->num_slots + (s->rank == short_rank ? -1 : more);
    epic_rows d_slot_weights = {0}, d_weights = {0};
    if (run_chance(common, 70)) {
        d_slot_weights = make_slot_gradients(s, room);
        d_weights = case_rows(s, s->num_tokens * s->w->layer.top_k + 1, 4);
    }
    epic_dispatch_backward_args a = {.call = case_call(s),
                                     .layer = &s->w->layer,
                                     .plan = s->plan,
                                     .plan_bytes = s->plan_bytes,
                                     .d_recv = epic_rows_as_const(make_slots(&m, s, room)),
                                     .d_slot_weights = d_slot_weights.data,
                                     .d_weights = d_weights.data,
                                     .type = m.type};
    a.d_tokens = case_rows(s, s->num_tokens, a.d_recv.row_bytes);
    case_nap(s);
    const epic_result result = call_dispatch_backward(s, &a);
    const bool cleared = result || s->w->plan->result;
    if (!case_lacks(type_needs(a.type))) {
        case_refused(s, result, fails(s, short_rank) ? EPIC_EOVERFLOW : EPIC_OK);
        if (cleared)
            CHECK(case_zero(a.d_tokens.data, s->num_tokens * a.d_tokens.row_bytes));
        else
            check_sums(&m, a.d_tokens);
        if (a.d_weights) {
            check_weight_gradients(s, a.d_weights, cleared);
            CHECK(case_poisoned(at(d_weights, d_weights.num_rows - 1), 4));
        }
    }
    case_drop(s);
}

/* ------------------------------------------------------------------------------- sum ---- */

static float tree_sum(const float *parts, int64_t stride, int first, int count)
{
    if (count == 1) return parts[first * stride];
    return tree_sum(parts, stride, first, count / 2) +
           tree_sum(parts, stride, first + count / 2, count / 2);
}

void case_sum(seat *s, run_random *common)
{
    static const int64_t counts[] = {0, 1, 5, 2047, 2048, 2049, 30000};
    const int64_t count = counts[run_below(common, 7)];
    const int ranks = s->w->num_ranks;
    const bool tree = (ranks & (ranks - 1)) == 0 && run_chance(common, 50);
    float *parts = malloc((size_t)(ranks * count) * sizeof *parts + 4);
    for (int r = 0; r < ranks; r++)
        world_row(s->w, STREAM_SUM, r, EPIC_F32, count, parts + r * count);
    float *data = case_copy(s, parts + s->rank * count, count * (int64_t)sizeof *data);
    case_choose_shift(s, common, EPIC_F32, false);
    const epic_allreduce_sum_args a = {.call = case_call(s),
                                       .data =
                                           case_lend_rows(s, (epic_rows){data, 1, count}).data,
                                       .count = count,
                                       .order = tree ? EPIC_TREE : EPIC_BY_RANK};
    case_nap(s);
    case_refused(s, case_return(s, epic_allreduce_sum(s->ctx, &a), 0), EPIC_OK);
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; i++) {
        float right = tree ? tree_sum(parts + i, count, 0, ranks) : parts[i];
        for (int r = 1; !tree && r < ranks; r++) right += parts[r * count + i];
        wrong += !oracle_same(&right, &data[i], EPIC_F32, 1);
    }
    CHECK_EQ(wrong, 0);
    free(parts);
    case_drop(s);
}
