/* SPDX-License-Identifier: Apache-2.0 */
/* Tests what epic_plan_read returns for plans of a CUDA context, and for damaged ones. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "rules/device_layout.h"

enum { RANKS = 4, TOKENS = 9, MAX_TOKENS = 16, EXPERTS = 8, TOP_K = 3, SLOTS = 20 };

typedef struct made { /* A plan of rank 2, in memory of exactly its size. */
    unsigned char *bytes;
    device_plan_header *header;
    int32_t *fate;
    size_t size;
} made;

static void seal(const made *m)
{
    m->header->sum = device_words_sum(m->header, offsetof(device_plan_header, sum));
}

static made make(void)
{
    const device_plan_layout at = device_plan_layout_of(RANKS, MAX_TOKENS, EXPERTS, TOP_K);
    made m = {.bytes = aligned_alloc(64, (size_t)at.bytes), .size = (size_t)at.bytes};
    memset(m.bytes, 0x5a, m.size);
    m.header = (device_plan_header *)(void *)m.bytes;
    m.fate = (int32_t *)(void *)(m.bytes + at.fate);
    *m.header = (device_plan_header){.magic = DEVICE_PLAN_MAGIC,
                                     .id = 77,
                                     .bytes = at.bytes,
                                     .max_tokens = MAX_TOKENS,
                                     .rank = 2,
                                     .num_ranks = RANKS,
                                     .num_experts = EXPERTS,
                                     .top_k = TOP_K,
                                     .alignment = 1,
                                     .sum_order = EPIC_TREE,
                                     .leaves = 8,
                                     .layer_leaves = 8,
                                     .num_local = 2,
                                     .owned = EXPERTS / RANKS,
                                     .tokens_of = {1, 2, TOKENS, 4},
                                     .slots_of = {0, 0, SLOTS, 0},
                                     .rank_at = {0, 2, 1, 3},
                                     .capacity = 30};
    for (int i = 0; i < TOKENS * TOP_K; i++) m.fate[i] = i % 4 ? i : -1 - i / 4 % 3;
    seal(&m);
    return m;
}

static void check_good(void)
{
    const made m = make();
    epic_plan_info info;
    CHECK_EQ(epic_plan_read(m.bytes, m.size, &info), EPIC_OK);
    CHECK_EQ(info.id, 77);
    CHECK_EQ(info.num_tokens, TOKENS);
    CHECK_EQ(info.total_tokens, 16);
    CHECK_EQ(info.num_slots, SLOTS);
    CHECK_EQ(info.capacity, 30);
    CHECK_EQ(info.num_kept, 20);
    CHECK_EQ(info.num_none, 3);
    CHECK_EQ(info.num_expert_full, 2);
    CHECK_EQ(info.num_rank_full, 2);
    CHECK_EQ(info.num_local_experts, 2);
    CHECK_EQ(info.num_leaves, 2);
    CHECK_EQ(info.first_leaf, 2); /* the subtree of this rank is the second one */
    CHECK(!memcmp(m.bytes + info.fate_offset, m.fate, sizeof *m.fate));
    /* after ranks 0 and 1 have left, half of the experts belong to this rank */
    memcpy(m.header->rank_at, (const uint8_t[]){3, 2, 0, 1}, RANKS);
    m.header->owned = EXPERTS / 2;
    seal(&m);
    CHECK_EQ(epic_plan_read(m.bytes, m.size, &info), EPIC_OK);
    CHECK_EQ(info.num_leaves, 4);
    CHECK_EQ(info.first_leaf, 4);
    m.header->result = EPIC_EOVERFLOW;
    seal(&m);
    CHECK_EQ(epic_plan_read(m.bytes, m.size, &info), EPIC_OK);
    CHECK_EQ(info.result, EPIC_EOVERFLOW);
    CHECK_EQ(info.num_slots, 0);
    free(m.bytes);
}

static void check_refused(const made *m, size_t size, const char *word)
{
    epic_plan_info info;
    CHECK_EQ(epic_plan_read(m->bytes, size, &info), EPIC_EINVAL);
    CHECK_SAY(strstr(epic_error(NULL), word), "\"%s\" does not say \"%s\"", epic_error(NULL),
              word);
}

