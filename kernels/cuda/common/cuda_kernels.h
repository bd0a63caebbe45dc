/* SPDX-License-Identifier: Apache-2.0 */
/* The arguments ("jobs") of the CUDA kernels and the functions that launch them. Plain C.
 *
 * A job is copied into the launch; launchers enqueue on the stream and return. Kernels of one
 * group run one at a time on each rank. Every CTA of a job must be resident at once (one per
 * SM), and so must the kernels of ranks that share a GPU, because they wait for each other. */
#ifndef EPIC_CUDA_KERNELS_H
#define EPIC_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "cuda/common/heap.h"
#include "epic/epic.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kinds of errors in the data of an operation (class (b) of epic.h); comments list `about`. */
typedef enum p2p_fault {
    P2P_FAULT_EXPERT = 0,     /* token, k, id, num_experts */
    P2P_FAULT_PLACEMENT = 1,  /* expert, rank */
    P2P_FAULT_CAPACITY = 2,   /* slots, needed */
    P2P_FAULT_ROWS = 3,       /* rows, needed, operation */
    P2P_FAULT_PLAN = 4,       /* the bytes are no plan of this rank and group */
    P2P_FAULT_TOKENS = 5,     /* tokens, tokens of the plan, operation */
    P2P_FAULT_DUPLICATE = 6,  /* token, k, id */
    P2P_FAULT_LOGICAL = 7,    /* token, k, id, num_logical */
    P2P_FAULT_REPLICA = 8,    /* expert, logical expert, num_logical */
    P2P_FAULT_NO_REPLICA = 9, /* logical expert */
    P2P_FAULT_LAYER = 10,     /* the plan was made with another layer */
    P2P_FAULT_LOCAL = 11,     /* rows, local experts */
    P2P_FAULT_ROOM = 12,      /* num_local_experts, experts of a rank */
    P2P_FAULT_UNEQUAL = 13    /* tokens of rank 0, tokens of this rank */
} p2p_fault;

/* An error in the data, in host memory. The kernel writes `result` last; the reader of the
 * notice sets it back to 0. */
typedef struct p2p_notice {
    uint32_t result;
    uint32_t epoch;
    uint32_t fault; /* a p2p_fault */
    int32_t rank;   /* rank whose data is wrong */
    int64_t about[4];
} p2p_notice;

/* notices that are kept until the host reads them; later ones are dropped */
#define P2P_NOTICES 8

/* Host memory through which kernels report to the host, and the host to running kernels. */
typedef struct p2p_status {
    /* an epic_result: why the group broke; written last; EPIC_OK: it has not */
    uint32_t result;
    uint32_t operation;
    uint32_t epoch;
    uint32_t phase;    /* a p2p_phase */
    uint32_t reporter; /* rank that found the failure */
    uint32_t culprits; /* bits of the ranks at fault */
    uint32_t own_signature, peer_signature;
    uint32_t dead;        /* written by the host: bits of the ranks whose processes have died */
    uint32_t deadline_ms; /* time limit of the operation that broke */
    uint64_t awake; /* written by the host while it runs: P2P_AWAKE; 0: no thread writes it */
    p2p_notice notices[P2P_NOTICES];
} p2p_status;

/* Counts how often the process has shown that it runs (beats), and how often it was found to
 * have been stopped. Both are in one word, so that kernels never see a beat without the stop
 * before it. */
#define P2P_AWAKE(stops, beats) ((uint64_t)(stops) << 32 | (uint32_t)(beats))
/* stops that postpone a deadline, at most, without progress in between */
#define P2P_POSTPONE_LIMIT 4

typedef enum p2p_phase { /* what a rank was waiting for when an operation failed */
                         P2P_PHASE_NONE = 0,
                         P2P_PHASE_ARRIVE = 1, /* for the peer to begin the operation */
                         P2P_PHASE_COUNTS = 2, /* for its counts of choices */
                         P2P_PHASE_RECORD = 3, /* for the slots of a token */
                         P2P_PHASE_ROW = 4,    /* for a row */
                         P2P_PHASE_FLOAT = 5,  /* for a weight */
                         P2P_PHASE_GRID = 6,   /* for this rank's own CTAs */
                         P2P_PHASE_TABLE = 7,  /* for nothing: tables of experts differ */
                         P2P_PHASE_OVERLAP = 8 /* for nothing: two operations ran at once */
} p2p_phase;

