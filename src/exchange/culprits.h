/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPIC_CULPRITS_H
#define EPIC_CULPRITS_H

#include "exchange/exchange.h"

/* Writes the ranks whose bits are set in `ranks` as text, for example "rank 2" or "ranks 1, 2
 * and 5". Lists at most 16 ranks, then appends "and N more". */
void format_ranks(char *out, size_t size, const uint64_t *ranks);

/* Returns true if the peer has finished the operation of exchange x. Such a peer is no culprit,
 * even if it has closed its context. x may still wait for such a peer: if the ring to EVERYONE
 * is full, the ring does not show which peer has not read its entries, so x waits for all
 * peers. */
bool has_peer_finished(const exchange *x, const epic_peer_status *status);

/* Sets the bits of the culprits in `culprits`, and writes to `sentence` an error text with the
 * status of up to four culprits. Starts with the ranks for which x waits, and continues with
 * the ranks for which those ranks wait, until it finds ranks that do not wait. Of the ranks
 * that do not wait, those that are furthest behind are the culprits. */
void find_culprits(exchange *x, uint64_t *culprits, char *sentence, size_t size);

#endif
