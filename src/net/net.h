/* SPDX-License-Identifier: Apache-2.0 */
/* A net: what carries bytes between GPUs of several hosts.  Each rank has one, to the ranks in its
 * place on the other hosts.  An *engine* is a way to make nets; it lives in a library of its own.
 *
 * A rank's peers write into its *inbox*, and what it sends lies in its *outbox*.  What holds:
 *   1. Every aligned word of 8 bytes arrives whole: who polls it sees the old word or the new one.
 *   2. Nothing else is ordered: the words of all puts land in any order, each of them once.
 *   3. A put that was taken lands, or the peer is said to be gone.
 *   4. Until done() says so, the source of a put is read again and again.
 *   5. After connect nothing blocks, nothing allocates memory of ours, and nothing calls CUDA.
 *
 * So a reader needs poison or a stamp in every word, and a writer needs no fence and no flag.  All
 * calls on a net are made by one thread at a time; words of the inbox may be read by any. */
#ifndef EPIC_NET_ENGINE_H
#define EPIC_NET_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"

#define NET_MAX_HOSTS 32
#define NET_HANDLE_BYTES 4096
#define NET_WHY_BYTES 256            /* bytes of a sentence */
#define NET_MAX_PUT_BYTES (1u << 20) /* of one put */

typedef struct net net;

/* How bytes travel, where the engine has a choice; EPIC_NET_RDMA. */
typedef enum net_rdma {
    NET_RDMA_IF_WHOLE, /* by remote writes where those are known to keep words whole */
    NET_RDMA_NEVER,    /* in messages that the receiver's thread copies, a word at a time */
    NET_RDMA_ALWAYS    /* by remote writes: who says so knows the network */
} net_rdma;

typedef struct net_setup {
    int32_t host, num_hosts; /* peers are the other hosts' ranks, by their host's number */
    net_rdma rdma;
    int32_t threads;      /* that the engine may have where CPUs move the bytes */
    bool on_gpu;          /* inbox and outbox lie on a GPU; else in host memory */
    void *inbox;          /* 8-byte aligned, as all below is */
    uint64_t inbox_bytes; /* the same on all */
    /* What goes to so many bytes at the beginning of an inbox is little, and awaited by what all
     * else waits for: an engine may let it overtake. */
    uint64_t urgent_bytes;
    const void *outbox; /* what puts read lies here */
    uint64_t outbox_bytes;
} net_setup;

typedef struct net_engine {
    const char *name;
    /* The size that puts should have, if there is as much; 2 KB to 512 KB. */
    uint32_t preferred_bytes;

    /* Can this host have such a net?  Local; `why` (NET_WHY_BYTES bytes) gets the reason when not. */
    bool (*is_available)(char *why);

    /* May inbox and outbox lie on a GPU here?  Local.  Whether the peers are reached that way is
     * known by connect alone. */
    bool (*can_reach_gpu)(void);

    /* Local.  `card` (NET_HANDLE_BYTES, zeroed) is what the peers must know; it carries 64 random
     * bits without which nothing is written into the inbox. */
    epic_result (*open)(net **out, const net_setup *setup, void *handle, char *why);

    /* Cards of all hosts, [num_hosts].  Local, and no peer has to answer.  EPIC_ENOTSUP: memory on
     * the GPU is out of a peer's reach; close, and open with host memory. */
    epic_result (*connect)(net *n, const void *handles, char *why);

    /* Takes `bytes` from the outbox to offset `to` of the host's inbox, all multiples of 8, at most
     * NET_MAX_PUT_BYTES.  False: there is no room, come again after look().  What goes to a host that
     * is gone is taken and dropped. */
    bool (*put)(net *n, int host, uint64_t to, const void *from, uint32_t bytes);

    /* The same of one word that needs no source. */
    bool (*put_word)(net *n, int host, uint64_t to, uint64_t value);

    /* Moves what can be moved; returns how much happened, 0: nothing. */
    int (*progress)(net *n);

    /* Puts and words to a host are counted together: have the first `count` of them left, so that
     * their sources may be written? */
    bool (*is_done)(const net *n, int host, uint64_t count);

    /* Has the engine given the host up?  It may never notice: lines do (lines.h). */
    bool (*is_gone)(const net *n, int host);

    /* How the peers are really reached, in a line of at most `size` bytes. */
    void (*describe)(const net *n, char *to, size_t size);

    /* NULL is allowed.  Sends what was taken, for a moment at most, whatever the peers do. */
    void (*close)(net *n);
} net_engine;

/* The engine of that name, loaded when it is first asked for; NULL and the reason (NET_WHY_BYTES
 * bytes): there is none. */
const net_engine *net_find_engine(const char *name, char *why);

#endif
