/* SPDX-License-Identifier: Apache-2.0 */
/* Messages between threads of one process. All generations of a group (each with its own set of
 * members) share one mailbox. */
#ifndef EPIC_THREADS_MAILBOX_H
#define EPIC_THREADS_MAILBOX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mailbox mailbox;

/* Creates a mailbox with a reference count of 1. Returns NULL if out of memory. */
mailbox *mailbox_new(int num_seats);
/* Add and remove a reference. The last release frees the mailbox. The callers hold a lock,
 * because these functions take none. */
void mailbox_retain(mailbox *m);
void mailbox_release(mailbox *m);

/* Appends a message to the queue of seat `to`, and wakes the rank on that seat. */
void mailbox_send(mailbox *m, int from, int to, const void *message, size_t bytes);
/* Removes the oldest message from the queue of a seat, and sets *from to its sender. Waits for
 * a message for at most `ms` milliseconds. Returns false if no message has arrived. */
bool mailbox_receive(mailbox *m, int seat, int *from, void *message, size_t bytes, uint32_t ms);

/* Marks the rank on a seat as gone, and wakes all ranks that wait for a message. */
void mailbox_mark_gone(mailbox *m, int seat);
bool mailbox_is_gone(mailbox *m, int seat);

#endif
