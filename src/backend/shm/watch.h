/* SPDX-License-Identifier: Apache-2.0 */
/* The watcher: a thread of each rank that notices at once when a peer's process exits. */
#ifndef EPIC_SHM_WATCH_H
#define EPIC_SHM_WATCH_H

#include "backend/shared/shared.h"

typedef struct shm_watch shm_watch;

/* Starts the watcher of this rank. The group's backend_data must be its shm_connections.
 * *out is NULL if the group has one rank, which needs no watcher. Errors: EPIC_ENOMEM,
 * EPIC_EDEVICE. */
epic_result shm_watch_open(epic_group *group, shm_watch **out);

/* Stops the thread and frees the watcher. `watch` may be NULL. */
void shm_watch_close(shm_watch *watch);

/* While the lock is held, the watcher neither reads nor writes the group. After the unlock it
 * chooses again which ranks to watch. `watch` may be NULL. */
void shm_watch_lock(shm_watch *watch);
void shm_watch_unlock(shm_watch *watch);

/* Frees a forked child's copy of the watcher. The thread itself does not exist in the child. */
void shm_watch_forget(shm_watch *watch);

#endif
