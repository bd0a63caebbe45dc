/* SPDX-License-Identifier: Apache-2.0 */
/* The start and the end of a case, its plan, and functions that the phases share. */
#include "suite_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

#define MOST_ELEMENTS \
    200000 /* limit for all rows that a rank makes or checks in one operation */

/* ----------------------------------------------------------------------------- tools ---- */

void case_nap(seat *s)
{
    if (s->delays) run_nap_us((long)run_below(&s->own, 1500));
}

static bool all_bytes(const void *bytes, int64_t count, unsigned char value)
{
    const unsigned char *p = bytes;
    for (int64_t i = 0; i < count; i++)
        if (p[i] != value) return false;
    return true;
}

bool case_poisoned(const void *bytes, int64_t count)
{
    return all_bytes(bytes, count, CASE_POISON);
}

bool case_zero(const void *bytes, int64_t count)
{
    return all_bytes(bytes, count, 0);
}

void case_refused(seat *s, epic_result result, epic_result expected)
{
    CHECK_SAY(result == expected, "rank %d: %s instead of %s: %s", s->rank,
              epic_result_name(result), epic_result_name(expected),
              result ? epic_error(s->ctx) : "");
}

/* Draws a hidden size, odd ones included, small enough for a test. */
int64_t case_hidden(seat *s, run_random *common, uint32_t type)
{
    static const int64_t elements[] = {1, 7, 100, 128, 1024, 1025, 3000};
    static const int64_t bytes[] = {1, 3, 16, 17, 640, 4096, 14336};
    const int64_t *list = type == EPIC_BYTES ? bytes : elements;
    const oracle_plan *p = s->w->plan;
    int64_t rows = p->total_tokens * s->w->layer.top_k;
    for (int r = 0; r < s->w->num_ranks; r++)
        if (p->num_slots[r] > rows) rows = p->num_slots[r];
    int64_t i = run_below(common, 7);
    while (i > 0 && list[i] * rows > MOST_ELEMENTS) i--;
    return run_chance(common, 25) ? run_between(common, 1, list[i]) : list[i];
}

uint32_t case_type(run_random *common, bool wide)
{
    static const uint32_t types[] = {EPIC_F32, EPIC_BF16, EPIC_F16, EPIC_F64};
    return types[run_below(common, wide ? 4 : 3)];
}

/* ------------------------------------------------------------------------------ plan ---- */

typedef struct plan_outputs { /* each may be NULL */
    int32_t *expert_rows, *expert_tokens, *load, *logical_load, *demand;
    int64_t *expert_rows_i64, *expert_tokens_i64;
} plan_outputs;

static int32_t *some(seat *s, run_random *common, int64_t count)
{
    if (run_chance(common, 15)) return NULL;
    return case_rows(s, count, 4).data;
}

static int64_t *some_i64(seat *s, run_random *common, int64_t count)
{
    return run_chance(common, 60) ? NULL : case_rows(s, count, 8).data;
}

/* Returns the load of an expert, also of an absent one. */
static int64_t load_of(const world *w, uint32_t expert)
{
    int64_t load = 0;
    if (w->rank_of[expert] >= 0 || w->logical_of) return w->plan->load[expert];
    for (int64_t c = 0; c < w->plan->total_tokens * w->layer.top_k; c++)
        load += w->named[c] == expert;
    return load;
}

static void check_counts(seat *s, const plan_outputs *out)
{
    const oracle_plan *p = s->w->plan;
    const int64_t at = s->rank * (int64_t)p->num_local;
    for (int64_t l = 0; l < p->num_local; l++) {
        if (out->expert_rows) CHECK_EQ(out->expert_rows[l], p->expert_rows[at + l]);
        if (out->expert_tokens) CHECK_EQ(out->expert_tokens[l], p->expert_tokens[at + l]);
        if (out->expert_rows_i64) CHECK_EQ(out->expert_rows_i64[l], p->expert_rows[at + l]);
        if (out->expert_tokens_i64)
            CHECK_EQ(out->expert_tokens_i64[l], p->expert_tokens[at + l]);
    }
    for (uint32_t e = 0; out->load && e < s->w->layer.num_experts; e++)
        if (out->load[e] != load_of(s->w, e)) CHECK_EQ(out->load[e], load_of(s->w, e));
    if (out->demand) CHECK_EQ(*out->demand, p->demand[s->rank]);
    for (int64_t l = 0; out->logical_load && l < s->w->layer.num_logical; l++) {
        int64_t load = 0;
        for (int64_t c = 0; c < p->total_tokens * s->w->layer.top_k; c++)
            load += s->w->named[c] == l;
        if (out->logical_load[l] != load) CHECK_EQ(out->logical_load[l], load);
    }
}

