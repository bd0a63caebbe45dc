/* SPDX-License-Identifier: Apache-2.0 */
/* The phases that send rows to experts: dispatch and combine_backward. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "suite_case.h"

#define MOST_BYTES (8 << 20)

static unsigned char *at(epic_rows rows, int64_t i)
{
    return (unsigned char *)rows.data + i * rows.row_bytes;
}

static int64_t top_k_of(const seat *s)
{
    return s->w->layer.top_k;
}

/* Returns the choice in a slot (FLAT: the token), or -1 for padding. */
static int64_t filled_by(const seat *s, int64_t slot)
{
    return s->w->plan->filled_by[s->rank][slot];
}

/* Chooses a rank whose receive buffer is one row too short, or -1. */
static int choose_short(seat *s, run_random *common)
{
    const int rank = (int)run_below(common, s->w->num_ranks);
    return run_chance(common, 4) && s->w->plan->num_slots[rank] > 0 ? rank : -1;
}

/* Compares quantized rows; in a block with values that are not finite, only the scales. */
static bool same_quantized(uint32_t how, int64_t n, const uint8_t *q, const void *scales,
                           const uint8_t *right_q, const void *right_scales)
{
    const int64_t block = how == EPIC_QUANTIZE_1X128 ? 128 : 32;
    for (int64_t first = 0; first < n; first += block) {
        const int64_t count = n - first < block ? n - first : block, b = first / block;
        if (how == EPIC_QUANTIZE_1X128) {
            float a, right;
            memcpy(&a, (const char *)scales + 4 * b, 4);
            memcpy(&right, (const char *)right_scales + 4 * b, 4);
            if (isnan(right) && isnan(a)) continue;
            if (memcmp(&a, &right, 4)) return false;
        } else {
            if (((const uint8_t *)scales)[b] != ((const uint8_t *)right_scales)[b])
                return false;
            if (((const uint8_t *)scales)[b] == 255) continue;
        }
        if (memcmp(q + first, right_q + first, (size_t)count)) return false;
    }
    return true;
}

/* Checks the rows after the last slab: unchanged, or zero if the flag asks for it. */
static void check_tail(const seat *s, epic_rows rows, uint32_t flags)
{
    const int64_t count = rows.num_rows - s->num_slots;
    if (!rows.data || count <= 0) return;
    if (flags & EPIC_ZERO_TAIL)
        CHECK(case_zero(at(rows, s->num_slots), count * rows.row_bytes));
    else
        CHECK(case_poisoned(at(rows, s->num_slots), count * rows.row_bytes));
}

/* Checks a slot of padding inside a slab. */
static bool as_padding(const void *bytes, int64_t count, uint32_t flags)
{
    return flags & EPIC_LEAVE_PADDING ? case_poisoned(bytes, count) : case_zero(bytes, count);
}

static uint32_t choose_flags(run_random *common)
{
    const uint32_t tail = run_chance(common, 30) ? EPIC_ZERO_TAIL : 0;
    return tail | (run_chance(common, 30) ? EPIC_LEAVE_PADDING : 0);
}

static void check_cleared(epic_rows rows)
{
    if (rows.data) CHECK(case_zero(rows.data, rows.num_rows * rows.row_bytes));
}

/* -------------------------------------------------------------------------- dispatch ---- */

typedef struct dispatched {
    epic_dispatch_args args;
    uint32_t type; /* type of the tokens; EPIC_BYTES: any bytes */
    int64_t n;     /* number of elements, or of bytes */
    epic_rows weights, slot_weights, recv_expert;
    int short_rank;
    /* slots of this rank if the caller knows them; 0: allocate a few more than needed */
    int64_t room;
} dispatched;

