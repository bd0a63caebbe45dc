/* SPDX-License-Identifier: Apache-2.0 */
/* What travels between two ranks of a TCP bootstrap, and how.
 *
 *   connecting rank                      rank 0
 *   hello                          ->
 *                                  <-    hello
 *   proof (if there is a secret)   ->
 *                                  <-    entry: a frame; from now on its end is the bootstrap's
 *                                  <-    begin: a frame, once every rank has come
 *   then, for each gather
 *   frame and its bytes            ->
 *                                  <-    frame and the bytes of all ranks
 *
 * In place of entry, begin or an answer rank 0 may send a failure: a frame whose result is not
 * EPIC_OK, and a sentence.  Nothing follows a failure.  With a secret every frame has a tag
 * (link.h); rank 0 proves itself by that of the entry.  Numbers travel in the sender's byte
 * order; a host of the other order does not recognize the magic. */
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

/* The first 16 bytes, up to num_ranks, mean the same in every version. */
typedef struct epic_hello {
    uint64_t magic;
    uint32_t version;
    int32_t rank;
    int32_t num_ranks;
    uint32_t left_ms; /* until the sender's deadline */
    uint32_t has_secret;
    uint32_t zero;
    uint8_t nonce[FRAME_NONCE]; /* fresh for every connection */
} epic_hello;

typedef struct epic_frame {
    uint32_t magic;
    uint32_t result; /* an epic_result */
    uint64_t sequence;
    uint64_t length;  /* of the bytes that follow */
    uint32_t left_ms; /* until the sender's deadline */
    uint32_t zero;
    uint8_t digest[FRAME_TAG]; /* of the bytes */
    uint8_t tag[FRAME_TAG];    /* of all above, with a secret; else zeros */
} epic_frame;

_Static_assert(sizeof(epic_hello) == 64, "no hidden padding");
_Static_assert(sizeof(epic_frame) == 96, "no hidden padding");

typedef enum epic_frame_state {
    FRAME_MORE, /* not finished, and the socket has no more room or bytes now */
    FRAME_DONE,
    FRAME_LOST /* the connection is gone */
} epic_frame_state;

/* False: the system gives no random bytes. */
bool epic_frame_make_hello(epic_hello *out, int32_t rank, int32_t num_ranks, bool has_secret,
                           const time_limit *limit);
uint64_t epic_frame_checksum(const void *bytes, size_t length);

/* Send and receive what the socket takes or has now.  *done counts what has gone (of frame and
 * bytes together) or arrived. */
epic_frame_state epic_frame_send(int socket, const epic_frame *frame, const void *bytes,
                                 size_t *done);
epic_frame_state epic_frame_receive(int socket, void *to, size_t bytes, size_t *done);

/* Waits for one of the poll() events.  False: `limit` passed first. */
bool epic_frame_wait(int socket, short events, time_limit *limit);

/* The same, whole.  FRAME_MORE: `limit` passed first. */
epic_frame_state epic_frame_send_bytes(int socket, const void *bytes, size_t length,
                                       time_limit *limit);
epic_frame_state epic_frame_receive_all(int socket, void *to, size_t bytes, time_limit *limit);

/* Options of every connection: no delay. */
void epic_frame_set_no_delay(int socket);

#endif
