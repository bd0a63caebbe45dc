/* SPDX-License-Identifier: Apache-2.0 */
/* A net of several strands.  A strand is a net of an engine; all strands of a host end in its one
 * inbox.  Where CPUs move the bytes each strand beside the first has a thread, so that they carry
 * what one thread cannot.  A net orders nothing, so strands need not wait for each other. */
#ifndef EPIC_NET_STRIPED_H
#define EPIC_NET_STRIPED_H

#include "net/net.h"

#define STRIPED_MAX 8 /* the first one with them */

/* What a library with strands defines, once. */
typedef struct stripe_engine {
    const net_engine *engine; /* makes one strand */
    bool (*can_gain)(
        const net *stripe); /* do more of them carry more than this one, which is open? */
} stripe_engine;

extern const stripe_engine striped_over;

epic_result striped_open(net **out, const net_setup *setup, void *handle, char *why);
epic_result striped_connect(net *n, const void *handles, char *why);
bool striped_put(net *n, int host, uint64_t to, const void *from, uint32_t bytes);
bool striped_put_word(net *n, int host, uint64_t to, uint64_t value);
int striped_progress(net *n);
bool striped_is_done(const net *n, int host, uint64_t count);
bool striped_is_gone(const net *n, int host);
void striped_describe(const net *n, char *to, size_t size);
void striped_close(net *n);

/* Of the engine that the library shows. */
#define STRIPED_CALLS                                                                       \
    .open = striped_open, .connect = striped_connect, .put = striped_put,                   \
    .put_word = striped_put_word, .progress = striped_progress, .is_done = striped_is_done, \
    .is_gone = striped_is_gone, .describe = striped_describe, .close = striped_close

#endif
