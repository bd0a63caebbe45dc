/* SPDX-License-Identifier: Apache-2.0 */
/* The data of random cases, the arrays of a rank, and its calls. */
#include "case_inner.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

/* ------------------------------------------------------------------------- random data ---- */

/* Returns a number with enough bits that sums round, and sometimes a special value. */
float case_number(uint64_t h, bool hard, uint32_t type)
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

void token_row(const test_case *c, int rank, int64_t token, uint8_t *row)
{
    const uint64_t kind = case_hash(c->seed, 50, (uint64_t)rank, (uint64_t)token) % 6;
    if (c->quantize) {
        for (int64_t i = 0; i < c->hidden; i++)
            case_put(row, i, c->type, token_element(c, rank, token, i));
        return;
    }
    if (c->hard && kind == 0) {
        memset(row, 0xff, (size_t)c->row_bytes);
        return;
    }
    for (int64_t i = 0; i < c->row_bytes; i += 8) {
        uint64_t word = case_hash(c->seed, 51 + (uint64_t)rank, (uint64_t)token, (uint64_t)i);
        if (c->hard && kind < 3 && word % 16 == 0)
            word = word & 256 ? 0x7fff7fffffffffffull : 0xffffffff7fffffffull;
        memcpy(row + i, &word, (size_t)(c->row_bytes - i < 8 ? c->row_bytes - i : 8));
    }
}

void token_scales(const test_case *c, int rank, int64_t token, uint8_t *scales)
{
    for (int64_t i = 0; i < c->scale_bytes; i++) {
        const uint64_t h =
            case_hash(c->seed, 52, (uint64_t)(rank * 100000 + token), (uint64_t)i);
        scales[i] = c->hard && token % 3 == 0 ? 0xff : (uint8_t)h;
    }
}

void received_row(const test_case *c, int rank, int64_t token, uint8_t *row, uint8_t *scales)
{
    if (!c->quantize) {
        token_row(c, rank, token, row);
        token_scales(c, rank, token, scales);
        return;
    }
    float *x = malloc((size_t)c->hidden * sizeof *x);
    for (int64_t i = 0; i < c->hidden; i++) x[i] = token_element(c, rank, token, i);
    oracle_quantize(c->quantize, x, 1, EPIC_F32, c->hidden, row, scales);
    free(x);
}

float choice_weight(const test_case *c, int rank, int64_t choice)
{
    const uint64_t h = case_hash(c->seed, 60, (uint64_t)rank, (uint64_t)choice);
    float x = (float)(h % 1000) / 333.0f - 1.0f;
    const uint32_t nan = 0xffffffffu;
    if (c->hard && h >> 32 & 15) return x;
    if (c->hard) memcpy(&x, &nan, 4);
    return x;
}

float slot_weight(const test_case *c, int rank, int64_t slot)
{
    const uint64_t h = case_hash(c->seed, 61, (uint64_t)rank, (uint64_t)slot);
    if (c->hard && (h >> 32) % 16 == 0) return -0.0f;
    return (float)(h % 1000) / 333.0f - 1.0f;
}

float slot_element(const test_case *c, int rank, int64_t slot, int64_t i)
{
    const uint64_t h = case_hash(c->seed, 70 + (uint64_t)rank, (uint64_t)slot, (uint64_t)i);
    return (float)oracle_round(c->type, case_number(h, c->hard, c->type));
}

float token_element(const test_case *c, int rank, int64_t token, int64_t i)
{
    const uint64_t h = case_hash(c->seed, 80 + (uint64_t)rank, (uint64_t)token, (uint64_t)i);
    return (float)oracle_round(c->type, case_number(h, c->hard, c->type));
}

static bool is_flat(const test_case *c)
{
    return c->r.layer.layout == EPIC_FLAT;
}

int64_t case_each(const test_case *c)
{
    return is_flat(c) ? c->r.layer.top_k : 1;
}

int64_t place_of_choice(const test_case *c, int rank, int64_t i)
{
    const int64_t k = c->r.layer.top_k;
    int64_t place = c->r.slot[rank][i] * case_each(c);
    for (int64_t j = i / k * k; j < i && is_flat(c); j++)
        place += c->r.rank[rank][j] == c->r.rank[rank][i];
    return place;
}

/* ---------------------------------------------------------------------------- one rank ---- */

static void *take_arena(bench *b, size_t bytes, int offset)
{
    const size_t at = (b->used + 255) / 256 * 256;
    b->used = at + bytes + 256;
    if (b->used > b->arena_bytes) {
        fprintf(stderr, "arena too small\n");
        exit(1);
    }
    CHECK_CUDA(cudaMemsetAsync(b->arena + at, CASE_GARBAGE, bytes + 256, b->me->stream));
    return b->arena + at + offset;
}

