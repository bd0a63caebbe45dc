/* SPDX-License-Identifier: Apache-2.0 */
/* The arguments ("jobs") of the CUDA kernels, and the functions that launch the kernels. Plain
 * C. docs/reference/glossary.md explains words such as choice, slot, slab and FLAT.
 *
 * A launcher enqueues one kernel on the stream and returns. CUDA copies the job as the kernel's
 * parameter. A rank runs one operation at a time. The CTAs of a kernel wait for each other and
 * for peers, so all of them must be resident at once, one per SM. If ranks share a GPU, the
 * CTAs of all these ranks must be resident at once. */
#ifndef EPIC_CUDA_KERNELS_H
#define EPIC_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "cuda/common/heap.h"
#include "epic/epic.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kinds of errors in the data of an operation (class (b) of epic.h). The comment of each kind
 * ends with the values that p2p_notice.about contains. */
typedef enum p2p_fault {
    /* an id is not an expert of the layer; about: token, k, id, num_experts */
    P2P_FAULT_EXPERT = 0,
    /* rank_of_expert has an invalid rank or, with EPIC_TREE, does not place whole blocks of
     * experts; about: expert, rank */
    P2P_FAULT_PLACEMENT = 1,
    /* the capacity is below the number of slots that this rank needs; about: capacity, needed
     * slots */
    P2P_FAULT_CAPACITY = 2,
    /* a buffer has too few rows; about: rows of the buffer, needed rows, epic_operation */
    P2P_FAULT_ROWS = 3,
    /* the bytes passed as plan are not a plan of this rank and group */
    P2P_FAULT_PLAN = 4,
    /* the call does not have as many tokens as the plan; about: tokens of the call, tokens of
     * the plan, epic_operation */
    P2P_FAULT_TOKENS = 5,
    /* a token has the same expert twice; about: token, k, id */
    P2P_FAULT_DUPLICATE = 6,
    /* an id is not a logical expert; about: token, k, id, num_logical */
    P2P_FAULT_LOGICAL = 7,
    /* logical_of_expert has an invalid value; about: expert, value, num_logical */
    P2P_FAULT_REPLICA = 8,
    /* a logical expert has no replica; about: logical expert */
    P2P_FAULT_NO_REPLICA = 9,
    /* the plan was made with another layer */
    P2P_FAULT_LAYER = 10,
    /* sum_replicas: `data` of a rank has too few rows; about: rows of `data`, needed rows (the
     * maximum number of experts that a rank owns) */
    P2P_FAULT_LOCAL = 11,
    /* some rank owns more experts than num_local_experts of epic_experts; about:
     * num_local_experts, maximum number of experts of a rank */
    P2P_FAULT_TOO_MANY_LOCAL = 12,
    /* an expert is on a vacant seat; about: expert, rank */
    P2P_FAULT_VACANT = 13,
    /* the leaves of the sum tree cannot be divided among the members; about: leaves, members */
    P2P_FAULT_MEMBERS = 14
} p2p_fault;

/* A notice reports an error in the data of an operation. A kernel writes the notice to host
 * memory. It writes `result` (an epic_result) last, so that the host never reads an incomplete
 * notice. After the host has read the notice, it sets `result` to 0 (EPIC_OK). */
typedef struct p2p_notice {
    uint32_t result;
    uint32_t epoch;
    uint32_t fault; /* enum p2p_fault */
    int32_t rank;
    int64_t about[4]; /* values that describe the error, see p2p_fault */
} p2p_notice;

/* Maximum number of unread notices. If the host has not read this many notices, kernels report
 * no further errors. */
#define P2P_NOTICES 8

/* Host memory through which a rank's kernels and its process communicate. Kernels report
 * failures and data errors. The host reports dead processes, and regularly increments a counter
 * of beats (P2P_AWAKE) to show that it runs. */
