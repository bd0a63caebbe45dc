/* SPDX-License-Identifier: Apache-2.0 */
/* The other side of a TCP bootstrap, controlled by the fuzzer's input. It sends raw bytes, and
 * whole hellos, proofs and frames. These are correct or damaged, so that the fuzzer also
 * reaches code after the handshake. */
#ifndef FUZZ_SCRIPT_H
#define FUZZ_SCRIPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bootstrap/tcp.h"

#define SCRIPT_SECRET "hush"
#define SCRIPT_MS 1000 /* the deadline of the fuzzed rank */

typedef struct script {
    const uint8_t *at;
    size_t left;
    bool listener; /* true: the script is rank 0 */
    bool has_secret;
    int num_ranks;
    epic_link link; /* state of the connection to which the script writes */
} script;

/* Opens a listening socket in place of rank 0's, and returns it. */
int script_listener(void);

/* Writes what the script contains, until it closes the connection or ends. */
void script_play(script *s, int socket);

uint8_t script_byte(script *s);

#endif
