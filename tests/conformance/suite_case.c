/* SPDX-License-Identifier: Apache-2.0 */
/* The frame of a case, its plan, and what the phases share. */
#include "suite_case.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"

#define POISON 0xab
#define MOST_BYTES (8 << 20)
#define MOST_ELEMENTS 200000 /* of all rows that a rank makes or checks in one operation */

/* ----------------------------------------------------------------------------- tools ---- */

void case_nap(seat *s)
{
    if (s->delays) run_nap_us((long)run_below(&s->own, 1500));
}

epic_rows case_rows(int64_t num_rows, int64_t row_bytes)
{
    const size_t bytes = (size_t)(num_rows * row_bytes);
    epic_rows rows = {NULL, num_rows, row_bytes};
    if (bytes == 0) return rows;
    rows.data = malloc(bytes);
    memset(rows.data, POISON, bytes);
    return rows;
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
    return all_bytes(bytes, count, POISON);
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

/* Odd ones, cut down until the case is not too large for a test. */
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
    return list[i];
}

uint32_t case_type(run_random *common, bool wide)
{
    static const uint32_t types[] = {EPIC_F32, EPIC_BF16, EPIC_F16, EPIC_F64};
    return types[run_below(common, wide ? 4 : 3)];
}

/* ------------------------------------------------------------------------------ plan ---- */

static epic_config sizes_of(const world *w)
{
    return (epic_config){.max_tokens = WORLD_MAX_TOKENS,
                         .max_row_bytes = 16,
                         .num_ranks = (uint32_t)w->num_ranks};
}

typedef struct plan_outputs { /* any may be missing */
    int32_t *expert_rows, *expert_tokens, *load, *demand;
} plan_outputs;

static int32_t *some(run_random *common, int64_t count)
{
    if (run_chance(common, 15)) return NULL;
    return case_rows(count, 4).data;
}

static void check_counts(seat *s, const plan_outputs *out)
{
    const oracle_plan *p = s->w->plan;
    const int64_t at = s->rank * (int64_t)p->num_local;
    for (int64_t l = 0; l < p->num_local; l++) {
        if (out->expert_rows) CHECK_EQ(out->expert_rows[l], p->expert_rows[at + l]);
        if (out->expert_tokens) CHECK_EQ(out->expert_tokens[l], p->expert_tokens[at + l]);
    }
    for (uint32_t e = 0; out->load && e < s->w->layer.num_experts; e++)
        if (out->load[e] != p->load[e]) CHECK_EQ(out->load[e], p->load[e]);
    if (out->demand) CHECK_EQ(*out->demand, p->demand[s->rank]);
}

