/* SPDX-License-Identifier: Apache-2.0 */
/* Rows and how they are divided: pieces, the ring of pieces in shared memory, the element types
 * of rows, and how units of work are dealt to warps.
 *
 *   vector  16 bytes: what a lane loads or stores at once
 *   piece   V vectors per lane of a warp (V is 4 for most kernels: 2 KB). Vector v of lane l
 *           is vector number (piece * V + v) * 32 + l of the row.
 *   span    several pieces of one row, which a warp moves one after the other
 *   unit    the work that a warp does at a time: one span in one role (send, receive, ...)
 *
 * EXACT (template argument): rows are aligned to 16 bytes and consist of whole pieces.
 * Otherwise the last piece may be shorter, and rows may be unaligned (RowShape.aligned). */
#ifndef EPIC_ROWS_CUH
#define EPIC_ROWS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/wait.cuh"

struct RowShape { /* Sizes of the caller's rows. */
    int64_t row_bytes;
    int32_t vectors; /* vectors per row; the last one may be partly filled */
    int32_t pieces;  /* pieces per row; the last one may be shorter */
    bool aligned;    /* row addresses and sizes are multiples of 16 bytes */
};

/* Returns the sizes of rows of row_bytes bytes, with V vectors per lane and piece. */
template <int V> __device__ __forceinline__ RowShape row_shape(int64_t row_bytes, int aligned)
{
    const int32_t vectors = (int32_t)((row_bytes + 15) / 16);
    return {row_bytes, vectors, (vectors + V * WARP - 1) / (V * WARP), aligned != 0};
}

/* Returns the byte offset of row i. Both operands of the product have 32 bits, so one
 * instruction multiplies them. */
__device__ __forceinline__ int64_t row_offset(int32_t i, const RowShape &s)
{
    return (int64_t)((uint64_t)(uint32_t)i * (uint32_t)s.row_bytes);
}

/* Returns bytes [at, at + 16) of a row at any address. Bytes past the end of the row come from
 * `fill`, a 32-bit word. */
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

/* Stores bytes [at, at + 16) of a row at any address, up to the end of the row. */
static __device__ __noinline__ void store_bytes(uint8_t *row, int64_t at, int64_t row_bytes,
                                                uint4 q)
{
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (at + i < row_bytes) row[at + i] = (uint8_t)(words[i / 4] >> (i % 4 * 8));
}

/* Returns vector number `vector` of a row, with zeros past its end. Used for rows that no
 * kernel reads again soon. */
__device__ __forceinline__ uint4 load_row(const uint8_t *row, int32_t vector, const RowShape &s,
                                          uint64_t policy)
{
    const int64_t at = (int64_t)vector * 16;
    if (vector >= s.vectors) return make_uint4(0, 0, 0, 0);
    return s.aligned ? load_once(row + at, policy) : load_bytes(row, at, s.row_bytes, 0);
}

/* Like load_row(), but for rows that are read again soon, and with `fill` past the end of the
 * row. */
__device__ __forceinline__ uint4 load_row_again(const uint8_t *row, int32_t vector,
                                                const RowShape &s, uint32_t fill)
{
    const int64_t at = (int64_t)vector * 16;
    if (vector >= s.vectors) return make_uint4(fill, fill, fill, fill);
    return s.aligned ? load_again(row + at) : load_bytes(row, at, s.row_bytes, fill);
}

/* Stores vector number `vector` of a row, up to the end of the row. */
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

/* Loads this lane's part of the piece that begins with vector `first`, for rows that are read
 * again soon. `fill`: value of words past the end of the row. Called by a whole warp. */
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

/* Stores this lane's part of the piece that begins with vector `first`. */
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

/* Stores zeros to this lane's part of a piece. */
template <int V, bool EXACT>
__device__ __forceinline__ void zero_piece(uint8_t *row, int32_t first, const RowShape &s,
                                           uint64_t policy)
{
    uint4 zeros[V];
#pragma unroll
    for (int v = 0; v < V; v++) zeros[v] = make_uint4(0, 0, 0, 0);
    store_piece<V, EXACT>(row, first, s, zeros, policy);
}

/* Returns a vector that is poison in every word. */
__device__ __forceinline__ uint4 poison_vector()
{
    return make_uint4(POISON, POISON, POISON, POISON);
}

/* Returns true if any word of the vector is poison. Poison is the largest 32-bit number, so
 * comparing the maximum of the words suffices. */
__device__ __forceinline__ bool has_poison(uint4 q)
{
    return max(max(q.x, q.y), max(q.z, q.w)) == POISON;
}

/* Returns the word, or `nan` if it equals poison. Results of arithmetic are never poison, but a
 * NaN of the caller may be. */
__device__ __forceinline__ uint32_t replace_poison(uint32_t word, uint32_t nan)
{
    return word == POISON ? nan : word;
}

/* Applies replace_poison() to each word of a vector. */
__device__ __forceinline__ uint4 replace_poisons(uint4 q, uint32_t nan)
{
    return make_uint4(replace_poison(q.x, nan), replace_poison(q.y, nan),
                      replace_poison(q.z, nan), replace_poison(q.w, nan));
}

/* Returns the byte offset of this lane's part of the piece that begins with `vector`. */
__device__ __forceinline__ int64_t lane_offset(int32_t vector)
{
    return (int64_t)((uint32_t)(vector + lane_id()) * 16u);
}

/* Rounds a size up to whole cache lines, so that the shared memory of each warp begins at a
 * line. Most rows begin at a line, too, and copies are faster between equal offsets in a line.
 */
static constexpr int round_up_to_lines(int bytes)
{
    return (bytes + 127) / 128 * 128;
}

