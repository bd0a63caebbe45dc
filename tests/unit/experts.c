/* SPDX-License-Identifier: Apache-2.0 */
/* The grouped MLP of the experts against plain float64 loops over tokens; gradients against
 * central differences of those loops. */
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epic/epic.h"
#include "experts/blas.h"
#include "rules/convert.h"

#define MOST_LOCAL 8
#define TAIL 5    /* slots past the last slab, poisoned */
#define STEP 1e-4 /* of central differences: their error is about STEP^2 */
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

static double between(double low, double high)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return low + (high - low) * ((double)(state >> 11) * 0x1p-53);
}

/* ------------------------------------------------------------------------------ numbers ---- */

/* The same numbers twice: as the library reads them, and in float64. */
typedef struct array {
    void *data;
    double *truth;
    uint32_t type;
    int64_t n;
} array;

static double number(const void *data, uint32_t type, int64_t i)
{
    float x;
    if (type == EPIC_F64) return ((const double *)data)[i];
    convert_to_float(&x, (const char *)data + i * convert_bytes(type), type, 1);
    return x;
}

static void put(array *a, int64_t i, double x)
{
    const float narrow = (float)x;
    if (a->type == EPIC_F64)
        ((double *)a->data)[i] = x;
    else
        convert_from_float((char *)a->data + i * convert_bytes(a->type), a->type, &narrow, 1);
    a->truth[i] = number(a->data, a->type, i);
}

static array make_array(uint32_t type, int64_t n)
{
    return (array){.data = malloc((size_t)n * 8 + 1),
                   .truth = calloc((size_t)n + 1, sizeof(double)),
                   .type = type,
                   .n = n};
}

static array random_array(uint32_t type, int64_t n, double size)
{
    array a = make_array(type, n);
    for (int64_t i = 0; i < n; i++) put(&a, i, between(-size, size));
    return a;
}

static void fill(array *a, int64_t first, int64_t end, double x)
{
    for (int64_t i = first; i < end; i++) put(a, i, x);
}

static void free_array(array *a)
{
    free(a->data);
    free(a->truth);
}

/* |a - want| / |want|, as vectors. */
static double distance(const array *a, const double *want)
{
    double difference = 0, size = 0;
    for (int64_t i = 0; i < a->n; i++) {
        const double d = number(a->data, a->type, i) - want[i];
        difference += d * d;
        size += want[i] * want[i];
    }
    return sqrt(difference) / (size > 1e-16 ? sqrt(size) : 1);
}

/* ------------------------------------------------------------------------------ problem ---- */

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

static uint32_t gradient_type(const problem *p)
{
    return p->experts.row_type == EPIC_F64 ? EPIC_F64 : EPIC_F32;
}

/* Padding is zero, the tail is poison. */
static void lay_out(problem *p, array *a, int64_t each)
{
    int64_t slot = 0;
    for (uint32_t e = 0; e < p->experts.num_local_experts; e++) {
        fill(a, (slot + p->tokens[e]) * each, (slot + p->rows[e]) * each, 0);
        slot += p->rows[e];
    }
    fill(a, slot * each, a->n, NAN);
}

static void make_memory(problem *p)
{
    CHECK(epic_experts_memory(&p->experts, p->num_slots, &p->memory) == EPIC_OK, "%s",
          epic_error(NULL));
    p->saved = malloc((size_t)p->memory.saved_bytes + 1);
    p->workspace = malloc((size_t)p->memory.backward_bytes + 1);
    memset(p->saved, 0xff, (size_t)p->memory.saved_bytes);
    memset(p->workspace, 0xff, (size_t)p->memory.backward_bytes);
}

