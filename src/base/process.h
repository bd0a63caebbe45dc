/* SPDX-License-Identifier: Apache-2.0 */
/* The end of other processes, and this process's file size limit and forks. */
#ifndef EPIC_PROCESS_H
#define EPIC_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

/* Returns a descriptor that becomes readable when the process ends, or -1 if the system has
 * none (Linux before 5.3, or a process of another PID namespace). */
int process_watch(int64_t pid);

/* Returns true if the process has ended.  Without a descriptor (fd -1) it uses the pid, and a
 * zombie counts as alive. */
bool process_ended(int fd, int64_t pid);

/* Returns true if this process may create a file or memfd of `bytes` bytes.  A larger one would
 * raise SIGXFSZ, which ends the process. */
bool process_may_grow(int64_t bytes);

/* Starts to count forks.  Returns false if there is no memory for it. */
bool process_count_forks(void);
/* Returns a number that differs between a process and its forked children, after
 * process_count_forks(). */
uint32_t process_generation(void);

#endif
