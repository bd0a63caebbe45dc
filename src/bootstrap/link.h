/* SPDX-License-Identifier: Apache-2.0 */
/* One connection of a TCP bootstrap, and the authentication of its frames.
 *
 * With a secret, both ends compute a key for this connection alone: an HMAC of the secret over
 * both hellos, which hold a new nonce of each end.  The key is never sent.  The tag of a frame
 * is an HMAC with that key over the sender's side, the number of the frame among those that it
 * has sent, and the frame, which holds the SHA-256 of its bytes.  A relay between the two ends
 * can close the connection and nothing else: a frame that is changed, left out, repeated,
 * reordered or sent back does not have the expected tag.  No field of a frame is used before
 * its tag is checked.
 *
 * Without a secret a checksum finds damage, but nothing stops an attacker. */
#ifndef EPIC_LINK_H
#define EPIC_LINK_H

#include "bootstrap/secret.h"

typedef struct epic_link {
    int socket;                /* -1: none */
    const epic_secret *secret; /* NULL: there is none, or the hellos are not exchanged yet */
    bool listener;             /* this end is rank 0 */
    uint64_t num_sent;         /* frames */
    uint64_t num_received;
    uint8_t key[SECRET_PROOF];
} epic_link;

/* A frame and its bytes that are being sent. */
typedef struct epic_message {
    epic_frame frame;
    const void *bytes;
    size_t done; /* bytes sent, of the frame and the bytes after it */
} epic_message;

/* Computes the key, so that frames carry tags from now on, if there is a secret.  Returns false
 * if libcrypto fails. */
bool epic_link_secure(epic_link *link, const epic_secret *secret, bool listener,
                      const epic_hello *listening, const epic_hello *connecting);

/* Makes a frame for `bytes`.  It has no tag yet, so it may be sent over several links. */
epic_frame epic_link_make_frame(const epic_secret *secret, epic_result result,
                                uint64_t sequence, const void *bytes, size_t length,
                                const time_limit *limit);

/* Makes a message with the next number of the link, and its tag. */
epic_message epic_link_message(epic_link *link, const epic_frame *frame, const void *bytes);

/* Gives the number of a message of which nothing was sent to the next message. */
void epic_link_reuse_number(epic_link *link);

/* Returns true if this is the next frame that the other end sent.  Call it once for each
 * frame. */
bool epic_link_check(epic_link *link, const epic_frame *frame);

/* Returns true if these are the bytes of a frame that epic_link_check() has accepted. */
bool epic_link_check_bytes(const epic_link *link, const epic_frame *frame, const void *bytes);

/* Send as much as the socket can take now; or all of it, or FRAME_MORE if the limit passes
 * first. */
epic_frame_state epic_link_send(const epic_link *link, epic_message *message);
epic_frame_state epic_link_send_all(const epic_link *link, epic_message *message,
                                    time_limit *limit);

/* Sends a failure.  The peer does not get it if it cannot be sent before the limit passes. */
void epic_link_send_failure(epic_link *link, epic_result result, const char *sentence,
                            time_limit *limit);

/* Receives the sentence of a failure whose frame was checked.  Returns its result, with that
 * sentence as this thread's error. */
epic_result epic_link_receive_failure(const epic_link *link, const epic_frame *frame,
                                      time_limit *limit);

/* Receives the sentence of a failure whose frame proves nothing; "" if none comes. */
void epic_link_receive_unproved(int socket, const epic_frame *frame,
                                char sentence[FRAME_SENTENCE + 1], time_limit *limit);

/* Closes the socket and erases the key. */
void epic_link_close(epic_link *link);

#endif