static void make_problem(problem *p, const epic_experts *experts, const int32_t *tokens,
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

static void free_problem(problem *p)
{
    array *all[] = {&p->x,         &p->slot_weights,  &p->w_gate_up, &p->w_down,
                    &p->b_gate_up, &p->b_down,        &p->d_y,       &p->y,
                    &p->d_x,       &p->d_w_gate_up,   &p->d_w_down,  &p->d_b_gate_up,
                    &p->d_b_down,  &p->d_slot_weights};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free_array(all[i]);
    free(p->saved);
    free(p->workspace);
}

static epic_experts_args forward_args(const problem *p)
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

static epic_experts_backward_args backward_args(const problem *p)
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

/* Results start as a pattern, so that what is not written shows. */
static void run(problem *p)
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

/* ------------------------------------------------------------------------------- oracle ---- */

static double limit_of(const epic_experts *ex)
{
    return ex->limit != 0 ? ex->limit : ex->activation == EPIC_CLAMPED_SILU ? 10 : 7;
}

static double act(const epic_experts *ex, double x)
{
    switch (ex->activation) {
    case EPIC_SILU:
        return x / (1 + exp(-x));
    case EPIC_GELU:
        return x * erfc(-x / sqrt(2)) / 2;
    case EPIC_GELU_TANH:
        return x / 2 * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * pow(x, 3))));
    case EPIC_RELU2:
        return x > 0 ? x * x : 0;
    default:
        x = fmin(x, limit_of(ex));
        return x / (1 + exp(-(ex->activation == EPIC_CLAMPED_SILU ? 1
                              : ex->alpha                         ? (double)ex->alpha
                                                                  : 1.702f) *
                            x));
    }
}

static double factor(const epic_experts *ex, double up)
{
    const double limit = limit_of(ex), clamped = fmax(-limit, fmin(up, limit));
    if (ex->activation == EPIC_CLAMPED_SWIGLU) return clamped + 1;
    return ex->activation == EPIC_CLAMPED_SILU ? clamped : up;
}

static double first_product(const problem *p, int e, int64_t slot, int64_t column)
{
    const double w =
        p->experts.weighting == EPIC_WEIGHT_INPUT ? p->slot_weights.truth[slot] : 1;
    double sum = p->biased ? p->b_gate_up.truth[e * p->width + column] : 0;
    for (int64_t i = 0; i < p->hidden; i++)
        sum += w * p->x.truth[slot * p->hidden + i] *
               p->w_gate_up.truth[(e * p->hidden + i) * p->width + column];
    return sum;
}

/* One token of expert e: y [hidden]. */
static void plain_token(const problem *p, int e, int64_t slot, double *y)
{
    const epic_experts *ex = &p->experts;
    const double w = ex->weighting == EPIC_WEIGHT_EARLY ? p->slot_weights.truth[slot] : 1;
    for (int64_t j = 0; j < p->hidden; j++)
        y[j] = p->biased ? w * p->b_down.truth[e * p->hidden + j] : 0;
    for (int64_t i = 0; i < p->inner; i++) {
        const int64_t gate = ex->interleaved ? 2 * i : i;
        const int64_t up = ex->interleaved ? 2 * i + 1 : p->inner + i;
        double h = act(ex, first_product(p, e, slot, gate));
        if (!ex->ungated) h *= factor(ex, first_product(p, e, slot, up));
        for (int64_t j = 0; j < p->hidden; j++)
            y[j] += w * h * p->w_down.truth[(e * p->inner + i) * p->hidden + j];
    }
}

/* All slots: 0 on padding, 77 (what was there) on the tail.  Returns the loss <d_y, y>. */
static double plain(const problem *p, double *y)
{
    double loss = 0, *row = malloc((size_t)p->hidden * sizeof *row);
    int64_t slot = 0;
    for (uint32_t e = 0; e < p->experts.num_local_experts; e++)
        for (int r = 0; r < p->rows[e]; r++, slot++) {
            memset(row, 0, (size_t)p->hidden * sizeof *row);
            if (r < p->tokens[e]) plain_token(p, (int)e, slot, row);
            for (int64_t j = 0; j < p->hidden; j++) {
                if (y != NULL) y[slot * p->hidden + j] = row[j];
                loss += row[j] * p->d_y.truth[slot * p->hidden + j];
            }
        }
    for (int64_t i = slot * p->hidden; y != NULL && i < p->y.n; i++) y[i] = 77;
    free(row);
    return loss;
}

/* The gradient of the loss for in[i], by differences; `each` numbers a slot for arrays of slots,
 * else 0. */
