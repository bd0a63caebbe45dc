/* SPDX-License-Identifier: Apache-2.0 */
/* Code that dispatch and combine_backward share, as both move rows of tokens to slots:
 * arguments of a unit, its pieces, and padding along with tokens. M is a RowMove. */
#ifndef EPIC_MOVING_CUH
#define EPIC_MOVING_CUH

#include "cuda/net/relay.cuh"
#include "cuda/plan/view.cuh"

template <class Job> struct RowMove { /* arguments of every unit of the running round */
    const Job &job;
    const OpState &op;
    const PlanView &plan;
    const Stride &stride;
    RowShape shape;
    uint64_t policy;
    int32_t first; /* first token of the round */
    int32_t top_k;
};

#define NO_PADDING 0 /* in place of an alignment: nothing is padded */

/* The roles of a warp, in this order: role 0 sends; F = num_forward_roles() roles forward rows that
 * came from other hosts (F is 0 without relays); role 1 + F + n receives from source n. */
__host__ __device__ __forceinline__ int num_roles(const p2p_self &self)
{
    return self.num_ranks + 1;
}

#define MAX_ROW_PUT_PIECES 32 /* pieces of a row that is put at once: 64 KB of pieces of 2 KB */

/* Like deal_units(). If there are other hosts, a unit is a whole row unless there are few
 * tokens: a net is slower than the warps with any span, and each unit costs an entry of the
 * ring. */
template <class Job>
static inline void deal_units_for_net(const p2p_self &self, Job &job, int num_sms, int block,
                                      int roles, int vectors)
{
    if (!HOSTS) return deal_units(job, num_sms, block, roles, vectors);
    const int64_t bytes = job.row_bytes, pieces = (bytes + vectors * 512 - 1) / (vectors * 512);
    const bool whole = pieces <= MAX_ROW_PUT_PIECES &&
                       near_ranks(self) != (1u << self.num_ranks) - 1 &&
                       (int64_t)job.num_tokens * roles >= 10 * num_sms * (block / WARP);
    if (whole) job.row_bytes = 1; /* one span */
    deal_units(job, num_sms, block, roles, vectors);
    job.row_bytes = bytes;
    if (whole) job.span = (int32_t)pieces;
}

/* The rank that a role receives from; role num_ranks is this rank itself. */
__device__ __forceinline__ int rank_of_role(const p2p_self &self, int role)
{
    return wrap_rank(self.rank + role, self.num_ranks);
}

/* Number of the first piece of a unit's span. */
template <class M> __device__ __forceinline__ int first_piece(const M &m, const UnitWalk &walk)
{
    return walk.span * m.job.span;
}

/* Pieces of a unit's span; the last span of a row may have fewer. */
template <class M> __device__ __forceinline__ int pieces_of(const M &m, const UnitWalk &walk)
{
    return min(m.job.span, m.shape.pieces - first_piece(m, walk));
}

/* backend hosts: posts the put of the pieces of a token that a warp has sent. They are put at
 * once, because the proxy needs time for each entry, and a fence per piece would take longer
 * than the piece. */
template <int V, class M>
__device__ __forceinline__ void post_put_pieces(const p2p_self &self, const M &m, int32_t place,
                                                int first, int count, uint32_t peers)
{
    const int32_t begin = first * V * WARP,
                  end = min((first + count) * V * WARP, m.shape.vectors);
    for (peers &= ~near_ranks(self); peers; peers &= peers - 1) {
        const int rank = __ffs(peers) - 1;
        const uint4 *staged = staged_row(m.op.outbox[rank], place, m.shape.vectors) + begin;
        post_put_warp(m.op, rank, staged, (uint32_t)(end - begin) * 16);
    }
}

/* Are there enough spans of a rank's tokens to pad slabs along with them? Then each warp and
 * each slab has at least one. */
__device__ __forceinline__ bool pads_with_tokens(const PlanView &plan, const Stride &stride,
                                                 int most_tokens)
{
    return most_tokens * stride.spans >= max(stride.units, 2 * (int)plan.header.num_experts);
}

/* Switches padding off if the caller does not need zeros in it. All threads, before
 * begin_operation(). */
template <class Job>
__device__ __forceinline__ void choose_padding(PlanView &plan, const Job &job)
{
    if (threadIdx.x == 0 && job.leave_padding) plan.header.alignment = NO_PADDING;
}

/* The padding of a slab; never more than the alignment, whatever the bytes of the plan are. */
__device__ __forceinline__ device_padding padding_of(const PlanView &plan, int slab)
{
    return {__ldcg(&plan.padding[slab].first),
            min(__ldcg(&plan.padding[slab].count), (int32_t)plan.header.alignment)};
}

/* Calls write(slot) for the padding that is written along with part `part` of `parts`. A part
 * has one slab, whose padding is spread over its parts. There is no division, which would wait
 * for stores. */
template <class Write>
__device__ __forceinline__ void for_each_padding_slot(const PlanView &plan, int slab_bits,
                                                      int part, int parts, Write write)
{
    const int slab = part & ((1 << slab_bits) - 1), sharers = parts >> slab_bits;
    int share = part >> slab_bits;
    if (share >= sharers) return;
    share += slab * sharers >> slab_bits;
    if (share >= sharers) share -= sharers;
    if (share >= (int)plan.header.alignment) return;
    const device_padding padding = padding_of(plan, slab);
    for (int32_t i = share; i < padding.count; i += sharers) write(padding.first + i);
}

/* Calls write(slot, piece) for the share of warp `warp` of `warps` in all padding.
 * padding_in(slab) returns the padding of a slab. */
template <class PaddingIn, class Write>
__device__ __forceinline__ void for_each_padding_of(PaddingIn padding_in, int owned, int pieces,
                                                    int warp, int warps, Write write)
{
    int next = warp; /* pieces of padding before this warp's next one */
    for (int base = 0; base < owned; base += WARP) {
        const int slab = base + lane_id();
        device_padding padding = {0, 0};
        if (slab < owned) padding = padding_in(slab);
        uint32_t some = __ballot_sync(ALL_LANES, padding.count > 0);
        for (; some; some &= some - 1) {
            const int i = __ffs(some) - 1;
            const int32_t slot = __shfl_sync(ALL_LANES, padding.first, i);
            const int32_t many = __shfl_sync(ALL_LANES, padding.count, i) * pieces;
            for (; next < many; next += warps) write(slot + next / pieces, next % pieces);
            next -= many;
        }
    }
}

/* Like for_each_padding_of(), for a plan that is read. */
template <class Write>
__device__ __forceinline__ void for_each_padding_piece(const PlanView &plan, int owned,
                                                       int pieces, int warp, int warps,
                                                       Write write)
{
    if (plan.header.alignment <= 1) return;
    for_each_padding_of([&](int slab) { return padding_of(plan, slab); }, owned, pieces, warp,
                        warps, write);
}

#endif
