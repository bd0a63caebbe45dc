/* SPDX-License-Identifier: Apache-2.0 */
/* What all kinds of bootstrap share: limits, a clock, and lists of ranks for errors. */
#ifndef EPIC_BOOTSTRAP_H
#define EPIC_BOOTSTRAP_H

#include <stdbool.h>

#include "base/error.h"

#define BOOTSTRAP_MAX_RANKS 65536
#define BOOTSTRAP_MAX_BYTES (16u << 20) /* most bytes of a rank in one gather */
#define BOOTSTRAP_TIMEOUT_MS 300000u    /* default, for timeout_ms 0 */

/* Checks the arguments of a gather.  Errors: EPIC_EINVAL. */
epic_result epic_bootstrap_check(const void *mine, const void *all, size_t bytes);

/* Makes the bootstrap of a single rank, whose gather copies. */
void epic_bootstrap_of_one(epic_bootstrap *out);

/* Returns the time of the monotonic clock, and the time from now to `end` for poll(), 0 if
 * `end` has passed. */
int64_t epic_bootstrap_now_ms(void);
int epic_bootstrap_left_ms(int64_t end);

/* Writes the ranks r with which[r], as in "rank 3", "ranks 3 and 4" or "ranks 3, 5 and 9".  It
 * names at most 16 of them, and then how many more. */
void epic_bootstrap_list_ranks(char *out, size_t size, const bool *which, int32_t num_ranks);

#endif
