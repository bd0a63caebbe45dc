/* SPDX-License-Identifier: Apache-2.0 */
/* Random layers with EPIC_TREE and EPIC_SUM_DENSE, equal for every number of ranks. */
#ifndef MOE_BITS_H
#define MOE_BITS_H

#include "unit/moe_layer.h"

#define LEAVES 8
#ifndef MOST_NUMBERS
/* largest number of elements of an expert's matrix, so that a case takes milliseconds */
#define MOST_NUMBERS (1 << 15)
#endif

/* --------------------------------------------------------------------- random layers ---- */

static inline void draw_router(problem *p, source *s)
{
    static const epic_router kinds[] = {
        {.normalize = EPIC_NORMALIZE_SUM},
        {.score = EPIC_SCORE_SIGMOID, .normalize = EPIC_NORMALIZE_SUM, .scale = 2.5},
        {.score = EPIC_SCORE_LOGITS, .weight_rule = EPIC_WEIGHT_SOFTMAX_CHOSEN},
        {.score = EPIC_SCORE_SQRTSOFTPLUS, .num_groups = 4, .topk_groups = 2},
    };
    p->layer.top_k = 1 + below(s, 4);
    p->router = kinds[below(s, 4)];
    p->router.num_experts = p->layer.num_experts;
    p->router.zero_experts = below(s, 3) ? 0 : 4;
    p->router.top_k = p->layer.top_k;
    p->gate_biased = below(s, 2);
    p->bias_given = below(s, 2);
    for (int i = 0; i < 96; i++) p->bias[i] = (float)between(s, -0.2, 0.2);
}

/* Draws replicas from a random source of its own. If blocks of experts change places,
 * gradients of replicas are compared one by one. */
static inline void draw_replicas(problem *p, uint32_t seed)
{
    source s = source_of(seed + 2000000);
    epic_layer *l = &p->layer;
    if (l->num_experts == LEAVES || below(&s, 3)) return;
    l->num_logical = p->router.num_experts = l->num_experts / 2;
    for (uint32_t e = 0; e < l->num_experts; e++)
        p->logical_of[e] =
            (int32_t)(e * 5 % l->num_experts < l->num_logical ? e * 5 % l->num_experts
                                                              : below(&s, 2));
}

static inline void draw_experts(problem *p, source *s)
{
    static const uint32_t types[] = {EPIC_F32, EPIC_BF16, EPIC_F32, EPIC_F16};
    const uint32_t hidden = 1 + below(s, below(s, 6) ? 200 : 1100);
    const uint32_t room = MOST_NUMBERS / hidden;
    p->experts = (epic_experts){.num_local_experts = 1,
                                .hidden = hidden,
                                .inner = 1 + below(s, room < 150 ? room : 150),
                                .activation = below(s, 6),
                                .weighting = below(s, 3),
                                .row_type = types[below(s, 4)],
                                .weight_type = below(s, 4)};
    p->has_shared = below(s, 2);
    p->shared_gated = below(s, 2);
    p->biased = below(s, 2);
    p->shared = p->experts;
    p->shared.inner = 1 + below(s, room < 100 ? room : 100);
    p->shared.weighting = EPIC_WEIGHT_LATE;
}

/* Makes a layer that tensor cores can compute: rows and weights of one 16-bit type, sizes a
 * multiple of `multiple`. */
static inline void even_out(epic_experts *e, uint32_t multiple)
{
    e->hidden = multiple * (1 + e->hidden % 8);
    const uint32_t room = MOST_NUMBERS / (e->hidden * multiple);
    e->inner = multiple * (1 + e->inner % (room < 8 ? room : 8));
    if (e->row_type == EPIC_F32) e->row_type = EPIC_BF16;
    e->weight_type = 0;
}

static inline void draw_losses(problem *p, source *s)
{
    p->moe.flags = EPIC_SUM_DENSE;
    p->moe.balance_coeff = below(s, 3) ? between(s, 0.01, 1) : 0;
    p->moe.z_coeff = below(s, 3) ? between(s, 0.01, 1) : 0;
    p->backward_flags = below(s, 3) ? 0 : EPIC_ACCUMULATE;
}

/* Gives every third layer a number of tokens that does not fill all blocks equally. Draws from
 * a random source of its own. */
static inline void draw_ragged(problem *p, uint32_t seed, int64_t block)
{
    source s = source_of(seed + 4000000);
    const int64_t unit = p->moe.sequence_tokens ? p->moe.sequence_tokens : 1;
    const int64_t most = LEAVES * block / unit;
    if (below(&s, 3)) return;
    p->tokens_of[0] = (int64_t)below(&s, (uint32_t)most + 1) * unit;
    if (below(&s, 2)) p->tokens_of[0] = (int64_t)(1u << below(&s, 3)) * unit;
}

