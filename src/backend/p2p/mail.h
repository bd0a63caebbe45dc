/* SPDX-License-Identifier: Apache-2.0 */
/* Messages between the processes of a group, for epic_regroup. The memory follows the heap and
 * has one box for each rank that writes. The copy engines of the GPU move the messages, so they
 * arrive while kernels occupy all SMs. */
#ifndef EPIC_P2P_MAIL_H
#define EPIC_P2P_MAIL_H

#include "backend/p2p/p2p.h"

/* Returns the size in bytes of the memory for messages that follows a heap. It is 0 if the
 * members of the group cannot change. */
int64_t p2p_mail_bytes(int64_t num_ranks);

/* Clears this memory of a new heap. Enqueues the work on the stream `side`. */
epic_result p2p_mail_clear(epic_group *group);

/* Sends a message to another rank. If the rank does not read it before 8 more have been sent,
 * it is lost. */
void p2p_mail_send(epic_group *group, int to, const void *message, size_t bytes);

/* Receives a message and sets *from to its sender. Waits for at most `ms` milliseconds. Returns
 * false if none has arrived. */
bool p2p_mail_receive(epic_group *group, int *from, void *message, size_t bytes, uint32_t ms);

/* Publishes to the members that this rank has entered its generation. Waits until all members
 * have done so, or one of them is gone. Errors: EPIC_ETIMEOUT, EPIC_EDEVICE. */
epic_result p2p_mail_meet(epic_group *group);

/* Returns whether a rank has closed its context or its process has ended, as the last call of
 * the other functions has found. */
bool p2p_mail_is_gone(const epic_group *group, int seat);

#endif