static void check_gradient(const problem *p, const char *name, const array *in,
                           const array *got, int64_t each, double step, double tolerance)
{
    double *want = malloc((size_t)in->n * sizeof *want);
    for (int64_t i = 0; i < in->n; i++) {
        const double here = in->truth[i];
        if (each && i >= p->occupied * each) {
            want[i] = 77;
            continue;
        }
        in->truth[i] = here + step;
        const double above = plain(p, NULL);
        in->truth[i] = here - step;
        const double below = plain(p, NULL);
        in->truth[i] = here;
        want[i] = (above - below) / (2 * step);
    }
    array inside = *got;
    if (each) inside.n = p->occupied * each;
    const double d = distance(&inside, want);
    const epic_experts *ex = &p->experts;
    CHECK(d <= tolerance,
          "%s off by %g: activation %u, ungated %u, interleaved %u, weighting %u, biased %d, "
          "rows %u, weights %u",
          name, d, ex->activation, ex->ungated, ex->interleaved, ex->weighting, p->biased,
          ex->row_type, ex->weight_type);
    for (int64_t i = inside.n; i < in->n; i++)
        CHECK(number(got->data, got->type, i) == 77, "%s: the tail was written", name);
    free(want);
}

static void check_padding(const problem *p, const char *name, const array *a, int64_t each)
{
    int64_t slot = 0;
    for (uint32_t e = 0; e < p->experts.num_local_experts; e++, slot += p->rows[e - 1])
        for (int64_t i = (slot + p->tokens[e]) * each; i < (slot + p->rows[e]) * each; i++)
            CHECK(number(a->data, a->type, i) == 0, "%s: padding is not 0", name);
}

typedef struct tolerances {
    double y, d_x, d_weights;
} tolerances;

static void check_forward(const problem *p, double tolerance)
{
    double *want = malloc((size_t)p->y.n * sizeof *want);
    plain(p, want);
    array inside = p->y;
    inside.n = p->occupied * p->hidden;
    const double d = distance(&inside, want);
    CHECK(d <= tolerance, "y off by %g: activation %u, rows %u, weights %u", d,
          p->experts.activation, p->experts.row_type, p->experts.weight_type);
    for (int64_t i = inside.n; i < p->y.n; i++)
        CHECK(number(p->y.data, p->y.type, i) == 77, "y: the tail was written");
    check_padding(p, "y", &p->y, p->hidden);
    free(want);
}

static void check_all(problem *p, tolerances t)
{
    run(p);
    check_forward(p, t.y);
    check_gradient(p, "d_x", &p->x, &p->d_x, p->hidden, STEP, t.d_x);
    check_gradient(p, "d_w_gate_up", &p->w_gate_up, &p->d_w_gate_up, 0, STEP, t.d_weights);
    check_gradient(p, "d_w_down", &p->w_down, &p->d_w_down, 0, STEP, t.d_weights);
    check_padding(p, "d_x", &p->d_x, p->hidden);
    if (p->biased) {
        check_gradient(p, "d_b_gate_up", &p->b_gate_up, &p->d_b_gate_up, 0, STEP, t.d_weights);
        check_gradient(p, "d_b_down", &p->b_down, &p->d_b_down, 0, STEP, t.d_weights);
    }
    if (p->experts.weighting == EPIC_WEIGHT_LATE) return;
    check_gradient(p, "d_slot_weights", &p->slot_weights, &p->d_slot_weights, 1, SLOT_STEP,
                   t.d_weights);
    check_padding(p, "d_slot_weights", &p->d_slot_weights, 1);
}

/* -------------------------------------------------------------------------------- tests ---- */

static const int32_t few[4] = {3, 0, 2, 1};

/* Every activation, gate, weighting and bias in float64, at several alignments. */
static void test_combinations(void)
{
    static const int alignments[] = {1, 16, 128};
    const tolerances exact = {1e-12, 1e-6, 1e-6};
    int turn = 0;
    for (uint32_t activation = 0; activation <= EPIC_CLAMPED_SILU; activation++)
        for (uint32_t shape = 0; shape < 3; shape++) /* gated, ungated, interleaved */
            for (uint32_t weighting = 0; weighting < 3; weighting++)
                for (int biased = 0; biased < 2; biased++) {
                    problem p;
                    const epic_experts ex = {.num_local_experts = 4,
                                             .hidden = 5,
                                             .inner = 3,
                                             .activation = activation,
                                             .ungated = shape == 1,
                                             .interleaved = shape == 2,
                                             .weighting = weighting,
                                             .row_type = EPIC_F64,
                                             .limit = 0.75f};
                    if (shape == 1 && activation >= EPIC_CLAMPED_SWIGLU) continue;
                    make_problem(&p, &ex, few, alignments[turn++ % 3], biased);
                    check_all(&p, exact);
                    free_problem(&p);
                }
}

