/* SPDX-License-Identifier: Apache-2.0 */
/* The hello: the struct that every rank sends to all ranks when a group opens. It describes the
 * rank's version, configuration, host and process. If opening has already failed on the rank,
 * the hello contains the error. */
#ifndef EPIC_HELLO_H
#define EPIC_HELLO_H

#include "backend/backend.h"

/* Size of an error sentence in a hello. Together with the prefix "open: rank 1023: " it fits
 * into the 511 bytes of a failure's sentence. */
#define HELLO_SENTENCE 480

/* The hello. All versions of EPIC with the same `magic` use this size and layout, so that ranks
 * of two versions can compare their hellos. */
typedef struct hello {
    uint64_t magic;
    uint32_t version;
    uint32_t bytes; /* sizeof(hello) */
    /* result of opening on this rank so far; if it is an error, `sentence` is its text */
    int64_t refused;
    int64_t rank, num_ranks;
    int64_t max_tokens, max_row_bytes, staging_bytes, timeout_ms, max_in_flight, max_sms,
        max_top_k;
    char backend[16];
    char name[64];
    /* a new random number in every hello; the group id is a hash of the numbers of all ranks */
    uint64_t random;
    epic_peer peer; /* host and process of the rank */
    char sentence[HELLO_SENTENCE];
} hello;

/* Fills in this rank's hello. Returns EPIC_EDEVICE if the operating system does not report the
 * identity of the host or of the process. All other fields are filled in even then. */
epic_result hello_fill(hello *mine, const epic_bootstrap *bootstrap, const epic_config *config);

/* Compares the hellos of all ranks. Returns the same result on every rank: EPIC_OK, the error
 * with which a rank failed, EPIC_EMISMATCH with both values of a field that differs, or
 * EPIC_EPEER for a hello that EPIC did not write. Any program that can connect to the bootstrap
 * may have written the data. Therefore every field is checked. */
epic_result hello_compare(hello *all, int num_ranks);

#endif
