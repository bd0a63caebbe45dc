/* SPDX-License-Identifier: Apache-2.0 */
/* Shared parts of both forms on MPI: counting, exchanges, slots. */
#include "forms.h"

#include <stdio.h>
#include <stdlib.h>

void *need(size_t bytes)
{
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    void *memory = aligned_alloc(4096, rounded ? rounded : 4096);
    if (!memory) {
        fprintf(stderr, "bench: no memory for %zu bytes\n", bytes);
        MPI_Abort(MPI_COMM_WORLD, 1);
        exit(1);
    }
    memset(memory, 0, rounded);
    return memory;
}

form *form_new(const job *j, int width, int64_t most_sent, int64_t most_landed)
{
    form *f = need(sizeof *f);
    const size_t ranks = (size_t)j->ranks, wide = (size_t)width * sizeof(int32_t);
    const size_t most = (size_t)(j->ranks > j->top_k ? j->ranks : j->top_k);
    f->width = width;
    f->flow = (flow){.out = need(ranks * sizeof(int)),
                     .out_at = need(ranks * sizeof(int)),
                     .in = need(ranks * sizeof(int)),
                     .in_at = need(ranks * sizeof(int))};
    f->where = need((size_t)j->tokens * most * sizeof(int32_t));
    f->token_of = need((size_t)most_sent * sizeof(int32_t));
    f->my_ids = need((size_t)most_sent * wide);
    f->my_weights = need((size_t)most_sent * wide);
    f->ids = need((size_t)most_landed * wide);
    f->with = need((size_t)most_landed * wide);
    f->slot_of = need((size_t)most_landed * wide);
    f->next = need((size_t)j->local * sizeof(int32_t));
    MPI_Type_contiguous(width * 4, MPI_BYTE, &f->words);
    MPI_Type_commit(&f->words);
    return f;
}

void form_free(form *f)
{
    void *all[] = {f->flow.out, f->flow.out_at, f->flow.in, f->flow.in_at,
                   f->where,    f->token_of,    f->my_ids,  f->my_weights,
                   f->ids,      f->with,        f->slot_of, f->next};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    MPI_Type_free(&f->words);
    free(f);
}

void form_count(form *f, const job *j)
{
    flow *w = &f->flow;
    MPI_Alltoall(w->out, 1, MPI_INT, w->in, 1, MPI_INT, MPI_COMM_WORLD);
    w->sent = w->came = 0;
    for (int r = 0; r < j->ranks; r++) {
        w->out_at[r] = w->sent;
        w->in_at[r] = w->came;
        w->sent += w->out[r];
        w->came += w->in[r];
    }
}

static void exchange(const form *f, const void *from, void *to, MPI_Datatype type)
{
    const flow *w = &f->flow;
    MPI_Alltoallv(from, w->out, w->out_at, type, to, w->in, w->in_at, type, MPI_COMM_WORLD);
}

void form_return(const form *f, const void *from, void *to, MPI_Datatype type)
{
    const flow *w = &f->flow;
    MPI_Alltoallv(from, w->in, w->in_at, type, to, w->out, w->out_at, type, MPI_COMM_WORLD);
}

static void pack(const form *f, const job *j, const bf16 *rows)
{
    for (int i = 0; i < f->flow.sent; i++)
        memcpy(j->pack + (int64_t)i * j->hidden, rows + (int64_t)f->token_of[i] * j->hidden,
               (size_t)j->hidden * sizeof(bf16));
}

static void unpack(form *f, const job *j)
{
    const int64_t all = (int64_t)f->flow.came * f->width;
    const size_t row_bytes = (size_t)j->hidden * sizeof(bf16);
    memset(j->expert_rows, 0, (size_t)j->local * sizeof *j->expert_rows);
    for (int64_t i = 0; i < all; i++)
        if (f->ids[i] >= 0) j->expert_rows[f->ids[i]]++;
    for (int e = 0, begin = 0; e < j->local; begin += j->expert_rows[e++]) f->next[e] = begin;
    for (int64_t i = 0; i < all; i++) {
        f->slot_of[i] = f->ids[i] < 0 ? -1 : f->next[f->ids[i]]++;
        if (f->slot_of[i] < 0) continue;
        j->slot_weights[f->slot_of[i]] = f->with[i];
        memcpy(j->slabs + (int64_t)f->slot_of[i] * j->hidden,
               j->landed + i / f->width * j->hidden, row_bytes);
    }
}

void form_dispatch(form *f, const job *j)
{
    pack(f, j, j->x);
    exchange(f, f->my_ids, f->ids, f->words);
    exchange(f, f->my_weights, f->with, f->words);
    exchange(f, j->pack, j->landed, j->row);
    unpack(f, j);
}

/* Computes a dot product with 16 partial sums, which the compiler can vectorize. */
static float dot(const bf16 *a, const bf16 *b, int hidden)
{
    float sums[16] = {0}, total = 0;
    int h = 0;
    for (; h + 16 <= hidden; h += 16)
        for (int i = 0; i < 16; i++)
            sums[i] = fmaf(to_float(a[h + i]), to_float(b[h + i]), sums[i]);
    for (; h < hidden; h++) total = fmaf(to_float(a[h]), to_float(b[h]), total);
    for (int i = 0; i < 16; i++) total += sums[i];
    return total;
}

static void unpack_gradients(form *f, const job *j)
{
    const int64_t all = (int64_t)f->flow.came * f->width;
    for (int64_t i = 0; i < all; i++) {
        if (f->slot_of[i] < 0) continue;
        const int64_t slot = f->slot_of[i];
        const bf16 *d = j->landed + i / f->width * j->hidden;
        bf16 *to = j->d_slabs + slot * j->hidden;
        const float w = j->slot_weights[slot];
        for (int h = 0; h < j->hidden; h++) to[h] = to_bf16(w * to_float(d[h]));
        j->d_slot_weights[slot] = dot(d, j->slabs + slot * j->hidden, j->hidden);
    }
}

void form_dispatch_gradients(form *f, const job *j)
{
    pack(f, j, j->d_out);
    exchange(f, j->pack, j->landed, j->row);
    unpack_gradients(f, j);
}
