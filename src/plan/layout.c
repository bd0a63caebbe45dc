/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the offsets of a plan's arrays, and checks the bytes of a plan. */
#include <string.h>

#include "base/hash.h"
#include "plan/plan.h"
#include "rules/device_layout.h"
#include "rules/invariant.h"

#define PLAN_MAGIC 0x314e414c50435045ull /* "EPCPLAN1" */
#define SECTION 64                       /* alignment of the arrays in bytes */

static int64_t add_section(int64_t *end, int64_t count)
{
    const int64_t begin = *end;
    *end = round_up(begin + count * (int64_t)sizeof(int32_t), SECTION);
    return begin;
}

void plan_layout(plan_header *h)
{
    const int64_t k = h->layer.top_k;
    int64_t end = round_up(sizeof *h, SECTION);
    h->tokens_of = add_section(&end, h->num_ranks);
    h->base_of = add_section(&end, h->num_ranks + 1);
    h->expert_of = add_section(&end, h->num_local);
    h->logical_of = add_section(&end, h->layer.num_logical ? h->layer.num_experts : 0);
    h->slab_begin = add_section(&end, h->num_local + 1);
    h->slab_count = add_section(&end, h->num_local);
    h->position_of = add_section(&end, h->num_ranks);
    h->fate = add_section(&end, h->num_tokens * k);
    h->rank_to = add_section(&end, h->num_tokens * k);
    h->slot_or_expert = add_section(&end, h->total_tokens * k);
    h->row_of = add_section(&end, h->layer.layout == EPIC_FLAT ? h->total_tokens : 0);
    h->bytes = end;
}

/* Returns the size of the planner's workspace in bytes: 7 int32 arrays [num_experts], 4 int32
 * arrays [num_ranks] and 2 int64 arrays [num_ranks]. */
static int64_t workspace_bytes(int64_t num_experts, int64_t num_ranks)
{
    int64_t end = 0;
    for (int i = 0; i < 7; i++) add_section(&end, num_experts);
    for (int i = 0; i < 4; i++) add_section(&end, num_ranks);
    add_section(&end, 2 * num_ranks);
    add_section(&end, 2 * num_ranks);
    return end;
}

int64_t plan_bytes_bound(const epic_layer *layer, int32_t num_ranks, int64_t max_tokens)
{
    const int64_t choices = (int64_t)num_ranks * max_tokens * layer->top_k;
    const int64_t padding = (int64_t)layer->num_experts * layer->alignment;
    if (max_tokens > INT32_MAX || choices + padding > INT32_MAX) return 0;
    plan_header header = {.num_tokens = max_tokens,
                          .total_tokens = num_ranks * max_tokens,
                          .num_ranks = num_ranks,
                          .num_local = (int32_t)layer->num_experts,
                          .layer = *layer};
    plan_layout(&header);
    const int64_t host = header.bytes + workspace_bytes(layer->num_experts, num_ranks);
    const int64_t device = device_layer_bytes(num_ranks, max_tokens, layer);
    return host > device ? host : device;
}

plan_view plan_view_of(const void *plan)
{
    const unsigned char *bytes = plan;
    const plan_header *h = plan;
    return (plan_view){
        .header = h,
        .tokens_of = (const int32_t *)(bytes + h->tokens_of),
        .base_of = (const int32_t *)(bytes + h->base_of),
        .expert_of = (const int32_t *)(bytes + h->expert_of),
        .logical_of = (const int32_t *)(bytes + h->logical_of),
        .slab_begin = (const int32_t *)(bytes + h->slab_begin),
        .slab_count = (const int32_t *)(bytes + h->slab_count),
        .position_of = (const int32_t *)(bytes + h->position_of),
        .fate = (const int32_t *)(bytes + h->fate),
        .rank_to = (const int32_t *)(bytes + h->rank_to),
        .slot_or_expert = (const int32_t *)(bytes + h->slot_or_expert),
        .row_of = (const int32_t *)(bytes + h->row_of),
    };
}

/* Returns the maximum number of experts on one member. If `members` is NULL, every rank is a
 * member. `count` [num_ranks] is scratch memory. */
