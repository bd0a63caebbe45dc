/* SPDX-License-Identifier: Apache-2.0 */
/* How rows are divided into pieces, and how units of work are divided among warps. This file
 * also has a ring buffer of pieces in shared memory, and the element types of rows.
 *
 *   vector  16 bytes: what a lane loads or stores at once
 *   piece   V vectors per lane of a warp (V is 4 for most kernels: 2 KB). Vector v of lane L
 *           is vector (piece * V + v) * 32 + L of the row.
 *   span    several pieces of one row, which a warp moves one after the other
 *   unit    the work that a warp does at a time: one span in one role (send, receive, ...)
 *
 * Template argument EXACT: if true, rows are aligned to 16 bytes and consist of whole pieces.
 * If false, the last piece may be shorter, and rows may be unaligned (RowShape.aligned).
 * `policy`: the result of policy_once() of ptx.cuh, for rows that no kernel reads again soon.
 * `fill`: the value of words after the end of the row. Functions that handle a piece are called
 * by a whole warp. */
#ifndef EPIC_ROWS_CUH
#define EPIC_ROWS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/wait.cuh"

struct RowShape { /* The sizes of the rows of an array of the caller. */
    int64_t row_bytes;
    /* number of vectors; the last vector may be partly filled */
    int32_t vectors;
    int32_t pieces; /* number of pieces; the last piece may be shorter */
    bool aligned;   /* the addresses of all rows, and row_bytes, are multiples of 16 */
};

/* Returns the shape of rows. V: number of vectors per lane of a piece. `aligned`:
 * RowShape.aligned. */
template <int V> __device__ __forceinline__ RowShape row_shape(int64_t row_bytes, int aligned)
{
    const int32_t vectors = (int32_t)((row_bytes + 15) / 16);
    return {row_bytes, vectors, (vectors + V * WARP - 1) / (V * WARP), aligned != 0};
}

/* Returns the offset in bytes of row i from row 0. The factors are converted to unsigned 32-bit
 * words, so that one instruction computes the 64-bit product. */
__device__ __forceinline__ int64_t row_offset(int32_t i, const RowShape &s)
{
    return (int64_t)((uint64_t)(uint32_t)i * (uint32_t)s.row_bytes);
}

