/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels have shipped, in fewer and larger puts: pieces for a host that lie one after the other
 * in the outbox become one. */
#ifndef EPIC_HOSTS_RUNS_H
#define EPIC_HOSTS_RUNS_H

#include <stdbool.h>
#include <stdint.h>

#define RUNS_PIECES 1024
#define RUNS_WORDS \
    7168 /* of a put, at most: 56 KB, over TCP the size to send (docs/hosts.md) */

typedef struct run {
    int host;
    uint64_t word;
    uint32_t words;
    int pieces; /* that it is made of */
} run;

typedef struct runs {
    int count, next; /* pieces that are there, and those before have been given */
    bool sorted;
    struct {
        uint64_t place; /* host and word */
        uint32_t words;
    } pieces[RUNS_PIECES];
} runs;

/* A piece more; there is room for RUNS_PIECES until all have been given. */
void runs_add(runs *all, int host, uint64_t word, uint32_t words);

/* False: all have been given, and there is room again. */
bool runs_next(runs *all, run *out);

/* That one has been given. */
void runs_pass(runs *all, const run *given);

#endif
