/* SPDX-License-Identifier: Apache-2.0 */
/* What every kind of bootstrap shares: limits, the clock, names of ranks. */
#ifndef EPIC_BOOTSTRAP_H
#define EPIC_BOOTSTRAP_H

#include <stdbool.h>

#include "base/error.h"

#define BOOTSTRAP_MAX_RANKS 65536
#define BOOTSTRAP_MAX_BYTES (16u << 20) /* what a rank may bring to one gather */
#define BOOTSTRAP_TIMEOUT_MS 300000u    /* what 0 means */

/* The checks that every gather begins with. */
epic_result epic_bootstrap_check(const void *mine, const void *all, size_t bytes);

/* The bootstrap of one rank: gather copies. */
void epic_bootstrap_of_one(epic_bootstrap *out);

/* Milliseconds of a clock that never jumps, and those from now to `end` for poll(): 0 if it has
 * passed. */
int64_t epic_bootstrap_now_ms(void);
int epic_bootstrap_left_ms(int64_t end);

/* Writes "rank 3", "ranks 3 and 4", "ranks 3, 5 and 9": those r below num_ranks with which[r];
 * at most 16 of them, then how many more. */
void epic_bootstrap_list_ranks(char *out, size_t size, const bool *which, int32_t num_ranks);

#endif
