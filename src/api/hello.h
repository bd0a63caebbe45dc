/* SPDX-License-Identifier: Apache-2.0 */
/* The hello: the data that the ranks exchange first when a group opens. */
#ifndef EPIC_HELLO_H
#define EPIC_HELLO_H

#include "backend/backend.h"

/* Bytes for an error sentence. With "open: rank 1023: " in front it fits into a failure's
 * 511 bytes. */
#define HELLO_SENTENCE 480

/* All versions with the same magic share the size and layout, so that versions can be
 * compared. */
typedef struct hello {
    uint64_t magic;
    uint32_t version;
    uint32_t bytes;  /* sizeof(hello) */
    int64_t refused; /* the epic_result of this rank so far; its text is `sentence` */
    int64_t rank, num_ranks;
    int64_t max_tokens, max_row_bytes, staging_bytes, timeout_ms, max_in_flight, max_sms,
        max_top_k;
    char backend[16];
    char name[64];
    uint64_t random;
    epic_peer peer;
    char sentence[HELLO_SENTENCE];
} hello;

/* Fills in this rank's hello. On EPIC_EDEVICE the system does not reveal host or process,
 * and all other fields are filled in. */
epic_result hello_fill(hello *mine, const epic_bootstrap *bootstrap, const epic_config *config);

/* Compares the hellos of all ranks; every rank gets the same result. Returns EPIC_OK, the
 * error with which a rank failed, EPIC_EMISMATCH with both values of a field that differs,
 * or EPIC_EPEER for a hello that EPIC did not write. The data may come from anyone who
 * reaches the bootstrap, so every field is checked, and control characters in texts become
 * '?'. */
epic_result hello_compare(hello *all, int num_ranks);

#endif