static int32_t max_experts_per_rank(int32_t *count, const epic_layer *layer, int32_t num_ranks,
                                    const int32_t *owner, const seat_set *members)
{
    int32_t most = 0;
    memset(count, 0, (size_t)num_ranks * sizeof *count);
    /* begin at INT32_MIN for a rank that has left, so that its count is never the maximum */
    for (int32_t r = 0; members && r < num_ranks; r++)
        if (!seat_set_has(members, r)) count[r] = INT32_MIN;
    for (uint32_t e = 0; e < layer->num_experts; e++)
        if (++count[owner[e]] > most) most = count[owner[e]];
    return most;
}

/* Sets the pointers of *p that point into the workspace. The size of the plan depends on the
 * placement of the experts, which is not known yet, so the workspace begins after the end of
 * the largest possible plan. */
static void locate_workspace(planner *p, const plan_header *h)
{
    plan_header largest = *h;
    largest.num_local = (int32_t)h->layer.num_experts;
    plan_layout(&largest);
    const int64_t experts = h->layer.num_experts;
    int64_t end = largest.bytes;
    int32_t **const by_expert[] = {&p->count,        &p->owner,    &p->local, &p->begin,
                                   &p->expert_quota, &p->num_kept, &p->next};
    int32_t **const by_rank[] = {&p->used_slots, &p->keep_limit, &p->limit_fits,
                                 &p->limit_fails};
    for (int i = 0; i < 7; i++)
        *by_expert[i] = (int32_t *)(p->bytes + add_section(&end, experts));
    for (int i = 0; i < 4; i++)
        *by_rank[i] = (int32_t *)(p->bytes + add_section(&end, h->num_ranks));
    p->needed = (int64_t *)(p->bytes + add_section(&end, 2 * h->num_ranks));
    p->capacity = (int64_t *)(p->bytes + add_section(&end, 2 * h->num_ranks));
}

static void locate_arrays(planner *p)
{
    const plan_header *h = p->header;
    unsigned char *bytes = p->bytes;
    p->tokens_of = (int32_t *)(bytes + h->tokens_of);
    p->base_of = (int32_t *)(bytes + h->base_of);
    p->expert_of = (int32_t *)(bytes + h->expert_of);
    p->logical_of = (int32_t *)(bytes + h->logical_of);
    p->slab_begin = (int32_t *)(bytes + h->slab_begin);
    p->slab_count = (int32_t *)(bytes + h->slab_count);
    p->position_of = (int32_t *)(bytes + h->position_of);
    p->fate = (int32_t *)(bytes + h->fate);
    p->rank_to = (int32_t *)(bytes + h->rank_to);
    p->ids = (int32_t *)(bytes + h->slot_or_expert);
    p->row_of = (int32_t *)(bytes + h->row_of);
}

void planner_begin(planner *p, void *plan, const epic_layer *layer, int32_t rank,
                   int32_t num_ranks, const int64_t *tokens_of, const plan_tables *tables)
{
    plan_header h = {.magic = PLAN_MAGIC,
                     .num_tokens = tokens_of[rank],
                     .rank = rank,
                     .num_ranks = num_ranks,
                     .num_members =
                         tables->members ? seat_set_count(tables->members) : num_ranks,
                     .layer = *layer};
    for (int32_t r = 0; r < num_ranks; r++) h.total_tokens += tokens_of[r];
    *p = (planner){.bytes = plan, .header = plan, .members = tables->members};
    p->has_absent = tables->has_absent || tables->members;
    locate_workspace(p, &h);
    const uint32_t block = (layer->num_experts + (uint32_t)num_ranks - 1) / (uint32_t)num_ranks;
    if (tables->rank_of_expert)
        memcpy(p->owner, tables->rank_of_expert, layer->num_experts * sizeof *p->owner);
    for (uint32_t e = 0, r = 0; e < layer->num_experts && !tables->rank_of_expert; r++)
        for (uint32_t end = e + block; e < end && e < layer->num_experts; e++)
            p->owner[e] = (int32_t)r;
    h.num_local =
        max_experts_per_rank(p->used_slots, layer, num_ranks, p->owner, tables->members);
    plan_layout(&h);
    /* also clears the padding between arrays, so that equal plans have equal bytes */
    memset(plan, 0, (size_t)h.fate);
    *p->header = h;
    locate_arrays(p);
    for (int32_t r = 0; r < num_ranks; r++) {
        p->tokens_of[r] = (int32_t)tokens_of[r];
        p->base_of[r + 1] = p->base_of[r] + p->tokens_of[r];
    }
    if (tables->logical_of_expert)
        memcpy(p->logical_of, tables->logical_of_expert,
               layer->num_experts * sizeof *p->logical_of);
    for (uint32_t e = 0; tables->members && layer->num_logical && e < layer->num_experts; e++)
        if (!seat_set_has(tables->members, p->owner[e])) p->logical_of[e] = EPIC_ABSENT;
}