/* Returns the number of tokens of a rank, in whole sequences. The last ranks have one sequence
 * less if the ranks cannot have equally many. */
static inline int64_t tokens_of_rank(const problem *p, int num_ranks, int rank)
{
    const int64_t unit = p->moe.sequence_tokens ? p->moe.sequence_tokens : 1;
    return (p->total / unit + num_ranks - 1 - rank) / num_ranks * unit;
}

static inline problem draw_of(uint32_t seed, uint32_t multiple)
{
    static const uint32_t alignments[] = {1, 16, 8, 128};
    source s = source_of(seed);
    problem p = {.num_ranks = 1};
    p.layer = (epic_layer){.num_experts = LEAVES << below(&s, 3),
                           .alignment = alignments[seed % 4],
                           .sum_order = EPIC_TREE,
                           .leaves = LEAVES,
                           .partial_type = below(&s, 2) ? EPIC_F32 : 0};
    draw_router(&p, &s);
    draw_replicas(&p, seed);
    p.scaled = seed % 3 == 0;
    draw_experts(&p, &s);
    if (multiple > 1) {
        even_out(&p.experts, multiple);
        const epic_experts whole = p.experts;
        even_out(&p.shared, multiple);
        p.shared.hidden = whole.hidden;
    }
    draw_losses(&p, &s);
    const int64_t block = 1 + below(&s, p.experts.hidden > 200 ? 5 : 24);
    if (below(&s, 4) == 0) p.moe.sequence_tokens = block;
    p.tokens_of[0] = LEAVES * block;
    draw_ragged(&p, seed, block);
    make_given(&p, &s);
    if (below(&s, 4) == 0) {
        p.layer.overflow = EPIC_OVERFLOW_DROP;
        p.layer.expert_capacity = 1 + below(&s, (uint32_t)p.total / 4 + 1);
    }
    p.placed = below(&s, 2);
    snprintf(
        p.name, sizeof p.name,
        "seed %u: %lld tokens, %u experts, top %u, alignment %u, hidden %u, inner %u, %s rows",
        seed, (long long)p.total, p.layer.num_experts, p.layer.top_k, p.layer.alignment,
        p.experts.hidden, p.experts.inner, convert_name(p.experts.row_type));
    return p;
}

static inline problem draw(uint32_t seed)
{
    return draw_of(seed, 1);
}

/* Returns the same layer over this many ranks, with blocks of experts on any rank. */
static inline problem spread(const problem *one, int num_ranks, uint32_t seed)
{
    source s = source_of(seed + 1000u * (uint32_t)num_ranks);
    problem p = *one;
    const uint32_t ranks = (uint32_t)num_ranks, turn = below(&s, ranks),
                   flip = below(&s, ranks);
    p.num_ranks = num_ranks;
    p.moe.capacity =
        p.total * p.layer.top_k + p.layer.num_experts / ranks * (p.layer.alignment - 1);
    for (int r = 0; r < num_ranks; r++) p.tokens_of[r] = tokens_of_rank(one, num_ranks, r);
    for (uint32_t e = 0; e < p.layer.num_experts; e++)
        p.rank_of_expert[e] =
            (int32_t)(((e / (p.layer.num_experts / ranks) + turn) % ranks) ^ flip);
    make_results(&p);
    return p;
}

static inline void same(const problem *p, const char *what, const void *a, const void *b,
                        size_t bytes)
{
    CHECK(bytes == 0 || !memcmp(a, b, bytes), "%s: %s has other bits with %d ranks", p->name,
          what, p->num_ranks);
}

/* Returns true if all ranks have equally many tokens. Only then the layer promises the bits of
 * one rank. */
static inline bool is_even(const problem *p)
{
    return p->tokens_of[0] == p->tokens_of[p->num_ranks - 1];
}

/* Compares all results of a layer with those on one rank. */
static inline void compare(const problem *one, const problem *many)
{
    if (!is_even(many)) return;
    same(many, "out", one->out.data, many->out.data, array_bytes(&one->out));
    for (int r = 0; r < many->num_ranks; r++)
        same(many, "the loss", one->loss.data, number_at(&many->loss, r),
             (size_t)convert_bytes(loss_type(one)));
    for (int i = 0; i < NUM_GIVEN; i++) {
        const size_t bytes = array_bytes(&one->gradient[i]);
        for (int r = 0; r < (is_dense(i) ? many->num_ranks : 1); r++)
            same(many, given_names[i], one->gradient[i].data,
                 (char *)many->gradient[i].data + (size_t)r * bytes, bytes);
    }
}

#endif
