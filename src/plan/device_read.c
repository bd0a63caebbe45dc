/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/device_read.h"

#include <string.h>

#include "base/error.h"
#include "rules/device_layout.h"

/* number of fates that are copied to the host at a time; the fate of a choice (a token and one
 * of its top_k experts) is its slot if the choice was kept, and the reason of the drop if
 * not */
#define CHUNK 1024

/* The header of a plan. It is a device_many_header if few.num_ranks is greater than
 * DEVICE_FEW_RANKS, and a device_few_header if not. few.num_ranks is valid in both cases,
 * because both types begin with the same members. */
typedef union header {
    device_few_header few;
    device_many_header many;
} header;

/* The members of a header that this file reads. Their offsets differ between the two types. */
typedef struct header_view {
    const int32_t *tokens_of, *slots_of;
    const uint8_t *rank_at;
    int32_t capacity;
    uint32_t layout, layer_leaves, num_logical;
    bool is_intact; /* true: the checksum is correct */
} header_view;

#define VIEW_OF(h)                                                                         \
    (header_view)                                                                          \
    {                                                                                      \
        (h)->tokens_of, (h)->slots_of, (h)->rank_at, (h)->capacity, (h)->layout,           \
            (h)->layer_leaves, (h)->num_logical,                                           \
            (h)->sum ==                                                                    \
                device_words_sum(h, (size_t)((const char *)&(h)->sum - (const char *)(h))) \
    }

static header_view view_header(const header *h)
{
    return h->few.num_ranks > DEVICE_FEW_RANKS ? VIEW_OF(&h->many) : VIEW_OF(&h->few);
}

/* Returns whether the header's checksum and sizes are correct and its values are in range. */
static bool is_header_valid(const device_few_header *h, const header_view *view)
{
    if (!view->is_intact || h->num_ranks < 1 || h->num_ranks > DEVICE_MOST_RANKS ||
        h->rank < 0 || h->rank >= h->num_ranks || h->num_experts < 1 ||
        h->num_experts > DEVICE_MAX_EXPERTS || h->owned < 0 ||
        h->owned > (int32_t)h->num_experts || h->top_k < 1 || h->top_k > DEVICE_MAX_TOP_K ||
        h->max_tokens < 0 || h->max_tokens > INT32_MAX || view->tokens_of[h->rank] < 0 ||
        view->tokens_of[h->rank] > h->max_tokens || view->layout > EPIC_FLAT)
        return false;
    const device_plan_layout at =
        device_plan_layout_of(h->num_ranks, h->max_tokens, h->num_experts, h->top_k);
    return h->bytes == device_plan_end(&at, view->layout, view->num_logical);
}

/* Counts the fates in fates[0 .. count) and adds the counts to *out. Returns false if a fate is
 * out of range. */
static bool count_fates(const int32_t *fates, int64_t count, epic_plan_info *out)
{
    for (int64_t i = 0; i < count; i++) {
        if (fates[i] < EPIC_FATE_ABSENT) return false;
        out->num_kept += fates[i] >= 0;
        out->num_none += fates[i] == EPIC_FATE_NONE;
        out->num_expert_full += fates[i] == EPIC_FATE_EXPERT_FULL;
        out->num_rank_full += fates[i] == EPIC_FATE_RANK_FULL;
        out->num_absent += fates[i] == EPIC_FATE_ABSENT;
    }
    return true;
}

/* Copies the fates of all choices to the host, chunk by chunk. Counts the choices that were
 * kept, that have no expert, and that were dropped for each reason. Adds the counts to *out. */
static epic_result read_fates(const unsigned char *from, int64_t choices, device_fetch fetch,
                              epic_plan_info *out)
{
    int32_t fates[CHUNK];
    for (int64_t done = 0; done < choices; done += CHUNK) {
        const int64_t count = choices - done < CHUNK ? choices - done : CHUNK;
        const size_t bytes = (size_t)count * sizeof *fates;
        if (!fetch(fates, from + done * (int64_t)sizeof *fates, bytes))
            return epic_fail(EPIC_EDEVICE, "plan: its bytes cannot be copied to the host");
        if (!count_fates(fates, count, out))
            return epic_fail(EPIC_EINVAL, "plan: an entry is out of range");
    }
    return EPIC_OK;
}

/* Fills in *out from the header, except the counts of fates. With EPIC_TREE, rank_at lists the
 * ranks in the order of their leaves, and all members of the group have equally many experts
 * and leaves. */
static void describe_device_plan(const device_few_header *h, const header_view *view,
                                 const device_plan_layout *at, epic_plan_info *out)
{
    *out = (epic_plan_info){.id = h->id,
                            .num_tokens = view->tokens_of[h->rank],
                            .num_slots = h->result ? 0 : view->slots_of[h->rank],
                            .capacity = view->capacity,
                            .result = h->result,
                            .num_local_experts = (uint32_t)h->num_local,
                            .fate_offset = at->fate,
                            .rank_offset = at->rank_of};
    for (int q = 0; q < h->num_ranks; q++) out->total_tokens += view->tokens_of[q];
    if (h->sum_order != EPIC_TREE) return;
    out->num_leaves =
        (uint32_t)((uint64_t)view->layer_leaves * (uint32_t)h->owned / h->num_experts);
    for (int i = 0; i < h->num_ranks; i++)
        if (view->rank_at[i] == h->rank) out->first_leaf = (uint32_t)i * out->num_leaves;
}

/* Copies the header of the plan to *h. Returns false if the bytes do not begin like a plan, or
 * cannot be copied. If the plan is too short for a device_many_header, the rest of *h stays
 * zero, so that the checksum is wrong. */
static bool read_header(const void *plan, int64_t plan_bytes, device_fetch fetch, header *h)
{
    memset(h, 0, sizeof *h);
    if (plan_bytes < (int64_t)sizeof h->few || !fetch(h, plan, sizeof h->few) ||
        h->few.magic != DEVICE_PLAN_MAGIC)
        return false;
    const bool is_many = h->few.num_ranks > DEVICE_FEW_RANKS;
    return !is_many || plan_bytes < (int64_t)sizeof h->many || fetch(h, plan, sizeof h->many);
}

bool device_plan_read(const void *plan, int64_t plan_bytes, device_fetch fetch,
                      epic_plan_info *out, epic_result *result)
{
    header bytes;
    if (!read_header(plan, plan_bytes, fetch, &bytes)) return false;
    const device_few_header *h = &bytes.few;
    const header_view view = view_header(&bytes);
    if (!is_header_valid(h, &view)) {
        *result = epic_fail(EPIC_EINVAL, "plan: its header is damaged");
        return true;
    }
    if ((uint64_t)h->bytes > (uint64_t)plan_bytes) {
        *result = epic_fail(EPIC_EINVAL, "plan: plan_bytes is %lld, the plan has %lld",
                            (long long)plan_bytes, (long long)h->bytes);
        return true;
    }
    const device_plan_layout at =
        device_plan_layout_of(h->num_ranks, h->max_tokens, h->num_experts, h->top_k);
    describe_device_plan(h, &view, &at, out);
    *result = read_fates((const unsigned char *)plan + at.fate, out->num_tokens * h->top_k,
                         fetch, out);
    return true;
}
