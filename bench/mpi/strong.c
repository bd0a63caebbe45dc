/* SPDX-License-Identifier: Apache-2.0 */
/* The strong form: sends a row for each (token, rank). Each rank adds its rows of a token
 * before it returns the sum. Sums are in EPIC's order, so that the results have EPIC's bits. */
#include "forms.h"

form *strong_new(const job *j, int64_t most_landed)
{
    const int64_t most = j->top_k < j->ranks ? j->top_k : j->ranks;
    return form_new(j, j->top_k, j->tokens * most, most_landed);
}

/* Counts rows. Sets where [tokens, ranks] to 0 for ranks that the token goes to, and to -1 for
 * others. */
static void count(form *f, const job *j)
{
    memset(f->flow.out, 0, (size_t)j->ranks * sizeof *f->flow.out);
    memset(f->where, 0xff, (size_t)j->tokens * (size_t)j->ranks * sizeof *f->where);
    for (int t = 0; t < j->tokens; t++) {
        const int32_t *ids = j->ids + (int64_t)t * j->top_k;
        int32_t *where = f->where + (int64_t)t * j->ranks;
        for (int k = 0; k < j->top_k; k++) {
            const int r = ids[k] / j->local;
            if (where[r] == 0) continue;
            where[r] = 0;
            f->flow.out[r]++;
        }
    }
    form_count(f, j);
}

/* Computes the index of each row in pack, by rank, then token, and stores its experts and
 * weights. */
static void place(form *f, const job *j)
{
    int next[1024];
    memcpy(next, f->flow.out_at, (size_t)j->ranks * sizeof *next);
    memset(f->my_ids, 0xff, (size_t)f->flow.sent * (size_t)j->top_k * sizeof *f->my_ids);
    for (int t = 0; t < j->tokens; t++) {
        int32_t *where = f->where + (int64_t)t * j->ranks;
        for (int r = 0; r < j->ranks; r++)
            if (where[r] == 0) f->token_of[where[r] = next[r]++] = t;
        for (int k = 0; k < j->top_k; k++) {
            const int64_t i = (int64_t)t * j->top_k + k;
            const int64_t at = (int64_t)where[j->ids[i] / j->local] * j->top_k + k;
            f->my_ids[at] = j->ids[i] % j->local;
            f->my_weights[at] = j->weights[i];
        }
    }
}

void strong_dispatch(form *f, const job *j)
{
    count(f, j);
    place(f, j);
    form_dispatch(f, j);
}

/* Sums the slots of each row, rounds the sum, and returns it into pack. */
static void home(const form *f, const job *j, const bf16 *slabs, const float *weights)
{
    for (int i = 0; i < f->flow.came; i++) {
        int first = 1;
        for (int k = 0; k < j->top_k; k++) {
            const int64_t slot = f->slot_of[(int64_t)i * j->top_k + k];
            if (slot < 0) continue;
            row_add(j->sum, slabs + slot * j->hidden, weights ? weights[slot] : 1, j->hidden,
                    first);
            first = 0;
        }
        row_round(j->landed + (int64_t)i * j->hidden, j->sum, j->hidden);
    }
    form_return(f, j->landed, j->pack, j->row);
}

static void sum(const form *f, const job *j, bf16 *out)
{
    for (int t = 0; t < j->tokens; t++) {
        int first = 1;
        for (int r = 0; r < j->ranks; r++) {
            const int64_t at = f->where[(int64_t)t * j->ranks + r];
            if (at < 0) continue;
            row_add(j->sum, j->pack + at * j->hidden, 1, j->hidden, first);
            first = 0;
        }
        row_round(out + (int64_t)t * j->hidden, j->sum, j->hidden);
    }
}

void strong_combine(form *f, const job *j)
{
    home(f, j, j->slabs, j->slot_weights);
    sum(f, j, j->out);
}

/* Returns gradients of weights, which are sent with the rows of the gradient. */
static void return_weights(form *f, const job *j)
{
    const int64_t came = (int64_t)f->flow.came * j->top_k;
    for (int64_t i = 0; i < came; i++)
        f->with[i] = f->slot_of[i] < 0 ? 0 : j->d_slot_weights[f->slot_of[i]];
    form_return(f, f->with, f->my_weights, f->words);
    for (int64_t i = 0; i < (int64_t)j->tokens * j->top_k; i++) {
        const int64_t t = i / j->top_k, k = i % j->top_k;
        const int64_t at = f->where[t * j->ranks + j->ids[i] / j->local];
        j->d_weights[i] = f->my_weights[at * j->top_k + k];
    }
}

void strong_gradients(form *f, const job *j)
{
    form_dispatch_gradients(f, j);
    home(f, j, j->d_slabs, NULL);
    sum(f, j, j->d_x);
    return_weights(f, j);
}