typedef struct p2p_status {
    /* enum epic_result: why the group has failed, or EPIC_OK; a kernel writes it last */
    uint32_t result;
    uint32_t operation; /* enum epic_operation: the operation that failed */
    uint32_t epoch;
    uint32_t phase;    /* what the reporter waited for: an enum p2p_phase */
    uint32_t reporter; /* rank that found the failure */
    /* the ranks at fault: a bit mask or, with MANY_RANKS, up to three ranks (pack_ranks()) */
    uint32_t culprits;
    /* if ranks called different operations: the signatures (hashes of arguments) of the
     * reporter and of one peer with another signature */
    uint32_t own_signature, peer_signature;
    /* written by the host: bit mask of the ranks whose processes have died */
    uint32_t dead[DEVICE_RANK_WORDS];
    uint32_t deadline_ms; /* time limit of the operation that failed */
    /* A value of P2P_AWAKE() that a host thread updates regularly. It shows kernels that the
     * process is not suspended. 0: there is no such thread. */
    uint64_t awake;
    p2p_notice notices[P2P_NOTICES];
    /* Copies of the fields of p2p_waits. The process reads them and shows them to epic-info. A
     * kernel that adds to a waiting time also stores the new sum here, together with the number
     * of operations of this kind. */
    uint64_t num_operations[P2P_OPERATIONS];
    p2p_wait_time waits[P2P_OPERATIONS][DEVICE_MAX_RANKS];
} p2p_status;

/* Packs two counts into one word: the number of times that a host thread has run (beats), and
 * the number of times that it found that the process had been suspended (stops). The counts
 * share one word, so a kernel that sees a new beat also sees all stops before this beat. */
#define P2P_AWAKE(stops, beats) ((uint64_t)(stops) << 32 | (uint32_t)(beats))
/* If the process was suspended, the deadlines of a rank's waits are postponed, at most this
 * many times in a row. A wait that succeeds sets the count of postponements to 0. */
#define P2P_POSTPONE_LIMIT 4

/* The reason why a rank waited when an operation failed. */
typedef enum p2p_phase {
    P2P_PHASE_NONE = 0,
    P2P_PHASE_ARRIVE = 1, /* the announcement of a peer */
    P2P_PHASE_COUNTS = 2, /* a peer's counts of choices */
    /* the record of a token (the list of its slots on this rank), which the token's rank
     * sends */
    P2P_PHASE_RECORD = 3,
    P2P_PHASE_ROW = 4,   /* a row */
    P2P_PHASE_FLOAT = 5, /* a weight or its gradient */
    P2P_PHASE_GRID = 6,  /* other CTAs of the same rank */
    /* Not a wait: ranks passed different tables rank_of_expert or logical_of_expert. */
    P2P_PHASE_TABLE = 7,
    /* not a wait: two operations of this rank ran at the same time */
    P2P_PHASE_OVERLAP = 8
} p2p_phase;

/* Packs the word `broken`, which describes why the group failed. `reporter`: the rank that
 * found the failure. `culprits`: the ranks at fault, as in p2p_status.culprits. */
#define P2P_BROKEN(result, operation, reporter, phase, culprits)                \
    ((uint64_t)(result) | (uint64_t)(operation) << 4 | (uint64_t)(phase) << 8 | \
     (uint64_t)(reporter) << 12 | (uint64_t)(culprits) << 32)

/* Bits 20 to 31 of `broken`: the number of the generation, modulo 2^12. A generation is a
 * period without a change of members. If a group continues without one of its ranks, that
 * rank's words have the number of an old generation, so the other ranks ignore these words. */
#define P2P_BROKEN_IN(generation) ((uint64_t)((generation)&0xfff) << 20)

/* An entry of the ring through which kernels request puts (net/net.cuh). A put copies `words`
 * words of 8 bytes from this rank's outbox to the same offset in the inbox of rank `peer`.
 * `word` is the index of the first of these words. Bits 0 to 32: `word`. The next
 * P2P_ENTRY_WORDS_BITS bits: `words`. The next bits up to bit 55: `peer`. Bits 56 to 63: the
 * lap. It is 1 + n % 255 if kernels had filled the whole ring n times before this entry. A
 * reader knows which lap the next entry has, and ignores an entry of an older lap. */
#define P2P_RING_ENTRIES (1u << 15)
/* number of bits of `words`; with MANY_RANKS, `peer` needs more bits, so `words` has fewer */
#define P2P_ENTRY_WORDS_BITS (MANY_RANKS ? 13 : 18)
#define P2P_ENTRY(peer, word, words)                                             \
    ((uint64_t)(peer) << (33 + P2P_ENTRY_WORDS_BITS) | (uint64_t)(words) << 33 | \
     (uint64_t)(word))