/* Every pair of types; the default limit and alpha of the clamped swiglu too. */
static void test_types(void)
{
    static const struct {
        uint32_t rows, weights;
        tolerances tolerances;
    } cases[] = {
        {EPIC_F32, EPIC_F32, {1e-5, 1e-4, 1e-4}},   {EPIC_F32, EPIC_BF16, {1e-5, 1e-4, 1e-4}},
        {EPIC_BF16, EPIC_BF16, {5e-3, 5e-3, 1e-4}}, {EPIC_BF16, EPIC_F32, {5e-3, 5e-3, 1e-4}},
        {EPIC_F16, EPIC_F16, {1e-3, 1e-3, 1e-4}},   {EPIC_F16, EPIC_BF16, {1e-3, 1e-3, 1e-4}},
    };
    for (int c = 0; c < 6; c++)
        for (uint32_t activation = 0; activation <= EPIC_CLAMPED_SILU; activation++) {
            problem p;
            const epic_experts ex = {.num_local_experts = 4,
                                     .hidden = 7,
                                     .inner = 6,
                                     .activation = activation,
                                     .weighting = (uint32_t)(c + (int)activation) % 3,
                                     .row_type = cases[c].rows,
                                     .weight_type = cases[c].weights};
            make_problem(&p, &ex, few, 4, activation % 2 == 0);
            check_all(&p, cases[c].tolerances);
            free_problem(&p);
        }
}

/* What is clamped has no gradient at all; what lies on the limit has all of it.  One number of
 * each kind, hidden and inner 1, so that the products are exact. */
static void test_limit(uint32_t activation, uint32_t type)
{
    static const double numbers[] = {-3, -2.5, -2, -1, 2, 2.5, 3}; /* the limit is 2.5 */
    const epic_experts ex = {.num_local_experts = 1,
                             .hidden = 1,
                             .inner = 1,
                             .activation = activation,
                             .row_type = type,
                             .limit = 2.5f,
                             .alpha = 1};
    const double slack = type == EPIC_F64 ? 1e-15 : 1e-6, plus = factor(&ex, 0);
    for (int g = 0; g < 7; g++)
        for (int u = 0; u < 7; u++) {
            problem p;
            const int32_t one = 1;
            make_problem(&p, &ex, &one, 1, false);
            put(&p.x, 0, 1);
            put(&p.w_gate_up, 0, numbers[g]);
            put(&p.w_gate_up, 1, numbers[u]);
            put(&p.w_down, 0, 1);
            put(&p.d_y, 0, 1);
            run(&p);
            const double gate = fmin(numbers[g], 2.5), up = fmax(-2.5, fmin(numbers[u], 2.5));
            const double s = 1 / (1 + exp(-gate));
            const double d_gate = numbers[g] > 2.5 ? 0 : s * (1 + gate * (1 - s)) * (up + plus);
            const double d_up = fabs(numbers[u]) > 2.5 ? 0 : gate * s;
            const double got[] = {number(p.d_w_gate_up.data, p.d_w_gate_up.type, 0),
                                  number(p.d_w_gate_up.data, p.d_w_gate_up.type, 1)};
            CHECK(fabs(got[0] - d_gate) <= slack * fabs(d_gate) * 4 &&
                      fabs(got[1] - d_up) <= slack * fabs(d_up) * 4,
                  "activation %u, gate %g, up %g: gradients %g and %g, not %g and %g",
                  activation, numbers[g], numbers[u], got[0], got[1], d_gate, d_up);
            CHECK(fabs(number(p.y.data, type, 0) - gate * s * (up + plus)) <= slack * 40,
                  "activation %u, gate %g, up %g: %g", activation, numbers[g], numbers[u],
                  number(p.y.data, type, 0));
            free_problem(&p);
        }
}

/* One expert has nearly all. */
static void test_skewed(void)
{
    static const int32_t skewed[5] = {1, 0, 300, 0, 2};
    const epic_experts ex = {.num_local_experts = 5,
                             .hidden = 67,
                             .inner = 33,
                             .weighting = EPIC_WEIGHT_EARLY,
                             .row_type = EPIC_F32};
    problem p;
    make_problem(&p, &ex, skewed, 16, true);
    run(&p);
    check_forward(&p, 1e-5);
    free_problem(&p);
}

static void copy_numbers(array *to, const array *from, int64_t to_first, int64_t from_first,
                         int64_t n)
{
    for (int64_t i = 0; i < n; i++) put(to, to_first + i, from->truth[from_first + i]);
}

