/* SPDX-License-Identifier: Apache-2.0 */
/* What a C programmer would write today: one step of expert parallelism on MPI, in two forms.
 *
 *   simple   a row travels for each choice
 *   strong   a row travels for each (token, rank); sums of a rank's rows travel home
 *
 * Both leave slots in EPIC's order (expert, source rank, token, k), so that everything that EPIC
 * computes can be compared.  Rows are bf16. */
#ifndef BENCH_FORMS_H
#define BENCH_FORMS_H

#include <math.h>
#include <mpi.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

static inline float to_float(bf16 x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To the nearest, ties to even; no NaN comes here. */
static inline bf16 to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* One rank's part of a step.  All memory is the benchmark's. */
typedef struct job {
    int rank, ranks, tokens, hidden, top_k, local; /* local: experts of a rank */
    const int32_t *ids;                            /* [tokens, top_k] */
    const float *weights;                          /* [tokens, top_k] */
    const bf16 *x, *d_out;                         /* [tokens, hidden] */
    bf16 *out, *d_x;                               /* [tokens, hidden] */
    float *d_weights;                              /* [tokens, top_k] */
    bf16 *slabs, *d_slabs;                         /* [slots, hidden] */
    float *slot_weights, *d_slot_weights;          /* [slots] */
    int32_t *expert_rows;                          /* [local] */
    bf16 *pack, *landed; /* rows on their way: [tokens * top_k] and [slots], at least */
    float *sum;          /* [hidden] */
    MPI_Datatype row;    /* hidden bf16 */
} job;

/* What a form keeps from dispatch for the calls after it. */
typedef struct form form;

form *simple_new(const job *j, int64_t most_landed);
void simple_dispatch(form *f, const job *j);
void simple_combine(form *f, const job *j);
void simple_gradients(form *f, const job *j);

form *strong_new(const job *j, int64_t most_landed);
void strong_dispatch(form *f, const job *j);
void strong_combine(form *f, const job *j);
void strong_gradients(form *f, const job *j);

/* ---------------------------------------------------------------- what both are made of ---- */

/* Rows or records from rank to rank, and where each rank's begin. */
typedef struct flow {
    int *out, *out_at, *in, *in_at; /* [ranks] */
    int sent, came;                 /* sums of out and in */
} flow;

/* A number with each row: of experts, or weights, top_k or one of them. */
struct form {
    flow flow;
    int width;          /* ids and weights of a row: top_k, strong; 1, simple */
    int32_t *where;     /* simple [tokens, top_k], strong [tokens, ranks]: place in pack; -1 */
    int32_t *token_of;  /* [sent] */
    int32_t *my_ids;    /* [sent, width]: local experts on the peer, -1: none */
    float *my_weights;  /* [sent, width] */
    int32_t *ids;       /* [came, width] */
    float *with;        /* [came, width] weights */
    int32_t *slot_of;   /* [came, width], -1: none */
    int32_t *next;      /* [local] */
    MPI_Datatype words; /* width of 4 bytes */
};

form *form_new(const job *j, int width, int64_t most_sent, int64_t most_landed);
void form_free(form *f);

/* Tells the peers how many rows come; f->flow.out is counted. */
void form_count(form *f, const job *j);

/* One exchange of `type` against the flow. */
void form_return(const form *f, const void *from, void *to, MPI_Datatype type);

/* Rows, with their experts and weights, to their slots: by expert, in order of arrival. */
void form_dispatch(form *f, const job *j);

/* Rows of d_out to the slots' gradients. */
void form_dispatch_gradients(form *f, const job *j);

void *need(size_t bytes);

/* sum (+)= w * row */
static inline void row_add(float *sum, const bf16 *row, float w, int hidden, int first)
{
    if (first)
        for (int h = 0; h < hidden; h++) sum[h] = w * to_float(row[h]);
    else
        for (int h = 0; h < hidden; h++) sum[h] = fmaf(w, to_float(row[h]), sum[h]);
}

static inline void row_round(bf16 *row, const float *sum, int hidden)
{
    for (int h = 0; h < hidden; h++) row[h] = to_bf16(sum[h]);
}

#endif