#define P2P_ENTRY_MOST_WORDS (1 << (P2P_ENTRY_WORDS_BITS - 1))
#define P2P_ENTRY_LAP(index) ((uint64_t)(1 + (index) / P2P_RING_ENTRIES % 255) << 56)
#define P2P_ENTRY_PEER(entry) \
    ((int)((entry) >> (33 + P2P_ENTRY_WORDS_BITS) & (MANY_RANKS ? 1023 : 31)))
#define P2P_ENTRY_WORDS(entry) ((uint32_t)((entry) >> 33 & ((1u << P2P_ENTRY_WORDS_BITS) - 1)))
#define P2P_ENTRY_WORD(entry) ((entry)&0x1ffffffffull)
/* value of `word` that marks the end of an epoch; a heap has fewer words than this */
#define P2P_EPOCH_ENDS 0x1ffffffffull

/* The ring through which kernels request puts, and its counters. All are in host memory. */
typedef struct p2p_ring {
    uint64_t *entries; /* [P2P_RING_ENTRIES], written by kernels */
    struct p2p_ring_words *words;
} p2p_ring;

typedef struct p2p_ring_words {
    /* number of entries that the proxy thread has read; written by the proxy thread */
    uint64_t taken;
    /* Number of operations for which the net has read all data from the outbox. The half of the
     * outbox that these operations used may be overwritten. Written by the proxy thread. */
    uint64_t freed;
    /* The word `waits` of this rank: the ranks for which this rank waits (heap.h). Kernels
     * write the word, and the proxy thread sends it to all ranks. */
    uint64_t waits;
} p2p_ring_words;

/* Number of bits of a count of choices in words that also contain a rank and a flag. The bits
 * must suffice for the number of all choices of one rank. */
#define P2P_COUNT_BITS (MANY_RANKS ? 23 : 26)

/* The part of p2p_self that only the backend `hosts` has. */
typedef struct p2p_net {
    p2p_ring ring;
    /* memory into which the net copies words from other hosts; it has the layout of a heap */
    uint8_t *inbox;
    /* size in bytes of the inbox if it is in host memory, where polls are slow; otherwise 0 */
    int64_t host_inbox_bytes;
    /* bit mask of the ranks on this host, including this rank */
    uint32_t host_ranks[DEVICE_RANK_WORDS];
    /* number of ranks per host if rows go through relays (net/relay.cuh), otherwise 0 */
    int32_t ranks_per_host;
    /* this rank sends at least this many tokens before it waits for a token; 0: no minimum */
    int32_t window_tokens;
} p2p_net;

/* The first field of every job: describes the rank and its group. */
typedef struct p2p_self {
    /* heap[q]: address of rank q's heap; if q is on another host, address of this rank's
     * outbox */
    uint8_t *heap[DEVICE_MAX_RANKS];
    p2p_heap at;        /* layout of every heap */
    p2p_status *status; /* device address; the status is in host memory */
    uint64_t group_id;
    uint64_t timeout_ns;
    int64_t max_tokens;
    int32_t rank, num_ranks;
    uint32_t operation; /* enum epic_operation */
    /* a hash of the arguments of the call that must be equal on all ranks */
    uint32_t signature;
    /* if layer_hashes[0] is not 0: only plans of a layer with one of these two hashes are
     * accepted */
    uint32_t layer_hashes[2];
    __extension__ p2p_net net[HOSTS]; /* backend `hosts` only (hosts.h) */
} p2p_self;

/* Arguments of the operation plan, which finds a slot for every choice. A *choice* is a token
 * and one of its top_k experts. */
