/* SPDX-License-Identifier: Apache-2.0 */
/* Changes the members of a group of processes. A *generation* is the group between two changes
 * of its members. This file has the messages of epic_regroup over the connections, and the
 * shared memory of the next generation. The descriptor of that memory is sent with these
 * messages. */
#ifndef EPIC_SHM_GENERATIONS_H
#define EPIC_SHM_GENERATIONS_H

#include "backend/shared/shared.h"

typedef struct shm_generations shm_generations;

/* Allocates the state of one rank. Errors: EPIC_ENOMEM. */
epic_result shm_generations_new(shm_generations **out, int num_ranks);

/* Closes all descriptors, unmaps the memory of a generation that was prepared but not entered,
 * and frees the state. Does nothing if `generations` is NULL. */
void shm_generations_free(shm_generations *generations, const shared_layout *layout);

extern const epic_regroup_transport shm_regroup;

#endif
