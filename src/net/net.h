/* SPDX-License-Identifier: Apache-2.0 */
/* The interface of a network engine: code that sends bytes between ranks on several hosts, from
 * and to GPU memory or host memory. Each rank opens one net, which connects the rank to one
 * rank on each other host. These ranks are its peers, and arrays of peers are indexed by host.
 * The backend `hosts` treats every rank as a separate host, so in this backend all other ranks
 * are peers. The engine NAME is in the library libepic_NAME.so, for example libepic_ucx.so.
 *
 * A rank has an inbox, into which its peers write, and an outbox, from which it sends. A *put*
 * copies words from a rank's outbox into the inbox of a peer. Engines guarantee:
 *
 * 1. Every aligned word of 8 bytes is written atomically. A reader that polls the word sees the
 *    old or the new value, never a mixture.
 * 2. Words arrive in any order, even the words of one put. Each word arrives once.
 * 3. A put that put() has accepted arrives, or is_gone() returns true for the peer.
 * 4. An engine may read the source of a put several times, until is_done() returns true for the
 *    put.
 * 5. After connect(), EPIC's part of the engine does not allocate host memory or call CUDA, and
 *    no function except close() blocks.
 *
 * Because of rule 2, a reader cannot infer from one word that another word has arrived. So each
 * word shows by its content that it has arrived, in one of two ways. Some words contain a value
 * that is never sent (poison) until a new value arrives. All other words contain a stamp, the
 * epoch (number) of the operation. A sender needs no fence and no flag. Only one thread at a
 * time may call functions of a net. Any thread may read words of the inbox. */
#ifndef EPIC_NET_ENGINE_H
#define EPIC_NET_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"

#define NET_MAX_HOSTS 256
#define NET_HANDLE_BYTES 4096
#define NET_WHY_BYTES 256 /* size of the buffer for an error text */
#define NET_GPU_BYTES 16  /* size of a PCI address */
#define NET_MAX_PUT_BYTES (1u << 20)

/* The net of one rank. Each engine defines its own struct. */
typedef struct net net;

/* How an engine with several ways of sending puts chooses one (EPIC_NET_RDMA). */
typedef enum net_rdma {
    /* RDMA writes if the network writes words atomically (rule 1), and messages if not */
    NET_RDMA_IF_WHOLE,
    /* messages, which a thread of the receiver stores into the inbox word by word */
    NET_RDMA_NEVER,
    /* RDMA writes; the user guarantees that the network writes words atomically */
    NET_RDMA_ALWAYS
} net_rdma;

/* Arguments of open(), which copies them. Inbox and outbox must stay valid until close(). */
typedef struct net_setup {
    /* this rank's host, and the number of hosts, which is at most NET_MAX_HOSTS */
    int32_t host, num_hosts;
    net_rdma rdma;
    /* Maximum number of threads that the engine may start. Engines start threads only if CPUs
     * copy the bytes, for example over TCP. With RDMA the network devices copy them. */
    int32_t threads;
    bool on_gpu; /* true: inbox and outbox are GPU memory; false: host memory */
    void *inbox; /* the addresses and sizes of inbox and outbox are multiples of 8 bytes */
    uint64_t inbox_bytes; /* equal on all ranks */
    /* Puts to the first `urgent_bytes` bytes of an inbox are small, and peers wait for these
     * puts first. So an engine may send them before other puts. */
    uint64_t urgent_bytes;
    const void *outbox; /* source memory of all puts */
    uint64_t outbox_bytes;
    /* PCI address of this rank's GPU, such as "0000:18:00.0", or "" if unknown. An engine may
     * use it to choose a network device near this GPU. */
    char gpu[NET_GPU_BYTES];
} net_setup;

/* The functions of an engine. A library exports one object of this type, epic_net_NAME. */
typedef struct net_engine {
    const char *name;
    /* The engine is fastest with puts of this size in bytes (from 2 KB to 512 KB). */
    uint32_t preferred_bytes;

    /* Returns true if this host can open a net of this engine. If not, writes the reason to
     * `why` (NET_WHY_BYTES bytes). Not collective. */
    bool (*is_available)(char *why);

    /* Returns true if inbox and outbox may be memory of a GPU of this host. Even if so,
     * connect() may find out that a peer cannot reach that memory. Not collective. */
    bool (*can_reach_gpu)(void);

    /* Opens this rank's end of the net. Writes to `handle` the data with which peers can
     * connect. The caller has zeroed the NET_HANDLE_BYTES bytes of `handle`. The data contains
     * 64 random bits, which a receiver expects in each message, because other programs may send
     * messages too. On an error, writes the reason to `why`. Not collective. */
    epic_result (*open)(net **out, const net_setup *setup, void *handle, char *why);

    /* Connects to all peers. `handles` [num_hosts, NET_HANDLE_BYTES] contains the handles of
     * this rank and its peers, by host. Does not wait for replies. Returns EPIC_ENOTSUP if the
     * GPU memory of a peer cannot be reached. The caller should then open a new net with host
     * memory. On an error, writes the reason to `why`. */
    epic_result (*connect)(net *n, const void *handles, char *why);

    /* Copies `bytes` bytes from the address `from` in the outbox to the offset `to` of the
     * inbox of the peer on `host`. `to`, `from` and `bytes` are multiples of 8, and `bytes` is
     * at most NET_MAX_PUT_BYTES. Returns false if too many puts are in flight; the caller must
     * then call progress() and try again. If the peer is gone, does not send the put and
     * returns true. */
    bool (*put)(net *n, int host, uint64_t to, const void *from, uint32_t bytes);

    /* Like put(), but sends one word of 8 bytes, which is passed by value. */
    bool (*put_word)(net *n, int host, uint64_t to, uint64_t value);

    /* Lets the engine send and receive. Returns the number of events (completed puts). */
    int (*progress)(net *n);

    /* Returns true if the engine no longer reads the sources of the first `count` puts to a
     * host, so that the caller may overwrite them. `count` includes all puts since open(), also
     * those of put_word(). */
    bool (*is_done)(const net *n, int host, uint64_t count);

    /* Returns true if the engine has detected that the peer on a host is gone. Some engines
     * never detect this, so liveness connections (liveness.h) watch the peers too. */
    bool (*is_gone)(const net *n, int host);

    /* Writes to `to` one line of at most `size` bytes about the networks of this net. */
    void (*describe)(const net *n, char *to, size_t size);

    /* Sends the accepted puts, then closes the net. If peers do not respond, closes the net
     * after about a second, even if some puts are not sent. Accepts NULL. */
    void (*close)(net *n);
} net_engine;

/* Returns the engine with this name. The first call loads its library. On an error, returns
 * NULL and writes the reason to `why` (NET_WHY_BYTES bytes). Any thread may call this
 * function. */
const net_engine *net_find_engine(const char *name, char *why);

#endif
