/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the bytes of a plan of a CUDA context on the host. */
#include "plan/device_read.h"

#include "base/error.h"
#include "rules/device_layout.h"

/* number of fates (slots of choices, or why they were dropped) that are copied to the host at a
 * time */
#define CHUNK 1024

/* Returns true if the header's checksum, ranges and sizes are valid. */
static bool is_header_valid(const device_plan_header *h)
{
    if (h->sum != device_header_sum(h) || h->num_ranks < 1 || h->num_ranks > DEVICE_MAX_RANKS ||
        h->rank < 0 || h->rank >= h->num_ranks || h->num_experts > DEVICE_MAX_EXPERTS ||
        h->top_k < 1 || h->top_k > DEVICE_MAX_TOP_K || h->max_tokens < 0 ||
        h->max_tokens > INT32_MAX || h->tokens_of[h->rank] < 0 ||
        h->tokens_of[h->rank] > h->max_tokens || h->layout > EPIC_FLAT)
        return false;
    const device_plan_layout at =
        device_plan_layout_of(h->num_ranks, h->max_tokens, h->num_experts, h->top_k);
    return h->bytes == device_plan_end(&at, h->layout, h->num_logical);
}

/* Counts `count` fates (slots of choices, or the reasons why they were dropped): adds 1 to the
 * count in *out that belongs to each fate. Returns false if a fate is out of range. */
static bool count_fates(const int32_t *fates, int64_t count, epic_plan_info *out)
{
    for (int64_t i = 0; i < count; i++) {
        if (fates[i] < EPIC_FATE_RANK_FULL) return false;
        out->num_kept += fates[i] >= 0;
        out->num_none += fates[i] == EPIC_FATE_NONE;
        out->num_expert_full += fates[i] == EPIC_FATE_EXPERT_FULL;
        out->num_rank_full += fates[i] == EPIC_FATE_RANK_FULL;
    }
    return true;
}

/* Copies the fates of all choices (their slots, or why they were dropped) from the plan, chunk
 * by chunk, and counts them in *out. */
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
 * ranks in the order of their leaves in the tree, and each rank has the same number of
 * leaves. */
static void describe_device_plan(const device_plan_header *h, const device_plan_layout *at,
                                 epic_plan_info *out)
{
    *out = (epic_plan_info){.id = h->id,
                            .num_tokens = h->tokens_of[h->rank],
                            .num_slots = h->result ? 0 : h->slots_of[h->rank],
                            .capacity = h->capacity,
                            .result = h->result,
                            .num_local_experts = (uint32_t)h->num_local,
                            .fate_offset = at->fate,
                            .rank_offset = at->rank_of};
    for (int q = 0; q < h->num_ranks; q++) out->total_tokens += h->tokens_of[q];
    if (h->sum_order != EPIC_TREE) return;
    out->num_leaves = h->layer_leaves / (uint32_t)h->num_ranks;
    for (int i = 0; i < h->num_ranks; i++)
        if (h->rank_at[i] == h->rank) out->first_leaf = (uint32_t)i * out->num_leaves;
}

bool device_plan_read(const void *plan, int64_t plan_bytes, device_fetch fetch,
                      epic_plan_info *out, epic_result *result)
{
    device_plan_header h;
    if (plan_bytes < (int64_t)sizeof h || !fetch(&h, plan, sizeof h) ||
        h.magic != DEVICE_PLAN_MAGIC)
        return false;
    if (!is_header_valid(&h)) {
        *result = epic_fail(EPIC_EINVAL, "plan: its header is damaged");
        return true;
    }
    if ((uint64_t)h.bytes > (uint64_t)plan_bytes) {
        *result = epic_fail(EPIC_EINVAL, "plan: plan_bytes is %lld, the plan has %lld",
                            (long long)plan_bytes, (long long)h.bytes);
        return true;
    }
    const device_plan_layout at =
        device_plan_layout_of(h.num_ranks, h.max_tokens, h.num_experts, h.top_k);
    describe_device_plan(&h, &at, out);
    *result = read_fates((const unsigned char *)plan + at.fate, out->num_tokens * h.top_k,
                         fetch, out);
    return true;
}
