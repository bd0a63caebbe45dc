/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA kernels: what they are given, and how they are launched.  Plain C.
 *
 * A job is copied into the launch; launchers enqueue on the stream and return.  Kernels of one
 * group run one at a time on each rank; every CTA of a job must be resident at once (one on an
 * SM), and so must the kernels of ranks that share a GPU. */
#ifndef EPIC_CUDA_KERNELS_H
#define EPIC_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "cuda/common/heap.h"
#include "epic/epic.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum p2p_fault { /* of the data of an operation: class (b) of epic.h */
                         P2P_FAULT_EXPERT = 0,     /* token, k, id, num_experts */
                         P2P_FAULT_PLACEMENT = 1,  /* expert, rank */
                         P2P_FAULT_CAPACITY = 2,   /* slots, needed */
                         P2P_FAULT_ROWS = 3,       /* rows, needed, operation */
                         P2P_FAULT_PLAN = 4,       /* this rank's bytes are no plan of it */
                         P2P_FAULT_TOKENS = 5,     /* tokens, the plan's, operation */
                         P2P_FAULT_DUPLICATE = 6,  /* token, k, id */
                         P2P_FAULT_LOGICAL = 7,    /* token, k, id, num_logical */
                         P2P_FAULT_REPLICA = 8,    /* expert, logical expert, num_logical */
                         P2P_FAULT_NO_REPLICA = 9, /* logical expert */
                         P2P_FAULT_LAYER =
                             10, /* this rank passes another layer than the plan's */
                         P2P_FAULT_LOCAL = 11,  /* rows, local experts */
                         P2P_FAULT_ROOM = 12,   /* num_local_experts, a rank's experts */
                         P2P_FAULT_UNEQUAL = 13 /* tokens of rank 0, and of this one */
} p2p_fault;

/* A data error, in host memory; result is written last, and 0 again by who has read it. */
typedef struct p2p_notice {
    uint32_t result;
    uint32_t epoch;
    uint32_t fault; /* a p2p_fault */
    int32_t rank;   /* whose data it is */
    int64_t about[4];
} p2p_notice;

#define P2P_NOTICES 8 /* kept until they are read; more are lost */

/* What kernels tell the host, in host memory, and what the host tells running kernels. */
typedef struct p2p_status {
    uint32_t result; /* what broke the group, written last; EPIC_OK: nothing yet */
    uint32_t operation;
    uint32_t epoch;
    uint32_t phase;    /* a p2p_phase */
    uint32_t reporter; /* rank that noticed */
    uint32_t culprits; /* a bit for each rank */
    uint32_t own_signature, peer_signature;
    uint32_t dead;        /* by the host: a bit for each rank whose process has ended */
    uint32_t deadline_ms; /* of the operation that broke */
    uint64_t awake;       /* by the host while it runs: P2P_AWAKE; 0: no thread writes it */
    p2p_notice notices[P2P_NOTICES];
} p2p_status;

/* How often the host has shown that its process runs, and how often it found that the process had been
 * stopped.  One word, so that kernels never see a beat without the stop before it. */
#define P2P_AWAKE(stops, beats) ((uint64_t)(stops) << 32 | (uint32_t)(beats))
#define P2P_POSTPONE_LIMIT 4 /* times that stops put a deadline off, unless something moves */

typedef enum p2p_phase { /* what a rank was waiting for */
                         P2P_PHASE_NONE = 0,
                         P2P_PHASE_ARRIVE = 1, /* the peer to begin the operation */
                         P2P_PHASE_COUNTS = 2, /* its counts of choices */
                         P2P_PHASE_RECORD = 3, /* where a token goes */
                         P2P_PHASE_ROW = 4,    /* a row */
                         P2P_PHASE_FLOAT = 5,  /* a weight */
                         P2P_PHASE_GRID = 6,   /* this rank's own CTAs */
                         P2P_PHASE_TABLE = 7,  /* nothing: tables of experts differ */
                         P2P_PHASE_OVERLAP = 8 /* nothing: two operations run at once */
} p2p_phase;

/* The word that tells a rank that the group is broken. */
#define P2P_BROKEN(result, operation, reporter, phase, culprits)                \
    ((uint64_t)(result) | (uint64_t)(operation) << 4 | (uint64_t)(phase) << 8 | \
     (uint64_t)(reporter) << 12 | (uint64_t)(culprits) << 32)

/* The library of backend hosts is made of the same sources, with EPIC_HOSTS: net/net.cuh. */
#ifdef EPIC_HOSTS
#define HOSTS 1
#else
#define HOSTS 0
#endif

