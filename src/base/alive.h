/* SPDX-License-Identifier: Apache-2.0 */
/* Shows other processes of this host that a process is dead, as early as possible.
 *
 * When a process is killed, Linux frees its memory, then closes its files, and only then
 * reports its exit through a pidfd. If the process has used a GPU, this takes 60 to 190 ms
 * (docs/lab/cuda.md). But before all this, Linux marks the words that a thread of the process
 * has registered as its robust futexes. So a thread of the process registers a word in shared
 * memory as a robust futex, and the other processes read this word. */
#ifndef EPIC_ALIVE_H
#define EPIC_ALIVE_H

#include <linux/futex.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The shared memory, called the page of a rank. The other processes map it read-only. */
typedef struct alive_page {
    uint64_t group_id;
    int64_t rank;
    /* 0: no thread is registered; otherwise the id of the registered thread. If that thread
     * ends while it is registered, Linux replaces the id by FUTEX_OWNER_DIED. */
    uint32_t word;
} alive_page;

/* The state of the process that owns the page. The struct must stay at its address while a
 * thread is registered. */
typedef struct alive {
    alive_page *page; /* NULL: there is no page, and the functions below do nothing */
    int fd;           /* file descriptor of the page's memory, or -1 */
    struct robust_list entry;
    struct robust_list_head list;
    /* the C library's list of robust futexes, which alive_unregister() restores */
    struct robust_list_head *list_before;
    size_t list_bytes;
} alive;

/* Allocates the page of one rank. If this fails, the rank has no page, and only a pidfd shows
 * that its process is dead. */
void alive_create(alive *a, uint64_t group_id, int rank);
/* Frees the page. The registered thread must have ended or called alive_unregister(). */
void alive_free(alive *a);

/* Registers the calling thread, which must live as long as the rank is a member of the group.
 * The thread must not lock a robust mutex (pthread_mutexattr_setrobust) while it is
 * registered. */
void alive_register(alive *a);
/* The registered thread calls this before it ends. If the thread ends without this call, the
 * other processes take the process for dead. */
void alive_unregister(alive *a);

/* Maps the page of a rank of another process. fd: the value of alive.fd in that process.
 * Returns NULL if the page cannot be mapped, for example because the process runs as another
 * user, or if the memory is not the page of this rank. alive_unmap() unmaps it. */
const alive_page *alive_map(int64_t pid, int fd, uint64_t group_id, int rank);
void alive_unmap(const alive_page *page);

/* Returns true if the thread that was registered has ended without alive_unregister(). Returns
 * false if page is NULL. */
bool alive_is_dead(const alive_page *page);

#endif
