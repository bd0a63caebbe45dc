/* SPDX-License-Identifier: Apache-2.0 */
/* Code that dispatch and combine_backward share. Both operations move one row per token to the
 * token's slots. dispatch moves the rows of the tokens. combine_backward moves the rows of
 * d_out, the gradient of combine's output. A unit is the work that a warp does at a time: it
 * sends, forwards or receives a span (some pieces) of one row. */
#ifndef EPIC_MOVING_CUH
#define EPIC_MOVING_CUH

#include "cuda/net/relay.cuh"
#include "cuda/plan/view.cuh"

/* The arguments of a round that dispatch and combine_backward have in common. The functions
 * below get them as `m`. */
template <class Job> struct RowMove {
    const Job &job;
    const OpState &op;
    const PlanView &plan;
    const Stride &stride;
    RowShape shape;
    /* L2 cache policy for rows that are stored once */
    uint64_t policy;
    int32_t round_begin; /* the first token of the running round */
    int32_t top_k;
};

/* if header.alignment has this value, the kernels do not zero padding slots */
#define NO_PADDING 0

/* Returns the number of roles (kinds of work of a unit), without the roles that forward. Role 0
 * sends. Roles 1 to F forward rows from other hosts, where F is num_forward_roles() (0 without
 * relays). Role F + n receives from the rank that is n above this rank, modulo num_ranks. Role
 * F + num_ranks receives from this rank itself. */
__host__ __device__ __forceinline__ int num_roles(const p2p_self &self)
{
    return self.num_ranks + 1;
}

/* Returns the number of roles of the units in the list (common/rows.cuh): all roles, also those
 * that forward. With many ranks, each group of 32 roles has one unit (WorkWalk). Group 0 is
 * role 0. */
__host__ __device__ __forceinline__ int num_unit_roles(const p2p_self &self)
{
    return 1 + num_role_groups(num_roles(self) + num_forward_roles(self) - 1);
}

/* Returns the first role of a group (WorkWalk). */
__device__ __forceinline__ int first_role_of_group(int group)
{
    return group == 0 ? 0 : 1 + (group - 1) * WARP;
}

/* a row of at most this many pieces can be one unit (64 KB, or 128 KB with 8 vectors per lane) */
#define MAX_ROW_PUT_PIECES 32

/* Divides units among warps. If there are ranks on other hosts and enough tokens, each unit is
 * a whole row, because each unit costs an entry of the proxy ring and time of the proxy thread.
 * Longer units do not slow down the operation, because the net is slower than the warps. */
template <class Job>
static inline void deal_units_for_net(const p2p_self &self, Job &job, int num_sms, int block,
                                      int roles, int vectors)
{
    if (!HOSTS) return deal_units(job, num_sms, block, roles, vectors);
    const int64_t bytes = job.row_bytes, pieces = (bytes + vectors * 512 - 1) / (vectors * 512);
    const bool whole = pieces <= MAX_ROW_PUT_PIECES && has_remote_ranks(self) &&
                       (int64_t)job.num_tokens * roles >= 10 * num_sms * (block / WARP);
    if (whole) job.row_bytes = 1; /* makes deal_units() choose one span per row */
    deal_units(job, num_sms, block, roles, vectors);
    job.row_bytes = bytes;
    if (whole) job.span = (int32_t)pieces;
}

/* Returns the rank that is `role` above this rank, modulo num_ranks. */
__device__ __forceinline__ int rank_of_role(const p2p_self &self, int role)
{
    return wrap_rank(self.rank + role, self.num_ranks);
}

/* Returns the index in the row of the first piece of a unit. */
template <class M> __device__ __forceinline__ int first_piece(const M &m, const UnitWalk &walk)
{
    return walk.span * m.job.span;
}

/* Returns the number of pieces of a unit. The last span of a row may have fewer pieces than the
 * other spans. */
template <class M> __device__ __forceinline__ int pieces_of(const M &m, const UnitWalk &walk)
{
    return min(m.job.span, m.shape.pieces - first_piece(m, walk));
}

