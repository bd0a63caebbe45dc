/* SPDX-License-Identifier: Apache-2.0 */
/* One connection of a TCP bootstrap, and what makes its frames authentic.
 *
 * With a secret, both ends have a key of this connection alone: an HMAC of the secret over both
 * hellos, so over a fresh nonce of each end; it is never sent.  The tag of a frame is the HMAC,
 * under that key, of the sender's side, of the frame's number among those that it sent here, and
 * of the frame, which holds the SHA-256 of its bytes.  So who relays the connection can cut it,
 * and nothing else: a frame that was changed, left out, repeated, moved or turned round does not
 * have the tag that is expected.  A frame is believed in nothing before its tag was checked.
 *
 * Without a secret a checksum finds damage, and there is no defence. */
#ifndef EPIC_LINK_H
#define EPIC_LINK_H

#include "bootstrap/secret.h"

typedef struct epic_link {
    int socket;                /* -1: none */
    const epic_secret *secret; /* NULL: not proved, or there is none */
    bool listener;             /* this end is rank 0 */
    uint64_t num_sent;         /* frames */
    uint64_t num_received;
    uint8_t key[SECRET_PROOF];
} epic_link;

/* A frame and its bytes on their way out. */
typedef struct epic_message {
    epic_frame frame;
    const void *bytes;
    size_t done; /* of frame and bytes together */
} epic_message;

/* Frames carry tags from here on, if there is a secret.  False: libcrypto refused. */
bool epic_link_secure(epic_link *link, const epic_secret *secret, bool listener,
                      const epic_hello *listening, const epic_hello *connecting);

/* Writes a frame for `bytes`; it has no tag yet, so it may be copied for several links. */
epic_frame epic_link_make_frame(const epic_secret *secret, epic_result result,
                                uint64_t sequence, const void *bytes, size_t length,
                                const time_limit *limit);

/* A letter with the next number of the link. */
epic_message epic_link_message(epic_link *link, const epic_frame *frame, const void *bytes);

/* Nothing of the letter was sent: its number goes to the next one. */
void epic_link_reuse_number(epic_link *link);

/* Is this the next frame that the other end sent?  Once for each frame. */
bool epic_link_check(epic_link *link, const epic_frame *frame);

/* Are these the bytes of a frame that was checked? */
bool epic_link_check_bytes(const epic_link *link, const epic_frame *frame, const void *bytes);

/* Sends what the socket takes now; all of it before `limit` has passed, or FRAME_MORE. */
epic_frame_state epic_link_send(const epic_link *link, epic_message *message);
epic_frame_state epic_link_send_all(const epic_link *link, epic_message *message,
                                    time_limit *limit);

/* Sends a failure; if the peer does not take it before `limit` has passed, it goes without. */
void epic_link_send_failure(epic_link *link, epic_result result, const char *sentence,
                            time_limit *limit);

/* Receives the sentence of a failure whose frame has come and was checked, and fails with it. */
epic_result epic_link_receive_failure(const epic_link *link, const epic_frame *frame,
                                      time_limit *limit);

/* The same of one that proves nothing; "" if there is none. */
void epic_link_receive_unproved(int socket, const epic_frame *frame,
                                char sentence[FRAME_SENTENCE + 1], time_limit *limit);

/* Closes, and forgets the key. */
void epic_link_close(epic_link *link);

#endif
