/* SPDX-License-Identifier: Apache-2.0 */
/* Op slots, called slots here. A rank's slot holds its op header (the arguments of its
 * operation) and counters for one exchange. Peers find the slot by tag and sequence number. */
#include <string.h>

#include "backend/shared/shared.h"

/* Returns whether all peers have finished the last exchange of this op slot, so that its memory
 * may be overwritten. */
static bool is_released(const epic_group *g, const shared_exchange *x)
{
    const uint64_t version = load_relaxed(&x->slot->version);
    for (int r = 0; r < g->num_ranks; r++)
        if (r != g->rank && load_ordered(&x->slot->peers[r].done) != version) return false;
    return true;
}

bool shared_slot_is_free(epic_group *g, const shared_exchange *x)
{
    return !load_ordered(&x->claimed) && is_released(g, x);
}

/* Claims a free op slot and returns its index, or -1 if no slot is free.
 *
 * Between the test and the claim, another thread may have claimed, used and released the slot.
 * So this function tests again after its claim. If peers still read the slot, the function
 * undoes the claim. While the slot was claimed, another thread may have found no free slot and
 * gone to sleep, so the function also wakes sleeping threads. */
int shared_claim(epic_group *g)
{
    for (int i = 0; i < g->layout.num_slots; i++) {
        shared_exchange *x = &g->exchanges[i];
        if (!shared_slot_is_free(g, x) || swap_ordered(&x->claimed, true)) continue;
        if (is_released(g, x)) return i;
        store_ordered(&x->claimed, false);
        shared_wake_free_slot(g, g->rank);
    }
    return -1;
}

static void raise_num_used_slots(shared_rank_state *head, uint32_t count)
{
    uint32_t used = load_relaxed(&head->num_used_slots);
    while (used < count && !compare_swap(&head->num_used_slots, &used, count)) continue;
}

/* Resets the counters of the slot for one peer. For a vacant seat (a rank that has left the
 * group), sets the counters as if the peer had read every entry and finished the exchange. So
 * code that looks for the slowest peer need not skip vacant seats. */
static void reset_counters(const epic_group *g, shared_op_slot *slot, int peer,
                           uint64_t version)
{
    shared_peer_counters *counters = &slot->peers[peer];
    const bool is_vacant = !seat_set_has(&g->members, peer);
    store_relaxed(&counters->sent, 0);
    store_relaxed(&counters->dropped, 0);
    store_relaxed(&counters->broadcast_dropped, is_vacant ? INT64_MAX : 0);
    if (is_vacant) store_relaxed(&counters->done, version);
}

/* Writes tag, sequence, operation and op header into this rank's op slot. The version is odd
 * during the writes. Tag and sequence are stored with release order, so a peer that loads a new
 * tag or sequence with acquire order and then loads the version sees the odd version. */
static void write_slot(epic_group *g, shared_exchange *x, const epic_op_header *header)
{
    shared_op_slot *slot = x->slot;
    const uint64_t version = load_relaxed(&slot->version);
    store_relaxed(&slot->version, version + 1);
    store_release(&slot->tag, x->tag);
    store_release(&slot->sequence, x->sequence);
    /* common[0] of an op header is the epic_operation (backend/transport.h) */
    store_release(&slot->operation, (uint32_t)header->common[0]);
    store_release(&slot->finished, 0);
    store_relaxed(&slot->futex, SLOT_FUTEX_IDLE);
    store_relaxed(&slot->wait.heartbeat_ns, 0);
    store_relaxed(&slot->wait.phase, 0);
    store_relaxed(&slot->broadcast_sent, 0);
    for (int r = 0; r < g->num_ranks; r++) reset_counters(g, slot, r, version + 2);
    slot->op_header = *header;
    store_ordered(&slot->version, version + 2);
}

/* Publishes this rank's op header in its op slot, and wakes the peers that have announced the
 * same exchange. Peers that announce later find the slot themselves. Each rank first stores the
 * version of its slot and then searches the peers' slots, both sequentially consistent. So of
 * two ranks, at least one finds the other's slot. */