typedef struct p2p_plan_job {
    p2p_self self;
    epic_layer layer;      /* with all defaults filled in */
    device_plan_layout at; /* offsets of the arrays in the plans of this layer */
    /* output of the operation plan; an existing plan (input) if `planners` is 0 */
    uint8_t *plan;
    /* [num_tokens, top_k]: expert id of each choice; negative: no expert */
    const void *topk_idx;
    /* [num_experts]: rank of each expert; NULL: rank r owns [r * block, (r + 1) * block) */
    const int32_t *rank_of_expert;
    /* [num_experts]: logical expert of each expert; used only if layer.num_logical is not 0 */
    const int32_t *logical_of_expert;
    /* outputs with the shapes of epic_plan_args (epic.h); NULL: not needed */
    int32_t *expert_rows, *expert_tokens, *load, *logical_load, *demand;
    int64_t *expert_rows_i64, *expert_tokens_i64;
    /* In device memory: the maximum number of slots that this rank may use (values below 1
     * count as 1). NULL: no limit. */
    const int32_t *capacity_limit;
    int32_t num_tokens;
    /* number of slots of the receive buffer; 0: no limit; see read_capacity()
     * (plan/view.cuh) */
    int32_t capacity;
    int32_t block;         /* number of experts per rank if rank_of_expert is NULL */
    int32_t has_int64_ids; /* 1: topk_idx is int64; 0: int32 */
    /* number of CTAs that make the plan; they are the first CTAs of the grid. 0: the plan
     * exists already */
    int32_t planners;
    int32_t is_lowlat; /* 1: use the low-latency planner (lowlat/plan.cuh) */
    /* maximum number of tokens per rank with which the low-latency planner is used */
    int32_t max_lowlat_tokens;
    /* 1: if choices must be dropped, the choices with the highest k are dropped first
     * (plan/keep_by_k.cuh) */
    int32_t by_k;
    /* 1: topk_idx contains ids of logical experts, and plan/resolve.cuh chooses their
     * replicas */
    int32_t resolves;
} p2p_plan_job;

/* Maximum of num_experts * top_k of a layer with EPIC_BY_K. The planner has one counter for
 * each pair (expert, k), so this number is limited. */
#define P2P_BY_K_TALLIES DEVICE_MAX_EXPERTS

/* Returns 1 if lowlat/plan.cuh can make plans of this layer for up to `most` tokens per rank.
 * `alone`: 1 if the kernel only makes a plan, 0 if it also sends rows. The result is equal on
 * all ranks, because it depends only on the arguments. */
static inline int p2p_can_plan_lowlat(int64_t ranks, int64_t most, const epic_layer *layer,
                                      int alone)
{
    const int64_t masks = ranks * ((most + 31) / 32) * layer->num_experts;
    const int64_t ids = ranks * most * device_round_up(layer->top_k, P2P_LOWLAT_LANE_IDS);
    return most <= (alone ? P2P_LOWLAT_OTHER_TOKENS : P2P_LOWLAT_TOKENS) &&
           ids <= (alone ? P2P_LOWLAT_ALONE_IDS : P2P_LOWLAT_IDS) &&
           masks <= (alone ? P2P_LOWLAT_ALONE_MASKS : P2P_LOWLAT_MASKS) && layer->top_k <= 32 &&
           layer->num_experts <= P2P_LOWLAT_EXPERTS && layer->alignment <= 1 << 16 &&
           layer->num_logical == 0 && !(layer->flags & EPIC_DROP_ABSENT) &&
           layer->overflow == EPIC_OVERFLOW_ERROR && layer->layout == EPIC_EXPERT_MAJOR;
}

/* Returns the maximum number of tokens per rank for which lowlat/plan.cuh makes plans of this
 * layer. Tries `most`, 512, 256, 128 and 64 in this order, and returns the first number that
 * p2p_can_plan_lowlat() accepts, or 0 if it accepts none. */
static inline int32_t p2p_lowlat_plan_tokens(int64_t ranks, int64_t most,
                                             const epic_layer *layer, int alone)
{
    while (most > 0 && !p2p_can_plan_lowlat(ranks, most, layer, alone))
        most = most > 512 ? 512 : most > 256 ? 256 : most > 128 ? 128 : most > 64 ? 64 : 0;
    return (int32_t)most;
}

/* Arguments of the operation dispatch, which moves rows of tokens to the slots of their
 * experts. If plan.planners is above 0, the same kernel also makes the plan. */