/* An entry of the ring between kernels and the thread that speaks to other hosts (net/net.cuh): so
 * many words of 8 bytes, at a place of the outbox that is also their place in the heap of that
 * host's rank.  `lap` is 1 to 255: how often the ring has gone round, so that an entry is its own
 * flag. */
#define P2P_RING_ENTRIES (1u << 15)
#define P2P_ENTRY(host, word, words) \
    ((uint64_t)(host) << 51 | (uint64_t)(words) << 33 | (uint64_t)(word))
#define P2P_ENTRY_MOST_WORDS (1 << 17)
#define P2P_ENTRY_LAP(place) ((uint64_t)(1 + (place) / P2P_RING_ENTRIES % 255) << 56)
#define P2P_ENTRY_HOST(entry) ((int)((entry) >> 51 & 31))
#define P2P_ENTRY_WORDS(entry) ((uint32_t)((entry) >> 33 & 0x3ffff))
#define P2P_ENTRY_WORD(entry) ((entry)&0x1ffffffffull)
#define P2P_EPOCH_ENDS 0x1ffffffffull /* in place of a word: heaps are smaller */

typedef struct p2p_ring { /* in host memory, as all that it points to */
    uint64_t *entries;    /* [P2P_RING_ENTRIES], by kernels */
    struct p2p_ring_words *words;
} p2p_ring;

typedef struct p2p_ring_words {
    uint64_t taken; /* by the thread: entries that it has read */
    uint64_t freed; /* by the thread: epochs of which the net has read all sources */
    uint64_t waits; /* by kernels: what peers are to have as this rank's word of `waits` */
} p2p_ring_words;

/* Of the counts that travel; more choices of one expert on one rank do not fit. */
#define P2P_COUNT_BITS 26

typedef struct p2p_self {            /* what every kernel knows about its rank */
    uint8_t *heap[DEVICE_MAX_RANKS]; /* hosts: of far peers, this rank's outbox */
    p2p_heap at;
    p2p_status *status; /* the device's address of host memory */
    uint64_t group_id;
    uint64_t timeout_ns;
    int64_t max_tokens;
    int32_t rank, num_ranks;
    uint32_t operation; /* an epic_operation */
    uint32_t signature; /* of what the ranks must call alike */
    /* Of the layer that the operation's plan must have: one of two; 0: any. */
    uint32_t layer_hashes[2];
#ifdef EPIC_HOSTS
    p2p_ring ring;
    uint8_t *inbox; /* laid out as the heap: what ranks of other hosts say */
    int64_t slow;   /* bytes of it, if it is host memory, of which each poll is slow; else 0 */
    uint32_t near;  /* a bit for each rank of this host, this one too */
    int32_t local;  /* ranks of each host, if rows go by relays (net/relay.cuh); else 0 */
    int32_t max_top_k; /* that the heap has room for */
    int32_t ahead;     /* tokens, at least, that are sent before one is received; 0: any */
#endif
} p2p_self;

typedef struct p2p_plan_job {
    p2p_self self;
    epic_layer layer;      /* defaults filled in */
    device_plan_layout at; /* of the layer's plans */
    uint8_t *plan;
    const void *topk_idx;
    const int32_t *rank_of_expert;    /* NULL: contiguous blocks */
    const int32_t *logical_of_expert; /* with layer.num_logical */
    int32_t *expert_rows, *expert_tokens, *load, *logical_load, *demand;
    int32_t num_tokens;
    int32_t capacity;          /* 0: no bound */
    int32_t block;             /* experts of a rank, without rank_of_expert */
    int32_t has_int64_ids;     /* topk_idx is int64 */
    int32_t planners;          /* CTAs that plan */
    int32_t is_lowlat;         /* lowlat/plan.cuh */
    int32_t max_lowlat_tokens; /* tokens of a rank that does so, at most */
    int32_t by_k;              /* choices are kept by k: plan/keep_by_k.cuh */
    int32_t resolves;          /* logical experts first become experts: plan/resolve.cuh */
} p2p_plan_job;

/* Of experts times top_k, where choices are kept by k. */
#define P2P_BY_K_TALLIES DEVICE_MAX_EXPERTS

/* Are these sizes, the same on all ranks, such that lowlat/plan.cuh makes plans of up to `most` tokens of
 * a rank? */
