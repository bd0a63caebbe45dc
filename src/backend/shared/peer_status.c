/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the status of a peer: the operation that it announced last, whether it waits, and for
 * which ranks. When a deadline has passed, exchange/culprits.c finds the culprits from the
 * status of all peers. */
#include <string.h>

#include "backend/shared/shared.h"
#include "base/clock.h"

#define GRACE_NS 100000000

/* Returns whether the heartbeat in `wait` is recent. A recent heartbeat shows that the rank
 * still waits. A waiting rank renews its heartbeat at least every slice_ns. A heartbeat counts
 * as recent if it is at most 2.5 slice_ns or GRACE_NS old, whichever is longer, because on a
 * busy machine the rank may have to wait for a core. */
static bool is_fresh(const epic_group *g, const shared_wait *wait)
{
    const int64_t heartbeat = load_acquire(&wait->heartbeat_ns), now = clock_ns();
    const int64_t slices = g->slice_ns * 5 / 2, limit = slices > GRACE_NS ? slices : GRACE_NS;
    return heartbeat && (now < heartbeat || now - heartbeat < limit);
}

static void add_wait(const epic_group *g, const shared_wait *wait, epic_peer_status *out)
{
    if (!is_fresh(g, wait)) return;
    out->is_waiting = true;
    for (int w = 0; w < (g->num_ranks + 63) / 64; w++)
        out->waits_for[w] |= load_relaxed(&wait->waits_for[w]);
}

/* Adds to *out the ranks for which any thread of the peer waits, in an operation or for a free
 * op slot. */
static void add_all_waits(const epic_group *g, int peer, epic_peer_status *out)
{
    const shared_rank_state *head = shared_rank_state_of(g, peer);
    const int used = (int)load_ordered(&head->num_used_slots);
    for (int i = 0; i < used && i < g->layout.num_slots; i++) {
        const shared_op_slot *slot = shared_op_slot_of(g, peer, i);
        if (!load_acquire(&slot->finished)) add_wait(g, &slot->wait, out);
    }
    if (load_acquire(&head->num_sleepers)) add_wait(g, &head->wait, out);
}

/* Reads the last operation that the peer announced. The peer may overwrite the op slot during
 * the loads, so the loads are repeated (at most 100 times) until the slot's version is even,
 * and equal before and after the loads. */
static void add_last_operation(const epic_group *g, int peer, epic_peer_status *out)
{
    for (int attempt = 0; attempt < 100; attempt++) {
        const uint32_t last = load_acquire(&shared_rank_state_of(g, peer)->last_slot);
        if (last == 0 || last > (uint32_t)g->layout.num_slots) return;
        const shared_op_slot *slot = shared_op_slot_of(g, peer, (int)last - 1);
        const uint64_t version = load_acquire(&slot->version);
        out->tag = load_acquire(&slot->tag);
        out->sequence = load_acquire(&slot->sequence);
        out->operation = load_acquire(&slot->operation);
        out->is_inside = !load_acquire(&slot->finished);
        if (version % 2 == 0 && load_relaxed(&slot->version) == version) return;
    }
}

/* Implements epic_transport.look: reads from shared memory what a peer is doing, so that an
 * error text can contain the rank that caused a delay. */
void shared_look_at_peer(epic_group *g, int peer, uint64_t tag, uint64_t sequence,
                         epic_peer_status *out)
{
    memset(out, 0, sizeof *out);
    /* A peer sets `closed` before it exits. So check the process first, and load `closed` after
     * that. In the other order, a peer that closes and exits between the two accesses would
     * seem to have died without closing. */
    out->is_gone = shared_is_gone(g, peer);
    out->has_closed = load_acquire(&shared_rank_state_of(g, peer)->closed);
    out->is_gone |= out->has_closed;
    add_last_operation(g, peer, out);
    int index;
    const shared_op_slot *slot = shared_find_slot(g, peer, tag, sequence, 0, &index);
    out->has_announced =
        slot || (out->operation && out->tag == tag && out->sequence >= sequence);
    if (slot) out->phase = load_acquire(&slot->wait.phase);
    if (slot && !load_acquire(&slot->finished))
        add_wait(g, &slot->wait, out);
    else
        add_all_waits(g, peer, out);
}