static uint64_t body_checksum(const plan_header *h)
{
    const unsigned char *bytes = (const unsigned char *)h;
    const int64_t begin = h->tokens_of;
    return hash_bytes(bytes + begin, (size_t)(h->bytes - begin));
}

static uint64_t header_checksum(const plan_header *h)
{
    plan_header copy;
    memcpy(&copy, h, sizeof copy);
    copy.header_sum = 0;
    return hash_bytes(&copy, sizeof copy);
}

static void clear_padding_after(planner *p, int64_t begin, int64_t count, int64_t end)
{
    begin += count * (int64_t)sizeof(int32_t);
    memset(p->bytes + begin, 0, (size_t)(end - begin));
}

void planner_seal(planner *p, uint64_t id, uint64_t group_id, epic_result result)
{
    plan_header *h = p->header;
    const int64_t k = h->layer.top_k;
    clear_padding_after(p, h->fate, h->num_tokens * k, h->rank_to);
    clear_padding_after(p, h->rank_to, h->num_tokens * k, h->slot_or_expert);
    clear_padding_after(p, h->slot_or_expert, h->total_tokens * k, h->row_of);
    clear_padding_after(p, h->row_of, h->layer.layout == EPIC_FLAT ? h->total_tokens : 0,
                        h->bytes);
    h->id = id;
    h->group_id = group_id;
    h->result = (uint32_t)result;
    h->body_sum = body_checksum(h);
    h->header_sum = header_checksum(h);
    INVARIANT(plan_check(&(plan_view){0}, h, h->bytes, group_id, h->rank, h->num_ranks) ==
              PLAN_OK);
}

const char *plan_damage_name(int damage)
{
    switch (damage) {
    case PLAN_TOO_SHORT:
        return "plan_bytes is less than the plan needs";
    case PLAN_BAD_MAGIC:
        return "the bytes are no plan of this version";
    case PLAN_BAD_HEADER:
        return "its header is damaged";
    case PLAN_BAD_BODY:
        return "its arrays are damaged";
    case PLAN_OUT_OF_RANGE:
        return "an entry is out of range";
    case PLAN_WRONG_RANK:
        return "it is from another group or rank, or from before epic_regroup";
    default:
        return "nothing is wrong with it";
    }
}

static bool are_all_within(const int32_t *values, int64_t count, int32_t least, int64_t most)
{
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < count; i++) {
        low = values[i] < low ? values[i] : low;
        high = values[i] > high ? values[i] : high;
    }
    return count <= 0 || (low >= least && high <= most);
}

/* Checks tokens_of and base_of: element r of base_of must be the sum of tokens_of over all
 * ranks below r (exclusive prefix sum). Adds with 64 bits, because a 32-bit sum could overflow
 * and look valid. */
static bool are_tokens_valid(const plan_view *v)
{
    const plan_header *h = v->header;
    int64_t base = 0;
    for (int32_t r = 0; r < h->num_ranks; r++) {
        if (v->base_of[r] != base || v->tokens_of[r] < 0) return false;
        base += v->tokens_of[r];
    }
    return base == h->total_tokens && v->base_of[h->num_ranks] == base &&
           v->tokens_of[h->rank] == h->num_tokens;
}

