/* SPDX-License-Identifier: Apache-2.0 */
/* The secret that the ranks of a group share. A rank proves with an HMAC-SHA-256 that it has
 * the secret, and never sends the secret. The secret protects only the bootstrap: no process
 * without the secret can join it, or change the data that the ranks exchange in it. */
#ifndef EPIC_SECRET_H
#define EPIC_SECRET_H

#include <stdbool.h>

#include "bootstrap/frames.h"

#define SECRET_PROOF 32 /* size in bytes of an HMAC-SHA-256, and of a SHA-256 */

typedef struct epic_secret {
    const char *text; /* string of the caller; NULL: this rank has no secret */
    void *library;    /* libcrypto; NULL without a secret */
    const void *(*sha256)(void);
    unsigned char *(*hmac)(const void *digest, const void *key, int key_bytes,
                           const unsigned char *data, size_t bytes, unsigned char *out,
                           unsigned int *out_bytes);
    int (*digest)(const void *data, size_t bytes, unsigned char *out, unsigned int *out_bytes,
                  const void *digest, void *engine);
    /* returns 0 if the bytes are equal; its time does not depend on the bytes */
    int (*compare)(const void *a, const void *b, size_t bytes);
} epic_secret;

/* The purpose of an HMAC with the secret. The HMAC covers the purpose, so that an HMAC for one
 * purpose is not valid for the other purpose. */
typedef enum epic_role {
    ROLE_CONNECTOR, /* the connecting rank proves that it has the secret */
    ROLE_SESSION    /* the key of the frames of one connection, never sent */
} epic_role;

/* Loads libcrypto for the secret `text`. If `text` is NULL, there is no secret, and nothing is
 * loaded. epic_secret_close() unloads libcrypto. Errors: EPIC_EINVAL (the secret is empty),
 * EPIC_ENOTSUP (no libcrypto). */
epic_result epic_secret_open(epic_secret *out, const char *text);
void epic_secret_close(epic_secret *secret);

/* Computes the HMAC with the secret over the role and both hellos. The hellos contain the
 * nonces, the rank and the number of ranks. Returns false if libcrypto fails. */
bool epic_secret_prove(const epic_secret *secret, epic_role role, const epic_hello *listening,
                       const epic_hello *connecting, uint8_t proof[SECRET_PROOF]);

/* Returns true if `proof` equals the result of epic_secret_prove() for the same arguments.
 * Compares in constant time. */
bool epic_secret_check(const epic_secret *secret, epic_role role, const epic_hello *listening,
                       const epic_hello *connecting, const uint8_t proof[SECRET_PROOF]);

/* epic_secret_mac() computes an HMAC-SHA-256 with any key, and epic_secret_digest() computes a
 * SHA-256. Both return false if libcrypto fails. */
bool epic_secret_mac(const epic_secret *secret, const void *key, size_t key_bytes,
                     const void *data, size_t bytes, uint8_t out[SECRET_PROOF]);
bool epic_secret_digest(const epic_secret *secret, const void *data, size_t bytes,
                        uint8_t out[SECRET_PROOF]);

#endif