void *case_upload(bench *b, const void *from, size_t bytes, int offset)
{
    void *to = take_arena(b, bytes, offset);
    CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, b->me->stream));
    CHECK_CUDA(cudaStreamSynchronize(b->me->stream));
    return to;
}

void *case_download(bench *b, const void *from, size_t bytes)
{
    void *to = malloc(bytes + 1);
    /* wait here: a copy that waits for a kernel would keep other threads from launching their
     * kernels */
    CHECK_CUDA(cudaStreamSynchronize(b->me->stream));
    CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, b->me->stream));
    CHECK_CUDA(cudaStreamSynchronize(b->me->stream));
    return to;
}

void report_wrong(bench *b, const char *format, ...)
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
            "hard %d weighted %d fused %d table %d flat %u drop %u tree %u leaves %u part %u "
            "by k %u logical %u result %d)\n",
            (unsigned long long)b->c.seed, b->me->rank, b->me->num_ranks, text,
            b->c.r.tokens_of[b->me->rank], l->num_experts, l->top_k, l->alignment, b->c.type,
            (long long)b->c.hidden, b->c.offset, b->c.hard, b->c.weighted, b->c.fused,
            b->c.r.table, l->layout, l->overflow, l->sum_order, l->leaves, l->partial_type,
            l->priority, l->num_logical, b->c.r.result);
}

bool case_must(bench *b, epic_result result, const char *what)
{
    if (result == EPIC_OK) return true;
    report_wrong(b, "%s: %s", what, epic_error(NULL));
    return false;
}

bool same_float(float a, float b)
{
    return (isnan(a) && isnan(b)) || !memcmp(&a, &b, 4);
}

/* Returns memory for a plan, filled with positive and negative words, because kernels may read
 * a record before they know that the plan does not have it. */
static void *take_plan(bench *b, size_t bytes)
{
    const size_t words = bytes / 4;
    uint32_t *garbage = malloc(words * 4 + 4);
    for (size_t i = 0; i < words; i++)
        garbage[i] = (uint32_t)case_hash(b->c.seed, 90, (uint64_t)b->me->rank, i);
    void *plan = case_upload(b, garbage, words * 4, 0);
    free(garbage);
    return plan;
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
    uint8_t *scales = malloc((size_t)(tokens * c->scale_bytes) + 8);
    const int64_t *ids = r->logical ? r->named[me] : r->ids[me];
    for (int64_t i = 0; i < choices; i++) {
        narrow[i] = (int32_t)ids[i];
        weights[i] = choice_weight(c, me, i);
    }
#pragma omp parallel for
    for (int64_t t = 0; t < tokens; t++) {
        token_row(c, me, t, rows + t * c->row_bytes);
        token_scales(c, me, t, scales + t * c->scale_bytes);
    }
    const size_t experts = r->layer.num_experts * sizeof(int32_t);
    a->plan_bytes =
        device_layer_bytes(r->num_ranks, b->me->group->config.max_tokens, &r->layer);
    a->plan = take_plan(b, a->plan_bytes);
    a->ids = c->wide ? case_upload(b, ids, (size_t)choices * 8, 0)
                     : case_upload(b, narrow, (size_t)choices * 4, 0);
    a->table = r->table ? case_upload(b, r->owner, experts, 0) : NULL;
    a->logical = r->logical ? case_upload(b, r->logical, experts, 0) : NULL;
    const uint64_t kind = r->capacity_of[me] ? case_hash(c->seed, 47, 0, 0) % 4 : 0;
    /* kind 2: the limit is smaller than the capacity; kind 3: larger */
    const int32_t limit = (int32_t)r->capacity_of[me] + (kind == 3 ? 5 : 0);
    a->capacity = r->capacity_of[me] + (kind == 2 ? me + 1 : 0);
    a->limit = kind > 1 ? case_upload(b, &limit, sizeof limit, 0) : NULL;
    a->expert_rows = take_arena(b, experts, 0);
    a->expert_tokens = take_arena(b, experts, 0);
    const bool has_i64 = case_hash(c->seed, 48, 0, 0) & 1;
    a->expert_rows_i64 = has_i64 ? take_arena(b, 2 * experts, 0) : NULL;
    a->expert_tokens_i64 = has_i64 ? take_arena(b, 2 * experts, 0) : NULL;
    a->load = take_arena(b, experts, 0);
    a->demand = take_arena(b, 4, 0);
    a->tokens = case_upload(b, rows, (size_t)(tokens * c->row_bytes), c->offset);
    a->weights = case_upload(b, weights, (size_t)choices * 4, 0);
    a->recv = take_arena(b, (size_t)(c->recv_rows[me] * c->recv_bytes), c->offset);
    a->scales = case_upload(b, scales, (size_t)(tokens * c->scale_bytes), c->offset);
    a->recv_scales = take_arena(b, (size_t)(c->recv_rows[me] * c->scale_bytes), c->offset);
    a->slot_weights = take_arena(b, (size_t)(c->recv_rows[me] * case_each(c)) * 4, 0);
    a->recv_expert = take_arena(b, (size_t)(c->recv_rows[me] * case_each(c)) * 4, 0);
    free(narrow);
    free(weights);
    free(rows);
    free(scales);
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
                            .logical_of_expert = a->logical,
                            .capacity = a->capacity,
                            .capacity_limit = a->limit,
                            .index_type = b->c.wide ? EPIC_I64 : EPIC_I32,
                            .expert_rows = a->expert_rows,
                            .expert_tokens = a->expert_tokens,
                            .load = a->load,
                            .demand = a->demand,
                            .expert_rows_i64 = a->expert_rows_i64,
                            .expert_tokens_i64 = a->expert_tokens_i64};
}