/* Returns bytes [at, at + 16) of a row that may be unaligned. */
static __device__ __noinline__ uint4 load_bytes(const uint8_t *row, int64_t at,
                                                int64_t row_bytes, uint32_t fill)
{
    uint32_t words[4] = {fill, fill, fill, fill};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (at + i >= row_bytes) continue;
        const int shift = i % 4 * 8;
        words[i / 4] = (words[i / 4] & ~(255u << shift)) | (uint32_t)row[at + i] << shift;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Stores bytes [at, at + 16) of a row that may be unaligned. Does not store bytes after the end
 * of the row. */
static __device__ __noinline__ void store_bytes(uint8_t *row, int64_t at, int64_t row_bytes,
                                                uint4 q)
{
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (at + i < row_bytes) row[at + i] = (uint8_t)(words[i / 4] >> (i % 4 * 8));
}

/* Returns a vector of a row. Use it for rows that no kernel reads again soon. Bytes after the
 * end of the row are zeros. */
__device__ __forceinline__ uint4 load_row(const uint8_t *row, int32_t vector, const RowShape &s,
                                          uint64_t policy)
{
    const int64_t at = (int64_t)vector * 16;
    if (vector >= s.vectors) return make_uint4(0, 0, 0, 0);
    return s.aligned ? load_once(row + at, policy) : load_bytes(row, at, s.row_bytes, 0);
}

/* Returns a vector of a row. Use it for rows that are read again soon. Bytes after the end of
 * the row are those of `fill`. */
__device__ __forceinline__ uint4 load_row_again(const uint8_t *row, int32_t vector,
                                                const RowShape &s, uint32_t fill)
{
    const int64_t at = (int64_t)vector * 16;
    if (vector >= s.vectors) return make_uint4(fill, fill, fill, fill);
    return s.aligned ? load_again(row + at) : load_bytes(row, at, s.row_bytes, fill);
}

/* Stores a vector of a row. Does not store bytes after the end of the row. */
__device__ __forceinline__ void store_row(uint8_t *row, int32_t vector, const RowShape &s,
                                          uint4 q, uint64_t policy)
{
    const int64_t at = (int64_t)vector * 16;
    if (vector >= s.vectors) return;
    if (s.aligned)
        store_once(row + at, q, policy);
    else
        store_bytes(row, at, s.row_bytes, q);
}

/* Loads this lane's vectors of a piece of a row. Use it for rows that are read again soon.
 * `first` (also in the functions below): index in the row of the piece's first vector. */
template <int V, bool EXACT>
__device__ __forceinline__ void load_piece_again(const uint8_t *row, int32_t first,
                                                 const RowShape &s, uint4 (&q)[V],
                                                 uint32_t fill = 0)
{
    const uint8_t *from = row + (first + lane_id()) * 16;
#pragma unroll
    for (int v = 0; v < V; v++)
        q[v] = EXACT ? load_again(from + v * WARP * 16)
                     : load_row_again(row, first + v * WARP + lane_id(), s, fill);
}

template <int V, bool EXACT>
__device__ __forceinline__ void store_piece(uint8_t *row, int32_t first, const RowShape &s,
                                            const uint4 (&q)[V], uint64_t policy)
{
    uint8_t *to = row + (first + lane_id()) * 16;
#pragma unroll
    for (int v = 0; v < V; v++)
        if (EXACT)
            store_once(to + v * WARP * 16, q[v], policy);
        else
            store_row(row, first + v * WARP + lane_id(), s, q[v], policy);
}

template <int V, bool EXACT>
__device__ __forceinline__ void zero_piece(uint8_t *row, int32_t first, const RowShape &s,
                                           uint64_t policy)
{
    uint4 zeros[V];
#pragma unroll
    for (int v = 0; v < V; v++) zeros[v] = make_uint4(0, 0, 0, 0);
    store_piece<V, EXACT>(row, first, s, zeros, policy);
}

__device__ __forceinline__ uint4 poison_vector()
{
    return make_uint4(POISON, POISON, POISON, POISON);
}

/* Returns true if any word of the vector is poison, the mark of a word that has not arrived
 * (heap.h). Poison is the largest 32-bit value, so it is enough to compare the maximum of the
 * words. */
__device__ __forceinline__ bool has_poison(uint4 q)
{
    return max(max(q.x, q.y), max(q.z, q.w)) == POISON;
}

/* Returns `nan` if `word` is poison (0xffffffff), otherwise `word`. Senders call it because the
 * caller's data may contain a NaN with the bits of poison. The receiver would take such a NaN
 * for a word that has not arrived. Results of arithmetic are never poison. */
__device__ __forceinline__ uint32_t replace_poison(uint32_t word, uint32_t nan)
{
    return word == POISON ? nan : word;
}

__device__ __forceinline__ uint4 replace_poisons(uint4 q, uint32_t nan)
{
    return make_uint4(replace_poison(q.x, nan), replace_poison(q.y, nan),
                      replace_poison(q.z, nan), replace_poison(q.w, nan));
}

/* Returns where this lane's first vector of a piece begins: the offset in bytes from the
 * beginning of the row. `vector`: index in the row of the piece's first vector. */
__device__ __forceinline__ int64_t lane_offset(int32_t vector)
{
    return (int64_t)((uint32_t)(vector + lane_id()) * 16u);
}

/* Rounds a size up to whole cache lines of 128 bytes, so that the shared memory of each warp
 * begins at a cache line. Most rows in global memory also begin at a cache line, and copies are
 * faster if source and destination have the same offset in their lines. */
static constexpr int round_up_to_lines(int bytes)
{
    return (bytes + 127) / 128 * 128;
}

/* A ring buffer of pieces in shared memory, used by one warp. Asynchronous copies (cp.async)
 * fill it in the order in which the warp uses the pieces. Each lane reads only the bytes that
 * it has copied itself, so no barrier is needed. The ring has AHEAD + 1 buffers. While the warp
 * uses one of them, the other AHEAD buffers are being filled. */
template <int V, bool EXACT> struct PieceRing {
    static constexpr int AHEAD = V > 4 ? 2 : 3, PIECE_BYTES = V * WARP * 16;
    static constexpr int BYTES = (AHEAD + 1) * PIECE_BYTES;
    uint32_t memory; /* shared-memory address of this lane's bytes in the first buffer */
    /* offset from `memory` of the buffer that the warp next reads and then fills again */
    uint32_t next = 0;

    /* warp_memory: BYTES bytes of shared memory for this warp. */
    __device__ __forceinline__ explicit PieceRing(const void *warp_memory)
        : memory(shared_address(warp_memory) + lane_id() * 16)
    {
    }
    /* Starts to copy this lane's vectors of a piece into the next buffer. `from`: address of
     * the lane's first vector. `vector`: index in the row of the piece's first vector. `once`:
     * true if no kernel reads the row again soon. */
    __device__ __forceinline__ void copy_piece(const uint8_t *from, int32_t vector,
                                               const RowShape &s, bool once, uint64_t policy)
    {
#pragma unroll
        for (int v = 0; v < V; v++) {
            if (!EXACT && vector + v * WARP + lane_id() >= s.vectors) continue;
            const uint32_t to = memory + next + v * WARP * 16;
            if (once)
                copy_once(to, from + v * WARP * 16, policy);
            else
                copy_again(to, from + v * WARP * 16);
        }
    }
    /* Ends the group of copies of one piece and moves to the next buffer. Must be called once
     * per buffer, even if nothing is copied to it, because wait_next() counts the groups. */
    __device__ __forceinline__ void commit_piece()
    {
        end_copies();
        next = next + PIECE_BYTES == BYTES ? 0 : next + PIECE_BYTES;
    }
    /* Waits until the oldest piece is in shared memory. Requires that the caller has called
     * commit_piece() for the AHEAD pieces after the oldest one. */
    __device__ __forceinline__ void wait_next()
    {
        wait_copies<AHEAD>();
    }
    /* Waits for the oldest piece as wait_next() does, and reads this lane's vectors of the
     * piece into q. `first`: index in the row of the piece's first vector. */
    __device__ __forceinline__ void read_piece(uint4 (&q)[V], int32_t first, const RowShape &s,
                                               uint32_t fill = 0)
    {
        wait_copies<AHEAD>();
#pragma unroll
        for (int v = 0; v < V; v++) {
            q[v] = load_shared(memory + next + v * WARP * 16);
            if (!EXACT && first + v * WARP + lane_id() >= s.vectors)
                q[v] = make_uint4(fill, fill, fill, fill);
        }
    }
};

/* Processes all units of a warp. The pieces of the units go through a PieceRing. While the warp
 * processes one unit, the next AHEAD units have begun, and AHEAD pieces are being copied.
 * Units: CombineStream or GradientStream. Called by a whole warp. Returns false if the group
 * has failed. */
template <class Units> __device__ __forceinline__ bool run_units(Units &&units)
{
    bool ok = true;
#pragma unroll 1
    for (int i = 0; i < Units::AHEAD; i++) units.begin_unit();
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < Units::AHEAD; i++) units.copy_next();
#pragma unroll 1
    while (ok && units.used != units.begun) ok = units.use_unit();
    wait_copies<0>();
    return ok;
}

