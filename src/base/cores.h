/* SPDX-License-Identifier: Apache-2.0 */
/* Which cores a rank may run on.  Launchers that bind ranks leave each of them few cores, so only
 * the sets of all ranks of a host together tell whether each could have a core of its own. */
#ifndef EPIC_CORES_H
#define EPIC_CORES_H

#include <sched.h>
#include <stdint.h>
#include <string.h>

#define CORE_WORDS 16

typedef struct core_set {
    uint64_t words[CORE_WORDS]; /* a bit for each core */
} core_set;

_Static_assert(sizeof(core_set) == sizeof(cpu_set_t), "core_set");

/* Of the calling thread; empty where the system does not say. */
static inline core_set cores_of_thread(void)
{
    core_set mine = {{0}};
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) == 0) memcpy(&mine, &cores, sizeof mine);
    return mine;
}

static inline int cores_count(const core_set *set)
{
    int count = 0;
    for (int w = 0; w < CORE_WORDS; w++) count += __builtin_popcountll(set->words[w]);
    return count;
}

#endif
