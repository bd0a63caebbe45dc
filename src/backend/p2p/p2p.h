/* SPDX-License-Identifier: Apache-2.0 */
/* Backend p2p: GPUs of one host or of one NVLink domain (fabric.h) that can access each other's
 * memory. Ranks are processes with one GPU each, threads of one process with one GPU each, or
 * several ranks that share a GPU. The backend `hosts` uses the same group and operations. A
 * rank's *heap* is the device memory into which its peers store rows and messages. */
#ifndef EPIC_P2P_H
#define EPIC_P2P_H

#include <pthread.h>

#include "backend/ops.h"
#include "backend/p2p/beats.h"
#include "base/alive.h"
#include "cuda/common/cuda_kernels.h"

#define P2P_DEFAULT_SMS 64 /* number of SMs of an operation if config.max_sms is 0 */
/* default number of SMs for a context whose operations have few and small rows (budget.c) */
#define P2P_SMALL_SMS 32
/* number of SMs of a shared GPU that its ranks leave free for other kernels */
#define P2P_SPARE_SMS 4

typedef struct p2p_watch p2p_watch; /* thread that detects when the process of a peer exits */
typedef struct hosts_part hosts_part;

typedef struct p2p_gpu { /* data about a rank's GPU; the rank sends it to all ranks */
    int32_t device_sms;
    /* number of SMs of the GPU in use by other contexts of the rank's process */
    int32_t taken_sms;
    uint8_t device[16]; /* uuid of the GPU */
} p2p_gpu;

/* Functions that differ between the backends `p2p` and `hosts`. */
typedef struct p2p_hooks {
    /* Writes `count` bytes at offset `at` into the heaps of the ranks in `ranks` or, in the
     * backend `hosts`, into their inboxes. `ranks` may contain the calling rank itself. Returns
     * when the bytes have arrived at all ranks that they can still reach. */
    void (*write)(epic_group *group, const seat_set *ranks, int64_t at, const void *bytes,
                  size_t count);

    /* Called before an operation is launched. The backend `hosts` wakes its proxy thread. */
    void (*wake)(const epic_group *group);
} p2p_hooks;

struct p2p_windows; /* windows of the group, defined in windows.c */

/* The memory of a heap and the handle with which other processes map it (EPIC_HEAP). */
typedef enum p2p_heap_kind {
    P2P_HEAP_IPC,        /* memory of cudaMalloc(), for which CUDA makes an IPC handle */
    P2P_HEAP_DESCRIPTOR, /* memory of cuMemCreate(), for which CUDA makes a file descriptor */
    P2P_HEAP_FABRIC      /* memory of cuMemCreate(), for which CUDA makes a fabric handle */
} p2p_heap_kind;

/* Description of a rank's heap, which the rank sends to all ranks through the bootstrap. */
typedef struct p2p_heap_handle {
    uint32_t kind; /* p2p_heap_kind */
    uint32_t reserved;
    int64_t bytes; /* size of the memory of cuMemCreate(); 0 if the kind is P2P_HEAP_IPC */
    /* by kind: a cudaIpcMemHandle_t, the name of the socket to which the other ranks send their
     * file descriptors, or a CUmemFabricHandle */
    unsigned char handle[64];
} p2p_heap_handle;

/* Memory of another rank that is mapped in this process. */
typedef struct p2p_mapping {
    void *at; /* NULL: nothing is mapped */
    /* size of the mapped memory of cuMemCreate(); 0: it was mapped by cudaIpcOpenMemHandle() */
    size_t bytes;
} p2p_mapping;

struct p2p_heap_memory; /* this rank's heap in memory of cuMemCreate(), in heap_memory.h */

/* Two words that each rank (the sender) writes into the memory for messages of every other rank
 * (the receiver) (mailbox.h). */
typedef struct p2p_mailbox_words {
    uint64_t sent;    /* number of messages that the sender has sent to the receiver */
    uint64_t entered; /* number of the last generation that the sender has entered */
} p2p_mailbox_words;

/* This rank's state of the messages that epic_regroup exchanges (mailbox.h). */
typedef struct p2p_mailbox {
    /* [DEVICE_MAX_RANKS], in pinned memory: copies of the words of all senders (`words`), and
     * of the words that show which ranks have closed (`gone`) */
    p2p_mailbox_words *words;
    uint64_t *gone;
    /* number of messages that this rank has sent to each rank */
    uint64_t sent[DEVICE_MAX_RANKS];
    /* number of messages that this rank has read from each rank */
    uint64_t read[DEVICE_MAX_RANKS];
    /* true for a rank whose exit has already ended a wait for messages; each exit ends only one
     * wait */
    bool has_reported[DEVICE_MAX_RANKS];
    int last; /* sender of the last message */
} p2p_mailbox;