/* The same numbers in another type. */
static void copy_problem(problem *to, const problem *from)
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
static double apart(const array *a, const array *b, int64_t n)
{
    array first = *a;
    double *want = malloc((size_t)n * sizeof *want);
    for (int64_t i = 0; i < n; i++) want[i] = number(b->data, b->type, i);
    first.n = n;
    const double d = distance(&first, want);
    free(want);
    return d;
}

/* Weights so large that they are converted in several tiles, against the float64 path. */
static void test_tiles(void)
{
    static const int32_t tokens[2] = {3, 2};
    epic_experts ex = {
        .num_local_experts = 2, .hidden = 1300, .inner = 900, .row_type = EPIC_BF16};
    problem narrow, wide;
    make_problem(&narrow, &ex, tokens, 4, true);
    ex.row_type = EPIC_F64;
    make_problem(&wide, &ex, tokens, 4, true);
    copy_problem(&wide, &narrow);
    run(&narrow);
    run(&wide);
    const int64_t slots = narrow.occupied * narrow.hidden;
    CHECK(apart(&narrow.y, &wide.y, slots) < 5e-3, "y");
    CHECK(apart(&narrow.d_x, &wide.d_x, slots) < 5e-3, "d_x");
    CHECK(apart(&narrow.d_w_gate_up, &wide.d_w_gate_up, wide.d_w_gate_up.n) < 1e-4,
          "d_w_gate_up");
    CHECK(apart(&narrow.d_w_down, &wide.d_w_down, wide.d_w_down.n) < 1e-4, "d_w_down");
    free_problem(&narrow);
    free_problem(&wide);
}

/* Weights multiplied in after the experts, as combine does, or early: the same. */
static void test_late_is_early(void)
{
    epic_experts ex = {.num_local_experts = 4,
                       .hidden = 24,
                       .inner = 20,
                       .weighting = EPIC_WEIGHT_EARLY,
                       .row_type = EPIC_F32};
    problem early, late;
    make_problem(&early, &ex, few, 4, true);
    ex.weighting = EPIC_WEIGHT_LATE;
    make_problem(&late, &ex, few, 4, true);
    copy_problem(&late, &early);
    for (int64_t i = 0; i < late.occupied * late.hidden; i++)
        put(&late.d_y, i, early.d_y.truth[i] * early.slot_weights.truth[i / late.hidden]);
    run(&early);
    run(&late);
    const int64_t slots = late.occupied * late.hidden;
    for (int64_t s = 0; s < late.occupied; s++) {
        double sum = 0, size = 1e-3;
        for (int64_t i = s * late.hidden; i < (s + 1) * late.hidden; i++) {
            const double y = number(late.y.data, EPIC_F32, i);
            put(&late.y, i, y * early.slot_weights.truth[s]);
            sum += early.d_y.truth[i] * y;
            size += fabs(early.d_y.truth[i] * y);
        }
        CHECK(fabs(sum - number(early.d_slot_weights.data, EPIC_F32, s)) < 1e-5 * size,
              "weight gradient of slot %lld", (long long)s);
    }
    CHECK(apart(&late.y, &early.y, slots) < 1e-6, "y");
    CHECK(apart(&late.d_x, &early.d_x, slots) < 1e-6, "d_x");
    CHECK(apart(&late.d_w_gate_up, &early.d_w_gate_up, late.d_w_gate_up.n) < 1e-6, "gate, up");
    CHECK(apart(&late.d_w_down, &early.d_w_down, late.d_w_down.n) < 1e-6, "down");
    CHECK(apart(&late.d_b_gate_up, &early.d_b_gate_up, late.d_b_gate_up.n) < 1e-6, "biases");
    CHECK(apart(&late.d_b_down, &early.d_b_down, late.d_b_down.n) < 1e-6, "down bias");
    free_problem(&early);
    free_problem(&late);
}

static bool same_bits(const array *a, int64_t a_first, const array *b, int64_t b_first,
                      int64_t n)
{
    const int64_t bytes = convert_bytes(a->type);
    return memcmp((char *)a->data + a_first * bytes, (char *)b->data + b_first * bytes,
                  (size_t)(n * bytes)) == 0;
}