/* A warp's ring of pieces in shared memory. Asynchronous copies (cp.async) fill it ahead of
 * use, in the order of use. Each lane reads back only what it copied itself, so no barrier is
 * needed. The ring has AHEAD + 1 buffers of one piece each: one is in use, AHEAD are being
 * filled. The buffer in use is the next one to be filled. */
template <int V, bool EXACT> struct PieceRing {
    static constexpr int AHEAD = V > 4 ? 2 : 3, PIECE_BYTES = V * WARP * 16;
    static constexpr int BYTES = (AHEAD + 1) * PIECE_BYTES;
    uint32_t memory; /* shared-memory address of this lane's part of the ring */
    /* offset of the buffer that is read next and then filled */
    uint32_t next = 0;

    /* warp_memory: BYTES bytes of shared memory for this warp. */
    __device__ __forceinline__ explicit PieceRing(const void *warp_memory)
        : memory(shared_address(warp_memory) + lane_id() * 16)
    {
    }
    /* Starts to copy this lane's part of a piece into the ring. `from`: address of that part.
     * `vector`: first vector of the piece. `once`: no kernel reads the row again soon. */
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
    /* Ends the group of asynchronous copies of one piece and moves to the next buffer. Called
     * once per piece, even if nothing was copied. */
    __device__ __forceinline__ void commit_piece()
    {
        end_copies();
        next = next + PIECE_BYTES == BYTES ? 0 : next + PIECE_BYTES;
    }
    /* Waits until the oldest piece has arrived. The copies of the AHEAD pieces after it must
     * have been committed. */
    __device__ __forceinline__ void wait_next()
    {
        wait_copies<AHEAD>();
    }
    /* Waits for the oldest piece and reads this lane's part to q. `first`: first vector of the
     * piece. `fill`: value of words past the end of the row. The copies of the AHEAD pieces
     * after it must have been committed. */
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

/* Does all units of a warp, whose pieces go through a ring. Keeps AHEAD units begun and the
 * copies of AHEAD pieces in flight. Units: a stream of combine or combine_backward. Called by a
 * whole warp. Returns false if the group is broken. */
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

/* The element types of rows. Each converts a vector of 16 bytes to N floats and back. NAN_WORD
 * replaces a NaN of the caller that equals poison. */
struct Bf16 {
    static constexpr int N = 8; /* elements per vector */
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

/* How units are dealt. All units of an operation form one list: for each step (one token), for
 * each role (send, receive from source 1, ...), for each span of the row:
 *
 *   unit number = (step * roles + role) * spans + span
 *
 * Warp w of W in the grid has units w, w + W, w + 2 W, ... */
/* Distance from a warp's unit to its next one (step, role, span) and the sizes of the list
 * (roles, spans per row, warps that take part). In shared memory. */
struct Stride {
    int step, role, span, roles, spans, units;

    /* Sets the distance if the first `num_units` warps of the grid take part. */
    __device__ void set_strides(int num_units, int num_roles, int num_spans)
    {
        units = num_units;
        roles = num_roles;
        spans = num_spans;
        span = units % spans;
        role = units / spans % roles;
        step = units / spans / roles;
    }
};

#define NO_STEP (1 << 30) /* step of warps that take no part: after all steps */

/* A warp's current position in the list of units. */
struct UnitWalk {
    int step, role, span;

    /* Begins at the first unit of this warp. */
    __device__ __forceinline__ explicit UnitWalk(const Stride &s)
    {
        const int first = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
        span = first % s.spans;
        role = first / s.spans % s.roles;
        step = first < s.units ? first / s.spans / s.roles : NO_STEP;
    }
    /* Moves to the next unit of this warp. Uses only additions, because a division would be
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

static inline int common_divisor(int a, int b)
{
    while (b) {
        const int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Returns the number of units per token: roles times spans of its row. `vectors`: vectors per
 * lane and piece. */
template <class Job> static inline int units_per_token(const Job &job, int roles, int vectors)
{
    const int64_t span_bytes = (int64_t)job.span * vectors * 512;
    return roles * (int)((job.row_bytes + span_bytes - 1) / span_bytes);
}

/* Chooses how a launch deals its units to warps, and sets it in the job. Measured:
 * docs/lab/cuda.md.
 *
 *   job.span   pieces per unit. A unit has a fixed cost, so a row has as few spans as keep
 *              all warps equally busy.
 *   job.lag    tokens by which receiving stays behind sending: about as many as all warps
 *              work on at a time, so that pieces have arrived when they are copied
 *   job.units  number of warps that take part. A token has `kinds` units, one for each role
 *              and span. The number of warps has no common divisor with `kinds`, so that each
 *              warp gets every kind in turn. Successive units of a warp should also be of
 *              distant kinds, because a warp that does similar work for long would get ahead
 *              of the others or fall behind. */
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
    /* spans of a long row: at most two pieces each */
    const bool parts = spans > 1 && pieces > 5;
    if (parts && job.span > 2) job.span = 2;
    const int kinds = units_per_token(job, roles, vectors);
    int best = 0;
    job.units = warps;
    for (int units = warps; units > 0 && units > warps - kinds; units--) {
        const int ahead = units % kinds, back = kinds - ahead;
        int turn = ahead < back ? ahead : back;
        if (turn > (kinds * 3 + 9) / 10) turn = (kinds * 3 + 9) / 10;
        if (turn <= best || common_divisor(units, kinds) != 1) continue;
        best = turn;
        job.units = units;
    }
    const int at_a_time = job.units / kinds, most = tokens / 8, lag = 16 + 8 * job.span;
    job.lag = at_a_time < most ? at_a_time : most;
    if (job.lag < 2 * lag) job.lag = lag;
    if (parts && job.span == 2 && job.lag > 2 * lag) job.lag = 2 * lag;
}

#endif
