/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the culprits: the ranks that caused another rank's wait to reach its deadline. */
#ifndef EPIC_CULPRITS_H
#define EPIC_CULPRITS_H

#include "exchange/exchange.h"

/* Writes the ranks whose bits are set in `ranks` as text, for example "rank 2" or "ranks 1, 2
 * and 5". Names at most 16 of them, then "and N more". */
void format_ranks(char *out, size_t size, const uint64_t *ranks);

/* Returns whether the peer has finished the exchange x. Such a peer is no culprit, and it may
 * close its context. x may still wait for it: a full ring to EVERYONE does not show which peer
 * has to read it, so all peers count as awaited. */
bool has_peer_finished(const exchange *x, const epic_peer_status *status);

/* Sets the bits of the culprits in `culprits`. Starts with the ranks that x waits for, and
 * follows their waits to ranks that do not wait. Of these it keeps those that are furthest
 * behind. Writes a sentence with the status of up to four culprits. */
void find_culprits(exchange *x, uint64_t *culprits, char *sentence, size_t size);

#endif