static epic_dispatch_args dispatch_args(bench *b, const arrays *a)
{
    const test_case *c = &b->c;
    const int me = b->me->rank;
    const epic_rows none = {0}, scales = {a->scales, c->r.tokens_of[me], c->scale_bytes};
    const epic_rows recv_scales = {a->recv_scales, c->recv_rows[me], c->scale_bytes};
    return (epic_dispatch_args){
        .call = b->call,
        .scales = epic_rows_as_const(c->quantize || !c->scale_bytes ? none : scales),
        .recv_scales = c->scale_bytes ? recv_scales : none,
        .type = c->quantize ? c->type : EPIC_BYTES,
        .quantize = c->quantize,
        .layer = &b->c.r.layer,
        .plan = a->plan,
        .plan_bytes = a->plan_bytes,
        .tokens = {a->tokens, c->r.tokens_of[me], c->row_bytes},
        .recv = {a->recv, c->recv_rows[me], c->recv_bytes},
        .weights = c->weighted ? a->weights : NULL,
        .slot_weights = c->weighted ? a->slot_weights : NULL,
        .recv_expert = is_flat(c) && c->seed % 3 ? a->recv_expert : NULL,
        .flags =
            (c->zero_tail ? EPIC_ZERO_TAIL : 0) | (c->leave_padding ? EPIC_LEAVE_PADDING : 0)};
}

void case_put(uint8_t *row, int64_t i, uint32_t type, float x)
{
    const size_t bytes = (size_t)oracle_type_bytes(type);
    if (isnan(x))
        memset(row + (size_t)i * bytes, 0xff, bytes);
    else
        oracle_put(row, type, i, x);
}

void make_sums(bench *b, sums *s)
{
    const test_case *c = &b->c;
    const int me = b->me->rank;
    const int64_t slots = c->recv_rows[me], tokens = c->r.tokens_of[me];
    uint8_t *rows = malloc((size_t)(slots * c->row_bytes) + 8);
    const int64_t num_floats = slots * case_each(c);
    float *weights = malloc((size_t)slots * 4 + 4);
    float *floats = malloc((size_t)num_floats * 4 + 4);
#pragma omp parallel for
    for (int64_t i = 0; i < slots; i++) {
        for (int64_t j = 0; j < c->hidden; j++)
            case_put(rows + i * c->row_bytes, j, c->type, slot_element(c, me, i, j));
        weights[i] = slot_weight(c, me, i);
    }
    for (int64_t i = 0; i < num_floats; i++) floats[i] = choice_weight(c, me, i + 1000000);
    s->num_rows = slots;
    s->rows = case_upload(b, rows, (size_t)(slots * c->row_bytes), c->offset);
    s->weights = case_upload(b, weights, (size_t)slots * 4, 0);
    s->floats = case_upload(b, floats, (size_t)num_floats * 4, 0);
    s->out = take_arena(b, (size_t)(tokens * c->row_bytes), c->offset);
    s->d_tokens = take_arena(b, (size_t)(tokens * c->row_bytes), c->offset);
    s->d_rows = take_arena(b, (size_t)(slots * c->row_bytes), c->offset);
    s->d_rows_scales = take_arena(b, (size_t)(slots * c->scale_bytes), c->offset);
    s->d_weights = take_arena(b, (size_t)slots * 4, 0);
    s->choice_floats = take_arena(b, (size_t)tokens * c->r.layer.top_k * 4, 0);
    free(rows);
    free(weights);
    free(floats);
    rows = malloc((size_t)(tokens * c->row_bytes) + 8);
#pragma omp parallel for
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < c->hidden; i++)
            case_put(rows + t * c->row_bytes, i, c->type, token_element(c, me, t, i));
    s->d_out = case_upload(b, rows, (size_t)(tokens * c->row_bytes), c->offset);
    free(rows);
}

