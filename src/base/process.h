/* SPDX-License-Identifier: Apache-2.0 */
/* Other processes: have they ended?  This one: its limit on files, and its forks. */
#ifndef EPIC_PROCESS_H
#define EPIC_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

/* A descriptor that becomes readable when the process ends; -1: the system has none (Linux before
 * 5.3, or another PID namespace). */
int process_watch(int64_t pid);

/* Without a descriptor, by its number: a zombie still counts as alive then. */
bool process_ended(int fd, int64_t pid);

/* May this process make a file, or memory of that kind, of so many bytes?  Asking for more would
 * raise SIGXFSZ, which ends a process that does not expect it. */
bool process_may_grow(int64_t bytes);

/* A number that is another one in every forked child; process_count_forks comes first and is
 * false where there is no memory for it. */
bool process_count_forks(void);
uint32_t process_generation(void);

#endif