/* The word `broken` of a failed group. */
#define P2P_BROKEN(result, operation, reporter, phase, culprits)                \
    ((uint64_t)(result) | (uint64_t)(operation) << 4 | (uint64_t)(phase) << 8 | \
     (uint64_t)(reporter) << 12 | (uint64_t)(culprits) << 32)

/* 1 in the library of backend hosts, which is compiled from the same sources with EPIC_HOSTS.
 */
#ifdef EPIC_HOSTS
#define HOSTS 1
#else
#define HOSTS 0
#endif

/* An entry of the ring through which kernels order puts to other hosts (net/net.cuh): `words`
 * words of 8 bytes, at word number `word` of the outbox for rank `host`, which is also their
 * place in that rank's inbox. `lap` is 1 to 255 and counts how often the ring has been filled,
 * so that an entry is its own flag. */
#define P2P_RING_ENTRIES (1u << 15)
#define P2P_ENTRY(host, word, words) \
    ((uint64_t)(host) << 51 | (uint64_t)(words) << 33 | (uint64_t)(word))
#define P2P_ENTRY_MOST_WORDS (1 << 17)
#define P2P_ENTRY_LAP(place) ((uint64_t)(1 + (place) / P2P_RING_ENTRIES % 255) << 56)
#define P2P_ENTRY_HOST(entry) ((int)((entry) >> 51 & 31))
#define P2P_ENTRY_WORDS(entry) ((uint32_t)((entry) >> 33 & 0x3ffff))
#define P2P_ENTRY_WORD(entry) ((entry)&0x1ffffffffull)
#define P2P_EPOCH_ENDS 0x1ffffffffull /* in place of a word number; heaps are smaller */

typedef struct p2p_ring { /* in host memory, as is everything that it points to */
    uint64_t *entries;    /* [P2P_RING_ENTRIES], written by kernels */
    struct p2p_ring_words *words;
} p2p_ring;

typedef struct p2p_ring_words {
    uint64_t taken; /* written by the proxy thread: entries that it has read */
    /* written by the proxy thread: epochs of which the net has read all sources */
    uint64_t freed;
    uint64_t waits; /* written by kernels: the word `waits` that peers shall see */
} p2p_ring_words;

/* Bits of a count of choices in a word; a rank may have at most this many choices of an expert.
 */
#define P2P_COUNT_BITS 26

typedef struct p2p_self {            /* Facts about its rank that every kernel has. */
    uint8_t *heap[DEVICE_MAX_RANKS]; /* backend hosts: of a remote peer, this rank's outbox */
    p2p_heap at;
    p2p_status *status; /* host memory, at its device address */
    uint64_t group_id;
    uint64_t timeout_ns;
    int64_t max_tokens;
    int32_t rank, num_ranks;
    uint32_t operation; /* an epic_operation */
    uint32_t signature; /* hash of the arguments that must be equal on all ranks */
    /* Hashes of the layers that the operation's plan may have; 0: any layer. */
    uint32_t layer_hashes[2];
#ifdef EPIC_HOSTS
    p2p_ring ring;
    uint8_t *inbox; /* what ranks of other hosts write; laid out as the heap */
    int64_t slow;   /* bytes of the inbox if it is host memory, whose polls are slow; else 0 */
    uint32_t near;  /* bits of the ranks on this host, this rank included */
    int32_t local;  /* ranks per host if rows go through relays (net/relay.cuh), else 0 */
    int32_t max_top_k; /* choices per token that the heap has room for */
    int32_t ahead;     /* least number of tokens that are sent before one is received; 0: any */
#endif
} p2p_self;