/* Checks that the slabs (the slots of one expert each) follow each other without gaps from slot
 * 0 to num_slots. Each slab must have at least as many slots as choices. */
static bool are_slabs_valid(const plan_view *v)
{
    const plan_header *h = v->header;
    const bool flat = h->layer.layout == EPIC_FLAT;
    if (v->slab_begin[0] != 0) return false;
    for (int32_t e = 0; e < h->num_local; e++) {
        const int64_t begin = v->slab_begin[e], end = v->slab_begin[e + 1];
        if (v->slab_count[e] < 0 || (!flat && end - begin < v->slab_count[e])) return false;
    }
    return flat || v->slab_begin[h->num_local] == h->num_slots;
}

/* Checks the range of every element, so that the code that uses the plan need not check it. */
static bool are_ranges_valid(const plan_view *v)
{
    const plan_header *h = v->header;
    const int64_t k = h->layer.top_k;
    const bool flat = h->layer.layout == EPIC_FLAT;
    return are_tokens_valid(v) && are_slabs_valid(v) &&
           are_all_within(v->expert_of, h->num_local, -1, (int64_t)h->layer.num_experts - 1) &&
           are_all_within(v->logical_of, h->layer.num_logical ? h->layer.num_experts : 0,
                          EPIC_ABSENT, (int64_t)h->layer.num_logical - 1) &&
           are_all_within(v->position_of, h->num_ranks, 0, h->num_members - 1) &&
           are_all_within(v->fate, h->num_tokens * k, EPIC_FATE_ABSENT, INT32_MAX) &&
           are_all_within(v->rank_to, h->num_tokens * k, -1, h->num_ranks - 1) &&
           are_all_within(v->slot_or_expert, h->total_tokens * k, -1,
                          (flat ? h->num_local : h->num_slots) - 1) &&
           are_all_within(v->row_of, flat ? h->total_tokens : 0, -1, h->num_slots - 1);
}

/* Checks the sizes in the header, and that the header has the offsets that plan_layout()
 * computes. */
static bool is_layout_valid(const plan_header *h)
{
    epic_layer layer;
    if (h->num_ranks < 1 || h->num_ranks > 65536 || h->rank < 0 || h->rank >= h->num_ranks ||
        h->num_members < 1 || h->num_members > h->num_ranks || h->layer.sum_order > EPIC_TREE ||
        layer_read(&layer, &h->layer, sizeof layer, (int32_t)h->num_members) != EPIC_OK ||
        memcmp(&layer, &h->layer, sizeof layer) != 0)
        return false;
    if (h->num_tokens < 0 || h->total_tokens < h->num_tokens || h->total_tokens > INT32_MAX ||
        h->num_local < 0 || h->num_local > MAX_EXPERTS || h->num_slots < 0 ||
        h->num_slots > INT32_MAX)
        return false;
    plan_header again = *h;
    plan_layout(&again);
    return memcmp(&again, h, sizeof again) == 0;
}

enum plan_damage plan_check(plan_view *out, const void *plan, int64_t plan_bytes,
                            uint64_t group_id, int32_t rank, int32_t num_ranks)
{
    const plan_header *h = plan;
    if (plan_bytes < (int64_t)sizeof *h) return PLAN_TOO_SHORT;
    if (h->magic != PLAN_MAGIC) return PLAN_BAD_MAGIC;
    if (h->header_sum != header_checksum(h) || !is_layout_valid(h)) return PLAN_BAD_HEADER;
    if ((uint64_t)h->bytes > (uint64_t)plan_bytes) return PLAN_TOO_SHORT;
    if (group_id && (h->group_id != group_id || h->rank != rank || h->num_ranks != num_ranks))
        return PLAN_WRONG_RANK;
    if (h->body_sum != body_checksum(h)) return PLAN_BAD_BODY;
    const plan_view view = plan_view_of(plan);
    if (!are_ranges_valid(&view)) return PLAN_OUT_OF_RANGE;
    *out = view;
    return PLAN_OK;
}
