/* SPDX-License-Identifier: Apache-2.0 */
/* The backend p2p: GPUs that can address each other's memory, one process for each, several in
 * one process, or several ranks on one GPU of one process. */
#ifndef EPIC_P2P_H
#define EPIC_P2P_H

#include "backend/ops.h"
#include "backend/p2p/beats.h"
#include "cuda/common/cuda_kernels.h"

#define P2P_DEFAULT_SMS 64 /* of a context that does not say how many, at most; and where it */
#define P2P_SMALL_SMS 32   /* never sends more than a few rows: measured, docs/lab/cuda.md */
#define P2P_SPARE_SMS 4    /* of a GPU that ranks share, for their other work */

typedef struct p2p_watch p2p_watch;   /* sees peers' processes end */
typedef struct hosts_part hosts_part; /* what backend hosts adds */

typedef struct p2p_gpu { /* what a rank tells the others of its GPU */
    int32_t device_sms;
    int32_t taken_sms;  /* by other contexts of its process */
    uint8_t device[16]; /* uuid */
} p2p_gpu;

/* How the two backends that share this folder differ at run time. */
typedef struct p2p_hooks {
    /* Writes `count` bytes at offset `at` of a rank's heap (hosts: inbox), its own included, and
     * returns when they are there or cannot arrive. */
    void (*write)(epic_group *group, int peer, int64_t at, const void *bytes, size_t count);

    /* Announces that an operation is about to be launched or given up. */
    void (*wake)(const epic_group *group);
} p2p_hooks;

struct epic_group {
    const p2p_hooks *hooks;
    p2p_self self;      /* what every job begins with; operation and signature still 0 */
    p2p_status *status; /* host memory that kernels write */
    epic_config config;
    epic_peer peers[DEVICE_MAX_RANKS];
    int32_t rank, num_ranks;
    int device;
    int device_sms;                /* of the whole GPU */
    int num_sms;                   /* of one operation, at most; taken from the GPU's */
    int ranks_here;                /* that share this GPU */
    bool mapped[DEVICE_MAX_RANKS]; /* heaps of other processes */
    p2p_watch *watch;
    p2p_beats *beats;      /* that show kernels that this process runs */
    hosts_part *hosts;     /* NULL: p2p */
    cudaStream_t side;     /* for words to peers while a kernel runs */
    uint64_t *word;        /* pinned host memory */
    bool bulk;             /* the GPU has bulk stores */
    int32_t lowlat_tokens; /* of a rank, at most: P2P_LOWLAT_TOKENS */
};

/* The sentence of a CUDA error, as EPIC_EDEVICE. */
epic_result p2p_cuda(cudaError_t error, const char *what);

/* Loads every kernel, so that no launch has to wait for an idle device. */
epic_result p2p_load(epic_group *group);

/* Is there a device at all?  `why` has 256 bytes. */
bool p2p_any_device(char *why);

static inline bool p2p_same(const uint64_t a[2], const uint64_t b[2])
{
    return a[0] == b[0] && a[1] == b[1];
}

/* A group that knows its layout, then its device, stream and status; and back. */
epic_group *p2p_group_new(const epic_join *join, const p2p_hooks *hooks);
epic_result p2p_group_device(epic_group *group, p2p_gpu *gpu);
void p2p_group_free(epic_group *group);
bool p2p_gpu_fits(const p2p_gpu *gpu); /* it was not written by a stranger */

int32_t p2p_top_k_for(const epic_config *config); /* choices that the heap has room for */
p2p_heap p2p_heap_for(const epic_config *config);
int64_t p2p_heap_bytes(const p2p_heap *at);
epic_result p2p_heap_clear(epic_group *group, uint8_t *heap);
uint32_t p2p_epoch(epic_group *group);
const uint64_t *p2p_gone(epic_group *group); /* NULL: the device does not answer */

/* Where the bytes that peers write with p2p_hooks.write are found. */
static inline uint8_t *p2p_inbox(const epic_group *g)
{
#ifdef EPIC_HOSTS
    return g->self.inbox;
#else
    return g->self.heap[g->rank];
#endif
}

bool p2p_fetch(void *to, const void *from, size_t bytes, bool *good);
void *p2p_allocate(epic_group *group, size_t bytes);
void p2p_release(epic_group *group, void *memory);
void p2p_describe(char *to, size_t size);

