/* SPDX-License-Identifier: Apache-2.0 */
/* A striped net combines several nets of one engine (net.h), its stripes, into one net. All
 * stripes of a rank send from the same outbox and receive into the same inbox. Each stripe
 * except the first has a thread, because several threads are faster if CPUs copy the bytes.
 * Words of a net may arrive in any order, so stripes need not wait for each other. */
#ifndef EPIC_NET_STRIPED_H
#define EPIC_NET_STRIPED_H

#include "net/net.h"

#define STRIPED_MAX 8

/* An engine (code that drives a network library) whose nets can be stripes. */
typedef struct stripe_engine {
    const net_engine *engine; /* opens, connects and closes one stripe */
    /* Returns whether more stripes like the open net `stripe` would be faster. */
    bool (*can_gain)(const net *stripe);
} stripe_engine;

/* The engine of the stripes. Each library that uses striped nets defines it, as ucx.c does. */
extern const stripe_engine striped_over;

/* These functions implement the members of net_engine (net.h). striped_open() opens up to 1 +
 * setup->threads stripes. All ranks must have the same number of stripes, so striped_connect()
 * closes the surplus stripes. */
epic_result striped_open(net **out, const net_setup *setup, void *handle, char *why);
epic_result striped_connect(net *n, const void *handles, char *why);
bool striped_put(net *n, int host, uint64_t to, const void *from, uint32_t bytes);
bool striped_put_word(net *n, int host, uint64_t to, uint64_t value);
int striped_progress(net *n);
bool striped_is_done(const net *n, int host, uint64_t count);
bool striped_is_gone(const net *n, int host);
void striped_describe(const net *n, char *to, size_t size);
void striped_close(net *n);

/* The fields of net_engine that a striped net provides. */
#define STRIPED_CALLS                                                                       \
    .open = striped_open, .connect = striped_connect, .put = striped_put,                   \
    .put_word = striped_put_word, .progress = striped_progress, .is_done = striped_is_done, \
    .is_gone = striped_is_gone, .describe = striped_describe, .close = striped_close

#endif
