/* SPDX-License-Identifier: Apache-2.0 */
/* Compares epic_capacity_bound with every possible choice of experts for small sizes. No choice
 * may need more slots, and at least one must need this number. */
#include "check.h"
#include "epic/epic.h"

#define MOST_CHOICES 9

typedef struct search {
    epic_layer layer;
    int num_experts, num_choices;
    /* largest number of choices of one expert: one per token if ids are distinct */
    int most_each;
    int counts[8];
    int64_t most;
} search;

static int64_t slots_of(const search *s)
{
    int64_t slots = 0;
    for (int e = 0; e < s->num_experts; e++) {
        int64_t kept = s->counts[e];
        const int64_t limit = s->layer.expert_capacity, unit = s->layer.alignment;
        if (limit && kept > limit) kept = limit;
        slots += (kept + unit - 1) / unit * unit;
    }
    return slots;
}

/* Tries every way to distribute the remaining choices over the experts of one rank, from
 * `first` on. */
static void spread(search *s, int first, int left)
{
    if (first == s->num_experts) {
        const int64_t slots = slots_of(s);
        if (slots > s->most) s->most = slots;
        return;
    }
    for (int n = 0; n <= left && n <= s->most_each; n++) {
        s->counts[first] = n;
        spread(s, first + 1, left - n);
    }
}

static void check_major(int ranks, int tokens, epic_layer layer)
{
    const epic_config config = {
        .max_tokens = tokens, .max_row_bytes = 1, .num_ranks = (uint32_t)ranks};
    search s = {.layer = layer,
                .num_experts = (int)layer.num_experts / ranks,
                .num_choices = ranks * tokens * (int)layer.top_k};
    s.most_each = s.num_choices;
    if (layer.flags & EPIC_DISTINCT) {
        s.most_each = ranks * tokens;
        if ((int)layer.top_k > s.num_experts) s.num_choices = ranks * tokens * s.num_experts;
    }
    if (s.num_choices > MOST_CHOICES) return;
    spread(&s, 0, s.num_choices);
    int64_t bound;
    CHECK(epic_capacity_bound(&config, &layer, &bound) == EPIC_OK);
    CHECK_SAY(
        bound == s.most,
        "%d ranks, %d tokens, top_k %u, %u experts, alignment %u, expert_capacity %u, flags "
        "%u: bound %lld, most %lld",
        ranks, tokens, layer.top_k, layer.num_experts, layer.alignment, layer.expert_capacity,
        layer.flags, (long long)bound, (long long)s.most);
}

static void check_flat(int ranks, int tokens, epic_layer layer)
{
    const epic_config config = {
        .max_tokens = tokens, .max_row_bytes = 1, .num_ranks = (uint32_t)ranks};
    const int64_t local = layer.num_experts / (unsigned)ranks;
    int64_t most = (int64_t)ranks * tokens;
    if (layer.expert_capacity && local * layer.expert_capacity < most)
        most = local * layer.expert_capacity;
    layer.layout = EPIC_FLAT;
    int64_t bound;
    CHECK_EQ(epic_capacity_bound(&config, &layer, &bound), EPIC_OK);
    CHECK_EQ(bound, most);
}

static void check_too_large(void)
{
    const epic_config config = {.max_tokens = 1 << 30, .max_row_bytes = 1, .num_ranks = 4};
    const epic_layer layer = {.num_experts = 4, .top_k = 1};
    int64_t size;
    CHECK_EQ(epic_capacity_bound(&config, &layer, &size), EPIC_EINVAL);
    CHECK_EQ(epic_plan_bytes(&config, &layer, &size), EPIC_EINVAL);
}

int main(void)
{
    static const uint32_t alignments[] = {1, 2, 3, 4, 16};
    check_begin();
    for (int ranks = 1; ranks <= 3; ranks++)
        for (int tokens = 1; tokens <= 4; tokens++)
            for (uint32_t top_k = 1; top_k <= 3; top_k++)
                for (int local = 1; local <= 4; local++)
                    for (int a = 0; a < 5; a++)
                        for (uint32_t limit = 0; limit <= 6; limit++) {
                            epic_layer layer = {.num_experts = (uint32_t)(local * ranks),
                                                .top_k = top_k,
                                                .alignment = alignments[a],
                                                .overflow = limit ? EPIC_OVERFLOW_DROP
                                                                  : EPIC_OVERFLOW_ERROR,
                                                .expert_capacity = limit};
                            check_major(ranks, tokens, layer);
                            check_flat(ranks, tokens, layer);
                            layer.flags = EPIC_DISTINCT;
                            check_major(ranks, tokens, layer);
                        }
    check_too_large();
    return check_end();
}