/* ----------------------------------------------------------------------- element types ---- */

/* Element types of rows. Each type converts a vector of 16 bytes to N floats and back.
 * NAN_WORD: the word that replaces poison in rows that are sent. MINUS_ZERO: a word whose
 * elements are all -0. */
struct Bf16 {
    static constexpr int N = 8; /* number of elements per vector */
    static constexpr uint32_t NAN_WORD = 0x7fff7fffu, MINUS_ZERO = 0x80008000u;
    static __device__ __forceinline__ void unpack_floats(uint4 q, float *x)
    {
        const uint32_t w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[2 * i] = __uint_as_float(w[i] << 16);
            x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
        }
    }
    static __device__ __forceinline__ uint32_t pack_pair(float low, float high)
    {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *(const uint32_t *)&pair;
    }
    static __device__ __forceinline__ uint4 pack_floats(const float *x)
    {
        return make_uint4(pack_pair(x[0], x[1]), pack_pair(x[2], x[3]), pack_pair(x[4], x[5]),
                          pack_pair(x[6], x[7]));
    }
};

struct F16 {
    static constexpr int N = 8;
    static constexpr uint32_t NAN_WORD = 0x7fff7fffu, MINUS_ZERO = 0x80008000u;
    static __device__ __forceinline__ void unpack_floats(uint4 q, float *x)
    {
        const uint32_t w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = __half22float2(*(const __half2 *)&w[i]);
            x[2 * i] = pair.x;
            x[2 * i + 1] = pair.y;
        }
    }
    static __device__ __forceinline__ uint32_t pack_pair(float low, float high)
    {
        const __half2 pair = __floats2half2_rn(low, high);
        return *(const uint32_t *)&pair;
    }
    static __device__ __forceinline__ uint4 pack_floats(const float *x)
    {
        return make_uint4(pack_pair(x[0], x[1]), pack_pair(x[2], x[3]), pack_pair(x[4], x[5]),
                          pack_pair(x[6], x[7]));
    }
};

