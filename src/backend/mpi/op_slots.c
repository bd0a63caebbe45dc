/* SPDX-License-Identifier: Apache-2.0 */
/* Op slots, here called slots: the state of one rank for one exchange. A slot is free, claimed,
 * open (announced), draining (finished, but MPI still reads its rings), and then free again. If
 * a peer's op header arrives before this rank has opened a slot for the exchange, the header is
 * stored in the list `early` of that peer. */
#include "backend/mpi/group.h"

/* Returns this rank's open op slot for an exchange, or NULL. */
op_slot *op_slots_find(epic_group *group, uint64_t tag, uint64_t sequence)
{
    for (int i = 0; i < group->num_slots; i++) {
        op_slot *slot = &group->slots[i];
        if (slot->state == SLOT_OPEN && slot->tag == tag && slot->sequence == sequence)
            return slot;
    }
    return NULL;
}

/* Stores a peer's op header in this rank's op slot. Stores has_header with release order,
 * because the thread of the slot reads it and the header without the mutex. */
static void store_header(op_slot *slot, int from, int peer_slot, const epic_op_header *header)
{
    slot->headers[from] = *header;
    slot->peer_slots[from] = peer_slot;
    atomic_store_explicit(&slot->has_header[from], true, memory_order_release);
    slot->num_events++;
}

/* Stores a peer's op header for an exchange that this rank has not begun. If the peer's list is
 * full, the peer has more than max_in_flight operations in flight, which is an error, so the
 * function breaks the group. */
static void store_early_header(epic_group *group, const control_message *message, int from)
{
    peer *p = &group->peers[from];
    for (uint32_t i = 0; i < group->max_early; i++) {
        early_header *e = &p->early[i];
        if (e->is_used) continue;
        *e = (early_header){true, message->slot_index, message->tag, message->sequence,
                            message->header};
        p->num_early++;
        return;
    }
    epic_failure_info failure = {.result = EPIC_EMISMATCH,
                                 .rank = group->rank,
                                 .tag = message->tag,
                                 .sequence = message->sequence,
                                 .num_culprits = 1,
                                 .culprits = {from},
                                 .sentence = "a rank began more operations at once than "
                                             "max_in_flight; open a new group"};
    control_break(group, &failure, true);
}

/* Stores a peer's op header in the op slot of its exchange or in the list of early headers. */
void op_slots_add_header(epic_group *group, const control_message *message, int from)
{
    peer *p = &group->peers[from];
    p->operation =
        /* common[0] of an op header is the epic_operation (exchange/op_header.h) */
        (uint32_t)message->header.common[0];
    p->tag = message->tag;
    p->sequence = message->sequence;
    op_slot *slot = op_slots_find(group, message->tag, message->sequence);
    if (slot)
        store_header(slot, from, message->slot_index, &message->header);
    else
        store_early_header(group, message, from);
}

static void take_early_header(epic_group *group, op_slot *slot, int from)
{
    peer *p = &group->peers[from];
    for (uint32_t i = 0; p->num_early && i < group->max_early; i++) {
        early_header *e = &p->early[i];
        if (!e->is_used || e->tag != slot->tag || e->sequence != slot->sequence) continue;
        store_header(slot, from, e->slot_index, &e->header);
        e->is_used = false;
        p->num_early--;
        return;
    }
}

op_slot *op_slots_find_free(epic_group *group)
{
    for (int i = 0; i < group->num_slots; i++)
        if (group->slots[i].state == SLOT_FREE) return &group->slots[i];
    return NULL;
}

/* Prepares a claimed op slot for a new exchange. No other thread uses it, so no mutex is
 * needed. */
static void reset_slot(epic_group *group, op_slot *slot)
{
    for (int r = 0; r < group->num_ranks; r++) {
        atomic_store_explicit(&slot->has_header[r], false, memory_order_relaxed);
        slot->send_rings[r] = (staging_ring){
            /* an exchange begins in a different half of the ring than the previous exchange */
            .num_started = (uint64_t)slot->num_flows};
        slot->receive_rings[r] = (staging_ring){0};
        slot->statuses[r].is_pending = false;
        slot->statuses[r].replied_ns = 0;
    }
    slot->per_segment = 0;
    slot->num_misses = 0;
    slot->waits_for_room = false;
    slot->wait = (wait_state){.unchanged_since_ns = clock_ns()};
}

/* Implements epic_transport.announce: opens the op slot, moves early headers of this exchange
 * to it, and sends this rank's header to all peers. */
void mpi_announce(epic_group *group, int index, uint64_t tag, uint64_t sequence,
                  const epic_op_header *header)
{
    op_slot *slot = &group->slots[index];
    reset_slot(group, slot);
    pthread_mutex_lock(group->mutex);
    slot->tag = group->last_tag = tag;
    slot->sequence = group->last_sequence = sequence;
    group->last_operation = (uint32_t)header->common[0];
    slot->announcement = (control_message){.kind = MESSAGE_HEADER,
                                           .slot_index = index,
                                           .tag = tag,
                                           .sequence = sequence,
                                           .header = *header};
    slot->state = SLOT_OPEN;
    for (int r = 0; r < group->num_ranks && !is_broken(group); r++) {
        if (r == group->rank) continue;
        take_early_header(group, slot, r);
        control_send(group, &slot->announcement, r, request_of(slot, r, REQUEST_HEADER));
    }
    pthread_mutex_unlock(group->mutex);
}
