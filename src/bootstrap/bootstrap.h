/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations that all kinds of bootstrap share. */
#ifndef EPIC_BOOTSTRAP_H
#define EPIC_BOOTSTRAP_H

#include <stdbool.h>

#include "base/error.h"

#define BOOTSTRAP_MAX_RANKS 65536
/* maximum number of bytes that a rank passes to a gather */
#define BOOTSTRAP_MAX_BYTES (16u << 20)
#define BOOTSTRAP_TIMEOUT_MS 300000u /* time limit if timeout_ms is 0 */

/* Checks the arguments of a gather. Returns EPIC_EINVAL if bytes is too large, or if a pointer
 * is NULL and bytes is not 0. */
epic_result epic_bootstrap_check(const void *mine, const void *all, size_t bytes);

/* Creates the bootstrap of a single rank, whose gather copies `mine` to `all`. */
void epic_bootstrap_of_one(epic_bootstrap *out);

/* epic_bootstrap_now_ms() returns the monotonic clock in milliseconds. epic_bootstrap_left_ms()
 * returns the time from now to `end` in milliseconds, as a timeout for poll(), or 0 if `end`
 * has passed. */
int64_t epic_bootstrap_now_ms(void);
int epic_bootstrap_left_ms(int64_t end);

/* Writes a list of the ranks r for which which[r] is true, for example "rank 3", "ranks 3 and
 * 4" or "ranks 3, 5 and 9". Lists at most 16 ranks, and appends how many more there are. */
void epic_bootstrap_list_ranks(char *out, size_t size, const bool *which, int32_t num_ranks);

#endif