typedef struct p2p_dispatch_job {
    p2p_plan_job plan;
    int64_t plan_bytes;
    const uint8_t *tokens; /* [num_tokens, token_bytes]: rows of this rank's tokens */
    uint8_t *recv;         /* output [recv_rows, row_bytes]: the receive buffer */
    /* [num_tokens, top_k]: weights of the choices; NULL: no weights are sent */
    const float *weights;
    /* output [recv_rows]: weight of each slot. FLAT: [recv_rows, top_k]: weights of the choices
     * of each row */
    float *slot_weights;
    int32_t *recv_expert; /* FLAT only: output [recv_rows, top_k]: local experts of each row */
    int64_t row_bytes;
    int32_t num_tokens, recv_rows; /* recv_rows: number of rows of recv */
    int32_t aligned; /* 1: the addresses of all rows, and row_bytes, are multiples of 16 */
    /* 1: the kernel for FLAT plans must be used. The other kernels can only move rows with an
     * existing FLAT plan. They cannot make a FLAT plan, move weights or write recv_expert. */
    int32_t flat;
    /* zero_tail: 1 if the slots after the last slab are zeroed. leave_padding: 1 if padding
     * slots (the slots without a token at the end of each slab) are not zeroed. */
    int32_t zero_tail, leave_padding;
    int32_t top_k;
    /* Tokens [0, num_early_tokens) are sent by other CTAs while the planner CTAs make the
     * plan. */
    int32_t num_early_tokens;
    /* low-latency kernels only: number of CTAs that only send rows; set by the launcher */
    int32_t num_send_only_ctas;
    /* In one step a warp sends one token and receives one token. If receiving is more than
     * `lag` tokens behind sending, one of every 2^catch_up steps receives two tokens
     * (dispatch/dispatch.cuh). Set by the launcher; not used by low-latency kernels. */
    int32_t catch_up;
    /* The next three fields are set by the launcher (common/rows.cuh, which also explains piece
     * and unit). */
    int32_t lag;         /* number of tokens by which receiving stays behind sending */
    int32_t span;        /* number of pieces of a row that a unit moves */
    int32_t total_warps; /* number of warps of all CTAs that move rows */
    /* The next fields up to scales_in_words, except token_bytes, are only for packed rows: rows
     * together with their scales (dispatch/packed.cuh). scale_bytes is 0 if rows have no
     * scales. */
    /* [num_tokens, scale_bytes]: the caller's scales; NULL if dispatch quantizes rows */
    const uint8_t *scales;
    uint8_t *recv_scales; /* output [recv_rows, scale_bytes] */
    int64_t scale_bytes;
    /* size in bytes of a row of `tokens`; equal to row_bytes unless dispatch quantizes */
    int64_t token_bytes;
    /* type: epic_type of the elements of `tokens`. quantize: how dispatch quantizes them
     * (epic_quantize); 0: it does not. */
    uint32_t type, quantize;
    /* scales_aligned: 1 if the scales of every row begin at a multiple of 16 bytes, and
     * scale_bytes is a multiple of 16. scales_in_words: 1 if every row of recv_scales begins at
     * a multiple of 4 bytes, and scale_bytes is a multiple of 4. */
    int32_t scales_aligned, scales_in_words;
    /* The next three fields are only for bulk stores (dispatch/bulk.cuh). The launcher sets
     * `warps` and num_buffers. */
    int32_t bulk;  /* 1: the GPU supports bulk stores */
    int32_t warps; /* number of warps of a CTA that move rows */
    /* number of packed rows that fit in the shared memory of each warp */
    int32_t num_buffers;
    /* The next fields are only for the kernels that store into windows (dispatch/windows.cuh).
     * windows [P2P_MAX_WINDOWS][DEVICE_MAX_RANKS]: the windows of all ranks; NULL if `recv` is
     * not in a window, or if the call cannot use windows. recv_place: the window that contains
     * `recv`, and the offset of `recv` in this window (p2p_window_words.place). */
    const p2p_mapped_window *windows;
    uint64_t recv_place;
    int32_t num_remote_ctas; /* number of CTAs that store rows to peers; set by the launcher */
    int32_t pad;
} p2p_dispatch_job;

/* Returns the size in bytes of a packed row: the sizes of the row and of its scales, each
 * rounded up to a multiple of 16. */
static inline int64_t p2p_packed_bytes(int64_t row_bytes, int64_t scale_bytes)
{
    return device_round_up(row_bytes, 16) + device_round_up(scale_bytes, 16);
}

/* Arguments of the operations combine and dispatch_backward. A rank adds the rows of a token's
 * slots on this rank; the result is a partial sum. The token's home rank (the rank that has the
 * token) adds the partial sums of all ranks. */