typedef struct p2p_plan_job {
    p2p_self self;
    epic_layer layer;      /* with defaults filled in */
    device_plan_layout at; /* layout of the plans of the layer */
    uint8_t *plan;
    const void *topk_idx;
    const int32_t *rank_of_expert;    /* NULL: contiguous blocks */
    const int32_t *logical_of_expert; /* if layer.num_logical is not 0 */
    int32_t *expert_rows, *expert_tokens, *load, *logical_load, *demand;
    int32_t num_tokens;
    int32_t capacity;          /* 0: no bound */
    int32_t block;             /* experts per rank, without rank_of_expert */
    int32_t has_int64_ids;     /* topk_idx is int64, else int32 */
    int32_t planners;          /* CTAs that plan */
    int32_t is_lowlat;         /* the low-latency planner is used (lowlat/plan.cuh) */
    int32_t max_lowlat_tokens; /* most tokens of a rank that uses it */
    int32_t by_k;              /* EPIC_BY_K drops choices (plan/keep_by_k.cuh) */
    /* ids are logical experts that must be resolved first (plan/resolve.cuh) */
    int32_t resolves;
} p2p_plan_job;

/* Most experts times top_k of a layer with EPIC_BY_K. */
#define P2P_BY_K_TALLIES DEVICE_MAX_EXPERTS

/* Can lowlat/plan.cuh make plans for up to `most` tokens of a rank? All ranks get the same
 * answer. */
static inline int p2p_can_plan_lowlat(int64_t ranks, int64_t most, const epic_layer *layer)
{
    const int64_t groups = ranks * ((most + 31) / 32);
    return layer->top_k <= 32 && ranks * most * layer->top_k <= P2P_LOWLAT_CHOICES &&
           groups * layer->num_experts <= P2P_LOWLAT_MASKS &&
           layer->num_experts <= P2P_LOWLAT_EXPERTS && layer->alignment <= 1 << 16 &&
           layer->num_logical == 0 && layer->overflow == EPIC_OVERFLOW_ERROR &&
           layer->sum_order == EPIC_BY_RANK && layer->layout == EPIC_EXPERT_MAJOR;
}

/* The most tokens per rank, up to `most`, for which lowlat/plan.cuh makes plans; 0: for none.
 */
static inline int32_t p2p_lowlat_plan_tokens(int64_t ranks, int64_t most,
                                             const epic_layer *layer)
{
    while (most > 0 && !p2p_can_plan_lowlat(ranks, most, layer))
        most = most > 256 ? 256 : most > 128 ? 128 : 0;
    return (int32_t)most;
}

typedef struct p2p_dispatch_job {
    p2p_plan_job plan; /* the plan to read, or with planners > 0 to make first */
    int64_t plan_bytes;
    const uint8_t *tokens;
    uint8_t *recv;
    const float *weights;
    float *slot_weights;
    int32_t *recv_expert; /* FLAT only */
    int64_t row_bytes;
    int32_t num_tokens, recv_rows;
    int32_t aligned; /* rows consist of aligned vectors of 16 bytes */
    int32_t flat;    /* the plan is FLAT and the call needs more than its rows */
    int32_t zero_tail, leave_padding;
    int32_t top_k; /* top_k of the layer */
    int32_t head;  /* tokens that are sent while the plan is made */
    int32_t
        num_send_only_ctas; /* low-latency kernels: CTAs that only send; set by the launch */
    /* others: speed of catching up (dispatch/dispatch.cuh); set by the launch */
    int32_t catch_up;
    /* Set by the launch: */
    int32_t lag;   /* tokens by which receiving stays behind sending */
    int32_t span;  /* pieces of a row that a warp moves one after the other */
    int32_t units; /* warps that move rows */
    /* For packed rows (dispatch/packed.cuh) only; scale_bytes is 0 if rows have no scales. */
    const uint8_t *scales; /* NULL if dispatch quantizes */
    uint8_t *recv_scales;
    int64_t scale_bytes;
    /* bytes of a row of `tokens`, which has `type` if dispatch quantizes */
    int64_t token_bytes;
    uint32_t type, quantize;
    int32_t scales_aligned, scales_in_words; /* second rows are aligned vectors; are words */
    /* Bulk stores (dispatch/bulk.cuh) only. */
    int32_t bulk;   /* the GPU has bulk stores */
    int32_t warps;  /* per CTA; set by the launch, */
    int32_t places; /* as are the packed rows that each has room for */
} p2p_dispatch_job;

