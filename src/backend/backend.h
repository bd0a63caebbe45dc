/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of every backend.
 *
 * A backend moves data between the ranks of a group in one way, for example through shared
 * memory. A backend exports one symbol, a struct epic_backend. api/backends.c or, for a backend
 * in a plugin, api/plugins.c lists this symbol. A host backend implements backend/transport.h,
 * a device backend implements backend/ops.h. docs/internals/backends.md shows how to add a
 * backend. */
#ifndef EPIC_BACKEND_H
#define EPIC_BACKEND_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "epic/epic.h"

#define EPIC_MAX_RANKS 1024 /* maximum number of ranks in a group of a host backend */
/* maximum value of max_in_flight: number of operations that one rank can have in flight */
#define EPIC_MAX_OP_SLOTS 64

struct epic_transport; /* defined in backend/transport.h */
struct epic_ops;       /* defined in backend/ops.h */

/* One rank's state in a group. Each backend defines its own struct. */
typedef struct epic_group epic_group;

/* The values of epic_peer.fabric: whether ranks of other hosts can map a rank's GPU memory. */
typedef enum peer_fabric {
    PEER_FABRIC_NONE,        /* the GPU is in no NVLink domain, or EPIC_HEAP excludes fabric */
    PEER_FABRIC_UNSUPPORTED, /* the GPU or its driver has no fabric handles */
    PEER_FABRIC_REFUSED, /* CUDA creates no fabric handle, for example without IMEX channel */
    PEER_FABRIC_READY    /* ranks of the same NVLink domain can map its memory */
} peer_fabric;

/* Data about one rank. All ranks exchange these data before epic_open chooses a backend. */
typedef struct epic_peer {
    /* Two ranks with equal values are on the same host and in the same PID namespace. host[0]
     * identifies the host until its next reboot, host[1] the PID namespace. */
    uint64_t host[2];
    uint64_t process[2]; /* two ranks with equal values are in the same process */
    int64_t pid;
    int64_t uid;
    /* inode of the network namespace; two ranks of a host can connect through an abstract UNIX
     * socket address if these inodes are equal */
    int64_t network_ns;
    /* Identifies the copy of libepic that the rank uses. Ranks of one process with equal values
     * share the library's global tables. The value is random and not the library's address,
     * because an address would reveal where the library is loaded (ASLR). */
    uint64_t library;
    /* The NVLink domain of the rank's GPU: two GPUs are in one domain if `cluster` and `clique`
     * are equal. The two are valid if `fabric` (a peer_fabric) is not PEER_FABRIC_NONE. Set
     * only if the ranks are on several hosts and request the backend gpu or p2p. */
    unsigned char cluster[16];
    uint32_t clique;
    uint32_t fabric;
} epic_peer;

static inline bool peer_has_domain_of(const epic_peer *a, const epic_peer *b)
{
    return !memcmp(a->cluster, b->cluster, sizeof a->cluster) && a->clique == b->clique;
}

/* Returns whether all ranks are in one NVLink domain, in which each rank can map the memory of
 * all others. */
static inline bool peers_share_domain(const epic_peer *peers, int num_ranks)
{
    for (int q = 0; q < num_ranks; q++)
        if (peers[q].fabric != PEER_FABRIC_READY || !peer_has_domain_of(&peers[q], &peers[0]))
            return false;
    return true;
}

#define EPIC_MAX_DEVICES 64

/* For each GPU, the number of SMs that the groups of this process use. The object is in
 * libepic.so, because all plugins share it. */
typedef struct epic_sm_budget {
    pthread_mutex_t mutex; /* guards taken */
    int taken[EPIC_MAX_DEVICES];
} epic_sm_budget;