typedef struct p2p_combine_job {
    p2p_self self;
    const uint8_t *plan;
    int64_t plan_bytes;
    const uint8_t *rows;       /* [num_rows, row_bytes]: one row per slot */
    uint8_t *out;              /* output [num_tokens, row_bytes]: the sums */
    const float *slot_weights; /* [num_rows]: weight of each slot; NULL: all weights are 1 */
    /* Only in dispatch_backward, otherwise NULL: the gradient of each slot's weight. It is a
     * float that is sent back to the home rank of the slot's token. */
    const float *slot_floats;
    /* output [num_tokens, top_k]: for each choice, the float that was sent back for it (the
     * gradient of its weight) */
    float *choice_floats;
    int64_t row_bytes;
    int32_t num_tokens, num_rows;
    uint32_t type;   /* epic_type of the elements of `rows` and `out` */
    int32_t aligned; /* 1: the addresses of all rows, and row_bytes, are multiples of 16 */
    /* Adding partial sums lags behind sending partial sums by this number of tokens. */
    int32_t lag;
    /* tree: 1 if the layer's sum order is EPIC_TREE. flat: 1 if the layout is FLAT. */
    int32_t top_k, tree, flat;
    /* offsets in bytes of the arrays rank_of and records in the plan */
    int64_t rank_of_at, records_at;
    /* number of leaves (blocks of experts) of the sum tree on each rank; 0: the kernel for
     * leaves is not used */
    int32_t leaves;
    /* Only for the kernel that stores into windows (combine/windows.cu): num_remote_ctas and
     * windows are as in p2p_dispatch_job. out_place: the window that contains `out`, and the
     * offset of `out` in this window (p2p_window_words.place). */
    int32_t num_remote_ctas;
    const p2p_mapped_window *windows;
    uint64_t out_place;
} p2p_combine_job;

#define P2P_STREAM_LEAVES 8 /* maximum of p2p_combine_job.leaves; a power of two */
#define P2P_MOST_LEAVES 128 /* maximum number of leaves of the sum tree on each rank */

/* Arguments of the operation combine_backward. For each slot, it computes d_rows (the slot's
 * weight times the d_out of its token) and d_slot_weights. */
typedef struct p2p_combine_backward_job {
    p2p_self self;
    const uint8_t *plan;
    int64_t plan_bytes;
    const uint8_t *d_out; /* [num_tokens, row_bytes]: gradient of combine's output */
    /* [num_rows, row_bytes]: the rows that combine added; NULL if d_slot_weights is NULL */
    const uint8_t *rows;
    /* output: the gradient of `rows`, [num_rows, row_bytes] or, if it is quantized, [num_rows,
     * quantized_bytes] */
    uint8_t *d_rows;
    const float *slot_weights; /* [num_rows]: weight of each slot; NULL: all weights are 1 */
    float *d_slot_weights;     /* output [num_rows]: gradient of slot_weights, or NULL */
    int64_t row_bytes;
    int32_t num_tokens, num_rows; /* num_rows: number of rows of d_rows and of `rows` */
    uint32_t type;                /* epic_type of the elements of d_out and `rows` */
    /* 1: the addresses of all rows, and row_bytes, are multiples of 16. If d_rows is quantized,
     * its rows need not be aligned. */
    int32_t aligned;
    int32_t zero_tail, leave_padding;
    int32_t top_k, lag, span, total_warps;
    /* output [num_rows, scale_bytes]: the scales of d_rows. This field and the next ones, up to
     * scales_in_words, are only for quantized d_rows. */
    uint8_t *d_rows_scales;
    /* size in bytes of a row of d_rows_scales, and of a row of d_rows */
    int64_t scale_bytes, quantized_bytes;
    uint32_t quantize; /* an epic_quantize; 0: d_rows is not quantized */
    /* 1: the rows of d_rows are aligned so that a lane can store all its elements of a vector
     * with one store instruction */
    int32_t quantized_whole;
    /* 1: the scales of each row begin at a multiple of 4 bytes, and their size is a multiple of
     * 4 */
    int32_t scales_in_words;
    /* Only for combine/backward_windows.cu, which stores into windows: num_remote_ctas and
     * windows are as in p2p_dispatch_job. d_rows_place: the window that contains `d_rows`, and
     * the offset of `d_rows` in this window. */
    int32_t num_remote_ctas;
    const p2p_mapped_window *windows;
    uint64_t d_rows_place;
} p2p_combine_backward_job;

/* Arguments of the operation allreduce_sum, which adds the arrays of all ranks in place. */
typedef struct p2p_sum_job {
    p2p_self self;
    float *data;
    int64_t count;  /* number of floats in `data`, at most self.at.source_bytes / 4 */
    uint32_t order; /* EPIC_BY_RANK or EPIC_TREE */
    uint32_t pad;
} p2p_sum_job;

