/* SPDX-License-Identifier: Apache-2.0 */
/* Declares the struct rank_info. When a group opens, every rank sends its rank_info to all
 * ranks. It contains the rank's version, configuration, host and process, and its error if
 * opening has already failed on this rank. */
#ifndef EPIC_RANK_INFO_H
#define EPIC_RANK_INFO_H

#include "backend/backend.h"

/* Size of an error text in a rank_info: small enough that the text with the prefix "open: rank
 * 1023: " fits into the 511 characters of a failure's text. */
#define RANK_INFO_SENTENCE 480

/* The data about a rank that the rank sends to all ranks. All versions of EPIC with this
 * `magic` use this size and layout, so ranks with two different versions can detect the
 * difference. */
typedef struct rank_info {
    uint64_t magic;
    uint32_t version;
    uint32_t bytes; /* sizeof(rank_info) */
    /* the rank's result of opening the group so far; if the result is an error, `sentence` is
     * the error text */
    int64_t refused;
    int64_t rank, num_ranks;
    int64_t max_tokens, max_row_bytes, staging_bytes, timeout_ms, max_in_flight, max_sms,
        max_top_k, flags;
    char backend[16];
    char name[64];
    uint64_t random; /* a new random value; the group id is a hash of the values of all ranks */
    epic_peer peer;  /* host and process of the rank */
    char sentence[RANK_INFO_SENTENCE];
} rank_info;

/* Fills in the rank_info of this rank. Returns EPIC_EDEVICE if the operating system does not
 * report the identity of the host or of the process; in this case still fills in all other
 * fields. */
epic_result rank_info_fill(rank_info *mine, const epic_bootstrap *bootstrap,
                           const epic_config *config);

/* Compares the rank_infos of all ranks. Returns the same result on every rank: EPIC_OK, the
 * error of a rank that failed, EPIC_EMISMATCH with both values of a field that differs, or
 * EPIC_EPEER for a rank_info that EPIC did not write. Checks every field, because any program
 * that can connect to the bootstrap may have sent the rank_info. */
epic_result rank_info_compare(rank_info *all, int num_ranks);

#endif
