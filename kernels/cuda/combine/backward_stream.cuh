/* SPDX-License-Identifier: Apache-2.0 */
/* The fast variant of combine_backward, for rows that are aligned to 16 bytes. d_out is the
 * gradient of combine's output. Each warp reads one stream of pieces, unit after unit: pieces
 * of d_out, and pieces of the caller's `rows`. It copies the pieces into a ring buffer in
 * shared memory some units before it uses them. So a piece in staging may be copied before it
 * has arrived. Then the copy contains poison (the mark of a word that has not arrived), and the
 * warp polls the piece in staging.
 *
 *     a unit that sends token i       a unit that receives token t of source q
 *
 *     d_out[i] -> ring                staging[q] -> ring -> d, and for each slot of t here:
 *                  |                    d_rows[slot] = weight * d
 *     staging of peers                  rows[slot] -> ring -> dot(d, rows[slot]), which is the
 *                                                             gradient of the slot's weight */
#ifndef EPIC_COMBINE_BACKWARD_STREAM_CUH
#define EPIC_COMBINE_BACKWARD_STREAM_CUH

#include "cuda/combine/backward.cuh"

/* One of the slots to which a unit stores the token that it receives. */
struct __align__(8) Slot
{
    int32_t number;
    float weight;
};

/* A unit that the warp has begun but not finished. It is in shared memory. */
struct Entry {
    int32_t token; /* the token that is sent or received */
    /* If the unit receives a token: the number of slots that the token has on this rank. If it
     * sends a token: a bit mask of the peers that need it (with MANY_RANKS: 1 if any peer needs
     * it). 0: the unit has nothing to do. */
    uint32_t work;
    __extension__ RankMask
        peers[MANY_RANKS]; /* many ranks only: the peers, if the unit sends */
    /* role: what the unit does (role_of()). count: number of pieces of its span. A unit without
     * work uses one buffer of the ring, which stays empty. */
    int16_t role, count;
    /* span: index in the row of the unit's span (some pieces). first: index in the row of the
     * first piece of the span. */
    int32_t span, first;
    Slot slots[WARP]; /* only if the unit receives: the token's slots on this rank */
};

/* Stores in `entry` the peers to which its unit sends. Returns the value that the caller must
 * store in Entry::work. */
__device__ __forceinline__ uint32_t store_peers(Entry &entry, const RankMask &peers)
{
#if MANY_RANKS
    if (lane_id() == 0) *entry.peers = peers;
    return has_any(peers);
#else
    (void)entry;
    return peers;
#endif
}

/* Returns the peers to which a unit sends. */
__device__ __forceinline__ RankMask peers_in(const Entry &entry)
{
#if MANY_RANKS
    return *entry.peers;
#else
    return entry.work;
#endif
}

