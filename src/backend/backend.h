/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend promises.  A backend is a way to reach peers; its files export one symbol, the
 * struct epic_backend.  api/backends.c lists all of them.  A host backend implements the functions
 * of backend/transport.h, a device backend those of backend/ops.h.  docs/internals/backends.md shows
 * how to add one. */
#ifndef EPIC_BACKEND_H
#define EPIC_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"

#define EPIC_MAX_RANKS 1024 /* host backends */
#define EPIC_MAX_CELLS 64   /* operations of one rank at once */

struct epic_transport; /* backend/transport.h */
struct epic_ops;       /* backend/ops.h */

/* One rank's view of the group; each backend has its own. */
typedef struct epic_group epic_group;

/* What a rank tells the others before a backend is chosen. */
typedef struct epic_peer {
    uint64_t host[2];    /* same value: same host and same boot */
    uint64_t process[2]; /* same value: same process */
    int64_t pid;
    int64_t uid;
    int64_t network_ns; /* inode: same value, same abstract socket names */
    uint64_t
        library; /* same value and process: ranks share this copy of the library, and so its
                           tables; random, as an address would tell where the library lies */
} epic_peer;

/* What join is given; borrowed for the call. */
typedef struct epic_join {
    const epic_bootstrap *bootstrap; /* gather, rank, num_ranks; checked */
    const epic_config *config;       /* every default filled in, equal on all ranks */
    const epic_peer *peers;          /* [num_ranks] */
    uint64_t group_id;               /* random, equal on all ranks */
} epic_join;

typedef struct epic_backend {
    const char *name; /* what epic_config.backend says */

    /* Can these ranks reach one another this way?  Local, quick, leaves no trace.  `why` (256
     * bytes) gets the reason when not. */
    bool (*can_join)(const epic_peer *peers, int num_ranks, const epic_config *config,
                     char *why);

    /* Collective.  On failure leaves nothing behind, and *out untouched; the sentence goes to
     * epic_fail.  After it the core tells all ranks how each fared. */
    epic_result (*join)(epic_group **out, const epic_join *join);

    /* Local.  Safe when a peer is already gone. */
    void (*leave)(epic_group *group);

    /* In a forked child: gives back what the child has of its parent's group, which goes on;
     * nothing that the parent or a peer can see may change.  NULL: the child keeps it. */
    void (*forget)(epic_group *group);

    /* What join will take, from a config with every default filled in. */
    void (*memory)(const epic_config *config, epic_memory_info *out);

    /* Copies bytes to the host if `from` is memory of this backend's devices, else false; *good:
     * they came.  Synchronizes.  NULL: it has no memory of its own. */
    bool (*fetch)(void *to, const void *from, size_t bytes, bool *good);

    /* Memory of the group's device, 64-byte aligned, and back; at open and close of a step only.
     * allocate: NULL if there is none left.  Both NULL: host memory. */
    void *(*allocate)(epic_group *group, size_t bytes);
    void (*release)(epic_group *group, void *memory);

    /* What this machine has for it, in a line of at most `size` bytes.  NULL: nothing to say. */
    void (*describe)(char *to, size_t size);

    /* How a group's peers on other hosts are really reached, as describe.  NULL: nothing to say. */
    void (*say)(const epic_group *group, char *to, size_t size);

    /* One of the two is set. */
    const struct epic_transport *transport; /* host backends */
    const struct epic_ops *ops;             /* device backends */

    /* A backend in a library of its own has its own epic_fail: this thread's last sentence of
     * it.  NULL: the core's. */
    const char *(*sentence)(void);

    /* A bootstrap of the ranks that `native`, what config.native points to, knows: epic_bootstrap_mpi.
     * NULL: it knows none. */
    epic_result (*bootstrap)(epic_bootstrap *out, const void *native, uint32_t timeout_ms);
} epic_backend;

/* Every backend of this build, in the order in which they are tried; NULL ends the list. */
extern const epic_backend *const epic_backends[];

#endif