static inline int p2p_can_plan_lowlat(int64_t ranks, int64_t most, const epic_layer *layer)
{
    const int64_t groups = ranks * ((most + 31) / 32);
    return layer->top_k <= 32 && ranks * most * layer->top_k <= P2P_LOWLAT_CHOICES &&
           groups * layer->num_experts <= P2P_LOWLAT_MASKS &&
           layer->num_experts <= P2P_LOWLAT_EXPERTS && layer->alignment <= 1 << 16 &&
           layer->num_logical == 0 && layer->overflow == EPIC_OVERFLOW_ERROR &&
           layer->sum_order == EPIC_BY_RANK && layer->layout == EPIC_EXPERT_MAJOR;
}

/* The most tokens of a rank, up to `most`, of which it makes them; 0: of none. */
static inline int32_t p2p_lowlat_plan_tokens(int64_t ranks, int64_t most,
                                             const epic_layer *layer)
{
    while (most > 0 && !p2p_can_plan_lowlat(ranks, most, layer))
        most = most > 256 ? 256 : most > 128 ? 128 : 0;
    return (int32_t)most;
}

typedef struct p2p_dispatch_job {
    p2p_plan_job plan; /* its plan is read, and made first if planners > 0 */
    int64_t plan_bytes;
    const uint8_t *tokens;
    uint8_t *recv;
    const float *weights;
    float *slot_weights;
    int32_t *recv_expert; /* FLAT */
    int64_t row_bytes;
    int32_t num_tokens, recv_rows;
    int32_t aligned; /* rows are vectors of 16 bytes */
    int32_t flat;    /* the plan is FLAT, and more than its rows is wanted */
    int32_t zero_tail, leave_padding;
    int32_t top_k; /* the layer's */
    int32_t head;  /* tokens that are sent while the plan is made */
    int32_t
        num_send_only_ctas; /* of a small operation: CTAs that only send; the launch fills it in */
    int32_t catch_up;       /* of a large one: see dispatch/dispatch.cuh; likewise */
    /* The launch fills in: */
    int32_t lag;   /* tokens that receiving stays behind sending, */
    int32_t span;  /* pieces of a row that a warp moves one after the other, */
    int32_t units; /* warps that move rows */
    /* Of strings (dispatch/packed.cuh) alone; scale_bytes is 0 without second rows: */
    const uint8_t *scales; /* NULL if they are made on the way */
    uint8_t *recv_scales;
    int64_t scale_bytes;
    int64_t token_bytes; /* a row of tokens, of `type` if that is quantized */
    uint32_t type, quantize;
    int32_t scales_aligned, scales_in_words; /* vectors of 16 bytes; words */
    /* Of strings that move whole (dispatch/bulk.cuh) alone: */
    int32_t bulk;   /* the GPU has bulk stores */
    int32_t warps;  /* of a CTA; the launch fills it in, */
    int32_t places; /* and how many strings each has room for */
} p2p_dispatch_job;

/* What travels for a token: whole vectors of its row, then of its second row. */
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
    const float *slot_weights; /* NULL: 1 */
    const float *slot_floats;  /* sent home unsummed, or NULL */
    float *choice_floats;      /* where they come to, [num_tokens, top_k] */
    int64_t row_bytes;
    int32_t num_tokens, num_rows;
    uint32_t type;
    int32_t aligned;
    int32_t lag;                    /* tokens that adding stays behind sending */
    int32_t top_k, tree, flat;      /* the layer's: its order is EPIC_TREE, its layout FLAT */
    int64_t rank_of_at, records_at; /* where these arrays begin in the plan */
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
    int32_t num_tokens, num_rows; /* of d_rows, and of rows */
    uint32_t type;
    int32_t aligned;
    int32_t zero_tail, leave_padding;
    int32_t top_k, lag, span, units; /* as in dispatch */
    /* Quantized: */
    uint8_t *d_rows_scales;
    int64_t scale_bytes, quantized_bytes; /* of rows of them, and of d_rows */
    uint32_t quantize;
    int32_t quantized_whole; /* rows are stored as what a lane has of a vector, */
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
    int64_t count; /* floats of an expert */
    int32_t num_rows;
    uint32_t pad;
} p2p_sum_replicas_job;

cudaError_t p2p_launch_plan(const p2p_plan_job *job, int num_sms, cudaStream_t stream);
cudaError_t p2p_launch_dispatch(const p2p_dispatch_job *job, int num_sms, cudaStream_t stream);
cudaError_t p2p_launch_dispatch_packed(const p2p_dispatch_job *job, int num_sms,
                                       cudaStream_t stream);
int p2p_can_dispatch_bulk(
    const p2p_dispatch_job *job); /* or, where not, as one of the two above */
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

/* Loads every kernel on the current device, so that no launch has to wait for a free device. */
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
