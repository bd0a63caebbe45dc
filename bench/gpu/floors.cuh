/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that do only a part of an operation's work. Their times are lower bounds (floors) of
 * the operation.
 *   push    stores every row once to each peer that needs it
 *   expand  the local part of dispatch: reads every row that arrives once, and writes its slots
 *           and the padding. With DOTS it also reads the rows of the slots, like
 *           combine_backward
 *   reduce  the local part of combine: reads the rows of the slots, and writes one row for each
 *           token of each rank
 *   hop     sends one word to each peer and waits for the answer
 * They read the destinations from a finished plan, wait for nothing (except hop), and use all
 * threads. */
#ifndef EPIC_BENCH_FLOORS_CUH
#define EPIC_BENCH_FLOORS_CUH

#include "cuda/common/rows.cuh"

#define FLOOR_BLOCK 1024
#define FLOOR_V 4 /* vectors per lane and unit */

struct Floor { /* One rank's part of an operation. */
    p2p_self self;
    const uint8_t *plan;
    device_plan_layout at;
    /* rows of this rank's tokens, and rows that stand in for those of peers */
    const uint8_t *own, *staged;
    uint8_t *slots;        /* expand writes the slots, reduce reads them */
    const uint8_t *others; /* rows of slots for the dot products */
    uint8_t *out;
    int64_t row_bytes, num_slots;
    int32_t tokens, top_k;
    int32_t padded; /* number of experts of this rank whose padding expand writes */
};

struct FloorUnit { /* A piece of a row of one source rank, which one warp processes. */
    int32_t token, source, vector, vectors;
    int32_t slot; /* lane n: the n-th slot of the token on this rank */
    uint32_t slots;
};

/* Calls body(unit) for the units of this warp, over every (token, source rank) with slots on
 * this rank. */
template <class Body> __device__ __forceinline__ void each_floor_unit(const Floor &f, Body body)
{
    const int warps = (int)(gridDim.x * blockDim.x / WARP), ranks = f.self.num_ranks;
    const int warp = (int)((blockIdx.x * blockDim.x + threadIdx.x) / WARP);
    const int32_t vectors = (int32_t)(f.row_bytes / 16);
    const int pieces = (vectors + FLOOR_V * WARP - 1) / (FLOOR_V * WARP);
    const int32_t *records = (const int32_t *)(f.plan + f.at.records);
    for (int u = warp; u < f.tokens * ranks * pieces; u += warps) {
        const int32_t token = u / (ranks * pieces), source = u / pieces % ranks;
        const int64_t at = ((int64_t)source * f.self.max_tokens + token) * f.top_k;
        FloorUnit unit = {token, source, u % pieces * FLOOR_V * WARP + lane_id(), vectors, -1};
        if (lane_id() < f.top_k) unit.slot = __ldg(records + at + lane_id());
        unit.slots = __ballot_sync(ALL_LANES, unit.slot >= 0);
        if (unit.slots) body(unit);
    }
}

__device__ __forceinline__ void floor_load(const uint8_t *row, const FloorUnit &u,
                                           uint4 (&q)[FLOOR_V])
{
#pragma unroll
    for (int v = 0; v < FLOOR_V; v++)
        if (u.vector + v * WARP < u.vectors)
            q[v] = load_again((const uint4 *)row + u.vector + v * WARP);
}

__device__ __forceinline__ void floor_store(uint8_t *row, const FloorUnit &u,
                                            const uint4 (&q)[FLOOR_V], uint64_t policy)
{
#pragma unroll
    for (int v = 0; v < FLOOR_V; v++)
        if (u.vector + v * WARP < u.vectors)
            store_once((uint4 *)row + u.vector + v * WARP, q[v], policy);
}

__device__ __forceinline__ int32_t next_slot(const FloorUnit &u, uint32_t &slots)
{
    const int32_t slot = __shfl_sync(ALL_LANES, u.slot, __ffs((int)slots) - 1);
    slots &= slots - 1;
    return slot;
}

/* Writes zeros to the padding, one row per warp. */
__device__ __forceinline__ void floor_pad(const Floor &f, uint64_t policy)
{
    const int warps = (int)(gridDim.x * blockDim.x / WARP);
    const int warp = (int)((blockIdx.x * blockDim.x + threadIdx.x) / WARP);
    const device_padding *padding = (const device_padding *)(f.plan + f.at.padding);
    const int sharers = max(warps / max(f.padded, 1), 1);
    for (int w = warp; w < f.padded * sharers; w += warps) {
        const device_padding pad = padding[w % f.padded];
        for (int32_t i = w / f.padded; i < pad.count; i += sharers)
            for (int32_t v = lane_id(); v < f.row_bytes / 16; v += WARP)
                store_once((uint4 *)(f.slots + (pad.first + i) * f.row_bytes) + v,
                           make_uint4(0, 0, 0, 0), policy);
    }
}

