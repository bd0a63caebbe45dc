/* SPDX-License-Identifier: Apache-2.0 */
/* The simple form: sends a row for each choice, and returns one. */
#include "forms.h"

form *simple_new(const job *j, int64_t most_landed)
{
    return form_new(j, 1, (int64_t)j->tokens * j->top_k, most_landed);
}

/* Computes the index of each choice in pack: by rank, then token, then k. */
static void place(form *f, const job *j)
{
    const int64_t all = (int64_t)j->tokens * j->top_k;
    int next[1024];
    memcpy(next, f->flow.out_at, (size_t)j->ranks * sizeof *next);
    for (int64_t i = 0; i < all; i++) {
        const int at = next[j->ids[i] / j->local]++;
        f->where[i] = at;
        f->token_of[at] = (int32_t)(i / j->top_k);
        f->my_ids[at] = j->ids[i] % j->local;
        f->my_weights[at] = j->weights[i];
    }
}

void simple_dispatch(form *f, const job *j)
{
    const int64_t all = (int64_t)j->tokens * j->top_k;
    memset(f->flow.out, 0, (size_t)j->ranks * sizeof *f->flow.out);
    for (int64_t i = 0; i < all; i++) f->flow.out[j->ids[i] / j->local]++;
    form_count(f, j);
    place(f, j);
    form_dispatch(f, j);
}

/* Returns the rows of slots into pack, in the order in which they arrived. */
static void home(const form *f, const job *j, const bf16 *slabs)
{
    for (int i = 0; i < f->flow.came; i++)
        memcpy(j->landed + (int64_t)i * j->hidden, slabs + (int64_t)f->slot_of[i] * j->hidden,
               (size_t)j->hidden * sizeof(bf16));
    form_return(f, j->landed, j->pack, j->row);
}

static void sum(const form *f, const job *j, const float *weights, bf16 *out)
{
    for (int t = 0; t < j->tokens; t++) {
        for (int k = 0; k < j->top_k; k++) {
            const int64_t i = (int64_t)t * j->top_k + k;
            row_add(j->sum, j->pack + (int64_t)f->where[i] * j->hidden,
                    weights ? weights[i] : 1, j->hidden, k == 0);
        }
        row_round(out + (int64_t)t * j->hidden, j->sum, j->hidden);
    }
}

void simple_combine(form *f, const job *j)
{
    home(f, j, j->slabs);
    sum(f, j, j->weights, j->out);
}

void simple_gradients(form *f, const job *j)
{
    form_dispatch_gradients(f, j);
    home(f, j, j->d_slabs);
    sum(f, j, NULL, j->d_x);
    for (int i = 0; i < f->flow.came; i++) f->with[i] = j->d_slot_weights[f->slot_of[i]];
    form_return(f, f->with, f->my_weights, f->words);
    for (int64_t i = 0; i < (int64_t)j->tokens * j->top_k; i++)
        j->d_weights[i] = f->my_weights[f->where[i]];
}
