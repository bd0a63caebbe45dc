/* SPDX-License-Identifier: Apache-2.0 */
/* A net of several strands.  A strand is a net of an engine; all strands of a host end in its one
 * inbox.  Where CPUs move the bytes each strand beside the first has a thread, so that they carry
 * what one thread cannot.  A net orders nothing, so strands need not wait for each other. */
#ifndef EPIC_NET_STRANDS_H
#define EPIC_NET_STRANDS_H

#include "net/net.h"

#define STRANDS_MOST 8 /* the first one with them */

/* What a library with strands defines, once. */
typedef struct strand_engine {
    const net_engine *net; /* makes one strand */
    bool (*gains)(
        const net *strand); /* do more of them carry more than this one, which is open? */
} strand_engine;

extern const strand_engine strands_of;

epic_result strands_open(net **out, const net_setup *setup, void *card, char *why);
epic_result strands_connect(net *w, const void *cards, char *why);
bool strands_put(net *w, int host, uint64_t to, const void *from, uint32_t bytes);
bool strands_word(net *w, int host, uint64_t to, uint64_t value);
int strands_look(net *w);
bool strands_done(const net *w, int host, uint64_t count);
bool strands_are_gone(const net *w, int host);
void strands_say(const net *w, char *to, size_t size);
void strands_close(net *w);

/* Of the engine that the library shows. */
#define STRANDS_CALLS                                                     \
    .open = strands_open, .connect = strands_connect, .put = strands_put, \
    .word = strands_word, .look = strands_look, .done = strands_done,     \
    .gone = strands_are_gone, .say = strands_say, .close = strands_close

#endif
