/* SPDX-License-Identifier: Apache-2.0 */
/* The layout of a plan in CUDA memory: sizes and offsets, for host code and for kernels.
 *
 * The plan is a header, followed by arrays of int32. Their offsets depend only on the sizes of
 * the group and of the layer. P is num_experts rounded up to a power of two. `slab_begin`,
 * `padding` and `expert_of` use only the elements of this rank's local experts. The lists in
 * `records` and `locals` have top_k elements, and unused elements at their end are -1.
 *
 *   slab_begin [num_experts]                    first slot of each local expert's slab
 *   padding    [P]                              first padding slot and number of padding slots
 *                                               of each local expert's slab (device_padding)
 *   rank_of    [max_tokens, top_k]              rank of the choice's expert; -1: no expert
 *   fate       [max_tokens, top_k]              slot on that rank, or an EPIC_FATE value
 *   records    [num_ranks, max_tokens, top_k]   for each token of each rank: its slots on this
 *                                               rank by ascending k. FLAT: its only slot
 *   locals     [num_ranks, max_tokens, top_k]   FLAT only, for each token of each rank: its
 *                                               local experts on this rank by ascending k
 *   logical    [num_experts]                    replicas only: logical expert of each expert
 *   expert_of  [num_experts]                    replicas only: id of each local expert */
#ifndef EPIC_DEVICE_LAYOUT_H
#define EPIC_DEVICE_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"

#ifdef __CUDACC__
#define DEVICE_LAYOUT_BOTH __host__ __device__
#else
#define DEVICE_LAYOUT_BOTH
#endif

#define DEVICE_MAX_RANKS 32 /* kernels use one bit of a word and one lane of a warp per rank */
#define DEVICE_MAX_EXPERTS 8192
/* Number of words that a rank has in the array `counts` of a heap. It has one word for each
 * expert, one for each rank, one for the hash of the table of replicas (plan/replicas.cuh), and
 * 15 unused words. */
#define DEVICE_MAX_TALLIES (DEVICE_MAX_EXPERTS + DEVICE_MAX_RANKS + 16)
#define DEVICE_MAX_TOP_K 64
#define DEVICE_PLAN_MAGIC 0x6e616c5063697045ull /* "EpicPlan" */

/* The first bytes of a plan in CUDA memory. */
typedef struct device_plan_header {
    uint64_t magic;
    uint64_t id; /* the plan's id, equal on all ranks */
    uint64_t group_id;
    int64_t bytes; /* bytes of the whole plan */
    int64_t max_tokens;
    int32_t rank, num_ranks;
    uint32_t num_experts, top_k, alignment, overflow, expert_capacity, sum_order, leaves,
        partial_type;
    uint32_t result;                     /* epic_result; with an error the plan has no slots */
    int32_t num_local;                   /* largest number of experts that one rank owns */
    int32_t owned;                       /* number of experts that this rank owns */
    int32_t tokens_of[DEVICE_MAX_RANKS]; /* number of tokens of each rank */
    int32_t slots_of[DEVICE_MAX_RANKS];  /* number of slots of each rank */
    /* With EPIC_TREE, the experts form num_ranks equal blocks, and rank_at[i] is the rank that
     * owns block i. The leaves of these experts are subtree i of the tree. */
    uint8_t rank_at[DEVICE_MAX_RANKS];
    int32_t capacity; /* number of slots that this rank may use */
    /* with EPIC_TREE: id of this rank's first expert; its experts are contiguous */
    int32_t first_expert;
    uint32_t layout;
    uint32_t layer_leaves; /* number of leaves that the layer sets. `leaves` is the number that
                              combine uses: layer_leaves, or num_ranks if the plan is FLAT. */
    uint32_t num_logical;  /* 0: no replicas */
    uint32_t layer_hash;   /* hash of all fields of the layer */
    uint32_t sum;          /* checksum of the words above */
} device_plan_header;

/* Returns what word i of a header adds to the header's checksum. `word` is the value of this
 * word. */
DEVICE_LAYOUT_BOTH static inline uint32_t device_header_share(uint32_t word, uint32_t i)
{
    return (word ^ i) * (2 * i + 0x9e3779b1u);
}

/* Returns the checksum of a header: the sum of device_header_share() over its words. */
static inline uint32_t device_header_sum(const device_plan_header *header)
{
    const uint32_t *words = (const uint32_t *)(const void *)header;
    uint32_t sum = 0;
    for (uint32_t i = 0; i < offsetof(device_plan_header, sum) / 4; i++)
        sum += device_header_share(words[i], i);
    return sum;
}