static void choose_shapes(seat *s, run_random *common, dispatched *d)
{
    epic_dispatch_args *a = &d->args;
    if (run_chance(common, 30)) {
        a->quantize = run_chance(common, 50) ? EPIC_QUANTIZE_1X128 : EPIC_QUANTIZE_1X32;
        d->type = a->type = case_type(common, false);
    } else if (run_chance(common, 50)) {
        d->type = case_type(common, true);
        a->type = run_chance(common, 50) ? d->type : EPIC_BYTES;
    }
    d->n = case_hidden(s, common, d->type);
    case_choose_shift(s, common, d->type, a->quantize);
    for (int r = 0; r < s->w->num_ranks && d->room; r++)
        if (s->w->capacity[r] * d->n > MOST_BYTES / 8) d->n = 3;
    a->tokens.row_bytes = d->n * oracle_type_bytes(d->type);
    a->recv.row_bytes = a->quantize ? d->n : a->tokens.row_bytes;
    if (a->quantize)
        a->recv_scales.row_bytes = oracle_scale_bytes(a->quantize, d->n);
    else if (run_chance(common, 30)) {
        static const int64_t bytes[] = {1, 4, 17, 56};
        a->scales.row_bytes = a->recv_scales.row_bytes = bytes[run_below(common, 4)];
    }
}

static void make_arrays(seat *s, run_random *common, dispatched *d)
{
    epic_dispatch_args *a = &d->args;
    const bool flat = oracle_is_flat(s->w->plan);
    const int64_t per_row = flat ? top_k_of(s) : 1;
    int64_t room = s->num_slots + run_below(common, 4);
    if (s->rank == d->short_rank) room = s->num_slots - 1;
    if (d->room) room = d->room;
    const epic_rows tokens = case_rows(s, s->num_tokens, a->tokens.row_bytes);
    epic_rows scales = {0};
    a->recv = case_rows(s, room, a->recv.row_bytes);
    if (a->scales.row_bytes) scales = case_rows(s, s->num_tokens, a->scales.row_bytes);
    if (a->recv_scales.row_bytes) a->recv_scales = case_rows(s, room, a->recv_scales.row_bytes);
    a->tokens = epic_rows_as_const(tokens);
    a->scales = epic_rows_as_const(scales);
    if (run_chance(common, 60)) {
        /* Passed even if empty, because all ranks must pass it or none. */
        d->weights = case_rows(s, s->num_tokens * top_k_of(s) + 1, 4);
        d->slot_weights = case_rows(s, room * per_row + 1, 4);
        a->weights = d->weights.data;
        a->slot_weights = d->slot_weights.data;
    }
    if (flat && run_chance(common, 60)) {
        d->recv_expert = case_rows(s, room * per_row + 1, 4);
        a->recv_expert = d->recv_expert.data;
    }
    for (int64_t t = 0; t < s->num_tokens; t++) {
        world_row(s->w, STREAM_TOKENS, s->first_token + t, d->type, d->n, at(tokens, t));
        if (a->scales.data)
            world_row(s->w, STREAM_SCALES, s->first_token + t, EPIC_BYTES, a->scales.row_bytes,
                      at(scales, t));
    }
    for (int64_t c = 0; a->weights && c < s->num_tokens * top_k_of(s); c++)
        ((float *)d->weights.data)[c] =
            world_weight(s->w, STREAM_TOKENS, s->first_token * top_k_of(s) + c);
}

/* Checks that the row and its scales arrived in the slot. */
static bool right_row(const seat *s, const dispatched *d, int64_t slot, int64_t token)
{
    const epic_dispatch_args *a = &d->args;
    unsigned char row[24576 + 64], q[4096], scales[256];
    world_row(s->w, STREAM_TOKENS, token, d->type, d->n, row);
    if (a->quantize) {
        oracle_quantize(a->quantize, row, 1, d->type, d->n, q, scales);
        return same_quantized(a->quantize, d->n, at(a->recv, slot), at(a->recv_scales, slot), q,
                              scales);
    }
    if (memcmp(row, at(a->recv, slot), (size_t)a->recv.row_bytes)) return false;
    if (!a->recv_scales.data) return true;
    world_row(s->w, STREAM_SCALES, token, EPIC_BYTES, a->scales.row_bytes, scales);
    return memcmp(scales, at(a->recv_scales, slot), (size_t)a->scales.row_bytes) == 0;
}

