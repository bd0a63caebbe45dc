/* SPDX-License-Identifier: Apache-2.0 */
/* The checks that every net must pass. They use the net as kernels do. A reader polls each word
 * of the inbox, which is poison until the word has arrived, checks it and restores the poison.
 * A writer reuses its outbox after is_done(). */
#ifndef NET_SUITE_H
#define NET_SUITE_H

#include "net/net.h"
#include "run.h"

typedef struct suite_verdict { /* shared by all ranks */
    _Atomic long words, torn, wrong, missing, twice;
    _Atomic long refusals; /* puts that found no room */
    _Atomic bool over;     /* a rank has failed: all stop */
} suite_verdict;

typedef struct suite_case {
    const net_engine *engine;
    net_rdma rdma;
    int threads; /* threads that the engine may start */
    uint64_t seed;
    /* bytes from each rank to each other rank in a round; a multiple of 8 */
    uint64_t bytes;
    uint32_t most_bytes; /* largest put */
    int rounds;
    /* words may arrive in parts or twice, so a wrong word is read again */
    bool tears;
    unsigned patience_ms; /* give up after this time without a new word */
    const char *wanted;   /* a part of the text of describe(); NULL: not checked */
    suite_verdict *verdict;
} suite_case;

/* Runs the part of one rank. A run_body; `self` is a suite_case. */
void suite_exchange(const epic_bootstrap *bootstrap, void *self);

/* Returns whether words were checked and no promise was broken. */
bool suite_is_clean(const suite_verdict *v);

/* Opens a net and connects it with the peers. Returns NULL after a failed check. */
net *suite_open(const net_engine *engine, const epic_bootstrap *bootstrap,
                const net_setup *setup);

/* Waits until all ranks have called it, and moves the net meanwhile, if there is one. */
void suite_wait_for_all(const net_engine *engine, net *w, const epic_bootstrap *bootstrap);

#endif
