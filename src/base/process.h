/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPIC_PROCESS_H
#define EPIC_PROCESS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* Returns a file descriptor (pidfd) that becomes readable when the process exits. The caller
 * must close the descriptor. Returns -1 if the system cannot create a pidfd, because Linux is
 * older than 5.3 or because the process is in another PID namespace. */
int process_watch(int64_t pid);

/* Returns true if the process has exited. fd is the result of process_watch(). If fd is -1,
 * only checks whether the pid exists, so a zombie process counts as running. */
bool process_ended(int fd, int64_t pid);

/* Returns true if this process may create a file or memfd of `bytes` bytes. Creating a larger
 * file would raise SIGXFSZ, which kills the process. */
bool process_may_create_file(int64_t bytes);

/* Starts to count forks: installs a handler that runs in each forked child. Returns false if
 * memory for the handler cannot be allocated. Any thread may call this function, any number of
 * times. */
bool process_count_forks(void);
/* Returns how many forks lead from the process that first called process_count_forks() to this
 * process. A context compares the value with the value at open to detect a forked child. */
uint32_t process_generation(void);

/* The groups of the backend `threads` in this process, and the mutex that guards them. After
 * process_count_forks() has returned true, a forked child begins with an empty list and an
 * unlocked mutex. Otherwise a child could wait forever for the mutex, because another thread of
 * the parent may hold it at the fork. */
typedef struct process_list {
    pthread_mutex_t mutex;
    struct thread_group *first;
} process_list;

extern process_list process_groups;

#endif
