/* SPDX-License-Identifier: Apache-2.0 */
/* A secret that the ranks of a group share: proved by HMAC-SHA-256, never sent. */
#ifndef EPIC_SECRET_H
#define EPIC_SECRET_H

#include <stdbool.h>

#include "meet/wire.h"

#define SECRET_PROOF 32 /* bytes of an HMAC-SHA-256 */

typedef struct epic_secret {
    const char *text; /* borrowed; NULL: this rank has no secret */
    void *library;    /* libcrypto, loaded only when there is a secret */
    const void *(*sha256)(void);
    unsigned char *(*hmac)(const void *digest, const void *key, int key_bytes,
                           const unsigned char *data, size_t bytes, unsigned char *out,
                           unsigned int *out_bytes);
    int (*compare)(const void *a, const void *b, size_t bytes); /* in constant time */
} epic_secret;

/* text NULL: no secret, and nothing is loaded.  Errors: EPIC_EINVAL (an empty secret),
 * EPIC_ENOTSUP (no libcrypto). */
epic_result epic_secret_open(epic_secret *out, const char *text);
void epic_secret_close(epic_secret *secret);

/* What the listening rank, or the connecting one, proves with: the HMAC of its role and of both
 * hellos, so of both nonces, the rank and the number of ranks.  A proof of one role is none of
 * the other.  False: libcrypto refused. */
bool epic_secret_prove(const epic_secret *secret, bool listener, const epic_hello *listening,
                       const epic_hello *connecting, uint8_t proof[SECRET_PROOF]);

/* Is this the proof that the role above would bring? */
bool epic_secret_check(const epic_secret *secret, bool listener, const epic_hello *listening,
                       const epic_hello *connecting, const uint8_t proof[SECRET_PROOF]);

#endif