template <bool DOTS>
__global__ void __launch_bounds__(FLOOR_BLOCK, 1) expand_kernel(const __grid_constant__ Floor f)
{
    const uint64_t policy = policy_once();
    uint32_t sum = 0;
    each_floor_unit(f, [&](const FloorUnit &u) {
        const int64_t row = u.source == f.self.rank
                                ? u.token
                                : ((int64_t)u.source * f.tokens + u.token) % f.num_slots;
        uint4 q[FLOOR_V], other[FLOOR_V] = {};
        floor_load((u.source == f.self.rank ? f.own : f.staged) + row * f.row_bytes, u, q);
        for (uint32_t slots = u.slots; slots;) {
            const int64_t slot = next_slot(u, slots);
            if (DOTS) floor_load(f.others + slot * f.row_bytes, u, other);
            floor_store(f.slots + slot * f.row_bytes, u, q, policy);
#pragma unroll
            for (int v = 0; v < FLOOR_V && DOTS; v++)
                sum ^= other[v].x ^ other[v].y ^ other[v].z ^ other[v].w;
        }
    });
    floor_pad(f, policy);
    /* otherwise the compiler would remove the reads */
    if (DOTS && sum == 0x12345678) f.out[0] = 1;
}

__global__ void __launch_bounds__(FLOOR_BLOCK, 1) reduce_kernel(const __grid_constant__ Floor f)
{
    const uint64_t policy = policy_once();
    each_floor_unit(f, [&](const FloorUnit &u) {
        uint4 q[FLOOR_V], next[FLOOR_V] = {}, sum[FLOOR_V] = {};
        uint32_t slots = u.slots;
        floor_load(f.slots + (int64_t)next_slot(u, slots) * f.row_bytes, u, next);
        for (bool more = true; more;) {
#pragma unroll
            for (int v = 0; v < FLOOR_V; v++) q[v] = next[v];
            more = slots != 0;
            if (more) floor_load(f.slots + (int64_t)next_slot(u, slots) * f.row_bytes, u, next);
#pragma unroll
            for (int v = 0; v < FLOOR_V; v++)
                sum[v] = make_uint4(sum[v].x + q[v].x, sum[v].y + q[v].y, sum[v].z + q[v].z,
                                    sum[v].w + q[v].w);
        }
        floor_store(f.out + u.token * f.row_bytes, u, sum, policy);
    });
}

/* Stores every row once to each peer that needs it. */
__global__ void push_kernel(p2p_self self, const uint8_t *x, const uint32_t *touched,
                            int tokens, int vectors)
{
    const int lane = threadIdx.x % 32, warps = gridDim.x * blockDim.x / 32;
    const int pieces = (vectors + 223) / 224, peers = self.num_ranks - 1;
    const int64_t room = self.at.source_bytes / (vectors * 16);
    for (int u = (blockIdx.x * blockDim.x + threadIdx.x) / 32; u < tokens * pieces * peers;
         u += warps) {
        const int token = u / (pieces * peers), distance = u / pieces % peers + 1;
        const int rank = (self.rank + distance) % self.num_ranks;
        if (!(touched[token] >> rank & 1)) continue;
        uint8_t *to = self.heap[rank] + self.at.staging +
                      (int64_t)(peers - distance) * self.at.source_bytes;
        const int first = u % pieces * 224 + lane;
        const int64_t row = min((int64_t)token, room - 1);
        uint4 q[7];
#pragma unroll
        for (int v = 0; v < 7; v++)
            if (first + v * 32 < vectors)
                q[v] = load_again((const uint4 *)x + (int64_t)token * vectors + first + v * 32);
#pragma unroll
        for (int v = 0; v < 7; v++)
            if (first + v * 32 < vectors)
                store_relaxed((uint4 *)to + row * vectors + first + v * 32, q[v]);
    }
}

/* Lane q sends the number n to rank q and waits for the same number from it, in the unused row.
 */
__global__ void hop_kernel(p2p_self self, uint32_t n)
{
    const int q = threadIdx.x;
    if (q >= self.num_ranks) return;
    store_relaxed((uint32_t *)(self.heap[q] + self.at.scratch) + self.rank, n);
    const uint32_t *from = (const uint32_t *)(self.heap[self.rank] + self.at.scratch) + q;
    for (int spins = 0; (int32_t)(load_relaxed(from) - n) < 0 && spins < 1 << 22; spins++) {
    }
}

#endif