static bool right_padding(const dispatched *d, int64_t slot)
{
    const epic_dispatch_args *a = &d->args;
    return as_padding(at(a->recv, slot), a->recv.row_bytes, a->flags) &&
           (!a->recv_scales.data ||
            as_padding(at(a->recv_scales, slot), a->recv_scales.row_bytes, a->flags)) &&
           (!a->slot_weights || as_padding(a->slot_weights + slot, 4, a->flags));
}

static bool same_float(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

static void check_expert_major(const seat *s, const dispatched *d)
{
    int64_t wrong_rows = 0, wrong_padding = 0, wrong_weights = 0;
    for (int64_t slot = 0; slot < s->num_slots; slot++) {
        const int64_t c = filled_by(s, slot);
        if (c < 0) {
            wrong_padding += !right_padding(d, slot);
            continue;
        }
        wrong_rows += !right_row(s, d, slot, c / top_k_of(s));
        wrong_weights +=
            d->args.slot_weights &&
            !same_float(d->args.slot_weights[slot], world_weight(s->w, STREAM_TOKENS, c));
    }
    CHECK_EQ(wrong_rows, 0);
    CHECK_EQ(wrong_padding, 0);
    CHECK_EQ(wrong_weights, 0);
}

static void check_flat(const seat *s, const dispatched *d)
{
    const oracle_plan *p = s->w->plan;
    const int64_t top_k = top_k_of(s);
    int64_t wrong_rows = 0, wrong_weights = 0, wrong_experts = 0;
    for (int64_t row = 0; row < s->num_slots; row++) {
        const int64_t token = filled_by(s, row);
        wrong_rows += !right_row(s, d, row, token);
        int64_t place = row * top_k;
        for (int64_t c = token * top_k; c < (token + 1) * top_k; c++) {
            if (p->fate[c] < 0 || s->w->rank_of[s->w->ids[c]] != s->rank) continue;
            const float weight = world_weight(s->w, STREAM_TOKENS, c);
            wrong_weights +=
                d->args.slot_weights && !same_float(d->args.slot_weights[place], weight);
            wrong_experts +=
                d->args.recv_expert && d->args.recv_expert[place] != p->local_of[s->w->ids[c]];
            place++;
        }
        for (; place < (row + 1) * top_k; place++) {
            wrong_weights +=
                d->args.slot_weights && !same_float(d->args.slot_weights[place], 0);
            wrong_experts += d->args.recv_expert && d->args.recv_expert[place] != -1;
        }
    }
    CHECK_EQ(wrong_rows, 0);
    CHECK_EQ(wrong_weights, 0);
    CHECK_EQ(wrong_experts, 0);
}

/* Views weights and experts as rows of one slot each, so that check_tail() works for them,
 * too. They have one extra element. */
static epic_rows by_slot(const dispatched *d, epic_rows list, int64_t per_row)
{
    return (epic_rows){list.data, d->args.recv.num_rows, 4 * per_row};
}

static void check_dispatched(const seat *s, const dispatched *d, epic_result result)
{
    const epic_dispatch_args *a = &d->args;
    const int64_t per_row = oracle_is_flat(s->w->plan) ? top_k_of(s) : 1;
    const epic_rows weights = by_slot(d, d->slot_weights, per_row);
    const epic_rows experts = by_slot(d, d->recv_expert, per_row);
    for (int i = 0; i < 2; i++) { /* the extra element */
        const epic_rows list = i ? d->recv_expert : d->slot_weights;
        if (list.data) CHECK(case_poisoned(at(list, list.num_rows - 1), 4));
    }
    if (result != EPIC_OK || s->w->plan->result != EPIC_OK) {
        check_cleared(a->recv);
        check_cleared(a->recv_scales);
        check_cleared(weights);
        return;
    }
    if (oracle_is_flat(s->w->plan))
        check_flat(s, d);
    else
        check_expert_major(s, d);
    check_tail(s, a->recv, a->flags);
    check_tail(s, a->recv_scales, a->flags);
    check_tail(s, weights, a->flags);
    if (!(a->flags & EPIC_ZERO_TAIL)) check_tail(s, experts, 0);
    for (int64_t i = s->num_slots * per_row;
         experts.data && a->flags & EPIC_ZERO_TAIL && i < experts.num_rows * per_row; i++)
        CHECK_EQ(a->recv_expert[i], -1); /* no expert in the padding */
}

static uint32_t dispatch_needs(const epic_dispatch_args *a)
{
    return a->quantize ? SUITE_QUANTIZE : a->scales.row_bytes ? SUITE_SCALES : 0;
}

static epic_dispatch_args lend_dispatch(seat *s, const epic_dispatch_args *args)
{
    epic_dispatch_args a = *args;
    a.plan = case_lend(s, a.plan);
    a.tokens = case_lend_const_rows(s, a.tokens);
    a.recv = case_lend_rows(s, a.recv);
    a.scales = case_lend_const_rows(s, a.scales);
    a.recv_scales = case_lend_rows(s, a.recv_scales);
    a.weights = case_lend(s, a.weights);
    a.slot_weights = case_lend(s, a.slot_weights);
    a.recv_expert = case_lend(s, a.recv_expert);
    return a;
}

/* On some ranks, calls first with weights but without slot_weights, or the reverse. That
 * call must be refused locally, whatever the other ranks pass, and no other rank may notice
 * it. */
static void refuse_alone(seat *s, const epic_dispatch_args *args, const epic_plan_args *plan)
{
    epic_dispatch_args a = *args;
    if (case_lacks(dispatch_needs(args)) || !run_chance(&s->own, 30)) return;
    if (!a.weights)
        a.weights = a.tokens.data;
    else if (run_chance(&s->own, 50))
        a.weights = NULL;
    else
        a.slot_weights = NULL;
    if (!a.weights && !a.slot_weights) return; /* this rank has no tokens */
    CHECK_EQ(plan ? epic_plan_dispatch(s->ctx, plan, &a) : epic_dispatch(s->ctx, &a),
             EPIC_EINVAL);
    CHECK(strstr(epic_error(s->ctx), "pass both or neither") != NULL);
}

static epic_result call_dispatch(seat *s, const epic_dispatch_args *args)
{
    const epic_dispatch_args a = lend_dispatch(s, args);
    refuse_alone(s, &a, NULL);
    return case_return(s, epic_dispatch(s->ctx, &a), dispatch_needs(&a));
}

void case_dispatch(seat *s, run_random *common)
{
    dispatched d = {.type = EPIC_BYTES, .short_rank = choose_short(s, common)};
    choose_shapes(s, common, &d);
    make_arrays(s, common, &d);
    d.args.layer = &s->w->layer;
    d.args.plan = s->plan;
    d.args.plan_bytes = s->plan_bytes;
    d.args.call = case_call(s);
    d.args.flags = choose_flags(common);
    case_nap(s);
    const epic_result result = call_dispatch(s, &d.args);
    const bool moves = s->w->plan->result == EPIC_OK;
    if (!case_lacks(dispatch_needs(&d.args))) {
        case_refused(s, result, d.short_rank >= 0 && moves ? EPIC_EOVERFLOW : EPIC_OK);
        check_dispatched(s, &d, result);
    }
    case_drop(s);
}

/* Plans and dispatches in one call, with a buffer whose size only the test can know to be
 * large enough. */
void case_dispatch_planned(seat *s, run_random *common, const epic_plan_args *plan)
{
    dispatched d = {.type = EPIC_BYTES, .short_rank = -1, .room = plan->capacity};
    choose_shapes(s, common, &d);
    make_arrays(s, common, &d);
    d.args.flags = choose_flags(common);
    case_nap(s);
    const epic_plan_args lent_plan = case_lend_plan(s, plan);
    const epic_dispatch_args lent = lend_dispatch(s, &d.args);
    refuse_alone(s, &lent, &lent_plan);
    const epic_result result =
        case_return(s, epic_plan_dispatch(s->ctx, &lent_plan, &lent), dispatch_needs(&d.args));
    if (case_lacks(dispatch_needs(&d.args))) return;
    case_refused(s, result, s->w->plan->result);
    check_dispatched(s, &d, result);
}

/* ------------------------------------------------------------------ combine_backward ---- */

typedef struct spread {
    epic_combine_backward_args args;
    epic_rows slot_weights, d_slot_weights;
    int64_t n;
    int short_rank;
} spread;

static void make_spread(seat *s, run_random *common, spread *d)
{
    epic_combine_backward_args *a = &d->args;
    const bool flat = oracle_is_flat(s->w->plan);
    if (run_chance(common, 30))
        a->quantize = run_chance(common, 50) ? EPIC_QUANTIZE_1X128 : EPIC_QUANTIZE_1X32;
    a->type = case_type(common, !a->quantize);
    d->n = case_hidden(s, common, a->type);
    case_choose_shift(s, common, a->type, a->quantize);
    const int64_t row_bytes = d->n * oracle_type_bytes(a->type);
    int64_t room = s->num_slots + run_below(common, 4);
    if (s->rank == d->short_rank) room = s->num_slots - 1;
    const epic_rows d_out = case_rows(s, s->num_tokens, row_bytes);
    epic_rows rows = {0};
    a->d_out = epic_rows_as_const(d_out);
    a->d_rows = case_rows(s, room, a->quantize ? d->n : row_bytes);
    if (a->quantize)
        a->d_rows_scales = case_rows(s, room, oracle_scale_bytes(a->quantize, d->n));
    if (!flat && run_chance(common, 70)) {
        d->slot_weights = case_rows(s, room + 1, 4);
        memset(d->slot_weights.data, 0xff, (size_t)(room + 1) * 4); /* NaN in padding */
        a->slot_weights = d->slot_weights.data;
    }
    if (!flat && run_chance(common, 70)) {
        rows = case_rows(s, room, row_bytes);
        a->rows = epic_rows_as_const(rows);
        d->d_slot_weights = case_rows(s, room + 1, 4);
        a->d_slot_weights = d->d_slot_weights.data;
    }
    for (int64_t t = 0; t < s->num_tokens; t++)
        world_row(s->w, STREAM_D_OUT, s->first_token + t, a->type, d->n, at(d_out, t));
    for (int64_t slot = 0; slot < s->num_slots && slot < room; slot++) {
        const int64_t c = filled_by(s, slot);
        if (c < 0) continue;
        if (a->rows.data) world_row(s->w, STREAM_ROWS, c, a->type, d->n, at(rows, slot));
        if (a->slot_weights)
            ((float *)d->slot_weights.data)[slot] = world_weight(s->w, STREAM_ROWS, c);
    }
}

static bool right_gradient(const seat *s, const spread *d, int64_t slot)
{
    const epic_combine_backward_args *a = &d->args;
    const int64_t c = filled_by(s, slot);
    const int64_t token = oracle_is_flat(s->w->plan) ? c : c / top_k_of(s);
    const float w = a->slot_weights ? world_weight(s->w, STREAM_ROWS, c) : 1;
    unsigned char d_out[24576 + 64], row[24576 + 64], scales[512];
    world_row(s->w, STREAM_D_OUT, token, a->type, d->n, d_out);
    if (a->quantize) {
        oracle_quantize(a->quantize, d_out, w, a->type, d->n, row, scales);
        return same_quantized(a->quantize, d->n, at(a->d_rows, slot),
                              at(a->d_rows_scales, slot), row, scales);
    }
    oracle_scale(d_out, w, a->type, d->n, row);
    return oracle_same(row, at(a->d_rows, slot), a->type, d->n);
}

static bool right_dot(const seat *s, const spread *d, int64_t slot)
{
    const epic_combine_backward_args *a = &d->args;
    if (!a->d_slot_weights) return true;
    const int64_t c = filled_by(s, slot);
    unsigned char d_out[24576 + 64], row[24576 + 64];
    world_row(s->w, STREAM_D_OUT, c / top_k_of(s), a->type, d->n, d_out);
    world_row(s->w, STREAM_ROWS, c, a->type, d->n, row);
    const float right = oracle_dot(d_out, row, a->type, d->n);
    return oracle_same(&right, &a->d_slot_weights[slot], EPIC_F32, 1);
}

static void check_spread(const seat *s, const spread *d, epic_result result)
{
    const epic_combine_backward_args *a = &d->args;
    const epic_rows weights = {d->d_slot_weights.data, a->d_rows.num_rows, 4};
    if (d->d_slot_weights.data) CHECK(case_poisoned(at(weights, weights.num_rows), 4));
    if (result != EPIC_OK || s->w->plan->result != EPIC_OK) {
        check_cleared(a->d_rows);
        check_cleared(a->d_rows_scales);
        check_cleared(weights);
        return;
    }
    int64_t wrong_rows = 0, wrong_dots = 0, wrong_padding = 0;
    for (int64_t slot = 0; slot < s->num_slots; slot++) {
        if (filled_by(s, slot) >= 0) {
            wrong_rows += !right_gradient(s, d, slot);
            wrong_dots += !right_dot(s, d, slot);
            continue;
        }
        wrong_padding += !as_padding(at(a->d_rows, slot), a->d_rows.row_bytes, a->flags);
        if (a->quantize)
            wrong_padding +=
                !as_padding(at(a->d_rows_scales, slot), a->d_rows_scales.row_bytes, a->flags);
        if (weights.data) wrong_padding += !as_padding(at(weights, slot), 4, a->flags);
    }
    CHECK_EQ(wrong_rows, 0);
    CHECK_EQ(wrong_dots, 0);
    CHECK_EQ(wrong_padding, 0);
    check_tail(s, a->d_rows, a->flags);
    check_tail(s, a->d_rows_scales, a->flags);
    check_tail(s, weights, a->flags);
}

static uint32_t backward_needs(const epic_combine_backward_args *a)
{
    return (a->quantize ? SUITE_QUANTIZE : 0) | (a->type == EPIC_F64 ? SUITE_F64 : 0);
}

static epic_result call_combine_backward(seat *s, const epic_combine_backward_args *args)
{
    epic_combine_backward_args a = *args;
    a.plan = case_lend(s, a.plan);
    a.d_out = case_lend_const_rows(s, a.d_out);
    a.rows = case_lend_const_rows(s, a.rows);
    a.d_rows = case_lend_rows(s, a.d_rows);
    a.d_rows_scales = case_lend_rows(s, a.d_rows_scales);
    a.slot_weights = case_lend(s, a.slot_weights);
    a.d_slot_weights = case_lend(s, a.d_slot_weights);
    return case_return(s, epic_combine_backward(s->ctx, &a), backward_needs(&a));
}

void case_combine_backward(seat *s, run_random *common)
{
    spread d = {.short_rank = choose_short(s, common)};
    make_spread(s, common, &d);
    d.args.layer = &s->w->layer;
    d.args.plan = s->plan;
    d.args.plan_bytes = s->plan_bytes;
    d.args.call = case_call(s);
    d.args.flags = choose_flags(common);
    case_nap(s);
    const epic_result result = call_combine_backward(s, &d.args);
    const bool moves = s->w->plan->result == EPIC_OK;
    if (!case_lacks(backward_needs(&d.args))) {
        case_refused(s, result, d.short_rank >= 0 && moves ? EPIC_EOVERFLOW : EPIC_OK);
        check_spread(s, &d, result);
    }
    case_drop(s);
}