void shared_announce(epic_group *g, int index, uint64_t tag, uint64_t sequence,
                     const epic_op_header *header)
{
    shared_exchange *x = &g->exchanges[index];
    shared_rank_state *head = shared_rank_state_of(g, g->rank);
    x->tag = tag;
    x->sequence = sequence;
    x->broadcast_out = (ring_end){0};
    x->slowest_peer = g->rank;
    memset(x->links, 0, (size_t)g->num_ranks * sizeof *x->links);
    raise_num_used_slots(head, (uint32_t)index + 1);
    write_slot(g, x, header);
    store_release(&head->last_slot, (uint32_t)index + 1);
    for (int r = 0; r < g->num_ranks; r++)
        if (r != g->rank && shared_match_peer(g, x, r)) shared_wake_slot(g, x->links[r].slot);
}

/* Returns whether a peer's op slot holds the exchange (tag, sequence). The peer may be writing
 * another exchange into the slot, so the version must be even, and the same before and after
 * the comparison. If this rank takes part in the exchange, a result of true stays valid after
 * the return, because the peer keeps the exchange in the slot until this rank has finished. */
static bool slot_holds(shared_op_slot *slot, uint64_t tag, uint64_t sequence)
{
    const uint64_t version = load_ordered(&slot->version);
    if (version == 0 || version % 2) return false;
    const bool same =
        load_acquire(&slot->tag) == tag && load_acquire(&slot->sequence) == sequence;
    return same && load_relaxed(&slot->version) == version;
}

/* Returns the peer's op slot for the exchange (tag, sequence) and sets *index to its index, or
 * returns NULL. The search begins at index `first`. Callers usually pass the index of this
 * rank's own slot, because the peer's slot often has the same index. */
shared_op_slot *shared_find_slot(const epic_group *g, int peer, uint64_t tag, uint64_t sequence,
                                 int first, int *index)
{
    const int used = (int)load_ordered(&shared_rank_state_of(g, peer)->num_used_slots);
    const int count = used < g->layout.num_slots ? used : g->layout.num_slots;
    for (int i = 0; i < count; i++) {
        *index = (first + i) % count;
        shared_op_slot *slot = shared_op_slot_of(g, peer, *index);
        if (slot_holds(slot, tag, sequence)) return slot;
    }
    return NULL;
}

/* If x->links has no op slot of the peer yet, looks for it. Returns whether the peer's op slot
 * is known. */
bool shared_match_peer(epic_group *g, shared_exchange *x, int peer)
{
    peer_link *link = &x->links[peer];
    if (!link->slot)
        link->slot = shared_find_slot(g, peer, x->tag, x->sequence, x->index, &link->index);
    return link->slot != NULL;
}

const epic_op_header *shared_op_header(epic_group *g, int index, int peer)
{
    shared_exchange *x = &g->exchanges[index];
    if (peer == g->rank) return &x->slot->op_header;
    return shared_match_peer(g, x, peer) ? &x->links[peer].slot->op_header : NULL;
}

/* Ends the exchange on this rank. Marks this rank's own slot as finished. In the slot of each
 * peer, sets `done` to show that this rank no longer uses that peer's slot. Releases the claim
 * on its own slot. Wakes all threads, on any rank, that wait for a free slot. */
void shared_finish(epic_group *g, int index)
{
    shared_exchange *x = &g->exchanges[index];
    store_release(&x->slot->finished, 1);
    for (int r = 0; r < g->num_ranks; r++) {
        shared_op_slot *peer_slot = x->links[r].slot;
        /* peer_slot is NULL for this rank itself, and for a peer whose slot was not found
         * before the group failed */
        if (!peer_slot) continue;
        store_ordered(&peer_slot->peers[g->rank].done, load_relaxed(&peer_slot->version));
        shared_wake_free_slot(g, r);
    }
    store_ordered(&x->claimed, false);
    shared_wake_free_slot(g, g->rank);
}
