/* SPDX-License-Identifier: Apache-2.0 */
/* One step of expert parallelism as a C programmer would write it on MPI today, in two forms.
 *
 *   simple   sends a row for each choice
 *   strong   sends a row for each (token, rank), and returns the sum of a rank's rows
 * Both store slots in EPIC's order (expert, source rank, token, k), so that all results can be
 * compared with EPIC's. Rows are bf16. */
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

/* Rounds to nearest even. x must not be NaN. */
static inline bf16 to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* One rank's part of a step. The benchmark owns all memory. */
typedef struct job {
    int rank, ranks, tokens, hidden, top_k, local; /* local: number of experts per rank */
    const int32_t *ids;                            /* [tokens, top_k] */
    const float *weights;                          /* [tokens, top_k] */
    const bf16 *x, *d_out;                         /* [tokens, hidden] */
    bf16 *out, *d_x;                               /* [tokens, hidden] */
    float *d_weights;                              /* [tokens, top_k] */
    bf16 *slabs, *d_slabs;                         /* [slots, hidden] */
    float *slot_weights, *d_slot_weights;          /* [slots] */
    int32_t *expert_rows;                          /* [local] */
    /* rows to send and received rows: at least [tokens * top_k] and [slots] */
    bf16 *pack, *landed;
    float *sum;       /* [hidden] */
    MPI_Datatype row; /* a row of `hidden` bf16 numbers */
} job;

/* State that a form keeps from dispatch for the later calls. */
typedef struct form form;

form *simple_new(const job *j, int64_t most_landed);
void simple_dispatch(form *f, const job *j);
void simple_combine(form *f, const job *j);
void simple_gradients(form *f, const job *j);

form *strong_new(const job *j, int64_t most_landed);
void strong_dispatch(form *f, const job *j);
void strong_combine(form *f, const job *j);
void strong_gradients(form *f, const job *j);

/* --------------------------------------------------------------- what both are made of ---- */

/* Numbers of rows or records between ranks, and the index of each rank's first one. */
typedef struct flow {
    int *out, *out_at, *in, *in_at; /* [ranks] */
    int sent, came;                 /* sums of out and of in */
} flow;

/* Rows are sent with numbers: the ids of experts or the weights. */
struct form {
    flow flow;
    int width; /* numbers per row: top_k (strong) or 1 (simple) */
    /* index in pack, or -1; simple: [tokens, top_k], strong: [tokens, ranks] */
    int32_t *where;
    int32_t *token_of;  /* [sent] */
    int32_t *my_ids;    /* [sent, width], local experts on the peer; -1: none */
    float *my_weights;  /* [sent, width] */
    int32_t *ids;       /* [came, width] */
    float *with;        /* [came, width] weights */
    int32_t *slot_of;   /* [came, width], -1: none */
    int32_t *next;      /* [local] */
    MPI_Datatype words; /* `width` words of 4 bytes */
};

form *form_new(const job *j, int width, int64_t most_sent, int64_t most_landed);
void form_free(form *f);

/* Exchanges how many rows each rank sends. f->flow.out must be set. */
void form_count(form *f, const job *j);

/* Exchanges elements of `type` in the reverse direction of the flow. */
void form_return(const form *f, const void *from, void *to, MPI_Datatype type);

/* Sends rows with their experts and weights, and stores them in their slots: by expert, in
 * order of arrival. */
void form_dispatch(form *f, const job *j);

/* Sends rows of d_out and stores them as the gradients of the slots. */
void form_dispatch_gradients(form *f, const job *j);

void *need(size_t bytes);

/* sum = w * row, or sum += w * row */
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