typedef struct device_padding { /* the padding slots of one slab */
    int32_t first, count;       /* first slot, and number of slots */
} device_padding;

/* Offsets of the arrays of a plan, in bytes. The member `bytes` is the end of `records`. */
typedef struct device_plan_layout {
    int64_t slab_begin, padding, rank_of, fate, records, bytes;
} device_plan_layout;

/* Rounds n up to a multiple of `to`. */
DEVICE_LAYOUT_BOTH static inline int64_t device_round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

/* Returns the smallest n for which 2^n is at least the number of slabs. */
DEVICE_LAYOUT_BOTH static inline int device_slab_bits(int64_t slabs)
{
#ifdef __CUDA_ARCH__
    return slabs > 1 ? 64 - __clzll(slabs - 1) : 0;
#else
    return slabs > 1 ? 64 - __builtin_clzll((unsigned long long)(slabs - 1)) : 0;
#endif
}

/* Returns the offsets of the arrays up to `records` for these sizes of the group and the layer.
 * Every array begins at a multiple of 128 bytes. */
DEVICE_LAYOUT_BOTH static inline device_plan_layout
device_plan_layout_of(int64_t num_ranks, int64_t max_tokens, int64_t num_experts, int64_t top_k)
{
    device_plan_layout at;
    const int64_t experts = device_round_up(num_experts * 4, 128);
    const int64_t choices = device_round_up(max_tokens * top_k * 4, 128);
    at.slab_begin = device_round_up((int64_t)sizeof(device_plan_header), 128);
    at.padding = at.slab_begin + experts;
    at.rank_of = at.padding + device_round_up((8ll << device_slab_bits(num_experts)), 128);
    at.fate = at.rank_of + choices;
    at.records = at.fate + choices;
    at.bytes = at.records + device_round_up(num_ranks * max_tokens * top_k * 4, 128);
    return at;
}

/* Returns the offset of the array `locals` in the plan of a FLAT layer. It has the local
 * experts that each received token has chosen. */
DEVICE_LAYOUT_BOTH static inline int64_t device_locals(const device_plan_layout *at)
{
    return at->bytes;
}

/* Returns the offset of the array `logical` in the plan of a layer with replicas: the logical
 * expert of each expert. The array expert_of follows it. */
DEVICE_LAYOUT_BOTH static inline int64_t device_logical(const device_plan_layout *at,
                                                        uint32_t layout)
{
    return layout == EPIC_FLAT ? 2 * at->bytes - at->records : at->bytes;
}

/* Returns the bytes of an array with one int32 per expert, such as slab_begin. */
DEVICE_LAYOUT_BOTH static inline int64_t device_table_bytes(const device_plan_layout *at)
{
    return at->padding - at->slab_begin;
}

/* Returns the bytes of a plan: the end of its last array. */
DEVICE_LAYOUT_BOTH static inline int64_t device_plan_end(const device_plan_layout *at,
                                                         uint32_t layout, uint32_t num_logical)
{
    return device_logical(at, layout) + (num_logical ? 2 * device_table_bytes(at) : 0);
}

/* Returns the bytes of a plan in EXPERT_MAJOR layout without replicas. Returns 0 for sizes that
 * CUDA contexts do not support. */
static inline int64_t device_plan_bytes(int64_t num_ranks, int64_t max_tokens,
                                        int64_t num_experts, int64_t top_k)
{
    if (num_ranks < 1 || num_ranks > DEVICE_MAX_RANKS || num_experts > DEVICE_MAX_EXPERTS ||
        top_k > DEVICE_MAX_TOP_K)
        return 0;
    return device_plan_layout_of(num_ranks, max_tokens, num_experts, top_k).bytes;
}

/* Like device_plan_bytes(), for a layer of any layout, with or without replicas. */
static inline int64_t device_layer_bytes(int64_t num_ranks, int64_t max_tokens,
                                         const epic_layer *layer)
{
    if (!device_plan_bytes(num_ranks, max_tokens, layer->num_experts, layer->top_k)) return 0;
    const device_plan_layout at =
        device_plan_layout_of(num_ranks, max_tokens, layer->num_experts, layer->top_k);
    return device_plan_end(&at, layer->layout, layer->num_logical);
}

#endif
