/* SPDX-License-Identifier: Apache-2.0 */
/* A link is one connection of a TCP bootstrap. Its messages are called frames (frames.h). A
 * link authenticates its frames.
 *
 * With a secret, both ends compute a key for this connection: an HMAC with the secret over both
 * hellos, each of which has a new nonce. The key is never sent. The authentication tag of a
 * frame is an HMAC with that key over the sender's side, the number of the frame in this
 * direction, and the header of the frame. The header contains the SHA-256 of the bytes after
 * it.
 *
 * So an attacker between the two ends can only close the connection: if the attacker changes,
 * removes, repeats, reorders or reflects frames, the tags do not match, and the receiver
 * rejects the frames. No field of a frame is used before its tag is checked.
 *
 * Without a secret a checksum detects damage, but an attacker can change frames. */
#ifndef EPIC_LINK_H
#define EPIC_LINK_H

#include "bootstrap/secret.h"

typedef struct epic_link {
    int socket;                /* -1: not connected */
    const epic_secret *secret; /* NULL: no secret, or epic_link_secure() has not run */
    bool listener;             /* true: this end of the link is rank 0 */
    /* numbers of frames sent and received on this link; authentication tags cover them */
    uint64_t num_sent;
    uint64_t num_received;
    uint8_t key[SECRET_PROOF];
} epic_link;

/* A message that is being sent: a frame and the bytes after it. */
typedef struct epic_message {
    epic_frame frame;
    const void *bytes;
    size_t done; /* number of bytes sent so far, of the frame and of the payload after it */
} epic_message;

/* If there is a secret, computes the key of the link. From then on each frame of the link has
 * an authentication tag. `listening` and `connecting` are the hellos of rank 0 and of the other
 * rank. Returns false if libcrypto fails. */
bool epic_link_secure(epic_link *link, const epic_secret *secret, bool listener,
                      const epic_hello *listening, const epic_hello *connecting);

/* Returns a frame for `bytes`, without an authentication tag. The same frame may be sent over
 * several links. */
epic_frame epic_link_make_frame(const epic_secret *secret, epic_result result,
                                uint64_t sequence, const void *bytes, size_t length,
                                const time_limit *limit);

/* Returns a message that contains the frame. With a secret, adds the authentication tag for the
 * link's next frame number. The messages of a link must be sent in the order of these calls. */
epic_message epic_link_message(epic_link *link, const epic_frame *frame, const void *bytes);

/* Makes the next message reuse the frame number of the last message. Requires that no byte of
 * the last message was sent. */
void epic_link_reuse_number(epic_link *link);

/* Returns true if the authentication tag shows that the other end sent this frame as its next
 * frame. Without a secret, checks only the magic number. Increments num_received, so this
 * function must be called exactly once for each received frame. */
bool epic_link_check(epic_link *link, const epic_frame *frame);

/* Returns true if `bytes` are the bytes of `frame`. Requires that epic_link_check() has
 * accepted the frame. */
bool epic_link_check_bytes(const epic_link *link, const epic_frame *frame, const void *bytes);

/* epic_link_send() sends as many bytes as the socket accepts without waiting.
 * epic_link_send_all() waits until all bytes are sent, and returns FRAME_MORE if the limit
 * passes first. */
epic_frame_state epic_link_send(const epic_link *link, epic_message *message);
epic_frame_state epic_link_send_all(const epic_link *link, epic_message *message,
                                    time_limit *limit);

/* Sends a failure frame and its error text. Gives up when the limit passes; in this case the
 * peer only notices that the connection is closed. */
void epic_link_send_failure(epic_link *link, epic_result result, const char *sentence,
                            time_limit *limit);

/* Receives the error text of a failure frame. Requires that epic_link_check() has accepted the
 * frame. Returns the result in the frame, and stores the text as this thread's error. */
epic_result epic_link_receive_failure(const epic_link *link, const epic_frame *frame,
                                      time_limit *limit);

/* Receives the error text of a failure frame without a valid authentication tag. Writes "" to
 * `sentence` if no text arrives. The caller may only print the text, because an attacker may
 * have written it. */
void epic_link_receive_unproved(int socket, const epic_frame *frame,
                                char sentence[FRAME_SENTENCE + 1], time_limit *limit);

/* Closes the socket and erases the key. */
void epic_link_close(epic_link *link);

#endif
