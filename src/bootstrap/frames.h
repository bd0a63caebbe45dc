/* SPDX-License-Identifier: Apache-2.0 */
/* The messages of a TCP bootstrap, and how they are sent and received.
 *
 * - connecting rank -> rank 0: hello
 * - rank 0 -> connecting rank: hello
 * - connecting rank -> rank 0: proof (only if there is a secret)
 * - rank 0 -> connecting rank: entry frame, which admits the connecting rank
 * - rank 0 -> connecting rank: begin frame, sent when all ranks have joined
 * - then for each gather, connecting rank -> rank 0: frame and the bytes of the connecting rank
 * - rank 0 -> connecting rank: frame and the bytes of all ranks
 *
 * If a connection is closed after its entry frame, the bootstrap fails. Rank 0 may send a
 * failure instead of any of its frames: a frame whose result is not EPIC_OK, followed by an
 * error text. After a failure rank 0 sends no more frames on the connection.
 *
 * With a secret every frame has an authentication tag (link.h). The authentication tag of the
 * entry frame proves that rank 0 has the secret. Integers are in the byte order of the sender.
 * A receiver with the opposite byte order does not recognize the magic number and refuses the
 * connection. */
#ifndef EPIC_BOOTSTRAP_FRAMES_H
#define EPIC_BOOTSTRAP_FRAMES_H

#include <poll.h>
#include <stddef.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/time_limit.h"

#define FRAME_VERSION 2u
#define HELLO_MAGIC 0x6f6c6c6563697065ull /* "epicello" in memory */
#define FRAME_MAGIC 0x65636970u           /* "pice" in memory */
#define FRAME_NONCE 32
#define FRAME_TAG 32
#define FRAME_SENTENCE 511

/* The first message of each side. The fields up to num_ranks have the same layout in every
 * version, so that each side can report the other side's version and rank in the error text. */
typedef struct epic_hello {
    uint64_t magic;
    uint32_t version;
    int32_t rank;
    int32_t num_ranks;
    uint32_t left_ms; /* milliseconds until the sender's time limit */
    uint32_t has_secret;
    uint32_t zero;
    uint8_t nonce[FRAME_NONCE]; /* new random bytes for every connection */
} epic_hello;

/* The header of every later message; `length` bytes follow it. */
typedef struct epic_frame {
    uint32_t magic;
    uint32_t result;   /* an epic_result */
    uint64_t sequence; /* number of the gather, from 1; 0 in all other frames */
    uint64_t length;   /* number of bytes after this header */
    uint32_t left_ms;  /* milliseconds until the sender's time limit */
    uint32_t zero;
    /* the SHA-256 of the bytes after this header; without a secret, their checksum */
    uint8_t digest[FRAME_TAG];
    /* authentication tag: an HMAC of the fields above; zeros without a secret */
    uint8_t tag[FRAME_TAG];
} epic_frame;

_Static_assert(sizeof(epic_hello) == 64, "no hidden padding");
_Static_assert(sizeof(epic_frame) == 96, "no hidden padding");

/* Result of a send or receive. */
typedef enum epic_frame_state {
    /* not finished: the socket accepts no more bytes now, or has no bytes to read now */
    FRAME_MORE,
    FRAME_DONE,
    FRAME_LOST /* the connection is closed */
} epic_frame_state;

/* Makes a hello with a new nonce. Returns false if the system provides no random bytes. */
bool epic_frame_make_hello(epic_hello *out, int32_t rank, int32_t num_ranks, bool has_secret,
                           const time_limit *limit);
/* Returns a checksum that detects damaged bytes. The checksum is not cryptographic. */
uint64_t epic_frame_checksum(const void *bytes, size_t length);

/* Send or receive as many bytes as the socket allows without waiting. *done is the number of
 * bytes sent or received so far. In epic_frame_send() *done includes the bytes of the frame
 * itself. The caller sets *done to 0 before the first call, and calls again while the result is
 * FRAME_MORE. */
epic_frame_state epic_frame_send(int socket, const epic_frame *frame, const void *bytes,
                                 size_t *done);
epic_frame_state epic_frame_receive(int socket, void *to, size_t bytes, size_t *done);

/* Waits for one of `events` (POLLIN) on the socket. Returns false if the limit passes first. */
bool epic_frame_wait(int socket, short events, time_limit *limit);

/* Send or receive all bytes. Wait if necessary. Return FRAME_MORE if the limit passes. */
epic_frame_state epic_frame_send_bytes(int socket, const void *bytes, size_t length,
                                       time_limit *limit);
epic_frame_state epic_frame_receive_all(int socket, void *to, size_t bytes, time_limit *limit);

/* Sets TCP_NODELAY, so that small messages are sent at once. */
void epic_frame_set_no_delay(int socket);

#endif