/* Checks that the loads of the replicas of a logical expert differ by at most one. */
static void check_balance(const seat *s, const int32_t *load)
{
    const int32_t *logical_of = s->w->logical_of;
    for (uint32_t e = 0; logical_of && load && e < s->w->layer.num_experts; e++)
        for (uint32_t f = 0; f < e; f++)
            if (s->w->rank_of[e] >= 0 && s->w->rank_of[f] >= 0 && logical_of[e] >= 0 &&
                logical_of[e] == logical_of[f] && abs(load[e] - load[f]) > 1)
                CHECK_EQ(load[e], load[f]);
}

/* Checks epic_plan_read: every choice has one fate. */
static void check_info(seat *s)
{
    const oracle_plan *p = s->w->plan;
    const int64_t top_k = s->w->layer.top_k, first = s->first_token * top_k;
    epic_plan_info info;
    if (!CHECK(epic_plan_read(s->plan, s->plan_bytes, &info) == EPIC_OK)) return;
    const int32_t *fate = (const int32_t *)(const void *)(s->plan + info.fate_offset);
    const int32_t *rank = (const int32_t *)(const void *)(s->plan + info.rank_offset);
    int64_t kept = 0, none = 0, expert_full = 0, rank_full = 0, absent = 0, wrong = 0;
    for (int64_t i = 0; i < s->num_tokens * top_k; i++) {
        const int32_t expected = p->fate[first + i];
        const int64_t id = s->w->ids[first + i];
        kept += expected >= 0;
        none += expected == EPIC_FATE_NONE;
        expert_full += expected == EPIC_FATE_EXPERT_FULL;
        rank_full += expected == EPIC_FATE_RANK_FULL;
        const bool is_known = id >= 0 && (expected >= 0 || !suite_there->device);
        absent += expected == EPIC_FATE_ABSENT;
        wrong += fate[i] != expected || rank[i] != (is_known ? s->w->owner_of[id] : -1);
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(info.num_kept, kept);
    CHECK_EQ(info.num_none, none);
    CHECK_EQ(info.num_expert_full, expert_full);
    CHECK_EQ(info.num_rank_full, rank_full);
    CHECK_EQ(info.num_absent, absent);
    CHECK_EQ(info.num_tokens, s->num_tokens);
    CHECK_EQ(info.total_tokens, p->total_tokens);
    CHECK_EQ(info.num_slots, s->num_slots);
    CHECK_EQ(info.capacity, s->w->capacity[s->rank]);
    CHECK_EQ(info.result, p->result);
    CHECK_EQ(info.num_local_experts, p->num_local);
    CHECK(info.id != 0 && info.id != s->plan_id);
    s->plan_id = info.id;
    if (s->w->layer.sum_order != EPIC_TREE) return;
    CHECK_EQ(info.num_leaves, p->leaves / s->w->num_ranks);
    const int64_t block = s->w->layer.num_experts / s->w->num_ranks;
    CHECK_EQ(s->w->rank_of[info.first_leaf / info.num_leaves * block], s->rank);
}

static epic_plan_args plan_args(seat *s, run_random *common, plan_outputs *out)
{
    const world *w = s->w;
    const uint32_t wide = run_chance(common, 50) ? EPIC_I64 : run_chance(common, 50);
    *out = (plan_outputs){.expert_rows = some(s, common, w->plan->num_local),
                          .expert_tokens = some(s, common, w->plan->num_local),
                          .load = some(s, common, w->layer.num_experts),
                          .logical_load = w->logical_of && run_chance(common, 85)
                                              ? case_rows(s, w->layer.num_logical, 4).data
                                              : NULL,
                          .demand = some(s, common, 1),
                          .expert_rows_i64 = some_i64(s, common, w->plan->num_local),
                          .expert_tokens_i64 = some_i64(s, common, w->plan->num_local)};
    void *ids = world_topk_idx(w, s->rank, wide);
    const int64_t id_bytes = s->num_tokens * w->layer.top_k * (wide == EPIC_I64 ? 8 : 4);
    const void *ids_here = case_copy(s, ids, id_bytes);
    free(ids);
    /* In some cases the limit is smaller than the capacity, in others larger. */
    const int64_t drawn = run_below(common, 8), kind = w->capacity[s->rank] ? drawn : 0;
    const int32_t limit = (int32_t)w->capacity[s->rank] + (kind == 1 ? 7 : 0);
    return (epic_plan_args){
        .call = case_call(s),
        .layer = &w->layer,
        .plan = s->plan,
        .plan_bytes = s->plan_bytes,
        .topk_idx = ids_here,
        .num_tokens = s->num_tokens,
        .rank_of_expert = w->table ? case_copy(s, w->owner_of, w->layer.num_experts * 4) : NULL,
        .logical_of_expert =
            w->logical_of ? case_copy(s, w->logical_of, w->layer.num_experts * 4) : NULL,
        .capacity = w->capacity[s->rank] + (kind == 2 ? 3 : 0),
        .capacity_limit = kind == 1 || kind == 2 ? case_copy(s, &limit, sizeof limit) : NULL,
        .index_type = wide == EPIC_I64 ? EPIC_I64
                      : wide           ? EPIC_I32
                                       : 0,
        .expert_rows = out->expert_rows,
        .expert_tokens = out->expert_tokens,
        .load = out->load,
        .logical_load = out->logical_load,
        .demand = out->demand,
        .expert_rows_i64 = out->expert_rows_i64,
        .expert_tokens_i64 = out->expert_tokens_i64};
}

epic_plan_args case_lend_plan(seat *s, const epic_plan_args *args)
{
    epic_plan_args a = *args;
    a.plan = case_lend(s, a.plan);
    a.topk_idx = case_lend(s, a.topk_idx);
    a.rank_of_expert = case_lend(s, a.rank_of_expert);
    a.logical_of_expert = case_lend(s, a.logical_of_expert);
    a.expert_rows = case_lend(s, a.expert_rows);
    a.expert_tokens = case_lend(s, a.expert_tokens);
    a.load = case_lend(s, a.load);
    a.logical_load = case_lend(s, a.logical_load);
    a.demand = case_lend(s, a.demand);
    a.expert_rows_i64 = case_lend(s, a.expert_rows_i64);
    a.expert_tokens_i64 = case_lend(s, a.expert_tokens_i64);
    a.capacity_limit = case_lend(s, a.capacity_limit);
    return a;
}

static uint32_t layer_needs(const epic_layer *layer)
{
    const bool by_k = layer->priority == EPIC_BY_K && layer->overflow == EPIC_OVERFLOW_DROP;
    const bool many = layer->num_experts * layer->top_k > suite_there->most_experts;
    return (by_k && many && layer->top_k > 1 ? SUITE_BY_K : 0) |
           (layer->num_logical ? SUITE_REPLICAS : 0) |
           (layer->sum_order == EPIC_TREE ? SUITE_TREE : 0) |
           (layer->num_experts > suite_there->most_experts ? SUITE_EXPERTS : 0);
}

static epic_result call_plan(seat *s, const epic_plan_args *args)
{
    const epic_plan_args a = case_lend_plan(s, args);
    return case_return(s, epic_plan(s->ctx, &a), layer_needs(a.layer));
}

/* Runs the plan. If the backend lacks a feature of the layer, the plan is refused and the
 * phases that need a plan are left out. */
void case_plan(seat *s, run_random *common)
{
    plan_outputs out;
    const epic_plan_args args = plan_args(s, common, &out);
    case_nap(s);
    const epic_result result = call_plan(s, &args);
    s->absent = case_lacks(layer_needs(&s->w->layer));
    if (!s->absent) {
        case_refused(s, result, s->w->plan->result);
        check_counts(s, &out);
        check_balance(s, out.load);
        check_info(s);
    }
    case_drop(s);
}

void case_plan_dispatch(seat *s, run_random *common)
{
    plan_outputs out;
    epic_plan_args args = plan_args(s, common, &out);
    if (args.capacity == EPIC_CAPACITY_EXACT) args.capacity = s->num_slots + 2;
    case_dispatch_planned(s, common, &args);
    case_drop(s);
}

/* Checks that the error contains the rank, the position and the value. */
static void check_named(const seat *s, int victim, int64_t choice, int64_t value)
{
    const int top_k = (int)s->w->layer.top_k;
    const char *said = epic_error(s->ctx);
    char rank[32], place[64], number[32];
    snprintf(rank, sizeof rank, "rank %d", s->w->seats.of[victim]);
    snprintf(place, sizeof place, "token %d, k %d", (int)choice / top_k, (int)choice % top_k);
    snprintf(number, sizeof number, "%lld", (long long)value);
    CHECK_SAY(strstr(said, rank) && strstr(said, place) && strstr(said, number),
              "no %s, %s, %s in: %s", rank, place, number, said);
}

/* Returns a choice after the first of its token, and in *value an id that the token has
 * already; -1: no such choice. */
static int64_t choose_twin(const world *w, run_random *common, int victim, int64_t *value)
{
    const int64_t top_k = w->layer.top_k, count = w->tokens_of[victim] * top_k;
    const int64_t *named = w->named + w->plan->first_token[victim] * top_k;
    const int64_t start = run_below(common, count);
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = (start + i) % count;
        *value = named[at - at % top_k];
        if (at % top_k && *value >= 0) return at;
    }
    return -1;
}