/* Damages every word of the header except the magic number. The checksum must detect it. */
static void check_damage(void)
{
    const made m = make();
    uint32_t *words = (uint32_t *)(void *)m.bytes;
    for (size_t i = 2; i <= offsetof(device_plan_header, sum) / 4; i++) {
        words[i] ^= 1u << i % 32;
        check_refused(&m, m.size, "damaged");
        words[i] ^= 1u << i % 32;
    }
    check_refused(&m, m.size - 1, "plan_bytes");
    m.fate[TOKENS * TOP_K - 1] = EPIC_FATE_ABSENT - 1;
    check_refused(&m, m.size, "out of range");
    free(m.bytes);
}

/* Damages the plan and corrects the checksum. No size may lead to an access outside of the
 * plan. */
static void check_forged(void)
{
    static const int64_t values[] = {-1, 0, 9, 5000, INT32_MAX, INT64_MAX / 4};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        const made m = make();
        device_plan_header good = *m.header;
        m.header->max_tokens = values[i];
        seal(&m);
        check_refused(&m, m.size, "damaged");
        *m.header = good;
        m.header->tokens_of[2] = values[i] == 9 ? MAX_TOKENS + 1 : -1;
        seal(&m);
        check_refused(&m, m.size, "damaged");
        *m.header = good;
        m.header->top_k = values[i] == 9 ? 4 : (uint32_t)values[i];
        seal(&m);
        check_refused(&m, m.size, "damaged");
        *m.header = good;
        m.header->rank = values[i] == 0 ? RANKS : -1;
        seal(&m);
        check_refused(&m, m.size, "damaged");
        *m.header = good;
        m.header->num_ranks = values[i] == 9 ? DEVICE_MAX_RANKS + 1 : 0;
        seal(&m);
        check_refused(&m, m.size, "damaged");
        free(m.bytes);
    }
}

/* Reads a plan of a group of more than DEVICE_FEW_RANKS ranks, which has another header. */
static void check_many_ranks(void)
{
    enum { MANY = 64, RANK = 63 };
    epic_plan_info info;
    const device_plan_layout at = device_plan_layout_of(MANY, MAX_TOKENS, MANY, 1);
    made m = {.bytes = aligned_alloc(64, (size_t)at.bytes), .size = (size_t)at.bytes};
    memset(m.bytes, 0x5a, m.size);
    device_many_header *h = (device_many_header *)(void *)m.bytes;
    CHECK(at.slab_begin >= (int64_t)sizeof *h);
    *h = (device_many_header){.magic = DEVICE_PLAN_MAGIC,
                              .id = 78,
                              .bytes = at.bytes,
                              .max_tokens = MAX_TOKENS,
                              .rank = RANK,
                              .num_ranks = MANY,
                              .num_experts = MANY,
                              .top_k = 1,
                              .num_local = 1,
                              .owned = 1,
                              .sum_order = EPIC_TREE,
                              .layer_leaves = MANY,
                              .capacity = 30};
    for (int q = 0; q < MANY; q++) {
        h->tokens_of[q] = q % 3;
        h->slots_of[q] = q;
        h->rank_at[q] = (uint8_t)(MANY - 1 - q);
    }
    h->tokens_of[RANK] = 2;
    h->sum = device_words_sum(h, offsetof(device_many_header, sum));
    int32_t *fate = (int32_t *)(void *)(m.bytes + at.fate);
    fate[0] = 5;
    fate[1] = EPIC_FATE_NONE;
    CHECK_EQ(epic_plan_read(m.bytes, m.size, &info), EPIC_OK);
    CHECK_EQ(info.id, 78);
    CHECK_EQ(info.num_tokens, 2);
    CHECK_EQ(info.total_tokens, 65);
    CHECK_EQ(info.num_slots, RANK);
    CHECK_EQ(info.capacity, 30);
    CHECK_EQ(info.num_kept, 1);
    CHECK_EQ(info.num_none, 1);
    CHECK_EQ(info.num_leaves, 1);
    CHECK_EQ(info.first_leaf, 0); /* rank 63 owns the first subtree */
    check_refused(&m, m.size - 1, "plan_bytes");
    check_refused(&m, sizeof *h - 1, "damaged");
    h->slots_of[40]++;
    check_refused(&m, m.size, "damaged");
    h->slots_of[40]--;
    h->num_ranks = DEVICE_MOST_RANKS + 1;
    h->sum = device_words_sum(h, offsetof(device_many_header, sum));
    check_refused(&m, m.size, "damaged");
    free(m.bytes);
}

int main(void)
{
    check_begin();
    check_good();
    check_many_ranks();
    check_damage();
    check_forged();
    return check_end();
}
