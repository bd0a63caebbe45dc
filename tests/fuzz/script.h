/* SPDX-License-Identifier: Apache-2.0 */
/* The other side of a TCP bootstrap, as the fuzzer's input says: raw bytes, and whole hellos, proofs
 * and frames, right or spoiled, so that what lies behind the handshake is reached too. */
#ifndef FUZZ_SCRIPT_H
#define FUZZ_SCRIPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bootstrap/tcp.h"

#define SCRIPT_SECRET "hush"
#define SCRIPT_MS 1000 /* the deadline of the rank that is fuzzed */

typedef struct script {
    const uint8_t *at;
    size_t left;
    bool listener; /* the script is rank 0 */
    bool has_secret;
    int num_ranks;
    epic_link link; /* of the connection that it writes to */
} script;

/* A listening socket that stands for rank 0's; where to connect to. */
int script_listener(void);

/* Writes what the script says until it hangs up, or ends. */
void script_play(script *s, int socket);

uint8_t script_byte(script *s);

#endif