/* An expert's results have the same bits alone and among others, elsewhere in the buffer. */
static void test_slab_alone(uint32_t type)
{
    static const int32_t crowd[4] = {37, 5, 83, 0}, alone[1] = {83};
    epic_experts ex = {.num_local_experts = 4,
                       .hidden = 200,
                       .inner = 136,
                       .weighting = EPIC_WEIGHT_EARLY,
                       .row_type = type};
    problem a, b;
    make_problem(&a, &ex, crowd, 16, true);
    ex.num_local_experts = 1;
    make_problem(&b, &ex, alone, 16, true);
    const int64_t h = a.hidden, first = a.rows[0] + a.rows[1], rows = b.rows[0];
    const int64_t wide = h * a.width, down = a.inner * h;
    copy_numbers(&b.x, &a.x, 0, first * h, rows * h);
    copy_numbers(&b.d_y, &a.d_y, 0, first * h, rows * h);
    copy_numbers(&b.slot_weights, &a.slot_weights, 0, first, rows);
    copy_numbers(&b.w_gate_up, &a.w_gate_up, 0, 2 * wide, wide);
    copy_numbers(&b.w_down, &a.w_down, 0, 2 * down, down);
    copy_numbers(&b.b_gate_up, &a.b_gate_up, 0, 2 * a.width, a.width);
    copy_numbers(&b.b_down, &a.b_down, 0, 2 * h, h);
    run(&a);
    run(&b);
    CHECK(same_bits(&a.y, first * h, &b.y, 0, rows * h), "y, type %u", type);
    CHECK(same_bits(&a.d_x, first * h, &b.d_x, 0, rows * h), "d_x, type %u", type);
    CHECK(same_bits(&a.d_w_gate_up, 2 * wide, &b.d_w_gate_up, 0, wide), "gate, up, %u", type);
    CHECK(same_bits(&a.d_w_down, 2 * down, &b.d_w_down, 0, down), "down, %u", type);
    CHECK(same_bits(&a.d_slot_weights, first, &b.d_slot_weights, 0, rows), "weights, %u", type);
    CHECK(same_bits(&a.d_b_down, 2 * h, &b.d_b_down, 0, h), "bias, %u", type);
    free_problem(&a);
    free_problem(&b);
}

/* Added to what is there; an expert with no token adds nothing. */
static void test_accumulate(void)
{
    const epic_experts ex = {
        .num_local_experts = 4, .hidden = 9, .inner = 5, .row_type = EPIC_F64};
    problem p;
    make_problem(&p, &ex, few, 2, true);
    run(&p);
    array *gradients[] = {&p.d_w_gate_up, &p.d_w_down, &p.d_b_gate_up, &p.d_b_down};
    for (int g = 0; g < 4; g++)
        for (int64_t i = 0; i < gradients[g]->n; i++)
            put(gradients[g], i, number(gradients[g]->data, EPIC_F64, i));
    epic_experts_backward_args b = backward_args(&p);
    b.flags = EPIC_ACCUMULATE;
    b.d_x = NULL;
    CHECK(epic_experts_backward(NULL, &b) == EPIC_OK, "%s", epic_error(NULL));
    for (int g = 0; g < 4; g++)
        for (int64_t i = 0; i < gradients[g]->n; i++) gradients[g]->truth[i] *= 2;
    for (int g = 0; g < 4; g++)
        CHECK(distance(gradients[g], gradients[g]->truth) < 1e-14, "gradient %d", g);
    b.d_w_gate_up = b.d_w_down = b.d_b_gate_up = b.d_b_down = NULL;
    CHECK(epic_experts_backward(NULL, &b) == EPIC_OK, "%s", epic_error(NULL));
    free_problem(&p);
}

