/* SPDX-License-Identifier: Apache-2.0 */
/* Two types: RankMask is a bit mask of ranks. RankNumbers is an array with one value per rank;
 * the lanes of a warp share the array.
 *
 * In the usual libraries a group has at most 32 ranks. In these libraries, RankMask is one
 * word, a lane has the value of one rank, and every function below is one or two instructions.
 * In the libraries for many ranks (MANY_RANKS, rules/device_layout.h) a mask has
 * DEVICE_RANK_WORDS words, and lane n has the values of the ranks n, n + 32, and so on. */
#ifndef EPIC_RANKS_CUH
#define EPIC_RANKS_CUH

#include "cuda/common/cuda_kernels.h"

#define WARP 32
#define ALL_LANES 0xffffffffu

__device__ __forceinline__ int lane_id()
{
    return threadIdx.x % WARP;
}

/* Calls use(first) for each group of 32 ranks, `first` to first + 31. The last group may
 * contain ranks that do not exist. In the usual libraries this is use(0) without a loop. Called
 * by a whole warp. */
template <class Use>
__device__ __forceinline__ void for_each_group(const p2p_self &self, Use use)
{
#if MANY_RANKS
    for (int first = 0; first < self.num_ranks; first += WARP) use(first);
#else
    (void)self;
    use(0);
#endif
}

#if MANY_RANKS
struct RankMask {
    uint32_t words[DEVICE_RANK_WORDS];
};

__host__ __device__ __forceinline__ RankMask no_ranks()
{
    RankMask mask;
    for (int w = 0; w < DEVICE_RANK_WORDS; w++) mask.words[w] = 0;
    return mask;
}

__host__ __device__ __forceinline__ RankMask rank_bit(int q)
{
    RankMask mask = no_ranks();
    mask.words[q / 32] = 1u << q % 32;
    return mask;
}

__host__ __device__ __forceinline__ bool has_rank(const RankMask &mask, int q)
{
    return mask.words[q / 32] >> q % 32 & 1;
}

__host__ __device__ __forceinline__ bool has_any(const RankMask &mask)
{
    uint32_t all = 0;
    for (int w = 0; w < DEVICE_RANK_WORDS; w++) all |= mask.words[w];
    return all != 0;
}

/* Returns the lowest rank of the mask, which must not be empty. */
__device__ __forceinline__ int first_rank(const RankMask &mask)
{
    int w = 0;
    while (w < DEVICE_RANK_WORDS - 1 && !mask.words[w]) w++;
    return w * 32 + __ffs(mask.words[w]) - 1;
}

__device__ __forceinline__ void add_rank(RankMask &mask, int q)
{
    mask.words[q / 32] |= 1u << q % 32;
}

__device__ __forceinline__ void remove_rank(RankMask &mask, int q)
{
    mask.words[q / 32] &= ~(1u << q % 32);
}

__device__ __forceinline__ void add_ranks_of(RankMask &mask, const RankMask &more)
{
    for (int w = 0; w < DEVICE_RANK_WORDS; w++) mask.words[w] |= more.words[w];
}

__device__ __forceinline__ void remove_ranks_of(RankMask &mask, const RankMask &others)
{
    for (int w = 0; w < DEVICE_RANK_WORDS; w++) mask.words[w] &= ~others.words[w];
}

__device__ __forceinline__ void remove_first(RankMask &mask)
{
    remove_rank(mask, first_rank(mask));
}

/* Returns the part of the mask for the ranks [first, first + count), as a word whose bit i
 * stands for rank first + i. count: at most 31. */
__device__ __forceinline__ uint32_t part_of_ranks(const RankMask &mask, int first, int count)
{
    uint64_t words = mask.words[first / 32];
    if (first / 32 + 1 < DEVICE_RANK_WORDS) words |= (uint64_t)mask.words[first / 32 + 1] << 32;
    return (uint32_t)(words >> first % 32) & ((1u << count) - 1);
}

/* Returns a mask of those ranks of `mask` that are in [first, first + count). count: at most
 * 31. */
__device__ __forceinline__ RankMask only_ranks(const RankMask &mask, int first, int count)
{
    RankMask some = no_ranks();
    for (int q = first; q < first + count; q++)
        if (has_rank(mask, q)) add_rank(some, q);
    return some;
}

/* Returns a mask of the ranks that the lanes of a warp pass. `rank`: this lane's rank; -1:
 * none. Called by a whole warp. */
