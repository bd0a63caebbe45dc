/* SPDX-License-Identifier: Apache-2.0 */
/* What the ranks of a group tell one another before anything else. */
#ifndef EPIC_HELLO_H
#define EPIC_HELLO_H

#include "backend/backend.h"

/* Fixed size and layout for every version that shares the magic: version comes first. */
typedef struct hello {
    uint64_t magic;
    uint32_t version;
    uint32_t bytes;  /* sizeof(hello) */
    int64_t refused; /* this rank's epic_result so far; sentence says why */
    int64_t rank, num_ranks;
    int64_t max_tokens, max_row_bytes, staging_bytes, timeout_ms, max_in_flight, max_sms;
    char backend[16];
    char name[64];
    uint64_t random;
    epic_peer peer;
    char sentence[448];
} hello;

/* Fails where the system does not tell who and where this process is: it must not seem to be
 * elsewhere then. */
epic_result hello_fill(hello *mine, const epic_meet *meet, const epic_config *config);

/* EPIC_OK, or EPIC_EMISMATCH naming both values; the same on every rank. */
epic_result hello_compare(const hello *all, int num_ranks);

#endif