struct F32 {
    static constexpr int N = 4;
    static constexpr uint32_t NAN_WORD = 0x7fffffffu, MINUS_ZERO = 0x80000000u;
    static __device__ __forceinline__ void unpack_floats(uint4 q, float *x)
    {
        x[0] = __uint_as_float(q.x);
        x[1] = __uint_as_float(q.y);
        x[2] = __uint_as_float(q.z);
        x[3] = __uint_as_float(q.w);
    }
    static __device__ __forceinline__ uint4 pack_floats(const float *x)
    {
        return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                          __float_as_uint(x[3]));
    }
};

/* -------------------------------------------------------------- dealing units to warps ---- */

/* How units are divided among warps. All units of an operation form one list, which is ordered
 * by token, then by role, then by span of the row. A role is a kind of work, for example to
 * send, or to receive from source rank 1.
 *
 *   index of a unit = (step * roles + role) * spans + span
 *
 * Here `step` is the index of the token. If W warps take part, warp w processes units w, w + W,
 * w + 2 * W, ... So the index of its next unit is greater by W. The members `step`, `role` and
 * `span` of a Stride are this distance W, split in the same way as the index of a unit. `roles`
 * is the number of roles, `spans` the number of spans of a row, and `total_warps` is W. Each
 * CTA has a Stride in shared memory. */
struct Stride {
    int step, role, span, roles, spans, total_warps;

    /* Sets all members, so that total_warps = (step * roles + role) * spans + span. The first
     * num_warps warps of the grid take part in the work. */
    __device__ void set_strides(int num_warps, int num_roles, int num_spans)
    {
        total_warps = num_warps;
        roles = num_roles;
        spans = num_spans;
        span = total_warps % spans;
        role = total_warps / spans % roles;
        step = total_warps / spans / roles;
    }
};

/* the step of a warp that has no more units: larger than every step of a list */
#define NO_STEP (1 << 30)

/* The position of a warp in the list of units: the step, role and span of its current unit. */
struct UnitWalk {
    int step, role, span;

    __device__ __forceinline__ explicit UnitWalk(const Stride &s)
    {
        const int first = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
        span = first % s.spans;
        role = first / s.spans % s.roles;
        step = first < s.total_warps ? first / s.spans / s.roles : NO_STEP;
    }
    /* Moves on to this warp's next unit. Adds the stride with carries, because divisions are
     * slow. */
    __device__ __forceinline__ void next_unit(const Stride &s)
    {
        span += s.span;
        role += s.role;
        step += s.step;
        if (span >= s.spans) span -= s.spans, role++;
        if (role >= s.roles) role -= s.roles, step++;
    }
};

/* Returns the number of groups of `roles` roles, which are the roles of a Stride that a
 * WorkWalk uses. */
__host__ __device__ __forceinline__ int num_role_groups(int roles)
{
    return MANY_RANKS ? (roles + WARP - 1) / WARP : roles;
}

#if MANY_RANKS
/* A UnitWalk that visits only units that have work. With many ranks, a rank receives nothing
 * from most sources for most tokens. If a warp visited these units, the work of a rank would
 * grow with the number of all tokens of the group. So the list has one unit for each group of
 * 32 roles. When the warp comes to a group, its lanes find out together which roles of the
 * group have work, and the warp then visits these roles in ascending order. In libraries for
 * few ranks each role has its own units, also those without work.
 *
 * Find::first_role(group) returns the first role of a group. find(walk, group) returns a bit
 * mask of the roles that have work: bit n stands for role first_role(group) + n. For a step
 * after the end of the list it must not return 0. */
struct WorkWalk : UnitWalk {
    int group;
    uint32_t left; /* the roles of the group that the walk still has to visit */

