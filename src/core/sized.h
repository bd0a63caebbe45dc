/* SPDX-License-Identifier: Apache-2.0 */
/* Structs that travel with their size: how a caller's struct becomes ours. */
#ifndef EPIC_SIZED_H
#define EPIC_SIZED_H

#include "core/error.h"

/* Copies a caller's struct into ours.  Shorter than ours: the rest is zero.  Longer: the tail
 * that we do not know must be zero, else EPIC_EINVAL; also for NULL or size 0, which never
 * were the struct `name`. */
epic_result epic_sized(void *ours, size_t our_size, const void *theirs, size_t size,
                       const char *name);

#endif
