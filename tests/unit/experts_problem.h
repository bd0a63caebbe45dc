/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs of the experts' tests: slabs with padding and a tail of NaNs. Every number is stored
 * twice, as the library reads it and in float64. */
#ifndef EXPERTS_PROBLEM_H
#define EXPERTS_PROBLEM_H

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epic/epic.h"
#include "rules/convert.h"

#define MOST_LOCAL 8
#define TAIL 5    /* number of slots past the last slab, filled with NaN */
#define STEP 1e-4 /* step of central differences, whose error is about STEP^2 */
#define SLOT_STEP 0x1p-12

static int failures;

#define CHECK(condition, ...)                                      \
    do {                                                           \
        if (!(condition) && failures++ < 20) {                     \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__);                                   \
            printf("\n");                                          \
        }                                                          \
    } while (0)

static uint64_t state = 0x2545f4914f6cdd1du;

static inline double between(double low, double high)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return low + (high - low) * ((double)(state >> 11) * 0x1p-53);
}

/* ----------------------------------------------------------------------------- numbers ---- */

/* An array of numbers, stored as the library reads them and in float64. */
typedef struct array {
    void *data;
    double *truth;
    uint32_t type;
    int64_t n;
} array;

static inline double number(const void *data, uint32_t type, int64_t i)
{
    float x;
    if (type == EPIC_F64) return ((const double *)data)[i];
    convert_to_float(&x, (const char *)data + i * convert_bytes(type), type, 1);
    return x;
}

static inline void put(array *a, int64_t i, double x)
{
    const float narrow = (float)x;
    if (a->type == EPIC_F64)
        ((double *)a->data)[i] = x;
    else
        convert_from_float((char *)a->data + i * convert_bytes(a->type), a->type, &narrow, 1);
    a->truth[i] = number(a->data, a->type, i);
}

static inline array make_array(uint32_t type, int64_t n)
{
    return (array){.data = malloc((size_t)n * 8 + 1),
                   .truth = calloc((size_t)n + 1, sizeof(double)),
                   .type = type,
                   .n = n};
}

static inline array random_array(uint32_t type, int64_t n, double size)
{
    array a = make_array(type, n);
    for (int64_t i = 0; i < n; i++) put(&a, i, between(-size, size));
    return a;
}

static inline void fill(array *a, int64_t first, int64_t end, double x)
{
    for (int64_t i = first; i < end; i++) put(a, i, x);
}

static inline void free_array(array *a)
{
    free(a->data);
    free(a->truth);
}

/* |a - want| / |want|, as vectors. */
static inline double distance(const array *a, const double *want)
{
    double difference = 0, size = 0;
    for (int64_t i = 0; i < a->n; i++) {
        const double d = number(a->data, a->type, i) - want[i];
        difference += d * d;
        size += want[i] * want[i];
    }
    return sqrt(difference) / (size > 1e-16 ? sqrt(size) : 1);
}

/* ----------------------------------------------------------------------------- problem ---- */

typedef struct problem {
    epic_experts experts;
    int64_t hidden, inner, width;
    int32_t tokens[MOST_LOCAL], rows[MOST_LOCAL];
    int64_t occupied, num_slots;
    bool biased;
    array x, slot_weights, w_gate_up, w_down, b_gate_up, b_down, d_y;
    array y, d_x, d_w_gate_up, d_w_down, d_b_gate_up, d_b_down, d_slot_weights;
    void *saved, *workspace;
    epic_experts_memory_info memory;
} problem;

static inline uint32_t gradient_type(const problem *p)
{
    return p->experts.row_type == EPIC_F64 ? EPIC_F64 : EPIC_F32;
}

/* Fills an array, with zeros in padding and NaNs in the tail. */
static inline void lay_out(problem *p, array *a, int64_t each)
{
    int64_t slot = 0;
    for (uint32_t e = 0; e < p->experts.num_local_experts; e++) {
        fill(a, (slot + p->tokens[e]) * each, (slot + p->rows[e]) * each, 0);
        slot += p->rows[e];
    }
    fill(a, slot * each, a->n, NAN);
}

