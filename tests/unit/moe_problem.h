/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs and results of a layer for all ranks in one place: parameters, rows and results.
 * Ranks write to memory that forked processes share. */
#ifndef MOE_PROBLEM_H
#define MOE_PROBLEM_H

#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "epic/epic.h"
#include "rules/convert.h"
#include "run.h"

#define MOST_RANKS 8
#define BEFORE 1.0 /* value of gradients before EPIC_ACCUMULATE adds to them */

static _Atomic int *failures; /* number of failures of all ranks */

#define CHECK(condition, ...)                                      \
    do {                                                           \
        if (!(condition) && atomic_fetch_add(failures, 1) < 20) {  \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__);                                   \
            printf("\n");                                          \
        }                                                          \
    } while (0)

static inline void *share(size_t bytes)
{
    void *memory =
        mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) abort();
    return memory;
}

/* ------------------------------------------------------------------------------ random ---- */

typedef struct source {
    uint64_t state;
} source;

static inline source source_of(uint64_t seed)
{
    return (source){(seed + 1) * 0x9e3779b97f4a7c15u};
}

static inline double between(source *s, double low, double high)
{
    s->state ^= s->state << 13;
    s->state ^= s->state >> 7;
    s->state ^= s->state << 17;
    return low + (high - low) * ((double)(s->state >> 11) * 0x1p-53);
}

/* Returns a random number from 0 to n - 1. */
static inline uint32_t below(source *s, uint32_t n)
{
    return (uint32_t)between(s, 0, n);
}

/* ------------------------------------------------------------------------------ arrays ---- */

typedef struct array {
    void *data;
    uint32_t type;
    int64_t n;
} array;

static inline size_t array_bytes(const array *a)
{
    return (size_t)(a->n * convert_bytes(a->type));
}

static inline array make_array(uint32_t type, int64_t n)
{
    array a = {.type = type, .n = n};
    a.data = share(array_bytes(&a));
    return a;
}

static inline void free_array(array *a)
{
    if (a->data) munmap(a->data, array_bytes(a) + 1);
    *a = (array){0};
}

static inline double get(const array *a, int64_t i)
{
    float x;
    if (a->type == EPIC_F64) return ((const double *)a->data)[i];
    convert_to_float(&x, (const char *)a->data + i * convert_bytes(a->type), a->type, 1);
    return x;
}

static inline void put(array *a, int64_t i, double x)
{
    const float narrow = (float)x;
    if (a->type == EPIC_F64)
        ((double *)a->data)[i] = x;
    else
        convert_from_float((char *)a->data + i * convert_bytes(a->type), a->type, &narrow, 1);
}

static inline void *number_at(const array *a, int64_t i)
{
    return (char *)a->data + i * convert_bytes(a->type);
}

static inline void fill_random(array *a, source *s, double size)
{
    for (int64_t i = 0; i < a->n; i++) put(a, i, between(s, -size, size));
}

/* ------------------------------------------------------------------------------- layer ---- */

enum { /* all arrays with a gradient; X: rows of all tokens; TOPK_WEIGHTS: forced weights */
       W_GATE,
       B_GATE,
       SCALE_OF_EXPERT,
       W_GATE_UP,
       W_DOWN,
       B_GATE_UP,
       B_DOWN,
       SHARED_GATE_UP,
       SHARED_DOWN,
       SHARED_B_GATE_UP,
       SHARED_B_DOWN,
       W_SHARED_GATE,
       X,
       TOPK_WEIGHTS,
       NUM_GIVEN
};

static const char *const given_names[NUM_GIVEN] = {
    "w_gate",      "b_gate",           "scale_of_expert", "w_gate_up",
    "w_down",      "b_gate_up",        "b_down",          "shared_gate_up",
    "shared_down", "shared_b_gate_up", "shared_b_down",   "w_shared_gate",
    "x",           "topk_weights_in"};

static inline bool is_per_expert(int which)
{
    return which >= W_GATE_UP && which <= B_DOWN;
}

static inline bool is_dense(int which)
{
    return which < X && !is_per_expert(which);
}

