/* SPDX-License-Identifier: Apache-2.0 */
/* Layers with EPIC_INVARIANT that compute random selections of the same tokens, in random
 * order, on several ranks with unequal numbers of tokens, with other alignments, capacities and
 * placements. The rows of a token in out and d_x must always have the bits that one rank
 * computes for all tokens together. */
#ifndef MOE_SELECTION_H
#define MOE_SELECTION_H

#include "unit/moe_bits.h"

/* Runs forward and backward on all ranks. The including file defines it. */
static void run(problem *p);

/* Replaces the tokens of a layer by `total` random ones, all on one rank. */
static inline void draw_all_tokens(problem *p, int64_t total, uint32_t seed)
{
    source s = source_of(seed + 5000000);
    free_array(&p->given[X]);
    free_array(&p->d_out);
    p->num_ranks = 1;
    p->total = p->tokens_of[0] = total;
    p->given[X] = make_array(row_type(p), total * p->experts.hidden);
    p->d_out = make_array(row_type(p), total * p->experts.hidden);
    fill_random(&p->given[X], &s, 1);
    fill_random(&p->d_out, &s, 1);
}

/* Sets the options with which the rows of a token depend on nothing else. */
static inline void make_invariant(problem *p)
{
    p->moe.flags |= EPIC_INVARIANT;
    p->moe.balance_coeff = p->moe.z_coeff = 0;
    p->moe.sequence_tokens = 0;
    p->layer.overflow = EPIC_OVERFLOW_ERROR;
    p->layer.expert_capacity = 0;
    p->backward_flags = 0;
}

static inline void set_capacity(problem *p, uint32_t more)
{
    p->moe.capacity = p->total * p->layer.top_k +
                      p->layer.num_experts / (uint32_t)p->num_ranks * (p->layer.alignment - 1) +
                      more + 1;
}

static inline void copy_row(const problem *p, array *to, int64_t i, const array *from,
                            int64_t token)
{
    const int64_t row = p->experts.hidden * convert_bytes(from->type);
    memcpy((char *)to->data + i * row, (const char *)from->data + token * row, (size_t)row);
}

/* Returns the layer for `total` tokens of `all`, which it draws and stores in `tokens`. Each
 * rank gets a random number of them. */
static inline problem select_tokens(const problem *all, int num_ranks, int64_t total,
                                    int64_t *tokens, source *s)
{
    static const uint32_t alignments[] = {1, 8, 16, 128};
    problem p = spread(all, num_ranks, below(s, 1000));
    free_results(&p);
    p.total = total;
    p.layer.alignment = alignments[below(s, 4)];
    p.placed = below(s, 2);
    memset(p.tokens_of, 0, sizeof p.tokens_of);
    p.given[X] = make_array(row_type(&p), total * p.experts.hidden);
    p.d_out = make_array(row_type(&p), total * p.experts.hidden);
    for (int64_t i = 0; i < total; i++) {
        tokens[i] = below(s, (uint32_t)all->total);
        copy_row(&p, &p.given[X], i, &all->given[X], tokens[i]);
        copy_row(&p, &p.d_out, i, &all->d_out, tokens[i]);
        p.tokens_of[below(s, (uint32_t)num_ranks)]++;
    }
    set_capacity(&p, below(s, 50));
    make_results(&p);
    return p;
}

/* Compares each token's rows with those of the layer that computed all tokens. */
static inline void compare_rows(const problem *all, const problem *p, const int64_t *tokens)
{
    const int64_t hidden = p->experts.hidden, row = hidden * convert_bytes(row_type(p));
    for (int64_t i = 0; i < p->total; i++) {
        const int64_t at = i * hidden, from = tokens[i] * hidden;
        const bool good =
            !memcmp(number_at(&p->out, at), number_at(&all->out, from), (size_t)row) &&
            !memcmp(number_at(&p->gradient[X], at), number_at(&all->gradient[X], from),
                    (size_t)row);
        CHECK(good, "%s: token %lld has other bits among %lld tokens on %d ranks", p->name,
              (long long)tokens[i], (long long)p->total, p->num_ranks);
        if (!good) return;
    }
}

static inline void test_selection(const problem *all, int num_ranks, int64_t total, source *s)
{
    int64_t *tokens = malloc((size_t)(total + 1) * sizeof *tokens);
    problem p = select_tokens(all, num_ranks, total, tokens, s);
    run(&p);
    compare_rows(all, &p, tokens);
    free_results(&p);
    free_array(&p.given[X]);
    free_array(&p.d_out);
    free(tokens);
}

/* Computes all tokens on one rank, and selections of them on other numbers of ranks. */
static inline void test_layer(problem *all, const int64_t *totals, int count, int most_ranks,
                              source *s)
{
    set_capacity(all, 0);
    make_results(all);
    run(all);
    for (int i = 0; i < count; i++) {
        int ranks = 1 << below(s, 4);
        if (ranks > most_ranks) ranks = most_ranks;
        test_selection(all, ranks, totals[i], s);
    }
    free_results(all);
}

/* A random layer with random tokens. `multiple`: like that of draw_of(). most_ranks: the
 * largest number of ranks, a power of two. */
static inline void test_selections(uint32_t seed, uint32_t multiple, int most_ranks)
{
    problem p = draw_of(seed, multiple);
    if (!p.layer.num_logical) { /* copies of an expert would need equal weights */
        source s = source_of(seed + 6000000);
        make_invariant(&p);
        draw_all_tokens(&p, 20 + below(&s, 100), seed);
        const int64_t totals[] = {1, 1 + below(&s, 8), 1 + below(&s, 150), 0};
        test_layer(&p, totals, 4, most_ranks, &s);
    }
    free_given(&p);
}

#endif
