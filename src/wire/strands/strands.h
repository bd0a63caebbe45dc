/* SPDX-License-Identifier: Apache-2.0 */
/* A wire of several strands.  A strand is a wire of an engine; all strands of a host end in its one
 * inbox.  Where CPUs move the bytes each strand beside the first has a thread, so that they carry
 * what one thread cannot.  A wire orders nothing, so strands need not wait for each other. */
#ifndef EPIC_WIRE_STRANDS_H
#define EPIC_WIRE_STRANDS_H

#include "wire/wire.h"

#define STRANDS_MOST 8 /* the first one with them */

/* Whose library has strands says of what engine they are, */
extern const wire_engine *const strands_of;

/* and whether more of them carry more than this one, which is open. */
bool strands_gain(const wire *strand);

epic_result strands_open(wire **out, const wire_setup *setup, void *card, char *why);
epic_result strands_connect(wire *w, const void *cards, char *why);
bool strands_put(wire *w, int host, uint64_t to, const void *from, uint32_t bytes);
bool strands_word(wire *w, int host, uint64_t to, uint64_t value);
int strands_look(wire *w);
bool strands_done(const wire *w, int host, uint64_t count);
bool strands_are_gone(const wire *w, int host);
void strands_say(const wire *w, char *to, size_t size);
void strands_close(wire *w);

/* Of the engine that the library shows. */
#define STRANDS_CALLS                                                     \
    .open = strands_open, .connect = strands_connect, .put = strands_put, \
    .word = strands_word, .look = strands_look, .done = strands_done,     \
    .gone = strands_are_gone, .say = strands_say, .close = strands_close

#endif
