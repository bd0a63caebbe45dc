/* SPDX-License-Identifier: Apache-2.0 */
/* Backend p2p: GPUs that can address each other's memory. Ranks are processes with a GPU each,
 * threads of one process with a GPU each, or several ranks that share a GPU. Backend hosts uses
 * the same group and operations. */
#ifndef EPIC_P2P_H
#define EPIC_P2P_H

#include "backend/ops.h"
#include "backend/p2p/beats.h"
#include "cuda/common/cuda_kernels.h"

#define P2P_DEFAULT_SMS 64 /* SMs of an operation if the config does not set max_sms, */
#define P2P_SMALL_SMS 32   /* and if it sends only few rows; measured, docs/lab/cuda.md */
#define P2P_SPARE_SMS 4 /* SMs that stay free on a GPU that ranks share, for their other work */

typedef struct p2p_watch p2p_watch;   /* watches the peers' processes */
typedef struct hosts_part hosts_part; /* state that backend hosts adds */

typedef struct p2p_gpu { /* what a rank sends to the others about its GPU */
    int32_t device_sms;
    int32_t taken_sms;  /* used by other contexts of its process */
    uint8_t device[16]; /* uuid */
} p2p_gpu;

/* Functions that differ between the two backends. */
typedef struct p2p_hooks {
    /* Writes `count` bytes at offset `at` of a rank's heap (backend hosts: of its inbox);
     * `peer` may be this rank. Returns when they have arrived or cannot arrive. */
    void (*write)(epic_group *group, int peer, int64_t at, const void *bytes, size_t count);

    /* Announces that an operation is about to be launched or given up. */
    void (*wake)(const epic_group *group);
} p2p_hooks;

struct epic_group {
    const p2p_hooks *hooks;
    p2p_self self;      /* template of the jobs' first member; operation and signature are 0 */
    p2p_status *status; /* host memory that kernels write */
    epic_config config;
    epic_peer peers[DEVICE_MAX_RANKS];
    int32_t rank, num_ranks;
    int device;
    int device_sms; /* SMs of the whole GPU */
    int num_sms;    /* SMs of an operation at most; taken from the GPU's budget */
    int ranks_here; /* ranks of the group on this GPU */
    bool mapped[DEVICE_MAX_RANKS]; /* heaps of other processes */
    p2p_watch *watch;
    p2p_beats *beats;      /* show kernels that this process runs */
    hosts_part *hosts;     /* NULL in p2p */
    cudaStream_t side;     /* for words to peers while a kernel runs */
    uint64_t *word;        /* pinned host memory */
    bool bulk;             /* the GPU has bulk stores */
    int32_t lowlat_tokens; /* most tokens of a rank that use low-latency kernels */
};

/* Turns a CUDA error into a result (EPIC_EDEVICE, EPIC_ENOMEM) with an error text. */
epic_result p2p_cuda(cudaError_t error, const char *what);

/* Loads every kernel, so that no launch waits for an idle device. */
epic_result p2p_load(epic_group *group);

/* Is there a CUDA device? If not, writes the reason to `why` (256 bytes). */
bool p2p_any_device(char *why);

/* Are two ids of hosts or processes equal? */
static inline bool p2p_same(const uint64_t a[2], const uint64_t b[2])
{
    return a[0] == b[0] && a[1] == b[1];
}

/* Makes a group that knows its layout; NULL: no memory. Then sets its device, stream and
 * status. p2p_group_free() undoes both. */
epic_group *p2p_group_new(const epic_join *join, const p2p_hooks *hooks);
epic_result p2p_group_device(epic_group *group, p2p_gpu *gpu);
void p2p_group_free(epic_group *group);
bool p2p_gpu_fits(const p2p_gpu *gpu); /* are the numbers in range? */

int32_t p2p_top_k_for(const epic_config *config); /* choices per token in the heap */
/* The offsets of the heap of a context with this config. */
p2p_heap p2p_heap_for(const epic_config *config);
/* Bytes to allocate for a heap. */
int64_t p2p_heap_bytes(const p2p_heap *at);
/* Sets words to 0 and staging to poison. Returns after the device has done so. */
epic_result p2p_heap_clear(epic_group *group, uint8_t *heap);
/* Reads the number of the last operation that began from the device. Waits for the copy, not
 * for kernels. */
uint32_t p2p_epoch(epic_group *group);
const uint64_t *p2p_gone(epic_group *group); /* [num_ranks]; NULL: the device does not answer */

/* Base of the memory that p2p_hooks.write writes. */
static inline uint8_t *p2p_inbox(const epic_group *g)
{
#ifdef EPIC_HOSTS
    return g->self.inbox;
#else
    return g->self.heap[g->rank];
#endif
}

/* epic_backend.fetch: copies bytes from memory that a device can access. Returns false if
 * `from` is host memory. `good`: whether the copy succeeded. */
bool p2p_fetch(void *to, const void *from, size_t bytes, bool *good);
/* Device memory of the group's GPU; NULL: there is not enough. */
void *p2p_allocate(epic_group *group, size_t bytes);
void p2p_release(epic_group *group, void *memory);
/* Writes one line about the GPUs of this host for epic_info. */
void p2p_describe(char *to, size_t size);

/* The budget of SMs of each GPU, for all contexts of this process. Returns the SMs in use. */
int p2p_budget_taken(int device);
/* Takes the SMs of this context (group->num_sms); ranks that share the GPU get equal numbers.
 */
epic_result p2p_budget_share(epic_group *group, const p2p_gpu *gpus);
/* Returns the SMs of this context to the budget of its GPU. */
void p2p_budget_give_back(epic_group *group);

/* Start and stop watching the peers' processes. */
epic_result p2p_watch_open(epic_group *group);
void p2p_watch_close(epic_group *group);

