/* SPDX-License-Identifier: Apache-2.0 */
/* What the ranks of a group tell one another before anything else. */
#ifndef EPIC_HELLO_H
#define EPIC_HELLO_H

#include "backend/backend.h"

/* Room for the longest sentence, which peers read behind "open: rank 1023: ", within the 511
 * bytes that a failure has. */
#define HELLO_SENTENCE 480

/* Fixed size and layout for every version that shares the magic: version comes first. */
typedef struct hello {
    uint64_t magic;
    uint32_t version;
    uint32_t bytes;  /* sizeof(hello) */
    int64_t refused; /* this rank's epic_result so far; sentence says why */
    int64_t rank, num_ranks;
    int64_t max_tokens, max_row_bytes, staging_bytes, timeout_ms, max_in_flight, max_sms,
        max_top_k;
    char backend[16];
    char name[64];
    uint64_t random;
    epic_peer peer;
    char sentence[HELLO_SENTENCE];
} hello;

/* EPIC_EDEVICE: the system does not let this rank find out who it is; all else is filled in. */
epic_result hello_fill(hello *mine, const epic_bootstrap *bootstrap, const epic_config *config);

/* EPIC_OK, what a rank refused with, EPIC_EMISMATCH naming both values, or EPIC_EPEER for a
 * record that no rank wrote; the same on every rank.  Control characters in texts become '?':
 * nothing in a record is trusted, it may come from anybody who reached the bootstrap. */
epic_result hello_compare(hello *all, int num_ranks);

#endif