typedef struct problem {
    char name[160];
    int num_ranks;
    int64_t tokens_of[MOST_RANKS], total;
    epic_layer layer;
    epic_router router;
    epic_experts experts, shared; /* num_local_experts counts the experts of all ranks */
    /* planned by epic_moe_plan, with exactly as many slots as needed */
    bool planned;
    bool has_shared, shared_gated, biased, gate_biased, scaled, wants_no_gradient, wants_no_d_x;
    epic_moe moe;                 /* its pointers are not set */
    bool is_limited;              /* the layer gets a capacity_limit */
    int32_t limit_of[MOST_RANKS]; /* the capacity_limit of each rank */
    int32_t rank_of_expert[64];
    bool placed;            /* experts are placed by the table below */
    int32_t logical_of[64]; /* used if layer.num_logical is set */
    float bias[96];         /* the router's bias */
    bool bias_given;
    int32_t *table, *token_ids; /* NULL: not used */
    int64_t table_rows;
    bool wide_ids;
    int32_t *topk_idx_in; /* [total, top_k]: forced ids; NULL: the router chooses */
    bool has_forced_weights;
    double d_loss, d_balance_loss, d_z_loss; /* gradients of the losses, with float32 values */
    bool narrow_losses;                      /* losses are float32 although rows are F64 */
    bool d_loss_given, d_parts_given;
    uint32_t backward_flags;
    bool narrow_gradients; /* gradients of experts have the type of the rows */

    array given[NUM_GIVEN];
    array d_out;
    array out;
    array gradient[NUM_GIVEN]; /* dense gradients: one after the other for every rank */
    array loss;                /* [3 * num_ranks]: sum, balance loss and z-loss */
    int32_t *load, *demand;    /* [num_ranks, num_experts], [num_ranks] */
    int32_t *logical_load;     /* [num_ranks, num_logical] */
    int32_t *topk_idx;         /* [total, top_k]: the ids that the layer used */
    array topk_weights;        /* [total, top_k] */
} problem;

static inline int64_t width_of(const epic_experts *e)
{
    return (int64_t)e->inner * (e->ungated ? 1 : 2);
}

static inline int64_t columns_of(const problem *p)
{
    return (int64_t)p->router.num_experts + p->router.zero_experts;
}

static inline uint32_t row_type(const problem *p)
{
    return p->experts.row_type ? p->experts.row_type : EPIC_F32;
}

static inline uint32_t real_type(const problem *p)
{
    return row_type(p) == EPIC_F64 ? EPIC_F64 : EPIC_F32;
}

static inline uint32_t loss_type(const problem *p)
{
    return p->narrow_losses ? EPIC_F32 : real_type(p);
}

static inline uint32_t type_given(const problem *p, int which)
{
    if (which == X) return row_type(p);
    if (which <= SCALE_OF_EXPERT || which == W_SHARED_GATE || which == TOPK_WEIGHTS)
        return real_type(p);
    const epic_experts *e = is_per_expert(which) ? &p->experts : &p->shared;
    return e->weight_type ? e->weight_type : row_type(p);
}

static inline uint32_t gradient_type(const problem *p, int which)
{
    const bool narrow = p->narrow_gradients && is_per_expert(which);
    return which == X || narrow ? row_type(p) : real_type(p);
}

/* Returns the numbers of one expert's part, or of the whole array. */
static inline int64_t numbers_of(const problem *p, int which)
{
    const int64_t hidden = p->experts.hidden;
    switch (which) {
    case W_GATE:
        return hidden * columns_of(p);
    case B_GATE:
        return p->gate_biased ? columns_of(p) : 0;
    case SCALE_OF_EXPERT:
        return p->scaled ? columns_of(p) : 0;
    case W_GATE_UP:
        return hidden * width_of(&p->experts);
    case W_DOWN:
        return p->experts.inner * hidden;
    case B_GATE_UP:
        return p->biased ? width_of(&p->experts) : 0;
    case B_DOWN:
        return p->biased ? hidden : 0;
    case SHARED_GATE_UP:
        return p->has_shared ? hidden * width_of(&p->shared) : 0;
    case SHARED_DOWN:
        return p->has_shared ? p->shared.inner * hidden : 0;
    case SHARED_B_GATE_UP:
        return p->has_shared && p->biased ? width_of(&p->shared) : 0;
    case SHARED_B_DOWN:
        return p->has_shared && p->biased ? hidden : 0;
    case W_SHARED_GATE:
        return p->has_shared && p->shared_gated ? hidden : 0;
    case TOPK_WEIGHTS:
        return p->has_forced_weights ? p->total * p->layer.top_k : 0;
    default:
        return p->total * hidden;
    }
}

static inline int64_t numbers_in_all(const problem *p, int which)
{
    return numbers_of(p, which) * (is_per_expert(which) ? p->layer.num_experts : 1);
}

/* Draws random parameters and rows. Sizes must be set. */
static inline void make_given(problem *p, source *s)
{
    static const double size[NUM_GIVEN] = {[W_GATE] = 1, [SCALE_OF_EXPERT] = 2, [X] = 1};
    p->total = 0;
    for (int r = 0; r < p->num_ranks; r++) p->total += p->tokens_of[r];
    for (int i = 0; i < NUM_GIVEN; i++) {
        p->given[i] = make_array(type_given(p, i), numbers_in_all(p, i));
        fill_random(&p->given[i], s, size[i] != 0 ? size[i] : 0.5);
    }
    p->d_out = make_array(row_type(p), p->total * p->experts.hidden);
    fill_random(&p->d_out, s, 1);
}