/* Nothing anywhere: arrays may be NULL, weight gradients are zeros. */
static void test_nothing(void)
{
    static const int32_t none[2] = {0, 0};
    const epic_experts ex = {
        .row_type = EPIC_F32, .num_local_experts = 2, .hidden = 4, .inner = 3};
    float d_w_down[24] = {1, [23] = 1};
    const epic_experts_args f = {.experts = &ex, .expert_rows = none};
    const epic_experts_backward_args b = {
        .experts = &ex, .expert_rows = none, .d_w_down = d_w_down};
    epic_experts_memory_info memory;
    CHECK(epic_experts_memory(&ex, 0, &memory) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(memory.saved_bytes == 0 && memory.backward_bytes == 0, "memory for nothing");
    CHECK(epic_experts_forward(NULL, &f) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(epic_experts_backward(NULL, &b) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(d_w_down[0] == 0 && d_w_down[23] == 0, "not cleared");
}

/* ----------------------------------------------------------------- products and threads ---- */

/* What is loaded against plain loops, as they lie and transposed. */
static void test_products(void)
{
    for (int turn = 0; turn < 24; turn++) {
        const int m = 1 + turn * 5 % 37, n = 1 + turn * 11 % 53, k = 1 + turn * 7 % 61;
        array a = random_array(EPIC_F32, m * k, 1), b = random_array(EPIC_F32, k * n, 1);
        array c = random_array(EPIC_F32, m * n, 1), d = make_array(EPIC_F32, m * n);
        copy_numbers(&d, &c, 0, 0, m * n);
        gemm g = {.m = m, .n = n, .k = k, .a = a.data, .b = b.data, .ldc = n};
        g.transpose_a = turn % 3 == 1;
        g.transpose_b = turn % 3 == 2;
        g.lda = g.transpose_a ? m : k;
        g.ldb = g.transpose_b ? k : n;
        g.add = turn % 2;
        g.c = c.data;
        gemm_f32(&g);
        g.c = d.data;
        gemm_plain_f32(&g);
        CHECK(apart(&d, &c, m * n) < 1e-5, "turn %d", turn);
        free_array(&a);
        free_array(&b);
        free_array(&c);
        free_array(&d);
    }
}

/* OpenBLAS has one thread inside, and afterwards what it had before. */
static void test_num_threads(void)
{
    void (*set)(int) = NULL;
    int (*get)(void) = NULL;
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_NOLOAD);
    if (library == NULL) return;
    void *address = dlsym(library, "openblas_set_num_threads");
    memcpy(&set, &address, sizeof set);
    address = dlsym(library, "openblas_get_num_threads");
    memcpy(&get, &address, sizeof get);
    const int before = get();
    set(2);
    experts_blas_enter();
    experts_blas_enter();
    CHECK(get() == 1, "%d threads inside", get());
    experts_blas_leave();
    CHECK(get() == 1, "%d threads inside", get());
    experts_blas_leave();
    CHECK(get() == 2, "%d threads outside", get());
    set(before);
    dlclose(library);
}

static void *run_again(void *problem_of_thread)
{
    for (int i = 0; i < 5; i++) run(problem_of_thread);
    return NULL;
}

/* Many threads at once get the bits that one gets. */
static void test_threads(void)
{
    static const int32_t tokens[3] = {40, 0, 25};
    const epic_experts ex = {
        .num_local_experts = 3, .hidden = 96, .inner = 64, .row_type = EPIC_F32};
    problem alone, many[3];
    pthread_t threads[3];
    make_problem(&alone, &ex, tokens, 8, true);
    run(&alone);
    for (int i = 0; i < 3; i++) {
        make_problem(&many[i], &ex, tokens, 8, true);
        copy_problem(&many[i], &alone);
        pthread_create(&threads[i], NULL, run_again, &many[i]);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        CHECK(same_bits(&many[i].y, 0, &alone.y, 0, alone.occupied * alone.hidden), "y");
        CHECK(same_bits(&many[i].d_w_down, 0, &alone.d_w_down, 0, alone.d_w_down.n),
              "d_w_down");
        free_problem(&many[i]);
    }
    free_problem(&alone);
}

/* ------------------------------------------------------------------------------ refusals ---- */

static void refuse_experts(epic_experts ex, const char *word)
{
    epic_experts_memory_info memory;
    CHECK(epic_experts_memory(&ex, 4, &memory) == EPIC_EINVAL, "accepted: %s", word);
    CHECK(strstr(epic_error(NULL), word) != NULL, "\"%s\" does not name %s", epic_error(NULL),
          word);
}

static void test_wrong_experts(void)
{
    const epic_experts good = {
        .row_type = EPIC_F32, .num_local_experts = 2, .hidden = 4, .inner = 3};
    epic_experts ex;
#define REFUSE(field, value, word) \
    do {                           \
        ex = good;                 \
        ex.field = value;          \
        refuse_experts(ex, word);  \
    } while (0)
    REFUSE(num_local_experts, 0, "num_local_experts");
    REFUSE(hidden, 0, "hidden");
    REFUSE(inner, 1u << 25, "inner");
    REFUSE(activation, 9, "activation");
    REFUSE(ungated, 2, "ungated");
    REFUSE(interleaved, 2, "interleaved");
    REFUSE(weighting, 3, "weighting");
    REFUSE(row_type, EPIC_I32, "row_type");
    REFUSE(weight_type, EPIC_E4M3, "weight_type");
    REFUSE(weight_type, EPIC_F64, "F64");
    REFUSE(limit, -1, "limit");
    REFUSE(flags, 1, "flags");
    ex = good;
    ex.ungated = ex.interleaved = 1;
    refuse_experts(ex, "interleaved needs a gate");
    ex.interleaved = 0;
    ex.activation = EPIC_CLAMPED_SWIGLU;
    refuse_experts(ex, "EPIC_CLAMPED_SWIGLU needs a gate");
    ex.activation = EPIC_CLAMPED_SILU;
    refuse_experts(ex, "EPIC_CLAMPED_SILU needs a gate");
}

static void refuse_forward(epic_experts_args args, const char *word)
{
    CHECK(epic_experts_forward(NULL, &args) == EPIC_EINVAL, "accepted: %s", word);
    CHECK(strstr(epic_error(NULL), word) != NULL, "\"%s\" does not name %s", epic_error(NULL),
          word);
}

static void test_wrong_arguments(void)
{
    static const int32_t negative[4] = {4, -1, 4, 4}, many[4] = {100, 0, 0, 0};
    const epic_experts ex = {.num_local_experts = 4,
                             .hidden = 4,
                             .inner = 3,
                             .weighting = EPIC_WEIGHT_EARLY,
                             .row_type = EPIC_F32};
    epic_experts late = ex;
    late.weighting = EPIC_WEIGHT_LATE;
    problem p;
    make_problem(&p, &ex, few, 4, true);
    const epic_experts_args good = forward_args(&p);
    epic_experts_args a;
#define REFUSE_CALL(field, value, word) \
    do {                                \
        a = good;                       \
        a.field = value;                \
        refuse_forward(a, word);        \
    } while (0)
    REFUSE_CALL(experts, NULL, "epic_experts");
    REFUSE_CALL(x, NULL, "x is NULL");
    REFUSE_CALL(y, NULL, "y is NULL");
    REFUSE_CALL(w_gate_up, NULL, "w_gate_up");
    REFUSE_CALL(w_down, NULL, "w_down");
    REFUSE_CALL(num_slots, -1, "num_slots");
    REFUSE_CALL(expert_rows, NULL, "expert_rows");
    REFUSE_CALL(expert_rows, negative, "expert_rows of local expert 1 is -1");
    REFUSE_CALL(expert_tokens, many, "expert_tokens 100");
    REFUSE_CALL(num_slots, 7, "add up to 12");
    REFUSE_CALL(slot_weights, NULL, "slot_weights");
    REFUSE_CALL(experts, &late, "EPIC_WEIGHT_LATE");
    REFUSE_CALL(saved_bytes, 8, "saved");
    REFUSE_CALL(workspace, NULL, "workspace");
    REFUSE_CALL(workspace, (char *)p.workspace + 4, "16 divides");
    REFUSE_CALL(flags, 1, "flags");

    epic_experts_backward_args b = backward_args(&p);
    b.workspace_bytes = good.workspace_bytes;
    CHECK(epic_experts_backward(NULL, &b) == EPIC_EINVAL &&
              strstr(epic_error(NULL), "workspace"),
          "%s", epic_error(NULL));
    b.d_y = NULL;
    CHECK(epic_experts_backward(NULL, &b) == EPIC_EINVAL && strstr(epic_error(NULL), "d_y"),
          "%s", epic_error(NULL));
    free_problem(&p);
}

int main(void)
{
    test_products();
    test_num_threads();
    test_combinations();
    test_types();
    for (uint32_t kind = EPIC_CLAMPED_SWIGLU; kind <= EPIC_CLAMPED_SILU; kind++) {
        test_limit(kind, EPIC_F64);
        test_limit(kind, EPIC_F32);
    }
    test_skewed();
    test_tiles();
    test_late_is_early();
    test_slab_alone(EPIC_F32);
    test_slab_alone(EPIC_BF16);
    test_accumulate();
    test_nothing();
    test_threads();
    test_wrong_experts();
    test_wrong_arguments();
    printf("with %s\n", epic_blas_name());
    if (failures) printf("%d checks failed\n", failures);
    return failures ? 1 : 0;
}