/* The ledger: every choice has one fate. */
static void check_info(seat *s)
{
    const oracle_plan *p = s->w->plan;
    const int64_t top_k = s->w->layer.top_k, first = s->first_token * top_k;
    epic_plan_info info;
    if (!CHECK(epic_plan_read(s->plan, s->plan_bytes, &info) == EPIC_OK)) return;
    const int32_t *fate = (const int32_t *)(const void *)(s->plan + info.fate_offset);
    const int32_t *rank = (const int32_t *)(const void *)(s->plan + info.rank_offset);
    int64_t kept = 0, none = 0, expert_full = 0, rank_full = 0, wrong = 0;
    for (int64_t i = 0; i < s->num_tokens * top_k; i++) {
        const int32_t expected = p->fate[first + i];
        const int64_t id = s->w->ids[first + i];
        kept += expected >= 0;
        none += expected == EPIC_FATE_NONE;
        expert_full += expected == EPIC_FATE_EXPERT_FULL;
        rank_full += expected == EPIC_FATE_RANK_FULL;
        wrong += fate[i] != expected || rank[i] != (id < 0 ? -1 : s->w->rank_of[id]);
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(info.num_kept, kept);
    CHECK_EQ(info.num_none, none);
    CHECK_EQ(info.num_expert_full, expert_full);
    CHECK_EQ(info.num_rank_full, rank_full);
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

/* Moves the plan elsewhere and spoils what it leaves behind. */
static void move_plan(seat *s)
{
    unsigned char *memory = malloc(s->plan_bytes + 64);
    unsigned char *plan = memory;
    while ((uintptr_t)plan % 64 != 16) plan++;
    memcpy(plan, s->plan, s->plan_bytes);
    memset(s->plan, POISON, s->plan_bytes);
    free(s->plan_memory);
    s->plan_memory = memory;
    s->plan = plan;
}

static epic_plan_args plan_args(seat *s, run_random *common, plan_outputs *out)
{
    const world *w = s->w;
    const uint32_t wide = run_chance(common, 50) ? EPIC_I64 : run_chance(common, 50);
    *out = (plan_outputs){.expert_rows = some(common, w->plan->num_local),
                          .expert_tokens = some(common, w->plan->num_local),
                          .load = some(common, w->layer.num_experts),
                          .demand = some(common, 1)};
    return (epic_plan_args){.call.tag = s->tag,
                            .layer = &w->layer,
                            .plan = s->plan,
                            .plan_bytes = s->plan_bytes,
                            .topk_idx = world_topk_idx(w, s->rank, wide),
                            .num_tokens = s->num_tokens,
                            .rank_of_expert = w->table ? w->rank_of : NULL,
                            .capacity = w->capacity[s->rank],
                            .index_type = wide == EPIC_I64 ? EPIC_I64
                                          : wide           ? EPIC_I32
                                                           : 0,
                            .expert_rows = out->expert_rows,
                            .expert_tokens = out->expert_tokens,
                            .load = out->load,
                            .demand = out->demand};
}

static void plan_done(seat *s, epic_plan_args *args, plan_outputs *out, epic_result result)
{
    case_refused(s, result, s->w->plan->result);
    check_counts(s, out);
    check_info(s);
    move_plan(s);
    free((void *)args->topk_idx);
    free(out->expert_rows);
    free(out->expert_tokens);
    free(out->load);
    free(out->demand);
}

void case_plan(seat *s, run_random *common)
{
    plan_outputs out;
    epic_plan_args args = plan_args(s, common, &out);
    case_nap(s);
    plan_done(s, &args, &out, epic_plan(s->ctx, &args));
}

/* The rows are whole only because a test knows the capacity; dispatch is checked elsewhere. */
void case_plan_dispatch(seat *s, run_random *common)
{
    plan_outputs out;
    epic_plan_args args = plan_args(s, common, &out);
    int64_t hidden = case_hidden(s, common, EPIC_BYTES);
    for (int r = 0; r < s->w->num_ranks; r++)
        if (s->w->capacity[r] * hidden > MOST_BYTES) hidden = 3;
    if (args.capacity == EPIC_CAPACITY_EXACT) args.capacity = s->num_slots + 2;
    const int64_t room = args.capacity;
    epic_dispatch_args d = {.tokens = case_rows(s->num_tokens, hidden),
                            .recv = case_rows(room, hidden)};
    for (int64_t t = 0; t < s->num_tokens; t++)
        world_row(s->w, STREAM_TOKENS, s->first_token + t, EPIC_BYTES, hidden,
                  (unsigned char *)d.tokens.data + t * hidden);
    case_nap(s);
    const epic_result result = epic_plan_dispatch(s->ctx, &args, &d);
    case_refused(s, result, s->w->plan->result);
    unsigned char *row = malloc((size_t)hidden);
    const unsigned char *recv = d.recv.data;
    int64_t wrong = 0;
    for (int64_t slot = 0; slot < s->num_slots; slot++) {
        const int64_t by = s->w->plan->filled_by[s->rank][slot];
        const int64_t top_k = oracle_is_flat(s->w->plan) ? 1 : s->w->layer.top_k;
        memset(row, 0, (size_t)hidden);
        if (by >= 0) world_row(s->w, STREAM_TOKENS, by / top_k, EPIC_BYTES, hidden, row);
        wrong += memcmp(row, recv + slot * hidden, (size_t)hidden) != 0;
    }
    CHECK_EQ(wrong, 0);
    if (result)
        CHECK(case_zero(recv, room * hidden));
    else
        CHECK(case_poisoned(recv + s->num_slots * hidden, (room - s->num_slots) * hidden));
    free(row);
    free(d.tokens.data);
    free(d.recv.data);
    free((void *)args.topk_idx);
    free(out.expert_rows);
    free(out.expert_tokens);
    free(out.load);
    free(out.demand);
}

/* ----------------------------------------------------------------------------- frame ---- */

void case_begin(seat *s, epic_context *ctx, const world *w, uint64_t tag, bool delays)
{
    const epic_config sizes = sizes_of(w);
    *s = (seat){.ctx = ctx, .w = w, .rank = epic_rank(ctx), .tag = tag, .delays = delays};
    check_seed = w->seed;
    s->failed_before = check_num_failed();
    s->own.state = run_mix(run_mix(w->seed, 1000 + (uint64_t)s->rank), tag);
    s->first_token = w->plan->first_token[s->rank];
    s->num_tokens = w->tokens_of[s->rank];
    s->num_slots = w->plan->num_slots[s->rank];
    s->plan_bytes = epic_plan_bytes(&sizes, &w->layer);
    if (!CHECK_SAY(s->plan_bytes > 0, "epic_plan_bytes: %s", epic_error(NULL)))
        s->plan_bytes = 64;
    s->plan = s->plan_memory = aligned_alloc(64, (s->plan_bytes + 63) / 64 * 64);
    memset(s->plan, POISON, s->plan_bytes);
}

void case_end(seat *s)
{
    if (check_num_failed() > s->failed_before && check_num_failed() < 40 && s->rank == 0)
        world_tell(s->w, "failed in or beside");
    free(s->plan_memory);
}

/* A case asks for some operations twice: nothing may be left over from the first time. */
bool case_phase(seat *s, int phase)
{
    static void (*const phases[])(seat *, run_random *) = {
        case_plan, case_dispatch, case_combine, case_combine_backward, case_dispatch_backward,
        case_sum,
    };
    const int count = sizeof phases / sizeof *phases;
    run_random common = {run_mix(s->w->seed, 500 + (uint64_t)phase)};
    if (phase >= 2 * count) return false;
    check_seed = s->w->seed;
    if (phase < count)
        phases[phase](s, &common);
    else if (phase == count && run_chance(&common, 40))
        case_plan_dispatch(s, &common);
    else if (phase > count && run_chance(&common, 10))
        phases[phase - count](s, &common);
    return true;
}

void case_run(epic_context *ctx, const world *w, uint64_t tag, bool delays)
{
    seat s;
    case_begin(&s, ctx, w, tag, delays);
    for (int phase = 0; case_phase(&s, phase); phase++) continue;
    case_end(&s);
}
