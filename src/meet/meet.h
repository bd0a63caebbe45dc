/* SPDX-License-Identifier: Apache-2.0 */
/* What every kind of meeting shares: limits, the clock, names of ranks. */
#ifndef EPIC_MEET_H
#define EPIC_MEET_H

#include <stdbool.h>

#include "base/error.h"

#define MEET_MAX_RANKS 65536
#define MEET_MAX_BYTES (16u << 20) /* what a rank may bring to one gather */
#define MEET_TIMEOUT_MS 300000u    /* what 0 means */

/* The checks that every gather begins with. */
epic_result epic_meet_check(const void *mine, const void *all, size_t bytes);

/* The meeting of one rank: gather copies. */
void epic_meet_alone(epic_meet *out);

/* Milliseconds of a clock that never jumps, and those from now to `end` for poll(): 0 if it has
 * passed. */
int64_t epic_meet_now(void);
int epic_meet_left(int64_t end);

/* Writes "rank 3", "ranks 3 and 4", "ranks 3, 5 and 9": those r below num_ranks with which[r];
 * at most 16 of them, then how many more. */
void epic_meet_names(char *out, size_t size, const bool *which, int32_t num_ranks);

#endif