/* One rank's state in a group. Read-only after join, with two exceptions. `windows`, `waits`
 * and the memory of *status, *beats and *word change at any time. The fields about the members
 * (`generation`, `vacant`, `mailbox`) change only while no other call runs. */
struct epic_group {
    const p2p_hooks *hooks;
    /* copied into the arguments of every kernel; p2p_fill_self() completes the copy */
    p2p_self self;
    p2p_status *status; /* host memory that kernels write */
    epic_config config;
    epic_peer peers[DEVICE_MAX_RANKS];
    int32_t rank, num_ranks;
    int device;
    int device_sms;            /* number of SMs of the whole GPU */
    int num_sms;               /* maximum number of SMs that an operation uses (budget.c) */
    int ranks_here;            /* number of ranks of the group that use this GPU */
    epic_sm_budget *sm_budget; /* SMs that all groups of this process use */
    p2p_heap_kind heap_kind;
    struct p2p_heap_memory *heap_memory; /* NULL if heap_kind is P2P_HEAP_IPC */
    /* [r]: the mapping of the heap of rank r, if rank r is in another process */
    p2p_mapping mappings[DEVICE_MAX_RANKS];
    /* number of the generation (the group between two changes of its members) */
    uint32_t generation;
    /* bit mask of the seats (rank numbers) whose ranks have left the group */
    uint32_t vacant;
    p2p_mailbox mailbox;
    p2p_watch *watch;
    alive alive; /* shows the peers if this process dies; not used in backend `hosts` */
    struct net_liveness *liveness; /* NULL if p2p_spans_hosts() is false, or in backend hosts */
    p2p_beats *beats;  /* heartbeat that shows kernels that this process is running (beats.h) */
    hosts_part *hosts; /* NULL in backend p2p */
    cudaStream_t side; /* stream for copies that must work while a kernel runs */
    uint64_t *word;    /* pinned host memory for small copies on the stream `side` */
    bool bulk;         /* true: the GPU has bulk stores (compute capability 9.0) */
    /* maximum number of tokens per rank for which low-latency kernels run */
    int32_t lowlat_tokens;
    /* windows of the group; NULL until one is added; read and set atomically */
    struct p2p_windows *windows;
    pthread_mutex_t waits_lock; /* protects `waits` */
    p2p_waits waits; /* memory into which the waiting times are copied from the device */
};

/* Returns EPIC_OK for cudaSuccess. For an error, stores an error text that begins with `what`,
 * clears the CUDA error, and returns EPIC_ENOMEM or EPIC_EDEVICE. */
epic_result p2p_cuda(cudaError_t error, const char *what);

/* Launches every kernel once, so that no later operation waits until CUDA has loaded a kernel
 * (load.c). */
epic_result p2p_load(epic_group *group);

/* Returns whether this process can use a CUDA device. If not, writes the reason to why[256]. */
bool p2p_any_device(char *why);

/* Returns whether two ids of hosts or processes are equal. */
static inline bool p2p_same(const uint64_t a[2], const uint64_t b[2])
{
    return a[0] == b[0] && a[1] == b[1];
}

/* p2p_group_new() creates a group and computes its heap layout. It returns NULL if out of
 * memory. p2p_group_device() then sets the group's device, creates the stream `side` and
 * allocates *status. p2p_group_free() frees all of these. */
epic_group *p2p_group_new(const epic_join *join, const p2p_hooks *hooks);
epic_result p2p_group_device(epic_group *group, p2p_gpu *gpu);
void p2p_group_free(epic_group *group);
/* Returns EPIC_ENOTSUP if config has more ranks or tokens than contexts on GPUs support. */
epic_result p2p_check_config(const epic_config *config);
/* Returns whether the values in *gpu, which a peer has sent, are in range. */
bool p2p_gpu_fits(const p2p_gpu *gpu);

