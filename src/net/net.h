/* SPDX-License-Identifier: Apache-2.0 */
/* The interface of a network library (engine) that carries bytes between GPUs of several
 * hosts. Each rank opens one net, which connects it with one rank of each other host. An
 * engine lives in a library of its own, libepic_NAME.so; libepic_ucx.so is one.
 *
 * A rank has an inbox, into which its peers write, and an outbox, from which it sends. The
 * engine promises:
 *   1. Every aligned word of 8 bytes arrives whole: a reader that polls it sees the old or the
 *      new value.
 *   2. Nothing else is ordered. The words of all puts land in any order, each of them once.
 *   3. An accepted put lands, or is_gone() reports the peer.
 *   4. The source of a put may be read, even repeatedly, until is_done() returns true for it.
 *   5. After connect() no call blocks, allocates host memory of EPIC, or calls CUDA.
 *
 * So a reader needs poison or a stamp in every word, and a writer needs no fence and no
 * flag. Only one thread at a time may call functions of a net. Any thread may read words of
 * the inbox. */
#ifndef EPIC_NET_ENGINE_H
#define EPIC_NET_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"

#define NET_MAX_HOSTS 32
#define NET_HANDLE_BYTES 4096
#define NET_WHY_BYTES 256            /* size of the buffer for an error text */
#define NET_MAX_PUT_BYTES (1u << 20) /* largest size of one put */

typedef struct net net;

/* How rows travel, where the engine has a choice; EPIC_NET_RDMA sets it. */
typedef enum net_rdma {
    /* remote writes where the network keeps words of 8 bytes whole, else messages */
    NET_RDMA_IF_WHOLE,
    NET_RDMA_NEVER, /* messages, which the receiving thread stores word by word */
    NET_RDMA_ALWAYS /* remote writes; the user promises that the network keeps words whole */
} net_rdma;

/* Arguments of open(). Copied; the memory must stay until close(). */
typedef struct net_setup {
    int32_t host, num_hosts; /* the peers are numbered by their hosts */
    net_rdma rdma;
    int32_t threads;      /* threads that the engine may start where CPUs move the bytes */
    bool on_gpu;          /* inbox and outbox are memory of a GPU; else of the host */
    void *inbox;          /* 8-byte aligned, like the sizes and the outbox */
    uint64_t inbox_bytes; /* the same on all ranks */
    /* Puts to the first `urgent_bytes` bytes of an inbox are small, and everything else
     * waits for them. An engine may let them overtake other puts. */
    uint64_t urgent_bytes;
    const void *outbox; /* puts read from here */
    uint64_t outbox_bytes;
} net_setup;

/* The functions of an engine. A library exports one object of this type, epic_net_NAME. */
typedef struct net_engine {
    const char *name;
    /* The engine is fastest with puts of this size, if that much is to send; 2 KB to 512 KB. */
    uint32_t preferred_bytes;

    /* Returns whether this host can open such a net, else writes the reason to `why`
     * (NET_WHY_BYTES bytes). Local. */
    bool (*is_available)(char *why);

    /* Returns whether inbox and outbox may lie on a GPU of this host. Local. Whether the
     * peers can be reached that way is known only after connect(). */
    bool (*can_reach_gpu)(void);

    /* Opens this rank's end and writes what the peers need to connect into `handle`
     * (NET_HANDLE_BYTES bytes, zeroed by the caller). Local. The handle contains 64 random
     * bits; a message without them is never stored into the inbox. An error writes its
     * reason to `why`. */
    epic_result (*open)(net **out, const net_setup *setup, void *handle, char *why);

    /* Connects to all peers; `handles` [num_hosts, NET_HANDLE_BYTES] are those of all hosts.
     * Local: no peer has to answer. EPIC_ENOTSUP: a peer's GPU memory cannot be reached;
     * close the net and open it again with host memory. */
    epic_result (*connect)(net *n, const void *handles, char *why);

    /* Sends `bytes` bytes of the outbox to offset `to` of the host's inbox. All are
     * multiples of 8; at most NET_MAX_PUT_BYTES bytes. Returns false if there is no room;
     * call progress() and try again. A put to a host that is gone is accepted and dropped. */
    bool (*put)(net *n, int host, uint64_t to, const void *from, uint32_t bytes);

    /* Like put(), but sends one word by value. */
    bool (*put_word)(net *n, int host, uint64_t to, uint64_t value);

    /* Moves what can be moved. Returns how many events happened; 0: none. */
    int (*progress)(net *n);

    /* Puts and words to one host are counted together. Returns true once the engine has read
     * the sources of the first `count` of them, so that they may be overwritten. */
    bool (*is_done)(const net *n, int host, uint64_t count);

    /* Returns true if the engine has given up the host. It may never notice that a host is
     * gone; liveness connections do (liveness.h). */
    bool (*is_gone)(const net *n, int host);

    /* Writes one line of at most `size` bytes with the transports of the peers. */
    void (*describe)(const net *n, char *to, size_t size);

    /* Closes the net. Sends accepted puts for a short time at most, whatever the peers do.
     * NULL is allowed. */
    void (*close)(net *n);
} net_engine;

/* Returns the engine of that name and loads its library at the first call. On an error
 * returns NULL and writes the reason to `why` (NET_WHY_BYTES bytes). Any thread may call it. */
const net_engine *net_find_engine(const char *name, char *why);

#endif
