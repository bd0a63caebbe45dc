/* SPDX-License-Identifier: Apache-2.0 */
/* A link is one connection of a TCP bootstrap, and its messages are called frames. This file
 * computes and checks the authentication tag of each frame. */
#include "bootstrap/link.h"

#include <string.h>
#include <unistd.h>

#include "base/text.h"

#define SIDE_BYTES 16

bool epic_link_secure(epic_link *link, const epic_secret *secret, bool listener,
                      const epic_hello *listening, const epic_hello *connecting)
{
    link->listener = listener;
    if (secret->text == NULL) return true;
    link->secret = secret;
    return epic_secret_prove(secret, ROLE_SESSION, listening, connecting, link->key);
}

/* Computes the digest of a frame's bytes. If the link has a secret, the digest is the SHA-256
 * of the bytes, which the authentication tag protects. Without a secret, the digest is a
 * checksum followed by zeros. Returns false if libcrypto fails. */
static bool compute_digest(const epic_secret *secret, const void *bytes, size_t length,
                           uint8_t digest[FRAME_TAG])
{
    const uint64_t sum = secret == NULL ? epic_frame_checksum(bytes, length) : 0;
    memset(digest, 0, FRAME_TAG);
    memcpy(digest, &sum, sizeof sum);
    return secret == NULL ||
           epic_secret_digest(secret, length > 0 ? bytes : "", length, digest);
}

epic_frame epic_link_make_frame(const epic_secret *secret, epic_result result,
                                uint64_t sequence, const void *bytes, size_t length,
                                const time_limit *limit)
{
    epic_frame frame = {
        .magic = FRAME_MAGIC,
        .result = (uint32_t)result,
        .sequence = sequence,
        .length = length,
        .left_ms = time_limit_left_ms(limit),
    };
    const bool keyed = secret != NULL && secret->library != NULL;
    (void)compute_digest(keyed ? secret : NULL, bytes, length, frame.digest);
    return frame;
}

/* Computes the authentication tag of a frame: an HMAC over the sender's side, the frame's
 * number on this link, and the fields of the frame before `tag`. */
static bool compute_tag(const epic_link *link, bool listener, uint64_t number,
                        const epic_frame *frame, uint8_t tag[FRAME_TAG])
{
    uint8_t data[SIDE_BYTES + sizeof number + offsetof(epic_frame, tag)] = {0};
    strcpy((char *)data, listener ? "from rank 0" : "to rank 0");
    memcpy(data + SIDE_BYTES, &number, sizeof number);
    memcpy(data + SIDE_BYTES + sizeof number, frame, offsetof(epic_frame, tag));
    return epic_secret_mac(link->secret, link->key, sizeof link->key, data, sizeof data, tag);
}

epic_message epic_link_message(epic_link *link, const epic_frame *frame, const void *bytes)
{
    epic_message message = {.frame = *frame, .bytes = bytes};
    const uint64_t number = link->num_sent++;
    /* if libcrypto fails, the tag stays zero, and the peer rejects the frame */
    if (link->secret != NULL)
        (void)compute_tag(link, link->listener, number, frame, message.frame.tag);
    return message;
}

void epic_link_reuse_number(epic_link *link)
{
    link->num_sent--;
}

bool epic_link_check(epic_link *link, const epic_frame *frame)
{
    uint8_t expected[FRAME_TAG];
    const uint64_t number = link->num_received++;
    if (frame->magic != FRAME_MAGIC) return false;
    if (link->secret == NULL) return true;
    return compute_tag(link, !link->listener, number, frame, expected) &&
           link->secret->compare(expected, frame->tag, sizeof expected) == 0;
}

bool epic_link_check_bytes(const epic_link *link, const epic_frame *frame, const void *bytes)
{
    uint8_t expected[FRAME_TAG];
    return compute_digest(link->secret, bytes, frame->length, expected) &&
           memcmp(expected, frame->digest, sizeof expected) == 0;
}

epic_frame_state epic_link_send(const epic_link *link, epic_message *message)
{
    return epic_frame_send(link->socket, &message->frame, message->bytes, &message->done);
}

epic_frame_state epic_link_send_all(const epic_link *link, epic_message *message,
                                    time_limit *limit)
{
    for (;;) {
        const epic_frame_state state = epic_link_send(link, message);
        if (state != FRAME_MORE) return state;
        if (!epic_frame_wait(link->socket, POLLOUT, limit)) return FRAME_MORE;
    }
}

void epic_link_send_failure(epic_link *link, epic_result result, const char *sentence,
                            time_limit *limit)
{
    const size_t length = strlen(sentence);
    const epic_frame frame =
        epic_link_make_frame(link->secret, result, 0, sentence, length, limit);
    epic_message message = epic_link_message(link, &frame, sentence);
    (void)epic_link_send_all(link, &message, limit);
}

void epic_link_receive_unproved(int socket, const epic_frame *frame,
                                char sentence[FRAME_SENTENCE + 1], time_limit *limit)
{
    memset(sentence, 0, FRAME_SENTENCE + 1);
    if (frame->length > FRAME_SENTENCE ||
        epic_frame_receive_all(socket, sentence, frame->length, limit) != FRAME_DONE)
        sentence[0] = '\0';
    text_clean(sentence);
}

epic_result epic_link_receive_failure(const epic_link *link, const epic_frame *frame,
                                      time_limit *limit)
{
    char sentence[FRAME_SENTENCE + 1] = {0};
    if (frame->result == EPIC_OK || !epic_is_result(frame->result) ||
        frame->length > FRAME_SENTENCE ||
        epic_frame_receive_all(link->socket, sentence, frame->length, limit) != FRAME_DONE ||
        !epic_link_check_bytes(link, frame, sentence))
        return epic_fail(EPIC_EPEER, "rank 0 failed, and its reason did not arrive completely");
    return epic_fail((epic_result)frame->result, "%s", sentence);
}

void epic_link_close(epic_link *link)
{
    if (link->socket >= 0) close(link->socket);
    explicit_bzero(link, sizeof *link);
    link->socket = -1;
}