/* Returns the offsets of the arrays in a heap of a context with this config. */
p2p_heap p2p_heap_for(const epic_config *config);
/* Returns the size in bytes of a heap's staging memory, into which peers send rows. */
int64_t p2p_staging_bytes(const p2p_heap *at, int64_t num_ranks);
/* Returns the allocation size of a heap in bytes. */
int64_t p2p_heap_bytes(const p2p_heap *at);
/* Clears a heap. Sets stamped words (words with the number of the operation that wrote them,
 * kernels/cuda/common/heap.h) to 0, and staging memory to poison (the value of a word that has
 * not arrived). Returns when the device has finished. */
epic_result p2p_heap_clear(epic_group *group, uint8_t *heap);
/* Clears this rank's heap for a new generation, in which epochs begin at 1 again. Keeps the
 * words `gone`, because a member may close its context early. Also keeps the device times and
 * the waiting times in the control memory. */
epic_result p2p_heap_renew(epic_group *group);
/* Returns the epoch (number) of the last operation that began on this rank's device. Copies the
 * epoch from the device and waits for this copy, but not for kernels. */
uint32_t p2p_epoch(epic_group *group);
/* Copies the words `gone` [DEVICE_MAX_RANKS] from the device. gone[r] is 0 while rank r may
 * access this rank's heap. Returns pinned host memory that is valid until the next call, or
 * NULL if the copy failed. */
const uint64_t *p2p_gone(epic_group *group);

/* Returns the memory of this rank into which its peers write with p2p_hooks.write. */
static inline uint8_t *p2p_inbox(const epic_group *g)
{
    return HOSTS ? g->self.net->inbox : g->self.heap[g->rank];
}

bool p2p_fetch(void *to, const void *from, size_t bytes, bool *good);
/* Allocates memory of the group's GPU, or returns NULL. p2p_release() frees it. */
void *p2p_allocate(epic_group *group, size_t bytes);
void p2p_release(epic_group *group, void *memory);
/* Writes one line about the GPUs of this host, for epic-info. */
void p2p_describe(char *to, size_t size);

/* Returns how many SMs of the group's device the contexts of this process use. */
int p2p_budget_taken(const epic_group *group);
/* Reserves SMs of the GPU, and sets group->num_sms to their number (budget.c). `gpus`
 * [num_ranks] is the data of all ranks. Ranks that share a GPU get the same number of SMs.
 * Errors: EPIC_EINVAL, EPIC_ENOTSUP. */
epic_result p2p_budget_share(epic_group *group, const p2p_gpu *gpus);
void p2p_budget_give_back(epic_group *group);

/* Returns whether the rank on `seat` (a rank number) has left the group. */
static inline bool p2p_is_vacant(const epic_group *group, int seat)
{
    return WITH_VACANT_SEATS && (group->vacant >> seat % 32 & 1);
}

/* Returns the number of ranks that have not left the group. */
static inline int p2p_num_members(const epic_group *group)
{
    return group->num_ranks - (WITH_VACANT_SEATS ? __builtin_popcount(group->vacant) : 0);
}

/* Implement epic_ops.set_members and epic_ops.regroup (members.c). */
void p2p_set_members(epic_group *group, const seat_set *members);
extern const struct epic_regroup_transport p2p_regroup;

/* Returns whether a peer in this process has freed its heap. Such a peer may not have announced
 * that it closes, because its join failed. */
bool p2p_has_released(const epic_group *group, int peer);

/* Start and end the watcher thread (watch.c). alive_fds [num_ranks]: alive.fd of each rank
 * (base/alive.h). */
epic_result p2p_watch_open(epic_group *group, const int *alive_fds);
void p2p_watch_close(epic_group *group);

/* Returns whether the process of `peer` has died. The watcher thread (backend p2p) or the proxy
 * thread (backend `hosts`) sets the bit of `peer` in status->dead. */
static inline bool p2p_is_dead(const epic_group *group, int peer)
{
    return __atomic_load_n(&group->status->dead[peer / 32], __ATOMIC_ACQUIRE) >> peer % 32 & 1;
}

/* Returns the ranks that have a heap: the members that have not died or freed it. */
seat_set p2p_ranks_with_heaps(const epic_group *group);

/* Sets the bit of a dead peer in status->dead. Running kernels read these bits. */
static inline void p2p_mark_dead(p2p_status *status, int peer)
{
    __atomic_fetch_or(&status->dead[peer / 32], 1u << peer % 32, __ATOMIC_RELEASE);
}

/* Returns a word with one culprit (a rank that caused a failure), in the format of
 * p2p_status.culprits. Kernels create such words with pack_ranks() (ranks.cuh). */