void case_bad_choice(epic_context *ctx, const epic_bootstrap *bootstrap, const world *w,
                     uint64_t tag, int victim)
{
    seat s;
    plan_outputs out;
    run_random common = {run_mix(w->seed, 900)};
    case_begin(&s, ctx, bootstrap, w, tag, false);
    const epic_plan_args args = plan_args(&s, &common, &out);
    const bool wide = args.index_type == EPIC_I64, distinct = w->layer.flags & EPIC_DISTINCT;
    int64_t value, at = distinct ? choose_twin(w, &common, victim, &value) : -1;
    if (at < 0) {
        at = run_below(&common, w->tokens_of[victim] * w->layer.top_k);
        value = run_between(&common, world_num_ids(w), wide ? INT64_MAX / 2 : INT32_MAX);
    }
    unsigned char *ids = (unsigned char *)(uintptr_t)args.topk_idx;
    if (s.rank == victim) memcpy(ids + at * (wide ? 8 : 4), &value, wide ? 8 : 4);
    case_refused(&s, call_plan(&s, &args), EPIC_EINVAL);
    check_named(&s, victim, at, value);
    case_drop(&s);
    w->plan->result = EPIC_EINVAL; /* the result that the dispatch must return */
    case_dispatch(&s, &common);
    w->plan->result = EPIC_OK;
    case_end(&s);
}

