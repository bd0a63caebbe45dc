/* SPDX-License-Identifier: Apache-2.0 */
/* Messages between the ranks of a group. With these messages epic_regroup decides which ranks
 * are in the next *generation* (the group between two changes of its members). Each rank
 * receives messages in memory that follows its heap. This memory has a ring of 8 messages for
 * each sender. The copy engines of the GPU move the messages, so the messages arrive while
 * kernels occupy all SMs. */
#ifndef EPIC_P2P_MAILBOX_H
#define EPIC_P2P_MAILBOX_H

#include "backend/p2p/p2p.h"

/* Returns the size in bytes of a rank's memory for messages. It is 0 if the members of the
 * group cannot change. */
int64_t p2p_mailbox_bytes(int64_t num_ranks);

/* Clears the memory for messages, which begins after this rank's new heap. Enqueues the work on
 * the stream `side`. */
epic_result p2p_mailbox_clear(epic_group *group);

/* Sends a message to another rank. The message is lost if the other rank does not read it
 * before this rank has sent 8 more. */
void p2p_mailbox_send(epic_group *group, int to, const void *message, size_t bytes);

/* Receives a message and sets *from to its sender. Waits for at most `ms` milliseconds. Returns
 * false if no message has arrived. */
bool p2p_mailbox_receive(epic_group *group, int *from, void *message, size_t bytes,
                         uint32_t ms);

/* Announces to all members: this rank has entered generation group->generation. Then waits
 * until all members have entered this generation, or until a member has closed its context or
 * died. Errors: EPIC_ETIMEOUT, EPIC_EDEVICE. */
epic_result p2p_mailbox_wait_members(epic_group *group);

/* Returns true if the rank on seat `seat` has closed its context or if its process has exited.
 * Reads no device memory: uses what the last call of p2p_mailbox_receive() or
 * p2p_mailbox_wait_members() has read. */
bool p2p_mailbox_is_gone(const epic_group *group, int seat);

#endif