static inline void make_results(problem *p)
{
    p->out = make_array(row_type(p), p->total * p->experts.hidden);
    for (int i = 0; i < NUM_GIVEN; i++)
        p->gradient[i] = make_array(gradient_type(p, i),
                                    numbers_in_all(p, i) * (is_dense(i) ? p->num_ranks : 1));
    p->loss = make_array(loss_type(p), 3 * p->num_ranks);
    p->load = share((size_t)p->num_ranks * p->layer.num_experts * sizeof(int32_t));
    p->logical_load = share((size_t)p->num_ranks * p->layer.num_logical * sizeof(int32_t));
    p->demand = share((size_t)p->num_ranks * sizeof(int32_t));
    p->topk_idx = share((size_t)p->total * p->layer.top_k * sizeof(int32_t));
    p->topk_weights = make_array(real_type(p), p->total * p->layer.top_k);
}

static inline void free_results(problem *p)
{
    free_array(&p->out);
    for (int i = 0; i < NUM_GIVEN; i++) free_array(&p->gradient[i]);
    free_array(&p->loss);
    munmap(p->load, (size_t)p->num_ranks * p->layer.num_experts * sizeof(int32_t) + 1);
    munmap(p->logical_load, (size_t)p->num_ranks * p->layer.num_logical * sizeof(int32_t) + 1);
    munmap(p->demand, (size_t)p->num_ranks * sizeof(int32_t) + 1);
    munmap(p->topk_idx, (size_t)p->total * p->layer.top_k * sizeof(int32_t) + 1);
    free_array(&p->topk_weights);
}

static inline void free_given(problem *p)
{
    for (int i = 0; i < NUM_GIVEN; i++) free_array(&p->given[i]);
    free_array(&p->d_out);
    free(p->table);
    free(p->token_ids);
    free(p->topk_idx_in);
}

/* Returns an element of a gradient: dense ones summed over ranks, or with EPIC_SUM_DENSE
 * that of rank 0. */
static inline double gradient_of(const problem *p, int which, int64_t i)
{
    const array *g = &p->gradient[which];
    const double before = which < X && p->backward_flags & EPIC_ACCUMULATE ? BEFORE : 0;
    if (!is_dense(which) || p->moe.flags & EPIC_SUM_DENSE) return get(g, i) - before;
    double sum = 0;
    for (int r = 0; r < p->num_ranks; r++) sum += get(g, r * numbers_of(p, which) + i) - before;
    return sum;
}

enum { LOSS, BALANCE_LOSS, Z_LOSS, NUM_LOSSES };

static inline double loss_of(const problem *p, int which)
{
    double sum = 0;
    if (p->moe.flags & EPIC_SUM_DENSE) return get(&p->loss, which * p->num_ranks);
    for (int r = 0; r < p->num_ranks; r++) sum += get(&p->loss, which * p->num_ranks + r);
    return sum;
}

/* Checks that both problems have the same bits in everything that the calls write. */
static inline void compare_bits(const problem *a, const problem *b, const char *how)
{
    CHECK(!memcmp(a->out.data, b->out.data, array_bytes(&a->out)), "%s: out %s", a->name, how);
    CHECK(!memcmp(a->loss.data, b->loss.data, array_bytes(&a->loss)), "%s: losses %s", a->name,
          how);
    CHECK(!memcmp(a->topk_idx, b->topk_idx, (size_t)a->topk_weights.n * sizeof *a->topk_idx),
          "%s: topk_idx_out %s", a->name, how);
    CHECK(!memcmp(a->topk_weights.data, b->topk_weights.data, array_bytes(&a->topk_weights)),
          "%s: topk_weights_out %s", a->name, how);
    for (int which = 0; which < NUM_GIVEN; which++)
        CHECK(!memcmp(a->gradient[which].data, b->gradient[which].data,
                      array_bytes(&a->gradient[which])),
              "%s: gradient of %s %s", a->name, given_names[which], how);
}

static inline int owner_of(const problem *p, uint32_t expert)
{
    return p->placed ? p->rank_of_expert[expert]
                     : (int)(expert / (p->layer.num_experts / (uint32_t)p->num_ranks));
}

static inline uint32_t most_local(const problem *p)
{
    uint32_t most = 0, count[MOST_RANKS] = {0};
    for (uint32_t e = 0; e < p->layer.num_experts; e++)
        if (++count[owner_of(p, e)] > most) most = count[owner_of(p, e)];
    return most;
}

#endif
