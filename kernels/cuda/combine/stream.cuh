/* SPDX-License-Identifier: Apache-2.0 */
/* The fast variant of combine, for aligned rows whose partial sums have the type of the rows.
 * Each rank sends one partial sum for a token. With LEAVES, a rank has several leaves of the
 * sum tree. It adds the rows of each leaf, and then adds the sums of the leaves in a tree.
 * combine.cu explains expert units, which send a partial sum to a peer, and source units, which
 * compute the result of one of this rank's tokens.
 *
 * Each warp reads one stream of pieces, unit after unit: pieces of rows on this rank, and
 * pieces of the peers' partial sums. It copies the pieces into a ring buffer in shared memory
 * some units before it uses them. So a piece of a partial sum may be copied before it has
 * arrived. Then the copy contains poison (the mark of a word that has not arrived), and the
 * warp polls the piece in staging.
 *
 *     an expert unit, token t of peer q         a source unit, token t of this rank
 *
 *     rows[slot of k]  -> ring -+               rows[slots here]  -> ring -+
 *     rows[slot of k'] -> ring -+               partial of peer a -> ring -+
 *                               |               partial of peer b -> ring -+
 *               sum of w * row  |                                          |  sum by rank, or
 *                               v                                          v  in the tree
 *                         staging of q                                   out[t]
 *
 * The *floats* of a token are one float per choice, which dispatch_backward returns to the
 * token's rank: the gradient of the choice's weight. Libraries for many ranks (MANY_RANKS) run
 * this variant only for sums by rank, not in tree order. The *sum order* is the order of ranks in
 * which partial sums are added: rank_at[p] is the rank at position p. */
#ifndef EPIC_COMBINE_STREAM_CUH
#define EPIC_COMBINE_STREAM_CUH

#include "cuda/combine/combine.cuh"

#define STREAM_V 4
/* number of levels of the sum tree within a rank: log2 of P2P_STREAM_LEAVES */
#define TREE_LEVELS 3

/* A slot of the token that a unit works on. */
struct __align__(8) Slot
{
    int32_t number;
    /* bits of the slot's weight or, in dispatch_backward, of the gradient of this weight */
    uint32_t word;
};

struct Entry { /* A unit that the warp has begun but not finished. It is in shared memory. */
    int32_t token;
    int32_t vector;    /* the unit's piece begins at this vector of the row */
    int16_t num_slots; /* number of slots that the token has on this rank */
    int16_t role; /* -1 for a token of this rank; otherwise selects the peer (peer_of_role()) */
    /* Only for a token of this rank: bit p is 1 if the rank at position p of the sum order
     * sends a partial sum for the token. With MANY_RANKS, bit p stands for sources[p]. */
    uint32_t positions;
    Slot slots[WARP]; /* the token's slots on this rank */
    /* only for a token of this rank: ranks[k] is the rank to which choice k goes */
    int32_t ranks[WARP];
    /* Only with MANY_RANKS, and for a token of this rank. sources: the ranks to which choices
     * of the token go, in ascending order. own: bit p is 1 if sources[p] is this rank. */
    __extension__ uint8_t sources[MANY_RANKS ? WARP : 0];
    __extension__ uint32_t own[MANY_RANKS];
};

/* The Entry of a unit if LEAVES is true. The array `slots` is in ascending order of leaves. The
 * slots of the same leaf are in ascending order of k. */
struct LeafEntry : Entry {
    uint32_t leaves; /* bit i is 1 if the token has slots in this rank's leaf i */
    uint32_t ends;   /* bit i is 1 if slots[i] is the last slot of its leaf */
    /* the slot of the token's n-th choice on this rank is slots[places[n]] */
    uint8_t places[WARP];
};

template <bool LEAVES> struct EntryOf {
    typedef Entry type;
};
template <> struct EntryOf<true> {
    typedef LeafEntry type;
};

/* The leaves of the sum tree on this rank, in shared memory. A leaf is a block of experts. */
struct __align__(16) LeafSlots
{
    /* first slot of each leaf; INT32_MAX for leaves that this rank does not have */
    int32_t begin[P2P_STREAM_LEAVES];
};

