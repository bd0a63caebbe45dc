/* SPDX-License-Identifier: Apache-2.0 */
/* The shared memory of a generation (the group between two changes of its members). The memory
 * is a memfd, which has no name in a file system, so no file stays behind after a crash. Its
 * size is sealed, because peers would crash if a rank could shrink the memfd. */
#ifndef EPIC_SHM_MEMORY_H
#define EPIC_SHM_MEMORY_H

#include "backend/shared/shared.h"

/* Creates the memory of the generation `group_id` and maps it. The caller closes *fd and unmaps
 * *segment, also after an error. Errors: EPIC_ENOMEM. */
epic_result shm_memory_create(const shared_layout *layout, uint64_t group_id, int *fd,
                              char **segment);

/* Checks and maps the memory whose descriptor `fd` rank `from` has sent. The memory must have
 * the right size, be sealed, and belong to the generation `group_id`. The caller unmaps
 * *segment, also after an error. Errors: EPIC_ENOMEM, EPIC_EDEVICE. */
epic_result shm_memory_open(const shared_layout *layout, uint64_t group_id, int from, int fd,
                            char **segment);

#endif
