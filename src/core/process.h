/* SPDX-License-Identifier: Apache-2.0 */
/* Has another process ended?  Zombies have. */
#ifndef EPIC_PROCESS_H
#define EPIC_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

/* A descriptor that becomes readable when the process ends; -1: the system has none (Linux before
 * 5.3, or another PID namespace). */
int process_watch(int64_t pid);

/* Without a descriptor, by its number: a zombie still counts as alive then. */
bool process_ended(int fd, int64_t pid);

#endif
