/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the ranks that caused a wait to reach its deadline. */
#ifndef EPIC_CULPRITS_H
#define EPIC_CULPRITS_H

#include "exchange/exchange.h"

/* Writes the ranks whose bits are set, for example "rank 2" or "ranks 1, 2 and 5". Names at
 * most 16 of them. */
void format_ranks(char *out, size_t size, const uint64_t *ranks);

/* Returns whether the peer has finished this exchange. A peer that has finished may close its
 * context, and is no culprit. x may still be marked as waiting for it, because a full ring to
 * EVERYONE does not show which peer still has to read it. */
bool has_peer_finished(const exchange *x, const epic_peer_status *status);

/* Sets the bits of the culprits. Starts with the ranks that x waits for, and follows their
 * waits to ranks that do not wait. Of these it keeps those that are furthest behind. Writes to
 * `sentence` a text with the status of up to four culprits. */
void find_culprits(exchange *x, uint64_t *culprits, char *sentence, size_t size);

#endif
