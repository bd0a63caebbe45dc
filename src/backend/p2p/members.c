/* SPDX-License-Identifier: Apache-2.0 */
/* The members of a group whose ranks can leave it. Kernels read the vacant seats from device
 * memory (p2p_group_words), so the arguments of captured CUDA graphs stay valid. */
#include <stddef.h>

#include "backend/p2p/p2p.h"

#if WITH_VACANT_SEATS
/* Ends the use of the heap of a rank that has left. Tells the rank that it may free its heap,
 * because this rank does not access it any more. */
static void release_seat(epic_group *g, int seat)
{
    *g->word = P2P_GONE(0);
    if (!p2p_is_dead(g, seat) && !p2p_has_released(g, seat))
        g->hooks->write(g, seat, g->self.at.gone + 8 * g->rank, g->word, sizeof *g->word);
    p2p_heap_unmap(g, seat);
}

/* Writes the generation and the vacant seats into this rank's heap. */
static void write_group_words(epic_group *g)
{
    const uint32_t words[2] = {g->generation, g->vacant};
    const int64_t at = g->self.at.broken + (int64_t)offsetof(p2p_group_words, generation);
    g->hooks->write(g, g->rank, at, words, sizeof words);
}

void p2p_set_members(epic_group *g, const seat_set *members)
{
    for (int q = 0; q < g->num_ranks; q++) {
        if (seat_set_has(members, q) || p2p_is_vacant(g, q)) continue;
        release_seat(g, q);
        g->vacant |= 1u << q;
    }
    write_group_words(g);
}
#endif
