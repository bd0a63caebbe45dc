/* SPDX-License-Identifier: Apache-2.0 */
/* A striped net is one net made of several nets of an engine, its stripes. All stripes of a
 * host write into its one inbox. Each stripe after the first has a thread, so where CPUs
 * move the bytes several threads share that work. A net orders nothing, so stripes need not
 * wait for each other. */
#ifndef EPIC_NET_STRIPED_H
#define EPIC_NET_STRIPED_H

#include "net/net.h"

#define STRIPED_MAX 8 /* largest number of stripes, with the first */

/* An engine whose nets can be stripes. A library with a striped net defines one object of
 * it. */
typedef struct stripe_engine {
    const net_engine *engine; /* opens one stripe */
    bool (*can_gain)(
        /* Returns true if several stripes move more bytes than this open one. */
        const net *stripe);
} stripe_engine;

/* The engine of the stripes; defined by the library. */
extern const stripe_engine striped_over;

/* The functions of net_engine, with the same contracts. A net opens up to 1 + setup->threads
 * stripes; striped_connect() closes those that a peer does not have. */
epic_result striped_open(net **out, const net_setup *setup, void *handle, char *why);
epic_result striped_connect(net *n, const void *handles, char *why);
bool striped_put(net *n, int host, uint64_t to, const void *from, uint32_t bytes);
bool striped_put_word(net *n, int host, uint64_t to, uint64_t value);
int striped_progress(net *n);
bool striped_is_done(const net *n, int host, uint64_t count);
bool striped_is_gone(const net *n, int host);
void striped_describe(const net *n, char *to, size_t size);
void striped_close(net *n);

/* The members of net_engine that a striped net implements. */
#define STRIPED_CALLS                                                                       \
    .open = striped_open, .connect = striped_connect, .put = striped_put,                   \
    .put_word = striped_put_word, .progress = striped_progress, .is_done = striped_is_done, \
    .is_gone = striped_is_gone, .describe = striped_describe, .close = striped_close

#endif