/* The arguments of join. They are valid only during the call, except *sm_budget. */
typedef struct epic_join {
    const epic_bootstrap *bootstrap; /* epic_open has checked gather, rank and num_ranks */
    const epic_config *config;       /* defaults filled in; equal on all ranks */
    const epic_peer *peers;          /* [num_ranks]: data about each rank */
    uint64_t group_id;               /* random; equal on all ranks */
    epic_sm_budget *sm_budget;       /* used by device backends, until leave */
} epic_join;

typedef struct epic_backend {
    const char *name; /* the value of epic_config.backend that selects this backend */

    /* Returns whether these ranks can form a group with this backend. If not, writes the reason
     * to `why`, which has 256 bytes. The call is not collective and has no side effects. */
    bool (*can_join)(const epic_peer *peers, int num_ranks, const epic_config *config,
                     char *why);

    /* Sets mine->cluster, mine->clique and mine->fabric to the NVLink domain of the current
     * device. NULL: the backend uses no NVLink domains. */
    void (*identify)(epic_peer *mine);

    /* Creates this rank's state in the group. Collective: all ranks call join. If join fails,
     * it releases everything, does not change *out and sets the error text with epic_fail.
     * After join, epic_open gathers the results of all ranks. */
    epic_result (*join)(epic_group **out, const epic_join *join);

    /* Releases the group. Not collective, and works even if a peer is gone. A device backend
     * first waits for peers that may still write into this rank's memory, but not longer than
     * config.timeout_ms. */
    void (*leave)(epic_group *group);

    /* Called in a forked child: releases the child's copy of the group, without an effect on
     * the parent and its peers. NULL: the child keeps its copy until it exits. */
    void (*forget)(epic_group *group);

    /* Writes to *out how much memory join allocates for one rank. *config has num_ranks and all
     * defaults filled in, and *out contains zeros. If the backend supports no group with this
     * config, returns an error and sets its text with epic_fail. epic_open calls this function
     * before join, so join need not check what this function has checked. */
    epic_result (*memory)(const epic_config *config, epic_memory_info *out);

    /* Returns whether `from` is in the memory of this backend's devices. If so, copies `bytes`
     * bytes from `from` to host memory at `to`, waits for the copy, and sets *good to whether
     * the copy succeeded. NULL: the backend has no device memory. */
    bool (*fetch)(void *to, const void *from, size_t bytes, bool *good);

    /* These functions allocate and release memory of the group's device, aligned to 64 bytes,
     * for the buffers of a dispatcher. allocate returns NULL if out of memory. Both NULL: the
     * dispatcher uses host memory. */
    void *(*allocate)(epic_group *group, size_t bytes);
    void (*release)(epic_group *group, void *memory);

    /* Writes one line of at most `size` bytes about this machine's hardware, for epic-info.
     * NULL: there is nothing to describe. */
    void (*describe)(char *to, size_t size);

    /* Writes one line of at most `size` bytes about the network that connects this rank with
     * its peers on other hosts. NULL: the backend uses no network library. */
    void (*describe_net)(const epic_group *group, char *to, size_t size);

    /* exactly one of `transport` and `ops` is set */
    const struct epic_transport *transport; /* set by a host backend */
    const struct epic_ops *ops;             /* set by a device backend */

    /* Returns the last error text of the calling thread. Set by a backend in a plugin, because
     * the plugin has its own copy of epic_fail. NULL: the backend uses the epic_fail of
     * libepic.so. */
    const char *(*sentence)(void);

    /* Creates a bootstrap. NULL in backends that cannot create a bootstrap.
     * - Backend mpi, for epic_bootstrap_mpi(): `native` is config.native, a pointer to an MPI
     *   communicator, or NULL for all ranks of the MPI job.
     * - Backend p2p, for epic_bootstrap_nccl(): `native` is an ncclComm_t, never NULL. */
    epic_result (*bootstrap)(epic_bootstrap *out, const void *native, uint32_t timeout_ms);
} epic_backend;

/* The backends in libepic.so, in the order in which epic_open tries them, followed by NULL. */
extern const epic_backend *const epic_backends[];

#endif
