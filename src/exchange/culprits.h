/* SPDX-License-Identifier: Apache-2.0 */
/* Who is to blame for a wait that ended at its deadline. */
#ifndef EPIC_CULPRITS_H
#define EPIC_CULPRITS_H

#include "exchange/exchange.h"

/* "rank 2", "ranks 1, 2 and 5": the ranks whose bits are set. */
void format_ranks(char *out, size_t size, const uint64_t *ranks);

/* Has the peer finished this exchange?  It may close then: nobody waits for it, even where one
 * lane to everyone is full and does not say who still reads it. */
bool has_peer_finished(const exchange *x, const epic_peer_status *sight);

/* Follows who waits for whom from this exchange to the ranks that do not wait themselves; of
 * those the ones furthest behind.  `sentence` tells where each was last seen. */
void find_culprits(exchange *x, uint64_t *culprits, char *sentence, size_t size);

#endif