/* ----------------------------------------------------------------------------- frame ---- */

void case_begin(seat *s, epic_context *ctx, const epic_bootstrap *bootstrap, const world *w,
                uint64_t tag, bool delays)
{
    epic_layer_info sizes = {0};
    *s = (seat){
        .ctx = ctx, .bootstrap = bootstrap, .w = w, .rank = 0, .tag = tag, .delays = delays};
    while (w->seats.of[s->rank] != epic_rank(ctx)) s->rank++;
    check_seed = w->seed;
    s->failed_before = check_num_failed();
    s->own.state = run_mix(run_mix(w->seed, 1000 + (uint64_t)s->rank), tag);
    s->places.state = run_mix(s->own.state, 77);
    s->first_token = w->plan->first_token[s->rank];
    s->num_tokens = w->tokens_of[s->rank];
    s->num_slots = w->plan->num_slots[s->rank];
    CHECK_SAY(epic_layer_sizes(ctx, &w->layer, &sizes) == EPIC_OK, "epic_layer_sizes: %s",
              epic_error(ctx));
    s->plan_bytes = sizes.plan_bytes > 64 ? sizes.plan_bytes : 64;
    s->plan = case_rows(s, 1, s->plan_bytes).data;
}

void case_end(seat *s)
{
    if (check_num_failed() > s->failed_before && check_num_failed() < 40 && s->rank == 0)
        world_report(s->w, "failed in, or at the same time as");
    free(s->plan);
}

/* Runs one phase. Some phases run twice, so that anything left over from the first run is
 * noticed. */
bool case_phase(seat *s, int phase)
{
    static void (*const phases[])(seat *, run_random *) = {
        case_plan,
        case_dispatch,
        case_combine,
        case_combine_backward,
        case_dispatch_backward,
        case_sum_replicas,
        case_sum,
    };
    const int count = sizeof phases / sizeof *phases;
    run_random common = {run_mix(s->w->seed, 500 + (uint64_t)phase)};
    if (phase >= 2 * count) return false;
    check_seed = s->w->seed;
    if (s->absent && phase % count != count - 1)
        return true; /* all phases except the sum need a plan */
    if (phase < count)
        phases[phase](s, &common);
    else if (phase == count && run_chance(&common, 40))
        case_plan_dispatch(s, &common);
    else if (phase > count && run_chance(&common, 10))
        phases[phase - count](s, &common);
    return true;
}

void case_run(epic_context *ctx, const epic_bootstrap *bootstrap, const world *w, uint64_t tag,
              bool delays)
{
    seat s;
    case_begin(&s, ctx, bootstrap, w, tag, delays);
    for (int phase = 0; case_phase(&s, phase); phase++) continue;
    case_end(&s);
}
