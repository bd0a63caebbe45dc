/* SPDX-License-Identifier: Apache-2.0 */
/* The engine chaos, for tests. Hosts are threads of this process. It keeps exactly the promises
 * of net.h and no others. Every put is cut into its words. These are read from their source and
 * land one by one, in random order, among the words of other puts, and some of them late. On
 * demand it breaks one promise, which a test must notice. */
#ifndef NET_CHAOS_H
#define NET_CHAOS_H

#include "net/net.h"

typedef enum chaos_damage {
    CHAOS_NONE,
    CHAOS_HALVES, /* words land in two halves */
    CHAOS_TWICE,  /* words land a second time later */
    CHAOS_LOST,   /* some words do not land */
    CHAOS_EARLY,  /* is_done() returns true before everything has been read */
    CHAOS_NUM_DAMAGES
} chaos_damage;

typedef struct chaos_settings {
    uint64_t seed;
    chaos_damage damage;
    /* Ends the program when the caller breaks a rule: it writes to a source before is_done(),
     * or puts to a place where words of another put may still land. */
    bool strict;
    /* is_done() returns true only after a while without puts. This finds callers that do not
     * wait for it. */
    bool slow;
    /* One word after another lands only after a while without puts, but is_done() returns true
     * at once. This finds callers that do not wait for all words. */
    bool late;
    /* The last words of urgent puts land only after everything else, one after another by
     * offset. This finds callers that use a put before all of it has landed. */
    bool last;
    /* The number plus one of a host that reports at connect that it reaches no GPU memory; 0:
     * all reach it. */
    int out_of_reach;
    /* The numbers plus one of two hosts: the puts of the first to the second are lost, as if the
     * second had lost its power. 0: none. */
    int cut_from, cut_to;
} chaos_settings;

/* Settings of nets that are opened from now on. */
extern chaos_settings chaos_settings_now;

extern EPIC_API const net_engine epic_net_chaos;

/* Acts as if this host had lost its power: puts to it are dropped, and is_gone() reports it. */
void chaos_kill(net *n);

/* Returns how many puts landed before an earlier one, to any host. */
uint64_t chaos_num_overtaken(const net *n);

#endif