__device__ __forceinline__ RankMask ranks_of_lanes(int rank)
{
    RankMask mask;
    for (int w = 0; w < DEVICE_RANK_WORDS; w++)
        mask.words[w] =
            __reduce_or_sync(ALL_LANES, rank >= 0 && rank / 32 == w ? 1u << rank % 32 : 0);
    return mask;
}

/* An array with one value per rank. Each lane of the warp has the values of some ranks. */
struct RankNumbers {
    int32_t numbers[DEVICE_RANK_WORDS];
};

/* Sets the value of rank first + lane_id(), where `first` is a multiple of 32. */
__device__ __forceinline__ void set_number(RankNumbers &n, int first, int32_t value)
{
    n.numbers[first / 32] = value;
}

/* Returns the value of `rank`. Called by a whole warp; all lanes must pass the same rank. */
__device__ __forceinline__ int32_t number_of_rank(const RankNumbers &n, int rank)
{
    return __shfl_sync(ALL_LANES, n.numbers[rank / 32], rank % 32);
}

/* Like number_of_rank(), but each lane may pass another rank. */
__device__ __forceinline__ int32_t number_of_each(const RankNumbers &n, int rank)
{
    int32_t number = 0;
    for (int w = 0; w < DEVICE_RANK_WORDS; w++) {
        const int32_t value = __shfl_sync(ALL_LANES, n.numbers[w], rank % 32);
        if (rank / 32 == w) number = value;
    }
    return number;
}

/* Returns the maximum of all values. Requires that no value is negative. Called by one warp. */
__device__ __forceinline__ int32_t largest_number(const RankNumbers &n)
{
    int32_t most = 0;
    for (int w = 0; w < DEVICE_RANK_WORDS; w++) most = max(most, n.numbers[w]);
    return (int32_t)__reduce_max_sync(ALL_LANES, (uint32_t)most);
}

/* Packs a mask of culprits (ranks that caused a failure) into 32 bits. Bits 0 to 29: the lowest
 * ranks of the mask, at most MOST_NAMED, 10 bits each. Bits 30 and 31: the number of these
 * ranks. */
#define MOST_NAMED 3
__device__ __forceinline__ uint32_t pack_ranks(RankMask mask)
{
    uint32_t packed = 0;
    int count = 0;
    for (; count < MOST_NAMED && has_any(mask); count++) {
        packed |= (uint32_t)first_rank(mask) << 10 * count;
        remove_first(mask);
    }
    return packed | (uint32_t)count << 30;
}

__device__ __forceinline__ RankMask unpack_ranks(uint32_t packed)
{
    RankMask mask = no_ranks();
    for (int i = 0; i < (int)(packed >> 30); i++)
        add_rank(mask, (packed >> 10 * i & 1023) % DEVICE_MAX_RANKS);
    return mask;
}
#else
typedef uint32_t RankMask;

/* Macros in place of the functions with these names above. Functions would give the kernels
 * other machine code than these plain operators, because the compiler inlines functions only
 * after its first optimizations. */
#define no_ranks() 0u
#define rank_bit(q) (1u << (q))
#define has_rank(mask, q) ((mask) >> (q)&1)
#define has_any(mask) (mask)
#define first_rank(mask) (__ffs(mask) - 1)
#define add_rank(mask, q) ((void)((mask) |= 1u << (q)))
#define remove_rank(mask, q) ((void)((mask) &= ~(1u << (q))))
#define add_ranks_of(mask, more) ((void)((mask) |= (more)))
#define remove_ranks_of(mask, others) ((void)((mask) &= ~(others)))
#define remove_first(mask) ((void)((mask) &= (mask)-1))
#define part_of_ranks(mask, first, count) ((mask) >> (first) & ((1u << (count)) - 1))
#define only_ranks(mask, first, count) ((mask) & ((1u << (count)) - 1) << (first))
#define ranks_of_lanes(rank) __reduce_or_sync(ALL_LANES, (rank) >= 0 ? 1u << (rank) : 0)

typedef int32_t RankNumbers;

#define set_number(numbers, first, value) ((void)(first), (void)((numbers) = (value)))
#define number_of_rank(numbers, rank) __shfl_sync(ALL_LANES, numbers, rank)
#define number_of_each number_of_rank
#define largest_number(numbers) ((int32_t)__reduce_max_sync(ALL_LANES, (uint32_t)(numbers)))
#define pack_ranks(mask) (mask)
#define unpack_ranks(packed) (packed)
#endif

#endif
