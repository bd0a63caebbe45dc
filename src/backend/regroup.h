/* SPDX-License-Identifier: Apache-2.0 */
/* The part of a transport that makes the next generation of a group. A *generation* is the
 * group between two changes of its members, for example the members that continue after a
 * failure (src/context/regroup.c).
 *
 * The members exchange messages to decide which of them continue. A message waits in the
 * mailbox of a seat (rank number) until the rank on that seat receives it. Each member prepares
 * the memory of the new generation, and enters the generation when the members are decided. On
 * CPUs each generation has memory of its own, so late stores of a rank that was left out have
 * no effect. On GPUs all generations use the same memory, and late stores of such a rank reach
 * only the part of its vacant seat. */
#ifndef EPIC_REGROUP_TRANSPORT_H
#define EPIC_REGROUP_TRANSPORT_H

#include "backend/seat_set.h"

#define REGROUP_MESSAGE_BYTES 480 /* maximum size of a message in bytes */

/* All functions are called by the thread that has called epic_regroup, while no other call runs
 * on the context. */
typedef struct epic_regroup_transport {
    /* Called first. Waits until the work of this rank on its device has ended, or returns an
     * error if the members of the group cannot change. NULL: there is nothing to do. */
    epic_result (*begin)(epic_group *group);

    /* Sends a message to a seat. The message may be lost if memory runs out. If group_id is
     * not 0, a handle to the memory of generation group_id is sent with the message, because
     * the receiver may have to prepare this generation. */
    void (*send)(epic_group *group, int to, const void *message, size_t bytes,
                 uint64_t group_id);

    /* Receives the oldest message to this rank and sets *from to its sender. Waits for at most
     * `ms` milliseconds. Returns false if no message has arrived. */
    bool (*receive)(epic_group *group, int *from, void *message, size_t bytes, uint32_t ms);

    /* Returns true if the rank on seat `seat` has closed its context or if its process has
     * exited. */
    bool (*is_gone)(epic_group *group, int seat);

    /* Creates the memory of the generation group_id. Called only by the rank that proposes this
     * generation, before it sends the proposal. NULL: prepare() creates the memory instead. */
    epic_result (*create)(epic_group *group, uint64_t group_id);

    /* Prepares the memory of the generation group_id. Releases the memory of a generation that
     * was prepared earlier and not entered. NULL: there is nothing to prepare. */
    epic_result (*prepare)(epic_group *group, uint64_t group_id);

    /* Enters the prepared generation, whose members are `members`, and releases the memory of
     * the current generation. Requires that no operation of this rank is in flight. An error
     * breaks the new generation. */
    epic_result (*enter)(epic_group *group, const seat_set *members);
} epic_regroup_transport;

#endif
