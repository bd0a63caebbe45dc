/* SPDX-License-Identifier: Apache-2.0 */
/* The backend mpi: ranks are processes of one MPI job. They share no memory and only exchange
 * messages. This file has the table of transport functions, and the transport functions that
 * poll MPI if they have no result yet. */
#include "backend/mpi/group.h"
#include "base/error.h"

#define RECENT_NS 1000000

/* Implements epic_transport.claim: reserves a free op slot. Returns its index, or -1. */
static int claim_slot(epic_group *group)
{
    pthread_mutex_lock(group->mutex);
    /* first free the slots of finished exchanges, whose memory is still in the cache */
    if (!is_broken(group)) progress_drain(group);
    op_slot *slot = op_slots_find_free(group);
    if (slot) slot->state = SLOT_CLAIMED;
    pthread_mutex_unlock(group->mutex);
    return slot ? slot->index : -1;
}

static bool has_come(const op_slot *slot, int from)
{
    return atomic_load_explicit(&slot->has_header[from], memory_order_acquire);
}

static const epic_op_header *get_header(epic_group *group, int index, int from)
{
    op_slot *slot = &group->slots[index];
    if (!has_come(slot, from)) progress_after_miss(group, slot);
    return has_come(slot, from) ? &slot->headers[from] : NULL;
}

static void *get_room(epic_group *group, int index, int to, int64_t entry)
{
    op_slot *slot = &group->slots[index];
    void *at = staging_room(group, slot, to, entry);
    if (!at) progress_after_miss(group, slot);
    return at;
}

static const void *get_entry(epic_group *group, int index, int from, int64_t entry)
{
    op_slot *slot = &group->slots[index];
    const void *at = staging_entry(group, slot, from, entry);
    if (at) return at;
    progress_after_miss(group, slot);
    return staging_entry(group, slot, from, entry);
}

static void look_at_peer(epic_group *group, int from, uint64_t tag, uint64_t sequence,
                         epic_peer_status *out)
{
    pthread_mutex_lock(group->mutex);
    progress_control(group);
    peer_status_read(group, from, tag, sequence, out);
    pthread_mutex_unlock(group->mutex);
}

static bool has_polled_recently(epic_group *group)
{
    const int64_t looked = atomic_load_explicit(&group->polled_ns, memory_order_relaxed);
    return clock_ns() - looked < RECENT_NS;
}

/* Implements epic_transport.failure. Polls MPI if no thread has done so for RECENT_NS, so that
 * a rank that never waits also finds failures.
 *
 * Polls until two polls in a row find nothing, because MPI may receive a message in one poll
 * and report it only in the next. So a rank that calls EPIC after a long time finds the failure
 * of an operation before it takes part in that operation. */
static bool get_failure(epic_group *group, epic_failure_info *out)
{
    if (!is_broken(group) && !has_polled_recently(group) &&
        pthread_mutex_trylock(group->mutex) == 0) {
        while (progress_control(group) || progress_control(group)) continue;
        pthread_mutex_unlock(group->mutex);
    }
    if (!is_broken(group)) return false;
    *out = group->failure;
    return true;
}

static const epic_transport transport = {
    .shares = false,
    .ring_bytes = mpi_ring_bytes,
    .claim = claim_slot,
    .announce = mpi_announce,
    .op_header = get_header,
    .shape = mpi_shape,
    .room = get_room,
    .send = mpi_send,
    .entry = get_entry,
    .drop = mpi_drop,
    .finish = mpi_finish,
    .wait = mpi_wait,
    .look = look_at_peer,
    .settle_ms = 1,
    .break_group = progress_break_group,
    .failure = get_failure,
    .bytes_sent = mpi_bytes_sent,
};

extern EPIC_API const epic_backend epic_backend_mpi;
const epic_backend epic_backend_mpi = {
    .name = "mpi",
    .can_join = mpi_can_join,
    .join = mpi_join,
    .leave = mpi_leave,
    .memory = mpi_memory,
    .transport = &transport,
    .sentence = epic_sentence,
    .bootstrap = mpi_bootstrap,
};