static inline uint32_t p2p_culprit_word(int rank)
{
    return MANY_RANKS ? 1u << 30 | (uint32_t)rank : 1u << rank % 32;
}

/* Returns whether `culprits`, a value of p2p_status.culprits, contains `rank`. */
static inline bool p2p_is_culprit(uint32_t culprits, int rank)
{
#if MANY_RANKS
    for (uint32_t i = 0; i < culprits >> 30; i++)
        if ((int)(culprits >> 10 * i & 1023) == rank) return true;
    return false;
#else
    return culprits >> rank % 32 & 1;
#endif
}

/* Allocates `bytes` bytes for this rank's heap, as EPIC_HEAP selects. p2p_heap_free() waits for
 * all kernels of the device and frees the heap. Errors: EPIC_EINVAL if EPIC_HEAP has an invalid
 * value, EPIC_ENOMEM, EPIC_ENOTSUP, EPIC_EDEVICE. */
epic_result p2p_heap_allocate(epic_group *group, int64_t bytes, uint8_t **heap);
void p2p_heap_free(epic_group *group, uint8_t *heap);

/* Returns whether rank `peer` is near this rank: both store directly into each other's heap. */
static inline bool p2p_is_near(const epic_group *group, int peer)
{
    return !HOSTS || p2p_same(group->peers[peer].host, group->peers[group->rank].host);
}

/* Returns whether ranks of other hosts store directly into this rank's heap. */
static inline bool p2p_spans_hosts(const epic_group *group)
{
    for (int q = 0; q < group->num_ranks; q++)
        if (p2p_is_near(group, q) &&
            !p2p_same(group->peers[q].host, group->peers[group->rank].host))
            return true;
    return false;
}

/* Makes this rank's heap accessible to the ranks near it. Adds the heap to the list of heaps of
 * this process, and describes the heap in *handle for ranks of other processes. */
epic_result p2p_heap_export(epic_group *group, uint8_t *heap, p2p_heap_handle *handle);
/* Sets group->self.heap[q] to the heap of rank q for each rank near this one. `handles`
 * [num_ranks] contains the handles of all ranks. If the heaps are exported as descriptors, all
 * ranks must call this function. Errors: EPIC_EMISMATCH if the ranks have different values of
 * EPIC_HEAP; EPIC_ENOTSUP if a heap cannot be mapped; EPIC_EPEER, EPIC_ETIMEOUT. */
epic_result p2p_heap_connect(epic_group *group, const p2p_heap_handle *handles);
/* If the heap of `peer` is mapped, unmaps it. */
void p2p_heap_unmap(epic_group *group, int peer);
/* Unmaps the heaps of all peers, and removes this rank's heap from the list of this process. */
void p2p_heap_disconnect(epic_group *group);

/* Windows (device memory into which peers store rows), in windows.c. p2p_add_window()
 * implements epic_window_alloc (args->data is NULL) and epic_window_register. Collective: all
 * ranks return the same error. EPIC_ENOMEM and EPIC_ENOTSUP do not break the group.
 * p2p_free_windows() waits until no kernel of this device runs, and frees the windows. */
epic_result p2p_add_window(epic_group *group, const epic_window_args *args,
                           epic_window_info *out);
void p2p_free_windows(epic_group *group);
/* Returns the table of all windows. The table is in device memory. Returns NULL if the group
 * has one rank or no window. */
const p2p_mapped_window *p2p_window_table(const epic_group *group);
/* Returns 0 if the output is not in a window. If it is, returns one word with the index of the
 * window plus one and the offset in the window (p2p_window_words). */
uint64_t p2p_window_place(const epic_group *group, epic_rows output);

/* Returns whether the ranks of each process share one copy of this library, and so its list of
 * heaps. If not, writes the reason to `why` (256 bytes). */
bool p2p_share_library(const epic_peer *peers, int num_ranks, char *why);

/* Returns the heap of rank `rank` in group group_id, or NULL if that rank is in another
 * process. */
uint8_t *p2p_heap_find(uint64_t group_id, int rank);

/* Returns EPIC_OK and sets *out to zeros if no kernel has reported a failure. If one has,
 * returns the result code of the failure and writes the failure to *out. */
epic_result p2p_check(epic_group *group, epic_failure_info *out);

/* Returns EPIC_OK if no kernel has reported a failure. If one has, returns the result code of
 * the failure and sets the error text. Every operation calls this function first. */
