/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the layout of a plan in CUDA memory (sizes and offsets), for host code and kernels.
 *
 * The plan is a header, followed by arrays of int32. The offsets of the arrays depend only on
 * the sizes of the group and of the layer. P is num_experts rounded up to a power of two. In
 * `slab_begin`, `padding` and `expert_of` only the first elements, one for each local expert of
 * this rank, are used. `records` and `locals` contain a list of top_k elements for each token;
 * unused elements at the end of a list are -1. A choice is a token and one of its top_k
 * experts, and a slab is the slots of one expert.
 *
 * - slab_begin [num_experts]: first slot of each local expert's slab
 * - padding [P]: first padding slot and number of padding slots of each local expert's slab
 *   (device_padding)
 * - rank_of [max_tokens, top_k]: rank of the choice's expert; -1: no expert
 * - fate [max_tokens, top_k]: slot of the choice on the rank of its expert, or an EPIC_FATE
 *   value
 * - records [num_ranks, max_tokens, top_k]: for each token of each rank, the token's slots on
 *   this rank by ascending k. FLAT: the token's only slot
 * - locals [num_ranks, max_tokens, top_k], only FLAT: for each token of each rank, the token's
 *   local experts on this rank by ascending k
 * - logical [num_experts], only with replicas: logical expert of each expert
 * - expert_of [num_experts], only with replicas: id of each local expert */
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

/* Maximum number of ranks of a group. The CUDA backends are built twice. The libraries for few
 * ranks use one bit of a 32-bit word and one lane of a warp per rank, so they support at most
 * DEVICE_FEW_RANKS ranks. The libraries for many ranks (EPIC_MANY_RANKS) use DEVICE_RANK_WORDS
 * words per mask, and loop over groups of 32 ranks. The number of ranks of a group decides
 * which library is loaded. */
#define DEVICE_FEW_RANKS 32
#define DEVICE_MOST_RANKS 256
#ifdef EPIC_MANY_RANKS
#define MANY_RANKS 1
#define DEVICE_MAX_RANKS DEVICE_MOST_RANKS
#else
#define MANY_RANKS 0
#define DEVICE_MAX_RANKS DEVICE_FEW_RANKS
#endif
/* number of 32-bit words of a mask of ranks */
#define DEVICE_RANK_WORDS (DEVICE_MAX_RANKS / 32)
#define DEVICE_MAX_EXPERTS 8192
/* Number of words that each rank has in the array `counts` of a heap (the receive buffer of a
 * rank): one word for each expert, one for each rank, one for the hash of the table of replicas
 * (plan/replicas.cuh), and 15 unused words. */
#define DEVICE_MAX_TALLIES (DEVICE_MAX_EXPERTS + DEVICE_MAX_RANKS + 16)
#define DEVICE_MAX_TOP_K 64
#define DEVICE_PLAN_MAGIC 0x6e616c5063697045ull /* "EpicPlan" */

/* The two types of header, which differ only in the lengths of three arrays. device_plan_header
 * is the type that the library being built uses. */
#define DEVICE_HEADER device_few_header
#define DEVICE_HEADER_RANKS DEVICE_FEW_RANKS
#include "rules/device_header_template.h"
#define DEVICE_HEADER device_many_header
#define DEVICE_HEADER_RANKS DEVICE_MOST_RANKS
#include "rules/device_header_template.h"
#if MANY_RANKS
typedef device_many_header device_plan_header;
#else
typedef device_few_header device_plan_header;
#endif

DEVICE_LAYOUT_BOTH static inline uint32_t device_header_share(uint32_t word, uint32_t i)
{
    return (word ^ i) * (2 * i + 0x9e3779b1u);
}

/* Returns the checksum of a header: the sum of device_header_share() over its words. `bytes` is
 * the size of the header before the member `sum`. */
static inline uint32_t device_words_sum(const void *header, size_t bytes)
{
    const uint32_t *words = (const uint32_t *)header;
    uint32_t sum = 0;
    for (uint32_t i = 0; i < bytes / 4; i++) sum += device_header_share(words[i], i);
    return sum;
}

typedef struct device_padding { /* the padding slots of one slab */
    int32_t first, count;       /* first slot, and number of slots */
} device_padding;