template <class ROW, bool EXACT, bool TREE, bool LEAVES> struct CombineStream {
    typedef PieceRing<STREAM_V, EXACT> Pieces;
    typedef typename EntryOf<LEAVES>::type Entry;
    static constexpr int V = STREAM_V, AHEAD = Pieces::AHEAD, ENTRIES = AHEAD + 1;
    static constexpr int WARP_BYTES =
        round_up_to_lines(Pieces::BYTES + ENTRIES * (int)sizeof(Entry));

    const CombineState &c;
    Entry *entries;
    Pieces ring;
    /* the next unit to begin in the list of expert units, and in the list of source units */
    WorkWalk expert_walk;
    UnitWalk source_walk;
    /* Words of the next units, loaded early because a load takes long. expert_slot,
     * source_slot: lane n has the n-th slot of the unit's token. source_rank: lane n has the
     * rank to which choice n goes. */
    int32_t expert_slot, source_slot, source_rank;
    /* The round ends before these tokens: expert units have tokens below expert_end, and source
     * units have tokens below source_end. */
    int32_t expert_end, source_end;
    /* In lane p: the rank at position p of the sum order. -1 if the order has no position p, or
     * if the rank is this rank. */
    int32_t position_rank;
    const Slot *slot; /* the slot whose row is copied next */
    /* only with MANY_RANKS: the unit whose pieces are being copied to the ring */
    __extension__ const Entry *copying[MANY_RANKS];
    /* address of this lane's bytes of the current piece in row 0 of job.rows; for row i, add
     * row_offset(i) */
    const uint8_t *rows;
    /* The unit whose pieces are being copied to the ring. vector: the unit's piece begins at
     * this vector of the row. */
    int32_t token, vector;
    int32_t slots = 0; /* number of rows on this rank that must still be copied for this unit */
    /* bit mask of the partial sums that must still be copied for this unit: bit p stands for
     * the rank at position p of the sum order */
    uint32_t positions = 0;
    /* the leaves on this rank; only with LEAVES */
    __extension__ const LeafSlots *leaf_slots[LEAVES];
    /* begun: number of units that this warp has begun (they are in `entries`). copied: number
     * of units whose pieces have been copied, or are being copied, to the ring. used: number of
     * finished units. */
    uint32_t begun = 0, copied = 0, used = 0;

    /* Prepares one round for one warp. memory: WARP_BYTES bytes of shared memory. end: the
     * round ends before this token. its_leaves: with LEAVES, the leaves of this rank. */
    __device__ __forceinline__ CombineStream(const CombineState &combine, uint8_t *memory,
                                             int32_t end, const LeafSlots *its_leaves)
        : c(combine), entries((Entry *)(memory + Pieces::BYTES)), ring(memory),
          expert_walk(c.expert), source_walk(c.source)
    {
        if constexpr (LEAVES) *leaf_slots = its_leaves;
        const p2p_self &self = c.job.self;
        expert_end = self.num_ranks > 1 ? end : c.round_begin;
        source_end = min(end, c.job.num_tokens);
        position_rank = lane_id() < self.num_ranks ? c.plan.header.rank_at[lane_id()] : -1;
        if (position_rank == self.rank) position_rank = -1;
        ExpertWork work = {c, expert_end};
        expert_walk.begin_walk(c.expert, work);
        load_expert();
        load_source();
    }

    /* ---- copying ---- */

    __device__ __forceinline__ void load_expert()
    {
        const int32_t t = c.round_begin + expert_walk.step;
        expert_slot =
            t < expert_end ? read_slot(c, peer_of_role(c, expert_walk.role), t, 0) : -1;
    }
    __device__ __forceinline__ void load_source()
    {
        const int32_t t = c.round_begin + source_walk.step;
        source_slot = t < source_end ? read_slot(c, c.job.self.rank, t, 0) : -1;
        source_rank = rank_of_choice(c, t, 0);
    }
    /* Stores in `entry` the ranks that send partial sums for the token of its unit: the ranks
     * to which the lanes' choices go (source_rank), without this rank. Returns the value to
     * store in Entry::positions. Called by a whole warp. */
    __device__ __forceinline__ uint32_t store_sources(Entry &entry)
    {
#if MANY_RANKS
        const RankMask touched = ranks_of_lanes(source_rank);
        int place = 0; /* number of touched ranks below source_rank */
        for (int w = 0; w < DEVICE_RANK_WORDS; w++) {
            const int ranks_below = source_rank - w * 32;
            const uint32_t below = ranks_below >= 32 ? ALL_LANES
                                   : ranks_below > 0 ? (1u << ranks_below) - 1
                                                     : 0;
            place += __popc(touched.words[w] & below);
        }
        const uint32_t bit = source_rank >= 0 ? 1u << place : 0;
        const bool is_own = source_rank == c.job.self.rank;
        const uint32_t own = __reduce_or_sync(ALL_LANES, is_own ? bit : 0);
        if (source_rank >= 0) entry.sources[place] = (uint8_t)source_rank;
        if (lane_id() == 0) *entry.own = own;
        return __reduce_or_sync(ALL_LANES, bit) & ~own;
#else
        (void)entry;
        const uint32_t touched =
            __reduce_or_sync(ALL_LANES, source_rank >= 0 ? 1u << source_rank : 0);
        return __ballot_sync(ALL_LANES, position_rank >= 0 && (touched >> position_rank & 1));
#endif
    }
    /* Returns the rank for which bit `position` of u.positions stands. */
    __device__ __forceinline__ int rank_at(const Entry &u, int position) const
    {
#if MANY_RANKS
        return u.sources[position];
#else
        (void)u;
        return c.plan.header.rank_at[position];
#endif
    }
    /* Like rank_at(), for the unit whose pieces are being copied to the ring. */
    __device__ __forceinline__ int copied_rank_at(int position) const
    {
#if MANY_RANKS
        return rank_at(**copying, position);
#else
        return c.plan.header.rank_at[position];
#endif
    }
    /* Only with LEAVES: sorts the slots of a unit by leaves; slots of the same leaf stay in the
     * order of choices. Sets entry.leaves, entry.ends and entry.places. Returns the index of
     * this lane's slot, its_slot, in the sorted order. Called by a whole warp. */
    __device__ __forceinline__ int sort_slots(LeafEntry &entry, int32_t its_slot)
    {
        const LeafSlots &at = **leaf_slots;
        const bool has_slot = its_slot >= 0;
        int leaf = 0;
#pragma unroll
        for (int i = 1; i < P2P_STREAM_LEAVES; i++) leaf += its_slot >= at.begin[i];
        const uint32_t same = __match_any_sync(ALL_LANES, has_slot ? leaf : -1);
        const uint32_t present = __reduce_or_sync(ALL_LANES, has_slot ? 1u << leaf : 0);
        /* Byte i of `low` (i < 4) or byte i - 4 of `high` (i >= 4) becomes the number of slots
         * in the leaves 0 to i. */
        const uint32_t one = has_slot ? 1u << leaf % 4 * 8 : 0, all_bytes = 0x01010101u;
        const uint32_t low = __reduce_add_sync(ALL_LANES, leaf < 4 ? one : 0) * all_bytes;
        const uint32_t high =
            (__reduce_add_sync(ALL_LANES, leaf < 4 ? 0 : one) + (low >> 24)) * all_bytes;
        const int end = (int)((leaf < 4 ? low : high) >> leaf % 4 * 8 & 255);
        const int place = has_slot ? end - __popc(same & ~lanes_below()) : 0;
        /* true if the slot is the last slot of its leaf */
        const bool is_last = has_slot && same >> lane_id() == 1;
        const uint32_t ends = __reduce_or_sync(ALL_LANES, is_last ? 1u << place : 0);
        entry.places[lane_id()] = (uint8_t)place;
        if (lane_id() == 0) {
            entry.leaves = present;
            entry.ends = ends;
        }
        return place;
    }
    /* Begins a unit: stores its data in `entry`, and starts to copy one float per slot to
     * shared memory. The float is the slot's weight or, if there are no weights, the slot's
     * element of slot_floats. its_slot: this lane's slot. its_positions: the value to store in
     * entry.positions. Called by a whole warp. */
    __device__ __forceinline__ void fill_entry(Entry &entry, int32_t of_token, int role,
                                               int piece, int32_t its_slot,
                                               uint32_t its_positions)
    {
        const float *from = c.job.slot_weights ? c.job.slot_weights : c.job.slot_floats;
        const uint32_t its_slots = __ballot_sync(ALL_LANES, its_slot >= 0);
        int place = lane_id();
        if constexpr (LEAVES) place = sort_slots(entry, its_slot);
        Slot &to = entry.slots[place];
        if (!LEAVES || its_slot >= 0) to.number = its_slot;
        if (from && its_slot >= 0)
            copy_word(shared_address(&to.word), from + its_slot);
        else if (!LEAVES || its_slot >= 0)
            to.word = 0;
        if (lane_id() == 0) {
            entry.token = of_token;
            entry.vector = piece * V * WARP;
            entry.num_slots = (int16_t)__popc(its_slots);
            entry.role = (int16_t)role;
            entry.positions = its_positions;
        }
        begun++;
    }
    /* Begins the next unit, if there is one. Prefers expert units until they are `lag` tokens
     * ahead of the source units, because peers wait for the results of expert units. */
    __device__ __forceinline__ void begin_unit()
    {
        const int32_t expert_token = c.round_begin + expert_walk.step,
                      source_token = c.round_begin + source_walk.step;
        const bool has_expert = expert_token < expert_end,
                   has_source = source_token < source_end;
        Entry &entry = entries[begun % ENTRIES];
        if (has_expert && (!has_source || expert_token < source_token + c.job.lag)) {
            fill_entry(entry, expert_token, expert_walk.role, expert_walk.span,
                       clamp_slot(c, expert_slot), 0);
            ExpertWork work = {c, expert_end};
            expert_walk.next_unit(c.expert, work);
            load_expert();
        } else if (has_source) {
            entry.ranks[lane_id()] = source_rank;
            fill_entry(entry, source_token, -1, source_walk.span, clamp_slot(c, source_slot),
                       store_sources(entry));
            source_walk.next_unit(c.source);
            load_source();
        }
    }
    /* Returns the address in staging at which `rank` stores its partial sum for a token. */
    __device__ __forceinline__ uint4 *staged_partial(int32_t of_token, int rank)
    {
        return staged_row(c.op.inbox[rank], of_token - c.round_begin, c.shape.vectors);
    }
    /* Starts to copy one more piece to the ring: a piece of a row on this rank, or of a peer's
     * partial sum. A unit without pieces uses one buffer of the ring, which stays empty. */
    __device__ __forceinline__ void copy_next()
    {
        if (!(slots | positions) && copied != begun) {
            const Entry &entry = entries[copied++ % ENTRIES];
            token = entry.token;
            vector = entry.vector;
            slots = entry.num_slots;
            positions = entry.positions;
            slot = entry.slots;
            if (MANY_RANKS) *copying = &entry;
            rows = c.job.rows + lane_offset(vector);
        }
        if (slots) {
            slots--;
            ring.copy_piece(rows + row_offset((slot++)->number, c.shape), vector, c.shape, true,
                            c.policy);
        } else if (positions) {
            const int position = __ffs(positions) - 1;
            const uint8_t *from =
                (const uint8_t *)staged_partial(token, copied_rank_at(position));
            positions &= positions - 1;
            if (!is_host_memory(c.op, from))
                ring.copy_piece(from + lane_offset(vector), vector, c.shape, false, c.policy);
        }
        ring.commit_piece();
    }

    /* ---- using ---- */

    /* Returns true if this lane's vector v is inside the row; without EXACT, the last piece of
     * a row may be shorter. */
    __device__ __forceinline__ bool in_row(const Entry &u, int v) const
    {
        return EXACT || u.vector + v * WARP + lane_id() < c.shape.vectors;
    }
    /* Starts to copy one more piece, so that the ring stays full. Then reads the oldest piece
     * of the ring into q. */
    __device__ __forceinline__ void read_piece(const Entry &u, uint4 (&q)[V])
    {
        copy_next();
        ring.read_piece(q, u.vector, c.shape);
    }
    static __device__ __forceinline__ void round_sums(uint4 (&to)[V],
                                                      const float (&sums)[V][ROW::N])
    {
#pragma unroll
        for (int v = 0; v < V; v++) to[v] = ROW::pack_floats(sums[v]);
    }
    /* Only with LEAVES: adds `node` to `sibling`, its left sibling in the tree, and stores the
     * sum in `node`. */
    static __device__ __forceinline__ void add_sibling(const uint4 (&sibling)[V],
                                                       uint4 (&node)[V])
    {
#pragma unroll
        for (int v = 0; v < V; v++) {
            uint4 sum = sibling[v];
            add_nodes<ROW>(sum, node[v]);
            node[v] = sum;
        }
    }
    /* Only with LEAVES: adds the leaf with index `leaf` to the tree. acc: the sum of the leaf's
     * rows. `left`: bit mask of the leaves that are added later. Take the smallest subtree that
     * contains this leaf and the next leaf. Its left child is a node at level `level`, and this
     * leaf is the last leaf below this node. So the function computes the node: the sum of this
     * leaf and of all nodes that wait at levels below `level`. The node then waits until its
     * right sibling is complete. At most one node of each level waits. Bit l of has_waiting is
     * 1 if a node of level l waits: in `node` if l is 0, else in waiting[l - 1]. After the last
     * leaf, `node` is the sum of all leaves. */
    static __device__ __forceinline__ void add_leaf(const float (&acc)[V][ROW::N],
                                                    uint4 (&node)[V],
                                                    uint4 (&waiting)[TREE_LEVELS - 1][V],
                                                    uint32_t &has_waiting, int leaf,
                                                    uint32_t left)
    {
        const int level = left ? 31 - __clz(leaf ^ (__ffs(left) - 1)) : TREE_LEVELS;
        const uint32_t parts = has_waiting & ((1u << level) - 1);
        uint4 child[V];
        round_sums(child, acc);
        if (parts & 1) add_sibling(node, child);
#pragma unroll 1
        for (uint32_t rest = parts & ~1u; rest; rest &= rest - 1)
            add_sibling(waiting[__ffs(rest) - 2], child);
        has_waiting = (has_waiting ^ parts) | 1u << level;
        if (left && level)
#pragma unroll
            for (int v = 0; v < V; v++) waiting[level - 1][v] = child[v];
#pragma unroll
        for (int v = 0; v < V; v++) node[v] = child[v];
    }
    /* Adds weight * q to the sums in acc. q: a piece of the row in the unit's slot i. If
     * IS_FIRST is true, sets the sums to weight * q, so that no instructions are needed to
     * clear them before. */
    template <bool IS_FIRST>
    static __device__ __forceinline__ void add_row(const Entry &u, bool with_weights, int i,
                                                   const uint4 (&q)[V], float (&acc)[V][ROW::N])
    {
        __syncwarp(); /* makes the weights visible that other lanes have copied */
        const float weight = with_weights ? __uint_as_float(u.slots[i].word) : 1.0f;
#pragma unroll
        for (int v = 0; v < V; v++) {
            float x[ROW::N];
            ROW::unpack_floats(q[v], x);
#pragma unroll
            for (int n = 0; n < ROW::N; n++)
                acc[v][n] =
                    IS_FIRST ? __fmul_rn(weight, x[n]) : __fmaf_rn(weight, x[n], acc[v][n]);
        }
    }
    /* Only with LEAVES: sets `sum` to this rank's partial sum, as add_rows_here() describes.
     * Requires that the unit has slots on this rank. */
    __device__ __forceinline__ void add_leaves_here(const Entry &u, uint4 (&sum)[V])
    {
        const bool with_weights = c.job.slot_weights != NULL;
        float acc[V][ROW::N];
        uint4 q[V];
        /* Nodes above the leaves wait in local memory, because registers do not suffice. */
        uint4 waiting[TREE_LEVELS - 1][V];
        uint32_t has_waiting = 0;
        int i = 0;
#pragma unroll 1
        for (uint32_t left = u.leaves; left;) {
            const int leaf = __ffs(left) - 1;
            left &= left - 1;
            read_piece(u, q);
            add_row<true>(u, with_weights, i, q, acc);
#pragma unroll 1
            while (!(u.ends >> i & 1)) {
                read_piece(u, q);
                add_row<false>(u, with_weights, ++i, q, acc);
            }
            i++;
            add_leaf(acc, sum, waiting, has_waiting, leaf, left);
        }
    }
    /* Sets `sum` to this rank's partial sum for the unit's token, rounded to type ROW: the sum
     * of weight * row over the token's slots on this rank. With LEAVES, rounds the sum of each
     * leaf, and adds these sums in a tree. */
    __device__ __forceinline__ void add_rows_here(const Entry &u, uint4 (&sum)[V])
    {
        const int32_t count = u.num_slots;
        const bool with_weights = c.job.slot_weights != NULL;
        float acc[V][ROW::N];
        uint4 q[V];
        int32_t i = 0;
        if constexpr (LEAVES) {
            if (count)
                add_leaves_here(u, sum);
            else
                read_piece(u, q); /* skip the empty buffer of the unit */
            return;
        }
        clear_sums(acc);
#pragma unroll 1
        do {
            read_piece(u, q); /* a unit without slots reads an empty buffer */
            if (!count) break;
            add_row<false>(u, with_weights, i, q, acc);
        } while (++i < count);
        round_sums(sum, acc);
    }
    /* Stores this rank's partial sum (`node`) to the staging of the token's rank. In
     * dispatch_backward, the unit of the first piece also sends the token's floats (gradients
     * of weights). */
    __device__ __forceinline__ void send_partial(const Entry &u, const uint4 (&node)[V])
    {
        const p2p_self &self = c.job.self;
        const int rank = peer_of_role(c, u.role);
        uint4 *to = staged_row(c.op.outbox[rank], u.token - c.round_begin, c.shape.vectors) +
                    u.vector + lane_id();
        if (u.num_slots)
#pragma unroll
            for (int v = 0; v < V; v++)
                if (in_row(u, v)) store_relaxed(to + v * WARP, node[v]);
        if (u.vector == 0 && c.job.slot_floats && lane_id() < u.num_slots)
            store_relaxed(
                floats_base(self, c.op, self.heap[rank], self.num_ranks - 2 - u.role) +
                    (int64_t)TOKEN_INDEX(c, u.token) * float_stride(c.top_k) + lane_id(),
                replace_poison(u.slots[place_of(u, lane_id())].word, F32::NAN_WORD));
        if (HOSTS && u.num_slots) post_put_partial(u, rank);
    }
    /* Only in backend `hosts`: counts a stored piece of a partial sum for another host. The
     * call after the last missing piece posts one put for all pieces, because the proxy thread
     * needs time for each put. The unit of the first piece also posts the put of the token's
     * floats. */
    __device__ __forceinline__ void post_put_partial(const Entry &u, int rank)
    {
        const p2p_self &self = c.job.self;
        const uint4 *staged =
            staged_row(c.op.outbox[rank], u.token - c.round_begin, c.shape.vectors);
        post_put_when_complete(self, c.op, rank, TOKEN_INDEX(c, u.token), c.shape.pieces,
                               staged, (uint32_t)c.shape.vectors * 16);
        if (u.vector == 0 && c.job.slot_floats)
            post_put_floats(
                c.op, rank,
                floats_base(self, c.op, self.heap[rank], self.num_ranks - 2 - u.role) +
                    (int64_t)TOKEN_INDEX(c, u.token) * float_stride(c.top_k),
                u.num_slots);
    }
    /* The peer at `position` of the sum order sends a partial sum. Reads one piece of it from
     * the ring into q. If the piece had not arrived when it was copied to the ring, waits for
     * it in staging. Then stores poison to the staging for the next use. Returns false if the
     * group has failed. */
    __device__ __forceinline__ bool receive_partial(const Entry &u, int position, uint4 (&q)[V])
    {
        uint4 *from = staged_partial(u.token, rank_at(u, position));
        const int rank = rank_at(u, position);
        read_piece(u, q);
        if (!receive_piece<V, EXACT>(c.op, rank, from, u.vector, c.shape.vectors, true, q))
            return false;
        poison_piece<V, EXACT>(from, u.vector, c.shape.vectors);
        return true;
    }
    /* Sets `out` to the sum of all ranks' partial sums, in ascending order of ranks. own: the
     * partial sum of this rank. Returns false if the group has failed. */
    __device__ __forceinline__ bool add_by_rank(const Entry &u, const uint4 (&own)[V],
                                                uint4 (&out)[V])
    {
        float total[V][ROW::N];
#if MANY_RANKS
        const uint32_t rank_bit = *u.own;
#else
        const uint32_t rank_bit = 1u << c.job.self.rank;
#endif
        uint32_t left = u.positions | (u.num_slots ? rank_bit : 0);
        const float zero = left ? -0.0f : 0.0f;
#pragma unroll
        for (int v = 0; v < V; v++)
#pragma unroll
            for (int i = 0; i < ROW::N; i++) total[v][i] = zero;
#pragma unroll 1
        for (; left; left &= left - 1) {
            uint4 q[V];
            if ((left & -left) == rank_bit) {
#pragma unroll
                for (int v = 0; v < V; v++) q[v] = own[v];
            } else if (!receive_partial(u, __ffs(left) - 1, q)) {
                return false;
            }
#pragma unroll
            for (int v = 0; v < V; v++) {
                float x[ROW::N];
                ROW::unpack_floats(q[v], x);
#pragma unroll
                for (int i = 0; i < ROW::N; i++) total[v][i] += x[i];
            }
        }
#pragma unroll
        for (int v = 0; v < V; v++) out[v] = ROW::pack_floats(total[v]);
        return true;
    }
    /* The token's n-th choice on this rank has a slot. Returns the index of this slot in
     * u.slots. */
    static __device__ __forceinline__ int place_of(const Entry &u, int n)
    {
        if constexpr (LEAVES)
            return u.places[n];
        else
            return n;
    }
    /* Adds `b` to `a`, and rounds the sums to type ROW. */
    static __device__ __forceinline__ void add_vector(uint4 &a, const uint4 &b)
    {
        if constexpr (LEAVES)
            add_nodes<ROW>(a, b);
        else
            PartialSum<ROW, ROW>::add_partials(&a, &b);
    }
    /* Adds `b` to `a`. If `a` is empty, copies `b` to it. Then sets has_b to false. has_a,
     * has_b: whether `a` and `b` contain a partial sum. */
    static __device__ __forceinline__ void add_to(uint4 (&a)[V], bool &has_a,
                                                  const uint4 (&b)[V], bool &has_b)
    {
#pragma unroll
        for (int v = 0; v < V && has_b; v++) {
            if (has_a)
                add_vector(a[v], b[v]);
            else
                a[v] = b[v];
        }
        has_a |= has_b;
        has_b = false;
    }
    /* Sets `out` to the sum of all ranks' partial sums in a binary tree. The tree has at most
     * eight leaves: leaf p is the partial sum of the rank at position p of the sum order. There
     * are not enough registers for the whole tree. So the sum of leaves 0 to 3 is kept in the
     * output row while leaves 4 to 7 are added. own: the partial sum of this rank. Returns
     * false if the group has failed. */
    __device__ __forceinline__ bool add_tree(const Entry &u, const uint4 (&own)[V],
                                             uint4 (&out)[V])
    {
        const p2p_self &self = c.job.self;
        const int last = self.num_ranks - 1;
        uint4 *row = (uint4 *)(c.job.out + u.token * c.shape.row_bytes) + u.vector + lane_id();
        uint4 q[V], pair[V];
        bool has_q, has_pair = false, has_out = false, has_stored_half = false;
#pragma unroll 1
        for (int position = 0; position <= last; position++) {
            has_q = u.positions >> position & 1;
            if (has_q && !receive_partial(u, position, q)) return false;
            if (u.num_slots && c.plan.header.rank_at[position] == self.rank) {
                has_q = true;
#pragma unroll
                for (int v = 0; v < V; v++) q[v] = own[v];
            }
            add_to(pair, has_pair, q, has_q);
            if (position % 2 || position == last) add_to(out, has_out, pair, has_pair);
            if (position % 4 != 3 || position == last || !has_out) continue;
            has_stored_half = true;
            has_out = false;
#pragma unroll
            for (int v = 0; v < V; v++)
                if (in_row(u, v)) store_in_place(row + v * WARP, out[v]);
        }
        if (has_stored_half) {
#pragma unroll
            for (int v = 0; v < V; v++) {
                q[v] = in_row(u, v) ? load_relaxed(row + v * WARP) : make_uint4(0, 0, 0, 0);
                if (has_out) add_vector(q[v], out[v]);
                out[v] = q[v];
            }
        } else if (!has_out) {
#pragma unroll
            for (int v = 0; v < V; v++) out[v] = make_uint4(0, 0, 0, 0);
        }
        return true;
    }
    /* Only in dispatch_backward: waits for the token's floats (one gradient of a weight per
     * choice), and stores them to choice_floats. Lane k handles choice k. Returns false if the
     * group has failed. */
    __device__ __forceinline__ bool receive_floats(const Entry &u)
    {
        const p2p_self &self = c.job.self;
        const int32_t rank = u.ranks[lane_id()];
        const int n = __popc(__match_any_sync(ALL_LANES, rank) & lanes_below());
        const uint32_t own = __shfl_sync(ALL_LANES, u.slots[place_of(u, lane_id())].word, n);
        uint32_t word = rank == self.rank ? own : 0, *from = NULL;
        if (rank >= 0 && rank != self.rank)
            from = floats_base(self, c.op, inbox_base(c.op, rank),
                               rank - self.rank - 1 + (rank < self.rank ? self.num_ranks : 0)) +
                   (int64_t)TOKEN_INDEX(c, u.token) * float_stride(c.top_k) + n;
        int missing = -1;
        const bool ok = wait_warp(c.op, missing, P2P_PHASE_FLOAT, [&] {
            if (from) word = load_relaxed(from);
            missing = from && word == POISON ? rank : -1;
            return __all_sync(ALL_LANES, missing < 0) != 0;
        });
        if (!ok) return false;
        if (from) *from = POISON;
        if (lane_id() < c.top_k)
            c.job.choice_floats[(int64_t)u.token * c.top_k + lane_id()] = __uint_as_float(word);
        return true;
    }
    /* Stores one piece of the result of this rank's token to the output. The result is the sum
     * of all ranks' partial sums. own: the partial sum of this rank. Returns false if the group
     * has failed. */
    __device__ __forceinline__ bool finish_token(const Entry &u, const uint4 (&own)[V])
    {
        uint4 out[V];
        if (!(TREE ? add_tree(u, own, out) : add_by_rank(u, own, out))) return false;
        uint8_t *row = c.job.out + row_offset(u.token, c.shape) + (u.vector + lane_id()) * 16;
#pragma unroll
        for (int v = 0; v < V; v++)
            if (in_row(u, v)) store_once(row + v * WARP * 16, out[v], c.policy);
        return u.vector || !c.job.choice_floats || receive_floats(u);
    }
    /* Begins one more unit, so that its copies start early. Then finishes the oldest unit.
     * Called by a whole warp. Returns false if the group has failed. */
    __device__ __forceinline__ bool use_unit()
    {
        begin_unit();
        __syncwarp();
        const Entry &u = entries[used++ % ENTRIES];
        uint4 own[V];
        if (u.num_slots || !u.positions) add_rows_here(u, own);
        if (u.role < 0) return finish_token(u, own);
        send_partial(u, own);
        return true;
    }
};

/* Runs all rounds of combine. Called by all threads of all CTAs. Returns false if the group has
 * failed.
 *
 *   EXACT       rows consist of whole pieces
 *   TREE        partial sums are added in tree order
 *   LEAVES      this rank has several leaves of the sum tree
 *   memory      the dynamic shared memory of the CTA
 *   leaf_slots  with LEAVES: the first slot of each leaf of this rank */
template <class ROW, bool EXACT, bool TREE, bool LEAVES>
__device__ __forceinline__ bool combine_stream(CombineState &c, OpState &op, uint8_t *memory,
                                               const LeafSlots *leaf_slots)
{
    typedef CombineStream<ROW, EXACT, TREE, LEAVES> Units;
    return for_each_round(c, op, c.shape.vectors * 16, [&](int32_t end) {
        return run_units(
            Units(c, memory + threadIdx.x / WARP * Units::WARP_BYTES, end, leaf_slots));
    });
}

#endif