    __device__ __forceinline__ explicit WorkWalk(const Stride &s) : UnitWalk(s), group(role)
    {
    }
    /* Selects the warp's first unit. */
    template <class Find>
    __device__ __forceinline__ void begin_walk(const Stride &s, Find &find)
    {
        left = find(*this, group);
        next_unit(s, find);
    }
    /* Moves on to the warp's next unit that has work. */
    template <class Find> __device__ __forceinline__ void next_unit(const Stride &s, Find &find)
    {
        while (!left) {
            role = group;
            UnitWalk::next_unit(s);
            group = role;
            left = find(*this, group);
        }
        role = Find::first_role(group) + __ffs(left) - 1;
        left &= left - 1;
    }
};
#else
struct WorkWalk : UnitWalk {
    __device__ __forceinline__ explicit WorkWalk(const Stride &s) : UnitWalk(s)
    {
    }
    template <class Find> __device__ __forceinline__ void begin_walk(const Stride &, Find &)
    {
    }
    template <class Find> __device__ __forceinline__ void next_unit(const Stride &s, Find &)
    {
        UnitWalk::next_unit(s);
    }
};
#endif

static inline int common_divisor(int a, int b)
{
    while (b) {
        const int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Returns the number of units of a token: the number of roles times the number of spans.
 * `vectors`: number of vectors per lane of a piece. */
template <class Job> static inline int units_per_token(const Job &job, int roles, int vectors)
{
    const int64_t span_bytes = (int64_t)job.span * vectors * 512;
    return roles * (int)((job.row_bytes + span_bytes - 1) / span_bytes);
}

/* Decides how a launch divides its units among warps, and stores the result in three fields of
 * the job. `block`: number of threads of a CTA. `vectors`: number of vectors per lane of a
 * piece. The rules are measured (docs/lab/cuda.md).
 *
 *   job.span   number of pieces per unit. A unit has a fixed cost, so long spans are better, as
 *              long as all warps are equally busy.
 *   job.lag    number of tokens by which receiving stays behind sending. It is about the number
 *              of tokens that all warps together process at a time, so that pieces have arrived
 *              when warps read them.
 *   job.total_warps
 *              number of warps that take part. A token has `kinds` units, one for each pair of
 *              role and span. The number of warps and `kinds` have no common divisor above 1,
 *              so that each warp gets all pairs one after the other. The role and span of a
 *              warp's next unit should also be far from those of its last unit. Otherwise a
 *              warp would do similar work for a long time, and get ahead of the other warps or
 *              fall behind. */
template <class Job>
static inline void deal_units(Job &job, int num_sms, int block, int roles, int vectors)
{
    const int warps = num_sms * (block / WARP),
              tokens = job.num_tokens > 1 ? job.num_tokens : 1;
    const int64_t lines = (job.row_bytes + 2047) / 2048;
    const int copies = roles - 1 + job.top_k;
    const int64_t pieces = (job.row_bytes + vectors * 512 - 1) / (vectors * 512);
    int64_t spans = (lines * copies * num_sms + 1279) / 1280;
    const int64_t least = (10 * (int64_t)warps - 1) / ((int64_t)tokens * roles) + 1;
    if (spans < least) spans = least;
    if (spans > pieces) spans = pieces;
    job.span = (int32_t)((pieces + spans - 1) / spans);
    /* if a long row is divided into several spans, each span has at most two pieces */
    const bool parts = spans > 1 && pieces > 5;
    if (parts && job.span > 2) job.span = 2;
    const int kinds = units_per_token(job, roles, vectors);
    int best = 0;
    job.total_warps = warps;
    for (int total = warps; total > 0 && total > warps - kinds; total--) {
        const int ahead = total % kinds, back = kinds - ahead;
        int turn = ahead < back ? ahead : back;
        if (turn > (kinds * 3 + 9) / 10) turn = (kinds * 3 + 9) / 10;
        if (turn <= best || common_divisor(total, kinds) != 1) continue;
        best = turn;
        job.total_warps = total;
    }
    const int at_a_time = job.total_warps / kinds, most = tokens / 8, lag = 16 + 8 * job.span;
    job.lag = at_a_time < most ? at_a_time : most;
    if (job.lag < 2 * lag) job.lag = lag;
    if (parts && job.span == 2 && job.lag > 2 * lag) job.lag = 2 * lag;
}

#endif