/* Offsets in bytes of the arrays of a plan. The member `bytes` is the end of `records`. */
typedef struct device_plan_layout {
    int64_t slab_begin, padding, rank_of, fate, records, bytes;
} device_plan_layout;

DEVICE_LAYOUT_BOTH static inline int64_t device_round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

DEVICE_LAYOUT_BOTH static inline int device_slab_bits(int64_t slabs)
{
#ifdef __CUDA_ARCH__
    return slabs > 1 ? 64 - __clzll(slabs - 1) : 0;
#else
    return slabs > 1 ? 64 - __builtin_clzll((unsigned long long)(slabs - 1)) : 0;
#endif
}

/* Returns the size in bytes of the header of a plan for num_ranks ranks. It is a constant in
 * kernels and in the libraries for many ranks. */
DEVICE_LAYOUT_BOTH static inline int64_t device_header_bytes(int64_t num_ranks)
{
#if MANY_RANKS || defined(__CUDACC__)
    (void)num_ranks;
    return (int64_t)sizeof(device_plan_header);
#else
    return (int64_t)(num_ranks > DEVICE_FEW_RANKS ? sizeof(device_many_header)
                                                  : sizeof(device_few_header));
#endif
}

/* Returns the offsets of the arrays up to `records`, which are multiples of 128 bytes. */
DEVICE_LAYOUT_BOTH static inline device_plan_layout
device_plan_layout_of(int64_t num_ranks, int64_t max_tokens, int64_t num_experts, int64_t top_k)
{
    device_plan_layout at;
    const int64_t experts = device_round_up(num_experts * 4, 128);
    const int64_t choices = device_round_up(max_tokens * top_k * 4, 128);
    at.slab_begin = device_round_up(device_header_bytes(num_ranks), 128);
    at.padding = at.slab_begin + experts;
    at.rank_of = at.padding + device_round_up((8ll << device_slab_bits(num_experts)), 128);
    at.fate = at.rank_of + choices;
    at.records = at.fate + choices;
    at.bytes = at.records + device_round_up(num_ranks * max_tokens * top_k * 4, 128);
    return at;
}

/* Returns the offset of the array `locals` (FLAT). */
DEVICE_LAYOUT_BOTH static inline int64_t device_locals(const device_plan_layout *at)
{
    return at->bytes;
}

/* Returns the offset of the array `logical`, which exists only in layers with replicas. In the
 * layout FLAT, `logical` follows `locals`, which is as large as `records`. Otherwise `logical`
 * follows `records`. The array expert_of follows `logical`. */
DEVICE_LAYOUT_BOTH static inline int64_t device_logical(const device_plan_layout *at,
                                                        uint32_t layout)
{
    return layout == EPIC_FLAT ? 2 * at->bytes - at->records : at->bytes;
}

DEVICE_LAYOUT_BOTH static inline int64_t device_table_bytes(const device_plan_layout *at)
{
    return at->padding - at->slab_begin;
}

DEVICE_LAYOUT_BOTH static inline int64_t device_plan_end(const device_plan_layout *at,
                                                         uint32_t layout, uint32_t num_logical)
{
    return device_logical(at, layout) + (num_logical ? 2 * device_table_bytes(at) : 0);
}

/* Returns the size in bytes of a plan in EXPERT_MAJOR layout without replicas, or 0 for sizes
 * that CUDA contexts do not support. */
static inline int64_t device_plan_bytes(int64_t num_ranks, int64_t max_tokens,
                                        int64_t num_experts, int64_t top_k)
{
    if (num_ranks < 1 || num_ranks > DEVICE_MOST_RANKS || num_experts > DEVICE_MAX_EXPERTS ||
        top_k > DEVICE_MAX_TOP_K)
        return 0;
    return device_plan_layout_of(num_ranks, max_tokens, num_experts, top_k).bytes;
}

/* Returns the size in bytes of a plan of any layer, or 0 if CUDA contexts do not support it. */
static inline int64_t device_layer_bytes(int64_t num_ranks, int64_t max_tokens,
                                         const epic_layer *layer)
{
    if (!device_plan_bytes(num_ranks, max_tokens, layer->num_experts, layer->top_k)) return 0;
    const device_plan_layout at =
        device_plan_layout_of(num_ranks, max_tokens, layer->num_experts, layer->top_k);
    return device_plan_end(&at, layer->layout, layer->num_logical);
}

#endif