/* Bytes that travel per token: whole vectors of its row, then of its second row. */
static inline int64_t p2p_packed_bytes(int64_t row_bytes, int64_t scale_bytes)
{
    return device_round_up(row_bytes, 16) + device_round_up(scale_bytes, 16);
}

typedef struct p2p_combine_job {
    p2p_self self;
    const uint8_t *plan;
    int64_t plan_bytes;
    const uint8_t *rows;
    uint8_t *out;
    const float *slot_weights; /* NULL: all 1 */
    const float *slot_floats;  /* sent back unsummed, or NULL */
    float *choice_floats;      /* where they arrive, [num_tokens, top_k] */
    int64_t row_bytes;
    int32_t num_tokens, num_rows;
    uint32_t type;
    int32_t aligned;
    int32_t lag; /* tokens by which adding stays behind sending */
    /* of the layer: top_k, is its order EPIC_TREE, is its layout FLAT */
    int32_t top_k, tree, flat;
    int64_t rank_of_at, records_at; /* offsets of these arrays in the plan */
} p2p_combine_job;

typedef struct p2p_combine_backward_job {
    p2p_self self;
    const uint8_t *plan;
    int64_t plan_bytes;
    const uint8_t *d_out;
    const uint8_t *rows; /* NULL without d_slot_weights */
    uint8_t *d_rows;
    const float *slot_weights;
    float *d_slot_weights;
    int64_t row_bytes;
    int32_t num_tokens, num_rows; /* of d_rows and of rows */
    uint32_t type;
    int32_t aligned;
    int32_t zero_tail, leave_padding;
    int32_t top_k, lag, span, units; /* as in dispatch */
    /* Quantized rows only. */
    uint8_t *d_rows_scales;
    int64_t scale_bytes, quantized_bytes; /* bytes of a row of scales, and of d_rows */
    uint32_t quantize;
    int32_t quantized_whole; /* a lane stores its part of a vector at once, */
    int32_t scales_in_words; /* and scales as words */
} p2p_combine_backward_job;

typedef struct p2p_sum_job {
    p2p_self self;
    float *data;
    int64_t count; /* at most self.at.source_bytes / 4 */
    uint32_t order;
    uint32_t pad;
} p2p_sum_job;

typedef struct p2p_sum_replicas_job {
    p2p_self self;
    const uint8_t *plan;
    int64_t plan_bytes;
    float *data;
    int64_t count; /* floats per expert */
    int32_t num_rows;
    uint32_t pad;
} p2p_sum_replicas_job;

/* Enqueue an operation on `stream` with at most num_sms CTAs, and return. */
cudaError_t p2p_launch_plan(const p2p_plan_job *job, int num_sms, cudaStream_t stream);
cudaError_t p2p_launch_dispatch(const p2p_dispatch_job *job, int num_sms, cudaStream_t stream);
cudaError_t p2p_launch_dispatch_packed(const p2p_dispatch_job *job, int num_sms,
                                       cudaStream_t stream);
int p2p_can_dispatch_bulk(
    const p2p_dispatch_job *job); /* otherwise use dispatch or dispatch_packed */
cudaError_t p2p_launch_dispatch_bulk(const p2p_dispatch_job *job, int num_sms,
                                     cudaStream_t stream);
cudaError_t p2p_launch_combine(const p2p_combine_job *job, int num_sms, cudaStream_t stream);
cudaError_t p2p_launch_combine_backward(const p2p_combine_backward_job *job, int num_sms,
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

/* Load the kernels on the current device, so that no later launch waits for an idle device. */
cudaError_t p2p_load_plan(void);
cudaError_t p2p_load_dispatch(void);
cudaError_t p2p_load_dispatch_packed(void);
cudaError_t p2p_load_dispatch_bulk(void);
cudaError_t p2p_load_combine(void);
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
