/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU cores on which a rank may run. A launcher may bind each rank to different cores. So a
 * rank needs the core sets of all ranks of its host to find out how many cores these ranks have
 * together. */
#ifndef EPIC_CORES_H
#define EPIC_CORES_H

#include <sched.h>
#include <stdint.h>
#include <string.h>

#define CORE_WORDS 16

typedef struct core_set {
    uint64_t words[CORE_WORDS]; /* bit mask: one bit for each core */
} core_set;

_Static_assert(sizeof(core_set) == sizeof(cpu_set_t), "core_set");

/* Returns the cores on which the calling thread may run, or an empty set if the system does not
 * report them. */
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