bool call_plan(bench *b, const arrays *a)
{
    const epic_plan_args args = plan_args(b, a);
    return case_must(b, p2p_ops.plan(b->me->group, &args), "plan");
}

bool call_dispatch(bench *b, const arrays *a)
{
    const epic_dispatch_args args = dispatch_args(b, a);
    return case_must(b, p2p_ops.dispatch(b->me->group, &args), "dispatch");
}

bool call_plan_dispatch(bench *b, const arrays *a)
{
    const epic_plan_args plan = plan_args(b, a);
    const epic_dispatch_args dispatch = dispatch_args(b, a);
    return case_must(b, p2p_ops.plan_dispatch(b->me->group, &plan, &dispatch), "plan_dispatch");
}

bool call_combine(bench *b, const arrays *a, const sums *s)
{
    const test_case *c = &b->c;
    const epic_combine_args args = {.call = b->call,
                                    .layer = &b->c.r.layer,
                                    .plan = a->plan,
                                    .plan_bytes = a->plan_bytes,
                                    .rows = {s->rows, s->num_rows, c->row_bytes},
                                    .out = {s->out, c->r.tokens_of[b->me->rank], c->row_bytes},
                                    .slot_weights =
                                        c->weighted && !is_flat(c) ? s->weights : NULL,
                                    .type = c->type};
    return case_must(b, p2p_ops.combine(b->me->group, &args), "combine");
}

bool call_dispatch_backward(bench *b, const arrays *a, const sums *s)
{
    const test_case *c = &b->c;
    const epic_dispatch_backward_args args = {
        .call = b->call,
        .layer = &b->c.r.layer,
        .plan = a->plan,
        .plan_bytes = a->plan_bytes,
        .d_recv = {s->rows, s->num_rows, c->row_bytes},
        .d_tokens = {s->d_tokens, c->r.tokens_of[b->me->rank], c->row_bytes},
        .d_slot_weights = s->floats,
        .d_weights = s->choice_floats,
        .type = c->type};
    return case_must(b, p2p_ops.dispatch_backward(b->me->group, &args), "dispatch_backward");
}

bool call_combine_backward(bench *b, const arrays *a, const sums *s)
{
    const test_case *c = &b->c;
    const epic_rows none = {0}, scales = {s->d_rows_scales, s->num_rows, c->scale_bytes};
    const epic_combine_backward_args args = {
        .call = b->call,
        .layer = &b->c.r.layer,
        .plan = a->plan,
        .plan_bytes = a->plan_bytes,
        .d_out = {s->d_out, c->r.tokens_of[b->me->rank], c->row_bytes},
        .rows = {s->rows, s->num_rows, c->row_bytes},
        .d_rows = {s->d_rows, s->num_rows, c->quantize ? c->recv_bytes : c->row_bytes},
        .d_rows_scales = c->quantize ? scales : none,
        .quantize = c->quantize,
        .slot_weights = c->weighted && !is_flat(c) ? s->weights : NULL,
        .d_slot_weights = is_flat(c) ? NULL : s->d_weights,
        .type = c->type,
        .flags = c->leave_padding ? EPIC_LEAVE_PADDING : 0};
    return case_must(b, p2p_ops.combine_backward(b->me->group, &args), "combine_backward");
}

static void dirty_memory(bench *b, void *to, int64_t bytes)
{
    CHECK_CUDA(cudaMemsetAsync(to, CASE_GARBAGE, (size_t)bytes, b->me->stream));
}

void dirty_received(bench *b, const arrays *a)
{
    const int64_t rows = b->c.recv_rows[b->me->rank];
    dirty_memory(b, a->recv, rows * b->c.recv_bytes);
    dirty_memory(b, a->recv_scales, rows * b->c.scale_bytes);
    dirty_memory(b, a->slot_weights, rows * case_each(&b->c) * 4);
    dirty_memory(b, a->recv_expert, rows * case_each(&b->c) * 4);
}

void dirty_sums(bench *b, const sums *s)
{
    const int64_t tokens = b->c.r.tokens_of[b->me->rank];
    dirty_memory(b, s->out, tokens * b->c.row_bytes);
    dirty_memory(b, s->d_tokens, tokens * b->c.row_bytes);
    dirty_memory(b, s->choice_floats, tokens * b->c.r.layer.top_k * 4);
    dirty_memory(b, s->d_rows, s->num_rows * b->c.row_bytes);
    dirty_memory(b, s->d_rows_scales, s->num_rows * b->c.scale_bytes);
    dirty_memory(b, s->d_weights, s->num_rows * 4);
}
