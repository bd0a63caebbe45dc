/* SPDX-License-Identifier: Apache-2.0 */
/* Random cases for the p2p backend: every rank makes the same case from the same seed, brings its
 * part, makes the calls, and compares what they wrote with plain loops, bit for bit. */
#ifndef EPIC_TEST_CASE_H
#define EPIC_TEST_CASE_H

#include "oracle.h"
#include "team.h"

typedef struct test_case {
    routing r;
    uint64_t seed;
    uint32_t type;
    int64_t hidden, row_bytes;
    uint32_t quantize;               /* of dispatch and combine_backward, an epic_quantize */
    int64_t recv_bytes, scale_bytes; /* of received rows, and of their second rows; 0: none */
    int64_t recv_rows[ORACLE_RANKS];
    int offset; /* bytes by which rows are not aligned */
    bool hard, weighted, fused, wide, zero_tail, leave_padding, plain;
    int sample; /* every how many tokens sums are checked */
} test_case;

typedef struct bench { /* a rank's memory and the running case */
    team_rank *me;
    test_case c;
    uint8_t *arena;
    size_t arena_bytes, used;
    int wrong;
    epic_call call;
} bench;

typedef struct arrays { /* what plan and dispatch are given and write */
    void *plan, *ids;
    int32_t *table, *logical, *expert_rows, *expert_tokens, *load, *demand, *recv_expert;
    void *tokens, *recv, *scales, *recv_scales;
    float *weights, *slot_weights;
    size_t plan_bytes;
} arrays;

typedef struct sums { /* what the sums are given and write */
    void *rows, *out, *d_tokens, *d_out, *d_rows, *d_rows_scales;
    float *weights, *floats, *choice_floats, *d_weights;
    int64_t num_rows;
} sums;

/* Random numbers that every rank draws alike. */
uint64_t draw_bits(uint64_t *state);
int64_t draw_between(uint64_t *state, int64_t low, int64_t high);

typedef enum case_kind {
    CASE_ANY,
    CASE_FEW,  /* what the kernels for few tokens take after a plan, */
    CASE_PLAIN /* and what those that make the plan take, too */
} case_kind;

#define MOST_CASE_TOKENS 640 /* of a context with more than P2P_LOWLAT_TOKENS */

void draw_case(test_case *c, uint64_t seed, int num_ranks, int64_t max_tokens,
               int64_t max_row_bytes, case_kind kind);

/* One of the forms that take kernels of their own: rows at any address, of vectors, of whole pieces;
 * each type; without second rows, with them, quantized; summed by rank, FLAT, as a tree (where ranks
 * are a power of two), in this order: a group that has met FLAT or a tree leaves some kernels. */
#define CASE_FORMS 27
void draw_form(test_case *c, uint64_t seed, int form, int num_ranks, int64_t max_tokens);

/* Full size: what the benchmark runs. */
void draw_big(test_case *c, uint64_t seed, int num_ranks, int64_t max_tokens);

/* Do its rows arrive: the plan is good and every rank's buffer is large enough? */
bool case_moves(const test_case *c);

/* FLAT: so many floats lie by row, else one by slot. */
int64_t case_each(const test_case *c);

/* Counts an error and tells of the first ones. */
void report_wrong(bench *b, const char *format, ...);

void make_inputs(bench *b, arrays *a);
void make_sums(bench *b, sums *s);

/* The calls; what they write is garbage before.  false: refused. */
bool call_plan(bench *b, const arrays *a);
bool call_dispatch(bench *b, const arrays *a);
bool call_plan_dispatch(bench *b, const arrays *a);
bool call_combine(bench *b, const arrays *a, const sums *s);
bool call_dispatch_backward(bench *b, const arrays *a, const sums *s);
bool call_combine_backward(bench *b, const arrays *a, const sums *s);
void dirty_received(bench *b, const arrays *a);
void dirty_sums(bench *b, const sums *s);

void check_plan(bench *b, const arrays *a);
void check_dispatch(bench *b, const arrays *a, const char *what);
void check_sums(bench *b, const sums *s);

/* epic_allreduce_sum of random floats, called and checked; epic_sum_replicas likewise. */
void test_sum(bench *b);
void test_sum_replicas(bench *b, const arrays *a);

#endif