static inline void make_memory(problem *p)
{
    CHECK(epic_experts_memory(NULL, NULL, &p->experts, p->num_slots, &p->memory) == EPIC_OK,
          "%s", epic_error(NULL));
    p->saved = malloc((size_t)p->memory.saved_bytes + 1);
    p->workspace = malloc((size_t)p->memory.backward_bytes + 1);
    memset(p->saved, 0xff, (size_t)p->memory.saved_bytes);
    memset(p->workspace, 0xff, (size_t)p->memory.backward_bytes);
}

static inline void make_problem(problem *p, const epic_experts *experts, const int32_t *tokens,
                                int alignment, bool biased)
{
    *p = (problem){.experts = *experts, .biased = biased};
    p->hidden = experts->hidden;
    p->inner = experts->inner;
    p->width = p->inner * (experts->ungated ? 1 : 2);
    const int64_t local = experts->num_local_experts;
    for (int64_t e = 0; e < local; e++) {
        p->tokens[e] = tokens[e];
        p->rows[e] = (tokens[e] + alignment - 1) / alignment * alignment;
        p->occupied += p->rows[e];
    }
    p->num_slots = p->occupied + TAIL;
    const uint32_t rows = experts->row_type;
    const uint32_t weights = experts->weight_type ? experts->weight_type : rows;
    const double scale = 1.5 / sqrt((double)p->hidden), down = 1 / sqrt((double)p->inner);
    p->x = random_array(rows, p->num_slots * p->hidden, 2);
    p->d_y = random_array(rows, p->num_slots * p->hidden, 1);
    p->slot_weights = random_array(EPIC_F32, p->num_slots, 1);
    p->w_gate_up = random_array(weights, local * p->hidden * p->width, scale);
    p->w_down = random_array(weights, local * p->inner * p->hidden, down);
    p->b_gate_up = random_array(weights, local * p->width, 0.5);
    p->b_down = random_array(weights, local * p->hidden, 0.5);
    p->y = make_array(rows, p->num_slots * p->hidden);
    p->d_x = make_array(rows, p->num_slots * p->hidden);
    p->d_slot_weights = make_array(EPIC_F32, p->num_slots);
    p->d_w_gate_up = make_array(gradient_type(p), p->w_gate_up.n);
    p->d_w_down = make_array(gradient_type(p), p->w_down.n);
    p->d_b_gate_up = make_array(gradient_type(p), p->b_gate_up.n);
    p->d_b_down = make_array(gradient_type(p), p->b_down.n);
    lay_out(p, &p->x, p->hidden);
    lay_out(p, &p->d_y, p->hidden);
    lay_out(p, &p->slot_weights, 1);
    make_memory(p);
}

static inline void free_problem(problem *p)
{
    array *all[] = {&p->x,         &p->slot_weights,  &p->w_gate_up, &p->w_down,
                    &p->b_gate_up, &p->b_down,        &p->d_y,       &p->y,
                    &p->d_x,       &p->d_w_gate_up,   &p->d_w_down,  &p->d_b_gate_up,
                    &p->d_b_down,  &p->d_slot_weights};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free_array(all[i]);
    free(p->saved);
    free(p->workspace);
}

static inline epic_experts_args forward_args(const problem *p)
{
    const bool late = p->experts.weighting == EPIC_WEIGHT_LATE;
    return (epic_experts_args){
        .experts = &p->experts,
        .x = p->x.data,
        .num_slots = p->num_slots,
        .expert_rows = p->rows,
        .expert_tokens = p->tokens,
        .slot_weights = late ? NULL : p->slot_weights.data,
        .w_gate_up = p->w_gate_up.data,
        .w_down = p->w_down.data,
        .b_gate_up = p->biased ? p->b_gate_up.data : NULL,
        .b_down = p->biased ? p->b_down.data : NULL,
        .saved = p->saved,
        .saved_bytes = (size_t)p->memory.saved_bytes,
        .workspace = p->workspace,
        .workspace_bytes = (size_t)p->memory.forward_bytes,
        .y = p->y.data,
    };
}