/* Takes SMs for one context from those of its GPU (group->num_sms), which ranks share that have
 * the same, and gives them back. */
int p2p_budget_taken(int device);
epic_result p2p_budget_share(epic_group *group, const p2p_gpu *gpus);
void p2p_budget_give_back(epic_group *group);

/* Begins and ends to watch the peers' processes. */
epic_result p2p_watch_open(epic_group *group);
void p2p_watch_close(epic_group *group);

/* Has the process of this peer ended?  The watcher of p2p and the proxy thread of hosts set it. */
static inline bool p2p_is_dead(const epic_group *group, int peer)
{
    return __atomic_load_n(&group->status->dead, __ATOMIC_ACQUIRE) >> peer & 1;
}

/* Lets the other ranks of this host reach the heap: those of this process find it, the others
 * need the handle.  Then reaches theirs, and lets go of all. */
epic_result p2p_heap_export(const epic_group *group, uint8_t *heap, cudaIpcMemHandle_t *handle);
epic_result p2p_heap_connect(epic_group *group, int peer, const cudaIpcMemHandle_t *handle);
void p2p_heap_disconnect(const epic_group *group);

/* Do ranks of one process share one copy of this library, and so its list of heaps?  If not, `why`
 * (256 bytes) gets the reason. */
bool p2p_share_library(const epic_peer *peers, int num_ranks, char *why);

/* Of a rank of this process; NULL: not here. */
uint8_t *p2p_heap_find(uint64_t group_id, int rank);

/* EPIC_OK, or the failure that a kernel has reported. */
epic_result p2p_check(epic_group *group, epic_failure_info *out);

/* The same as a step's result, its sentence left with the thread. */
epic_result p2p_check_group(epic_group *group);

/* The oldest data error that has not been returned yet, as a result with its sentence. */
epic_result p2p_take_notice(epic_group *group);

void p2p_abort(epic_group *group, uint64_t tag, const char *why);

/* Router and losses; router.c. */
epic_result p2p_router_forward(epic_group *group, const epic_router_args *args);
epic_result p2p_router_backward(epic_group *group, const epic_router_backward_args *args);
epic_result p2p_balance_loss_forward(epic_group *group, const epic_loss *args, double factor);
epic_result p2p_balance_loss_backward(epic_group *group, const epic_loss *args, double factor);
epic_result p2p_z_loss_forward(epic_group *group, const epic_loss *args, double factor);
epic_result p2p_z_loss_backward(epic_group *group, const epic_loss *args, double factor);
epic_result p2p_bias_update(epic_group *group, const epic_bias_update_args *args);

/* The experts; experts.c. */
epic_result p2p_experts_forward(epic_group *group, const epic_experts_args *args);
epic_result p2p_experts_backward(epic_group *group, const epic_experts_backward_args *args);

/* The layer's dense part; gate.c, tokens.c. */
epic_result p2p_gate(epic_group *group, const epic_gate *gate);
epic_result p2p_gate_backward(epic_group *group, const epic_gate *gate);
epic_result p2p_add(epic_group *group, epic_stream stream, void *to, const void *from,
                    int64_t count, uint32_t type, bool replace);
epic_result p2p_sent_choices(epic_group *group, epic_stream stream, const layer_tokens *tokens,
                             int32_t *to);
epic_result p2p_shared_gate(epic_group *group, epic_stream stream, const layer_tokens *tokens);
epic_result p2p_shared_gate_backward(epic_group *group, epic_stream stream,
                                     const layer_tokens *tokens, float *gradient,
                                     bool accumulate, void *workspace);
epic_result p2p_zero_weights(epic_group *group, epic_stream stream, const layer_tokens *tokens);
epic_result p2p_finish(epic_group *group, epic_stream stream, const layer_tokens *tokens,
                       const layer_rows *rows);
epic_result p2p_fits(epic_group *group, const epic_plan_args *args, uint32_t num_local);
epic_result p2p_trees(epic_group *group, epic_stream stream, float *values, int64_t n);
epic_result p2p_give_losses(epic_group *group, epic_stream stream, const float *losses,
                            const epic_moe_args *args);
epic_result p2p_take_losses(epic_group *group, epic_stream stream, float *d_losses,
                            const epic_moe_backward_args *args);

extern const epic_ops p2p_ops;
extern EPIC_API const epic_backend epic_backend_p2p, epic_backend_hosts;

#endif
