/* SPDX-License-Identifier: Apache-2.0 */
/* What every net must do, as the kernels use it: a reader polls each word of the inbox, which is
 * poison until it has come, checks it and restores the poison; a writer uses its outbox again once
 * done() lets it. */
#ifndef NET_SUITE_H
#define NET_SUITE_H

#include "net/net.h"
#include "run.h"

typedef struct suite_verdict { /* shared by all ranks */
    _Atomic long words, torn, wrong, missing, twice;
    _Atomic long refusals; /* puts that found no room */
    _Atomic bool over;     /* a rank has seen enough: all stop */
} suite_verdict;

typedef struct suite_case {
    const net_engine *engine;
    net_rdma rdma;
    int threads; /* of the engine's, beside the one that looks */
    uint64_t seed;
    uint64_t bytes;      /* from each rank to each, a round; a multiple of 8 */
    uint32_t most_bytes; /* of one put */
    int rounds;
    bool tears;           /* words come in parts, and twice: a wrong one is looked at again */
    unsigned patience_ms; /* without a new word */
    const char *wanted;   /* what say() must contain; NULL: anything */
    suite_verdict *verdict;
} suite_case;

/* One rank's part: a run_body; `self` is a suite_case. */
void suite_exchange(const epic_bootstrap *bootstrap, void *self);

/* No violation of any kind, and something was there to look at. */
bool suite_clean(const suite_verdict *v);

/* A net, opened and connected with the peers of the bootstrap; NULL: a check has failed. */
net *suite_open(const net_engine *engine, const epic_bootstrap *bootstrap,
                const net_setup *setup);

/* Waits for all ranks of the bootstrap, and looks meanwhile if there is a net. */
void suite_bootstrap(const net_engine *engine, net *w, const epic_bootstrap *bootstrap);

#endif
