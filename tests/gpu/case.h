/* SPDX-License-Identifier: Apache-2.0 */
/* Random cases for the CUDA backends. Every rank makes the same case from the same seed, does
 * its part, makes the calls, and compares the results with plain loops, bit for bit. */
#ifndef EPIC_TEST_CASE_H
#define EPIC_TEST_CASE_H

#include "oracles/oracle.h"
#include "team.h"

#define ORACLE_RANKS DEVICE_MAX_RANKS /* largest number of ranks of a case */

typedef struct routing { /* the routing of all ranks: inputs, then the oracle's results */
    int num_ranks;
    epic_layer layer; /* with defaults filled in */
    int32_t tokens_of[ORACLE_RANKS];
    int64_t capacity_of[ORACLE_RANKS];
    int64_t *ids[ORACLE_RANKS];   /* [tokens, top_k]; with replicas: set by solve_routing() */
    int64_t *named[ORACLE_RANKS]; /* with replicas: the logical experts that EPIC gets */
    int32_t *owner;               /* [num_experts] */
    int32_t *logical;             /* [num_experts]; NULL: no replicas */
    bool table;
    int32_t *slot[ORACLE_RANKS]; /* [tokens, top_k]: slot on the owner, or an EPIC_FATE */
    int32_t *rank[ORACLE_RANKS]; /* [tokens, top_k]: the owner, or -1 */
    int64_t *experts;            /* the experts of all choices, as `plan` reads them */
    oracle_plan *plan;
    int32_t result;
} routing;

/* Computes the results, again if they exist. free_routing() frees everything, the inputs too.
 */
void solve_routing(routing *r);
void free_routing(routing *r);

typedef struct test_case {
    routing r;
    uint64_t seed;
    uint32_t type;
    int64_t hidden, row_bytes;
    /* an epic_quantize value, for dispatch and combine_backward */
    uint32_t quantize;
    /* bytes of received rows and of their second rows; 0: none */
    int64_t recv_bytes, scale_bytes;
    int64_t recv_rows[ORACLE_RANKS];
    int offset; /* distance in bytes of row addresses from an aligned address */
    bool hard, weighted, fused, wide, zero_tail, leave_padding, plain;
    int sample; /* only the sums of every n-th token are checked */
} test_case;

typedef struct bench { /* memory of a rank, and the running case */
    team_rank *me;
    test_case c;
    uint8_t *arena;
    size_t arena_bytes, used;
    int wrong;
    epic_call call;
} bench;

typedef struct arrays { /* inputs and outputs of plan and dispatch */
    void *plan, *ids;
    int32_t *table, *logical, *expert_rows, *expert_tokens, *load, *demand, *recv_expert;
    int32_t *limit; /* capacity_limit; NULL in half of the cases */
    int64_t *expert_rows_i64, *expert_tokens_i64; /* NULL in half of the cases */
    int64_t capacity;
    void *tokens, *recv, *scales, *recv_scales;
    float *weights, *slot_weights;
    size_t plan_bytes;
} arrays;

typedef struct sums { /* inputs and outputs of the sums */
    void *rows, *out, *d_tokens, *d_out, *d_rows, *d_rows_scales;
    float *weights, *floats, *choice_floats, *d_weights;
    int64_t num_rows;
} sums;

/* Random numbers that are the same on every rank. */
uint64_t draw_bits(uint64_t *state);
int64_t draw_between(uint64_t *state, int64_t low, int64_t high);

typedef enum case_kind {
    CASE_ANY,
    CASE_LOWLAT,    /* cases for the low-latency kernels that read a plan */
    CASE_PLAIN,     /* cases for the low-latency kernels that also make the plan */
    CASE_FLAT_DROPS /* FLAT layers in which every rank drops choices */
} case_kind;

/* largest number of tokens in a context with more than P2P_LOWLAT_TOKENS */
#define MOST_CASE_TOKENS 1056

void draw_case(test_case *c, uint64_t seed, int num_ranks, int64_t max_tokens,
               int64_t max_row_bytes, case_kind kind);

/* Case number n of the forms that have kernels of their own: rows at any address, of vectors,
 * of whole pieces; each type; without second rows, with them, quantized; summed by rank, FLAT,
 * as a tree (if the number of ranks is a power of two), as a tree with several leaves on each
 * rank. These last forms begin with number CASE_LEAVES. */
#define CASE_FORMS 36
#define CASE_LEAVES 27
void draw_form(test_case *c, uint64_t seed, int form, int num_ranks, int64_t max_tokens);

/* Draws a case of full size, like those of the benchmark. */
void draw_big(test_case *c, uint64_t seed, int num_ranks, int64_t max_tokens);

/* Returns whether rows are moved: the plan is valid and every rank's buffer is large enough. */
bool case_moves(const test_case *c);

/* Returns the number of floats per slot. With FLAT a slot is a row. */
int64_t case_each(const test_case *c);

/* Counts an error, and prints the first ones. */
void report_wrong(bench *b, const char *format, ...);

void make_inputs(bench *b, arrays *a);
void make_sums(bench *b, sums *s);

/* These functions make the calls, with garbage in the outputs before. They return false if the
 * call is refused. */
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

#endif