/* Only in backend `hosts`: posts puts of the pieces [first, first + count) of a row, which this
 * warp has stored to the outbox. Posts one put to each rank of `peers` (bit mask) that is on
 * another host. One put sends all pieces, because each entry of the proxy ring costs a fence
 * and time of the proxy thread. `index`: index of the token in the round. Called by a whole
 * warp. */
template <int V, class M>
__device__ __forceinline__ void post_put_pieces(const p2p_self &self, const M &m, int32_t index,
                                                int first, int count, RankMask peers)
{
    const int32_t begin = first * V * WARP,
                  end = min((first + count) * V * WARP, m.shape.vectors);
    for (remove_near_ranks(peers, self); has_any(peers); remove_first(peers)) {
        const int rank = first_rank(peers);
        const uint4 *staged = staged_row(m.op.outbox[rank], index, m.shape.vectors) + begin;
        post_put_warp(m.op, rank, staged, (uint32_t)(end - begin) * 16);
    }
}

/* Returns true if the units that receive this rank's tokens must also zero the padding slots.
 * They do this if there is at least one such unit per warp, and at least two such units per
 * expert of the layer. If the result is false, a separate pass zeroes the padding slots. */
__device__ __forceinline__ bool pads_with_tokens(const PlanView &plan, const Stride &stride,
                                                 int most_tokens)
{
    return most_tokens * stride.spans >=
           max(stride.total_warps, 2 * (int)plan.header.num_experts);
}

/* Disables the zeroing of padding slots if the caller does not need the zeros (leave_padding).
 * Called by all threads, before begin_operation(). */
template <class Job>
__device__ __forceinline__ void choose_padding(PlanView &plan, const Job &job)
{
    if (threadIdx.x == 0 && job.leave_padding) plan.header.alignment = NO_PADDING;
}

/* Returns the padding slots of a slab (the slots of one expert). Limits the number of padding
 * slots to `alignment`, so that a damaged plan does no harm. */
__device__ __forceinline__ device_padding padding_of(const PlanView &plan, int slab)
{
    return {__ldcg(&plan.padding[slab].first),
            min(__ldcg(&plan.padding[slab].count), (int32_t)plan.header.alignment)};
}

/* Calls write(slot) for the padding slots that one unit must zero. `spans`: number of units
 * that receive this rank's tokens. Together they zero all padding slots. `span`: index of this
 * unit among these units. The unit with index s zeroes padding slots of slab s mod 2^slab_bits
 * (a slab is the slots of one expert). Units with the same slab divide its padding slots among
 * themselves. The code contains no divisions, because a division would wait for earlier
 * stores. */
template <class Write>
__device__ __forceinline__ void for_each_padding_slot(const PlanView &plan, int slab_bits,
                                                      int span, int spans, Write write)
{
    const int slab = span & ((1 << slab_bits) - 1), sharers = spans >> slab_bits;
    int share = span >> slab_bits;
    if (share >= sharers) return;
    share += slab * sharers >> slab_bits;
    if (share >= sharers) share -= sharers;
    if (share >= (int)plan.header.alignment) return;
    const device_padding padding = padding_of(plan, slab);
    for (int32_t i = share; i < padding.count; i += sharers) write(padding.first + i);
}

/* This rank has `owned` slabs, one per local expert. `warps` warps divide all pieces of the
 * padding slots of these slabs among themselves. Calls write(slot, piece) for each piece of
 * this warp. `warp`: index of this warp among these warps. `pieces`: number of pieces per row.
 * padding_in(slab) returns the padding slots of a slab. Called by a whole warp. */
template <class PaddingIn, class Write>
__device__ __forceinline__ void for_each_padding_of(PaddingIn padding_in, int owned, int pieces,
                                                    int warp, int warps, Write write)
{
    /* The pieces of a slab's padding slots are numbered from 0. `next` is the number of the
     * next piece that this warp writes. */
    int next = warp;
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

/* Like for_each_padding_of(), but reads the padding slots of each slab from the plan. */
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