static inline epic_experts_backward_args backward_args(const problem *p)
{
    const epic_experts_args f = forward_args(p);
    return (epic_experts_backward_args){
        .experts = f.experts,
        .x = f.x,
        .num_slots = f.num_slots,
        .expert_rows = f.expert_rows,
        .expert_tokens = f.expert_tokens,
        .slot_weights = f.slot_weights,
        .w_gate_up = f.w_gate_up,
        .w_down = f.w_down,
        .b_gate_up = f.b_gate_up,
        .b_down = f.b_down,
        .saved = f.saved,
        .saved_bytes = f.saved_bytes,
        .workspace = f.workspace,
        .workspace_bytes = (size_t)p->memory.backward_bytes,
        .d_y = p->d_y.data,
        .d_x = p->d_x.data,
        .d_w_gate_up = p->d_w_gate_up.data,
        .d_w_down = p->d_w_down.data,
        .d_b_gate_up = p->d_b_gate_up.data,
        .d_b_down = p->d_b_down.data,
        .d_slot_weights = f.slot_weights ? p->d_slot_weights.data : NULL,
    };
}

/* Runs forward and backward. Fills results with a pattern first, so that elements that are not
 * written are noticed. */
static inline void run(problem *p)
{
    const epic_experts_args f = forward_args(p);
    const epic_experts_backward_args b = backward_args(p);
    array *results[] = {&p->y,        &p->d_x,         &p->d_w_gate_up,
                        &p->d_w_down, &p->d_b_gate_up, &p->d_b_down};
    for (int i = 0; i < 6; i++) fill(results[i], 0, results[i]->n, 77);
    fill(&p->d_slot_weights, 0, p->num_slots, 77);
    CHECK(epic_experts_forward(NULL, &f) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(epic_experts_backward(NULL, &b) == EPIC_OK, "%s", epic_error(NULL));
}

static const int32_t few[4] = {3, 0, 2, 1};

static inline void copy_numbers(array *to, const array *from, int64_t to_first,
                                int64_t from_first, int64_t n)
{
    for (int64_t i = 0; i < n; i++) put(to, to_first + i, from->truth[from_first + i]);
}

/* Copies the numbers into another type. */
static inline void copy_problem(problem *to, const problem *from)
{
    copy_numbers(&to->x, &from->x, 0, 0, from->x.n);
    copy_numbers(&to->d_y, &from->d_y, 0, 0, from->d_y.n);
    copy_numbers(&to->slot_weights, &from->slot_weights, 0, 0, from->slot_weights.n);
    copy_numbers(&to->w_gate_up, &from->w_gate_up, 0, 0, from->w_gate_up.n);
    copy_numbers(&to->w_down, &from->w_down, 0, 0, from->w_down.n);
    copy_numbers(&to->b_gate_up, &from->b_gate_up, 0, 0, from->b_gate_up.n);
    copy_numbers(&to->b_down, &from->b_down, 0, 0, from->b_down.n);
}

/* |a - b| / |b| over the first n. */
static inline double apart(const array *a, const array *b, int64_t n)
{
    array first = *a;
    double *want = malloc((size_t)n * sizeof *want);
    for (int64_t i = 0; i < n; i++) want[i] = number(b->data, b->type, i);
    first.n = n;
    const double d = distance(&first, want);
    free(want);
    return d;
}

static inline bool same_bits(const array *a, int64_t a_first, const array *b, int64_t b_first,
                             int64_t n)
{
    const int64_t bytes = convert_bytes(a->type);
    return memcmp((char *)a->data + a_first * bytes, (char *)b->data + b_first * bytes,
                  (size_t)(n * bytes)) == 0;
}

#endif