epic_result p2p_check_group(epic_group *group);

/* Returns the oldest data error that no call has returned yet, and sets its error text.
 * Returns EPIC_OK if there is none. */
epic_result p2p_next_data_error(epic_group *group);

void p2p_record_waits(epic_group *group, struct recorder_page *page);

epic_result p2p_read_waits(epic_group *group, uint32_t first, uint32_t last,
                           epic_wait_info *out);

/* Implements epic_backend.bootstrap: creates a bootstrap over the NCCL communicator
 * `native`. */
epic_result p2p_bootstrap_nccl(epic_bootstrap *out, const void *native, uint32_t timeout_ms);

/* Breaks the group on all ranks. The other ranks return EPIC_EPEER with the text `why`. */
void p2p_abort(epic_group *group, uint64_t tag, const char *why);

/* Router and losses, in router.c. Each function checks that the kernels support the arguments,
 * and launches kernels on the stream of its call. Errors: EPIC_ENOTSUP, EPIC_EDEVICE. */
epic_result p2p_router_forward(epic_group *group, const epic_router_args *args);
epic_result p2p_router_backward(epic_group *group, const epic_router_backward_args *args);
epic_result p2p_balance_loss_forward(epic_group *group, const epic_loss_args *args,
                                     double factor);
epic_result p2p_balance_loss_backward(epic_group *group, const epic_loss_args *args,
                                      double factor);
epic_result p2p_z_loss_forward(epic_group *group, const epic_loss_args *args, double factor);
epic_result p2p_z_loss_backward(epic_group *group, const epic_loss_args *args, double factor);
epic_result p2p_bias_update(epic_group *group, const epic_bias_update_args *args);

/* Experts, in experts.c. The functions launch the GEMMs and the activation function on the
 * stream of the call. Errors: EPIC_ENOTSUP, EPIC_EDEVICE, and errors of the caller's gemm. */
epic_result p2p_experts_forward(epic_group *group, const epic_experts_args *args);
epic_result p2p_experts_backward(epic_group *group, const epic_experts_backward_args *args);

/* The functions below (gate.c, tokens.c) process only the tokens of this rank. backend/ops.h
 * describes them. Errors: EPIC_EDEVICE. */

/* Computes logits [tokens, columns] = x w_gate + b_gate in float32. */
epic_result p2p_gate(epic_group *group, const epic_gate_args *gate);
/* Computes the gradients of w_gate, b_gate and x. Adds the gradient of x to d_x. */
epic_result p2p_gate_backward(epic_group *group, const epic_gate_args *gate);
epic_result p2p_add(epic_group *group, epic_stream stream, void *to, const void *from,
                    int64_t count, uint32_t type, bool replace);
epic_result p2p_read_counts(epic_group *group, epic_stream stream, const int32_t *from,
                            int64_t count, int32_t *to);
epic_result p2p_mask_zero_experts(epic_group *group, epic_stream stream,
                                  const layer_tokens *tokens, int32_t *to);
epic_result p2p_shared_gate(epic_group *group, epic_stream stream, const layer_tokens *tokens);
epic_result p2p_shared_gate_backward(epic_group *group, epic_stream stream,
                                     const layer_tokens *tokens, float *gradient,
                                     bool accumulate, void *workspace);
epic_result p2p_zero_weights(epic_group *group, epic_stream stream, const layer_tokens *tokens);
epic_result p2p_add_local_rows(epic_group *group, epic_stream stream,
                               const layer_tokens *tokens, const layer_rows *rows);
epic_result p2p_check_plan_fits(epic_group *group, const epic_plan_args *args,
                                uint32_t num_local);
epic_result p2p_sum_trees(epic_group *group, epic_stream stream, float *values, int64_t n);
epic_result p2p_write_losses(epic_group *group, epic_stream stream, const float *losses,
                             const epic_moe_args *args);
/* Computes d_losses [2] = {d_balance_loss + d_loss, d_z_loss + d_loss}, where d_loss is the
 * gradient of the sum of the two losses. If d_loss is NULL, its value is 1. If another pointer
 * is NULL, its value is 0. */
epic_result p2p_read_d_losses(epic_group *group, epic_stream stream, float *d_losses,
                              const epic_moe_backward_args *args);

extern const epic_ops p2p_ops;
extern EPIC_API const epic_backend epic_backend_p2p, epic_backend_hosts;

#endif