/* Arguments of the operation sum_replicas. For each logical expert, it adds the data of all
 * replicas. */
typedef struct p2p_sum_replicas_job {
    p2p_self self;
    const uint8_t *plan;
    int64_t plan_bytes;
    /* [num_rows, count]: the floats of this rank's experts. On return, every replica of a
     * logical expert has the sum over all its replicas. */
    float *data;
    int64_t count; /* number of floats in `data` per expert of this rank */
    int32_t num_rows;
    uint32_t pad;
} p2p_sum_replicas_job;

/* Each launcher enqueues the kernel of one operation on `stream`, with at most num_sms CTAs. It
 * returns the error of the launch. */
cudaError_t p2p_launch_plan(const p2p_plan_job *job, int num_sms, cudaStream_t stream);
cudaError_t p2p_launch_dispatch(const p2p_dispatch_job *job, int num_sms, cudaStream_t stream);
cudaError_t p2p_launch_dispatch_packed(const p2p_dispatch_job *job, int num_sms,
                                       cudaStream_t stream);
/* Returns 1 if the kernel with bulk stores (dispatch/bulk.cu) supports the job. */
int p2p_can_dispatch_bulk(const p2p_dispatch_job *job);
cudaError_t p2p_launch_dispatch_bulk(const p2p_dispatch_job *job, int num_sms,
                                     cudaStream_t stream);
/* Requires a job with windows, and aligned rows without scales. */
cudaError_t p2p_launch_dispatch_windows(const p2p_dispatch_job *job, int num_sms,
                                        cudaStream_t stream);
cudaError_t p2p_launch_combine(const p2p_combine_job *job, int num_sms, cudaStream_t stream);
/* Requires a job with windows, aligned rows, and one choice per token. */
cudaError_t p2p_launch_combine_windows(const p2p_combine_job *job, int num_sms,
                                       cudaStream_t stream);
cudaError_t p2p_launch_combine_backward(const p2p_combine_backward_job *job, int num_sms,
                                        cudaStream_t stream);
/* Requires a job with windows and aligned rows, without weights and without quantization. */
cudaError_t p2p_launch_backward_windows(const p2p_combine_backward_job *job, int num_sms,
                                        cudaStream_t stream);
cudaError_t p2p_launch_lowlat_plan(const p2p_plan_job *job, int num_sms, cudaStream_t stream);
cudaError_t p2p_launch_lowlat_dispatch(const p2p_dispatch_job *job, int num_sms,
                                       cudaStream_t stream);
cudaError_t p2p_launch_lowlat_dispatch_packed(const p2p_dispatch_job *job, int num_sms,
                                              cudaStream_t stream);
cudaError_t p2p_launch_lowlat_combine(const p2p_combine_job *job, int num_sms,
                                      cudaStream_t stream);
cudaError_t p2p_launch_flat_floats(const p2p_combine_job *job, int num_sms,
                                   cudaStream_t stream);
cudaError_t p2p_launch_sum(const p2p_sum_job *job, int num_sms, cudaStream_t stream);
cudaError_t p2p_launch_sum_replicas(const p2p_sum_replicas_job *job, int num_sms,
                                    cudaStream_t stream);

/* Each function loads the kernels of one operation on the current device. The host calls it
 * when a context is opened, because CUDA may wait until the device is idle if it loads a kernel
 * later. */
cudaError_t p2p_load_plan(void);
cudaError_t p2p_load_dispatch(void);
cudaError_t p2p_load_dispatch_packed(void);
cudaError_t p2p_load_dispatch_bulk(void);
cudaError_t p2p_load_dispatch_windows(void);
cudaError_t p2p_load_combine(void);
cudaError_t p2p_load_combine_windows(void);
cudaError_t p2p_load_combine_backward(void);
cudaError_t p2p_load_lowlat_plan(void);
cudaError_t p2p_load_lowlat_dispatch(void);
cudaError_t p2p_load_lowlat_dispatch_packed(void);
cudaError_t p2p_load_lowlat_combine(void);
cudaError_t p2p_load_flat_floats(void);
cudaError_t p2p_load_sum(void);
cudaError_t p2p_load_sum_replicas(void);

#ifdef __cplusplus
}
#endif
#endif