/* Has the process of this peer died? Set by the watcher of p2p or the proxy thread of hosts. */
static inline bool p2p_is_dead(const epic_group *group, int peer)
{
    return __atomic_load_n(&group->status->dead, __ATOMIC_ACQUIRE) >> peer & 1;
}

/* Makes the heap reachable for the other ranks of this host: ranks of this process find it in a
 * list, the others need the handle. */
epic_result p2p_heap_export(const epic_group *group, uint8_t *heap, cudaIpcMemHandle_t *handle);
/* Sets heap[peer] to the heap of a peer. Errors: EPIC_ENOTSUP if it cannot be mapped. */
epic_result p2p_heap_connect(epic_group *group, int peer, const cudaIpcMemHandle_t *handle);
/* Unmaps all heaps, and removes this rank's from the list. */
void p2p_heap_disconnect(const epic_group *group);

/* Do the ranks of each process share one copy of this library, and so its list of heaps? If
 * not, writes the reason to `why` (256 bytes). */
bool p2p_share_library(const epic_peer *peers, int num_ranks, char *why);

/* The heap of a rank of this process; NULL: it is not here. */
uint8_t *p2p_heap_find(uint64_t group_id, int rank);

/* Returns EPIC_OK, or the failure that a kernel has reported, in `out`. */
epic_result p2p_check(epic_group *group, epic_failure_info *out);

/* Returns EPIC_OK, or the failure as the result of an operation, with its error text. */
epic_result p2p_check_group(epic_group *group);

/* Returns the oldest data error that has not been returned, with its error text; EPIC_OK: none.
 */
epic_result p2p_take_notice(epic_group *group);

/* Breaks the group on all ranks, with `why` as the error text on the others. */
void p2p_abort(epic_group *group, uint64_t tag, const char *why);

/* Router and losses, in router.c. Each function checks that the kernels support the arguments,
 * and launches on the stream of its call. Errors: EPIC_ENOTSUP, EPIC_EDEVICE. */
epic_result p2p_router_forward(epic_group *group, const epic_router_args *args);
epic_result p2p_router_backward(epic_group *group, const epic_router_backward_args *args);
epic_result p2p_balance_loss_forward(epic_group *group, const epic_loss_args *args,
                                     double factor);
epic_result p2p_balance_loss_backward(epic_group *group, const epic_loss_args *args,
                                      double factor);
epic_result p2p_z_loss_forward(epic_group *group, const epic_loss_args *args, double factor);
epic_result p2p_z_loss_backward(epic_group *group, const epic_loss_args *args, double factor);
epic_result p2p_bias_update(epic_group *group, const epic_bias_update_args *args);

/* Experts, in experts.c. Both functions launch the products and the activation on the stream of
 * the call. Errors: EPIC_ENOTSUP, EPIC_EDEVICE, and those of the caller's gemm. */
epic_result p2p_experts_forward(epic_group *group, const epic_experts_args *args);
epic_result p2p_experts_backward(epic_group *group, const epic_experts_backward_args *args);

/* The dense part of a layer, in gate.c and tokens.c. Errors: EPIC_EDEVICE. */

/* logits [tokens, columns] = x w_gate + b_gate in float32. */
epic_result p2p_gate(epic_group *group, const epic_gate_args *gate);
/* The gradients of w_gate, b_gate and x; d_x is added to rows that exist. */
epic_result p2p_gate_backward(epic_group *group, const epic_gate_args *gate);
/* Adds `count` numbers to `to`. replace: copies them instead. from NULL: they are zeros. */
epic_result p2p_add(epic_group *group, epic_stream stream, void *to, const void *from,
                    int64_t count, uint32_t type, bool replace);
/* Writes topk_idx without the choices of zero-experts, which are not sent. */
epic_result p2p_sent_choices(epic_group *group, epic_stream stream, const layer_tokens *tokens,
                             int32_t *to);
/* The factors of the shared expert's output: a sigmoid per token. */
epic_result p2p_shared_gate(epic_group *group, epic_stream stream, const layer_tokens *tokens);
/* d_shared_weights in place, and the gradient [hidden] of the gate's weights (NULL: not
 * wanted). */
epic_result p2p_shared_gate_backward(epic_group *group, epic_stream stream,
                                     const layer_tokens *tokens, float *gradient,
                                     bool accumulate, void *workspace);
/* The gradients of the weights of choices of zero-experts. */
epic_result p2p_zero_weights(epic_group *group, epic_stream stream, const layer_tokens *tokens);
/* Sums the rows of a layer's output: combined, shared expert, zero-experts. */
epic_result p2p_finish(epic_group *group, epic_stream stream, const layer_tokens *tokens,
                       const layer_rows *rows);
/* Checks on the device that the plan has at most num_local experts on a rank and, with
 * EPIC_TREE, as many tokens on every rank. The kernel reports a data error if not. */
epic_result p2p_fits(epic_group *group, const epic_plan_args *args, uint32_t num_local);
/* values [2, n]: sums each row in a binary tree, to values[0] and values[1]. */
epic_result p2p_trees(epic_group *group, epic_stream stream, float *values, int64_t n);
/* Copies the layer's losses to the caller's arguments that are not NULL. */
epic_result p2p_give_losses(epic_group *group, epic_stream stream, const float *losses,
                            const epic_moe_args *args);
/* d_losses [2]: the gradients of the balance loss and the z loss, each with d_loss added. NULL
 * for d_loss counts as 1, for the others as 0. */
epic_result p2p_take_losses(epic_group *group, epic_stream stream, float *d_losses,
                            const epic_moe_backward_args *args);

extern const epic_ops p2p_ops;
extern EPIC_API const epic_backend epic_backend_p2p, epic_backend_hosts;

#endif