template <class ROW, bool EXACT, bool QUANTIZE> struct GradientStream {
    static constexpr int V = Dot<ROW>::V;
    typedef PieceRing<V, EXACT> Pieces;
    static constexpr int AHEAD = Pieces::AHEAD, ENTRIES = AHEAD + 1;
    /* DOTS: number of dot products for which `sums` has space. When `sums` is full, add_dots()
     * adds the sums of the lanes. PITCH: distance in floats between two rows of `sums`. It is
     * greater than WARP to avoid bank conflicts. */
    static constexpr int DOTS = 8, PITCH = WARP + 4;
    static constexpr int SUMS = Pieces::BYTES + ENTRIES * (int)sizeof(Entry);
    static constexpr int WARP_BYTES = round_up_to_lines(SUMS + DOTS * PITCH * 4);

    const BackwardMove &m;
    Entry *entries;
    /* [DOTS][PITCH], in shared memory: for each dot product, the sum of each lane */
    float *sums;
    Pieces ring;
    int32_t end;          /* the round ends before this token */
    BackwardWork work;    /* finds the units that have work */
    WorkWalk walk;        /* selects the unit that the warp begins next */
    int32_t next_word;    /* result of read_ahead() for the unit that the warp begins next */
    const Entry *copying; /* the unit whose pieces are being copied to the ring */
    const uint8_t *from;  /* address of this lane's bytes of the next piece of d_out */
    /* address of this lane's bytes of the current piece in row 0 of the caller's `rows`; for
     * row i, add row_offset(i) */
    const uint8_t *rows;
    const Slot *slot; /* the slot whose row is copied next */
    int32_t vector;   /* index in the row of the first vector of the current piece */
    /* pieces: number of pieces of d_out that must still be copied for the unit. slots: number
     * of slots from whose rows the current piece must still be copied. */
    int pieces = 0, slots = 0;
    /* begun: number of units that this warp has begun (they are in `entries`). copied: number
     * of units whose pieces have been copied, or are being copied, to the ring. used: number of
     * finished units. */
    uint32_t begun = 0, copied = 0, used = 0;

    /* Prepares one round for one warp. memory: WARP_BYTES bytes of shared memory for this warp.
     * round_end: the round ends before this token. */
    __device__ __forceinline__ GradientStream(const BackwardMove &move, uint8_t *memory,
                                              int32_t round_end)
        : m(move), entries((Entry *)(memory + Pieces::BYTES)), sums((float *)(memory + SUMS)),
          ring(memory), end(round_end), work{m, round_end}, walk(m.stride)
    {
        walk.begin_walk(m.stride, work);
        next_word = read_ahead(m, walk);
    }

    /* ---- copying ---- */

    /* Begins the warp's next unit, if there is one: fills in its Entry, and starts to copy the
     * weights of its slots to shared memory. */
    __device__ __forceinline__ void begin_unit()
    {
        const int32_t sent = m.round_begin + walk.step, received = sent - m.job.lag;
        if (received - m.job.lag >= end) return;
        /* An older unit has used this entry. A warp collective precedes each write below, so no
         * lane still reads the data of the older unit. */
        Entry &entry = entries[begun++ % ENTRIES];
        uint32_t amount; /* Entry::work */
        const int role = role_of(m, walk);
        if (role == 0) {
            amount =
                store_peers(entry, choose_routes(m, walk, sent, end,
                                                 peers_of(m, sent < end ? next_word : -1)));
        } else {
            const bool in = received >= m.round_begin && received < end;
            const int32_t its_slot = in ? clamp_slot(m, next_word) : -1;
            amount = (uint32_t)__popc(__ballot_sync(ALL_LANES, its_slot >= 0));
            Slot &to = entry.slots[lane_id()];
            if (its_slot >= 0) {
                to.number = its_slot;
                if (m.job.slot_weights)
                    copy_word(shared_address(&to.weight), m.job.slot_weights + its_slot);
                else
                    to.weight = 1.0f;
            }
        }
        if (lane_id() == 0) {
            entry.token = role == 0 ? sent : received;
            entry.work = amount;
            entry.role = (int16_t)role;
            entry.span = walk.span;
            entry.first = first_piece(m, walk);
            entry.count = (int16_t)pieces_of(m, walk);
        }
        walk.next_unit(m.stride, work);
        next_word = read_ahead(m, walk);
    }
    /* Returns true if the unit receives a token of a peer, which arrives in staging. */
    __device__ __forceinline__ bool is_staged(const Entry &u) const
    {
        return u.role > 0 && u.role < m.job.self.num_ranks;
    }
    __device__ __forceinline__ uint4 *staged_d_out(const Entry &u) const
    {
        return staged_row(m.op.inbox[rank_of_role(m.job.self, u.role)], u.token - m.round_begin,
                          m.shape.vectors);
    }
    /* Selects the next unit for copy_next(), which copies the pieces of one unit at a time: the
     * oldest unit that has been begun but not copied. */
    __device__ __forceinline__ void open_unit()
    {
        const Entry &entry = *(copying = &entries[copied++ % ENTRIES]);
        vector = (entry.first - 1) * V * WARP;
        from = is_staged(entry) ? (const uint8_t *)staged_d_out(entry)
                                : m.job.d_out + row_offset(entry.token, m.shape);
        from += lane_offset(entry.first * V * WARP);
        rows = m.job.rows + lane_offset(entry.first * V * WARP) - Pieces::PIECE_BYTES;
        pieces = entry.work ? entry.count : 1;
    }
    /* Starts to copy one more piece to the ring: a piece of d_out, or of a slot's row in
     * `rows`. */
    __device__ __forceinline__ void copy_next()
    {
        if (slots) {
            slots--;
            ring.copy_piece(rows + row_offset((slot++)->number, m.shape), vector, m.shape, true,
                            m.policy);
        } else {
            if (!pieces && copied != begun) open_unit();
            if (pieces) {
                pieces--;
                vector += V * WARP;
                rows += Pieces::PIECE_BYTES;
                if (copying->work && !is_host_memory(m.op, from))
                    ring.copy_piece(from, vector, m.shape, false, m.policy);
                from += Pieces::PIECE_BYTES;
                if (copying->role && m.job.d_slot_weights) slots = (int)copying->work;
                slot = copying->slots;
            }
        }
        ring.commit_piece();
    }

    /* ---- using ---- */

    /* Starts to copy one more piece, so that the ring stays full. Then reads the oldest piece
     * of the ring into q. `its_vector`: index in the row of that piece's first vector. Words
     * after the end of the row become `fill`. */
    __device__ __forceinline__ void read_piece(int32_t its_vector, uint4 (&q)[V], uint32_t fill)
    {
        copy_next();
        ring.read_piece(q, its_vector, m.shape, fill);
    }
    /* Waits until a piece of d_out has arrived in staging. On entry, q is the copy from the
     * ring, with poison for words that had not arrived. On return, q is the whole piece, and
     * its staging is poison again. Returns false if the group has failed. */
    __device__ __forceinline__ bool wait_d_out(const Entry &u, int32_t its_vector,
                                               uint4 (&q)[V])
    {
        uint4 *staging = staged_d_out(u);
        const int rank = rank_of_role(m.job.self, u.role);
        if (!receive_piece<V, EXACT>(m.op, relay_of(m.op, rank), staging, its_vector,
                                     m.shape.vectors, true, q))
            return false;
        poison_piece<V, EXACT>(staging, its_vector, m.shape.vectors);
        fill_end<ROW, V, EXACT>(m, its_vector, q);
        return true;
    }
    /* Stores weight * x, rounded to type ROW. `to`: address at which this lane's first vector
     * of the piece is stored. */
    __device__ __forceinline__ void store_scaled(uint8_t *to, int32_t its_vector, float weight,
                                                 const float (&x)[V][ROW::N])
    {
#pragma unroll
        for (int v = 0; v < V; v++)
            if (EXACT || its_vector + v * WARP + lane_id() < m.shape.vectors)
                store_once(to + v * WARP * 16, scale_vector<ROW>(weight, x[v]), m.policy);
    }
    /* For each of the unit's slots `first` to first + count - 1, computes block `piece` of the
     * slot's dot product. Lane i adds the values that all lanes have stored in `sums` for slot
     * first + i, and stores the result to `parts` (dot_part_of()). Called by a whole warp. */
    __device__ __forceinline__ void add_dots(const Entry &u, int piece, int first, int count)
    {
        __syncwarp();
        if (lane_id() < count) {
            const float dot = add_lanes<ROW>((const float4 *)(sums + lane_id() * PITCH));
            const int rank = rank_of_role(m.job.self, u.role);
            store_relaxed(dot_part_of(m, rank, u.token, first + lane_id()) + piece,
                          replace_poison(__float_as_uint(dot), F32::NAN_WORD));
        }
        __syncwarp();
    }
    /* Processes one received piece q of d_out: for each of the unit's slots, stores weight * q
     * to d_rows, and computes one block of the slot's dot product. */
    __device__ __forceinline__ void fill_slots(const Entry &u, int piece, const uint4 (&q)[V])
    {
        const bool dots = m.job.d_slot_weights != NULL;
        const int32_t its_vector = piece * V * WARP;
        uint8_t *const d_rows = m.job.d_rows + lane_offset(its_vector);
        const int count = (int)u.work;
        float x[V][ROW::N];
#pragma unroll
        for (int v = 0; v < V; v++) {
            ROW::unpack_floats(q[v], x[v]);
            keep_in_registers(x[v]);
        }
        uint32_t largest = 0;
        if (QUANTIZE) largest = find_largest<V, ROW::N>(x, m.job.quantize);
        __syncwarp(); /* makes the weights visible that other lanes have copied */
        Slot next = u.slots[0];
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const Slot current = next;
            uint4 y[V];
            if (dots) read_piece(its_vector, y, 0);
            /* Load the next slot before the stores to the current slot, because the load would
             * wait for them. */
            next = u.slots[min(i + 1, WARP - 1)];
            if (QUANTIZE)
                store_scaled_quantized<ROW, V>(m, current.number, piece, current.weight, x,
                                               largest);
            else
                store_scaled(d_rows + row_offset(current.number, m.shape), its_vector,
                             current.weight, x);
            if (!dots) continue;
            const int n = i % DOTS;
            sums[n * PITCH + lane_id()] = dot_of<ROW, V>(x, y);
            if (n == DOTS - 1 || i == count - 1) add_dots(u, piece, i - n, n + 1);
        }
    }
    /* Begins one more unit, so that its copies start early. Then finishes the oldest unit.
     * Called by a whole warp. Returns false if the group has failed. */
    __device__ __forceinline__ bool use_unit()
    {
        begin_unit();
        __syncwarp();
        const Entry &u = entries[used++ % ENTRIES];
        const int count = u.count;
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const int piece = u.first + i;
            uint4 q[V];
            read_piece(piece * V * WARP, q, ROW::MINUS_ZERO);
            if (!u.work) break;
            if (u.role == 0) {
                send_to_peers<ROW, V, EXACT>(m, u.token, piece * V * WARP, peers_in(u), q);
                continue;
            }
            if (is_staged(u) && !wait_d_out(u, piece * V * WARP, q)) return false;
            fill_slots(u, piece, q);
        }
        if (u.role == 0 && u.work)
            post_put_pieces<V>(m.job.self, m, u.token - m.round_begin, u.first, count,
                               peers_in(u));
        if (is_forward_role(u.role))
            return forward_unit<V>(m, -u.role, u.token, end, u.first, count);
        return u.role == 0 || is_staged(u) ||
               do_extra_work<V, EXACT, QUANTIZE>(m, u.span, u.token, end);
    }
};

#endif
