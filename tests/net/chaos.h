/* SPDX-License-Identifier: Apache-2.0 */
/* The engine chaos, for tests: hosts are threads of this process.  It keeps what a net promises and
 * nothing else: every put is cut into its words, which land one by one, in random order, among those
 * of other puts, some of them late, and are read from their source only then.  On demand it breaks
 * one promise, which a test must notice. */
#ifndef NET_CHAOS_H
#define NET_CHAOS_H

#include "net/net.h"

typedef enum chaos_damage {
    CHAOS_NONE,
    CHAOS_HALVES, /* words land in two halves */
    CHAOS_TWICE,  /* words land once more, later */
    CHAOS_LOST,   /* some words do not land */
    CHAOS_EARLY,  /* done() is said before everything has been read */
    CHAOS_NUM_DAMAGES
} chaos_damage;

typedef struct chaos_settings {
    uint64_t seed;
    chaos_damage damage;
    /* Ends the program when the caller breaks a promise of its own: a source that is written
     * before done(), or a put to where words of another may still land. */
    bool strict;
    /* done() comes when nothing was given for a while: for who does not wait for it. */
    bool slow;
    /* One word after the other lands then, and done() comes at once: for who does not wait for all
     * words. */
    bool late;
    /* The last word of each urgent put lands when all else has landed and nothing was given for a while,
     * one after the other, by their places: for who takes a part for the whole. */
    bool last;
    /* The number of a host that reaches no memory on a GPU, and says so when it connects, and 1; 0: all
     * reach it. */
    int out_of_reach;
} chaos_settings;

/* What nets that are opened from now on do. */
extern chaos_settings chaos_settings_now;

extern EPIC_API const net_engine epic_net_chaos;

/* As if this host had lost its power: its peers' puts are dropped, and it is said to be gone. */
void chaos_kill(net *n);

/* Puts that landed before one that was given earlier, to whatever host. */
uint64_t chaos_num_overtaken(const net *n);

#endif
