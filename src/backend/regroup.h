/* SPDX-License-Identifier: Apache-2.0 */
/* The part of a transport that makes the next generation of a group (src/regroup).
 *
 * The members send each other messages to decide on the members that go on. A message waits at
 * its seat until that seat receives it. Then each member prepares the memory of the new
 * generation, and enters it when the members are decided. The memory of a generation is never
 * used by the next one, so late stores of a rank that was left out have no effect. */
#ifndef EPIC_REGROUP_TRANSPORT_H
#define EPIC_REGROUP_TRANSPORT_H

#include "backend/seat_set.h"

#define REGROUP_MESSAGE_BYTES 480 /* largest size of a message */

typedef struct epic_regroup_transport {
    /* Sends a message to a seat. It may be lost if out of memory. If group_id is not 0, the
     * receiver may have to prepare the generation group_id, so its memory is sent too. */
    void (*send)(epic_group *group, int to, const void *message, size_t bytes,
                 uint64_t group_id);

    /* Receives the oldest message to this rank and sets *from to its sender. Waits for at most
     * `ms` milliseconds. Returns false if no message came. */
    bool (*receive)(epic_group *group, int *from, void *message, size_t bytes, uint32_t ms);

    /* Returns whether the rank on a seat has closed its context or its process has ended. */
    bool (*is_gone)(epic_group *group, int seat);

    /* Creates the memory of the generation that is called group_id. Only the rank that proposes
     * this generation calls it, before it does so. NULL: prepare() creates the memory. */
    epic_result (*create)(epic_group *group, uint64_t group_id);

    /* Prepares the memory of the generation that is called group_id. Releases the memory of a
     * generation that was prepared before and not entered. */
    epic_result (*prepare)(epic_group *group, uint64_t group_id);

    /* Enters the prepared generation, and releases the memory of the current one. No operation
     * of this rank is in flight. */
    void (*enter)(epic_group *group, const seat_set *members);
} epic_regroup_transport;

#endif
