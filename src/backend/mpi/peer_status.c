/* SPDX-License-Identifier: Apache-2.0 */
/* Exchanges the status of ranks. A rank that waits for a long time sends status requests to the
 * ranks for which it waits, to the ranks for which those ranks wait, and so on. A rank that
 * waits inside EPIC polls MPI, so it replies. At its deadline a rank can therefore distinguish
 * peers that wait from peers that do not reply, and reports only the latter as culprits. */
#include <string.h>

#include "backend/mpi/group.h"

#define MS 1000000ll
/* a rank sends its first status requests after it has waited this long */
#define PATIENCE_NS (50 * MS)
#define PACE_NS (10 * MS) /* minimum time between two rounds of status requests */
/* minimum time between a reply of a peer and the next request to this peer */
#define AGAIN_NS (100 * MS)
/* A peer that does not reply gets the next request after this time. The time is long, so that
 * few messages accumulate at a peer that hangs. */
#define SILENT_NS (5000 * MS)
#define FRESH_NS (500 * MS)
/* After wait() has returned, a thread still counts as waiting for this long, because it usually
 * calls wait() again. */
#define MOMENT_NS (100 * MS)

static send_buffer *find_free_buffer(epic_group *group)
{
    for (int i = 0; i < NUM_SEND_BUFFERS; i++) {
        int sent = 0;
        if (MPI_Test(&group->send_buffers[i].request, &sent, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            return NULL;
        if (sent) return &group->send_buffers[i];
    }
    return NULL;
}

static bool is_fresh(const peer_status *s, int64_t now)
{
    return s->replied_ns && now - s->replied_ns <= FRESH_NS;
}

/* Sends a status request to a peer that is not gone. Does nothing if a request sent within
 * SILENT_NS is pending, if the last reply is younger than AGAIN_NS, or if no send buffer is
 * free. */
static void send_request(epic_group *group, op_slot *slot, int to, int64_t now)
{
    peer_status *s = &slot->statuses[to];
    if (to == group->rank || liveness_is_gone(group, to) || is_broken(group)) return;
    if (s->is_pending && now - s->requested_ns < SILENT_NS) return;
    if (!s->is_pending && s->replied_ns && now - s->replied_ns < AGAIN_NS) return;
    send_buffer *l = find_free_buffer(group);
    if (!l) return;
    s->is_pending = true;
    s->requested_ns = now;
    l->message = (control_message){.kind = MESSAGE_STATUS_REQUEST,
                                   .slot_index = slot->index,
                                   .tag = slot->tag,
                                   .sequence = slot->sequence};
    control_send(group, &l->message, to, &l->request);
}

/* `whom` is a bit mask of ranks. For each rank in `whom`, adds the ranks for which that rank
 * waits according to its last reply. Repeats this until no more ranks are added (transitive
 * closure). */
static void add_indirect_waits(epic_group *group, const op_slot *slot, int64_t now,
                               uint64_t *whom)
{
    uint64_t followed[RANK_WORDS] = {0};
    for (int r = 0; r < group->num_ranks; r++) {
        const peer_status *s = &slot->statuses[r];
        if (!has_rank(whom, r) || has_rank(followed, r)) continue;
        if (!is_fresh(s, now) || !s->status_report.is_waiting) continue;
        followed[r / 64] |= 1ull << (r % 64);
        for (int w = 0; w < RANK_WORDS; w++) whom[w] |= s->status_report.waits_for[w];
        r = -1; /* start again, because a lower rank may have been added */
    }
}

/* Sends status requests if the op slot has waited for PATIENCE_NS without a change. */
void peer_status_request(epic_group *group, op_slot *slot, int64_t now)
{
    if (now - slot->wait.unchanged_since_ns < PATIENCE_NS) return;
    if (now - slot->wait.requested_ns < PACE_NS) return;
    slot->wait.requested_ns = now;
    uint64_t whom[RANK_WORDS];
    memcpy(whom, slot->wait.waits_for, sizeof whom);
    add_indirect_waits(group, slot, now, whom);
    for (int r = 0; r < group->num_ranks; r++)
        if (has_rank(whom, r)) send_request(group, slot, r, now);
}

static void add_wait(status_report *out, const wait_state *w, int64_t now)
{
    if (!w->is_waiting && now - w->last_ns > MOMENT_NS) return;
    out->is_waiting = 1;
    for (int i = 0; i < RANK_WORDS; i++) out->waits_for[i] |= w->waits_for[i];
}

/* Returns this rank's reply to a status request. The reply contains the ranks for which this
 * rank waits in the exchange (tag, sequence). If this rank does not take part in that exchange,
 * the reply contains the ranks for which it waits in any exchange or for a free op slot. */
static status_report make_report(epic_group *group, uint64_t tag, uint64_t sequence)
{
    status_report out = {
        .operation = group->last_operation,
        .is_inside = op_slots_find(group, group->last_tag, group->last_sequence) != NULL,
        .tag = group->last_tag,
        .sequence = group->last_sequence};
    const int64_t now = clock_ns();
    const op_slot *here = op_slots_find(group, tag, sequence);
    if (here) {
        out.phase = here->wait.phase;
        add_wait(&out, &here->wait, now);
        return out;
    }
    add_wait(&out, &group->wait, now);
    for (int i = 0; i < group->num_slots; i++)
        if (group->slots[i].state == SLOT_OPEN) add_wait(&out, &group->slots[i].wait, now);
    return out;
}

/* Replies to a status request, if a send buffer is free. */
void peer_status_reply(epic_group *group, const control_message *question, int from)
{
    send_buffer *l = is_broken(group) ? NULL : find_free_buffer(group);
    if (!l) return;
    l->message = (control_message){.kind = MESSAGE_STATUS_REPLY,
                                   .slot_index = question->slot_index,
                                   .tag = question->tag,
                                   .sequence = question->sequence,
                                   .status_report =
                                       make_report(group, question->tag, question->sequence)};
    control_send(group, &l->message, from, &l->request);
}

/* Stores a peer's reply, if this rank is still in the exchange of the request. */
void peer_status_store(epic_group *group, const control_message *reply, int from)
{
    op_slot *slot = op_slots_find(group, reply->tag, reply->sequence);
    /* the exchange is over, so the reply is not needed */
    if (!slot || slot->index != reply->slot_index) return;
    peer_status *s = &slot->statuses[from];
    s->is_pending = false;
    s->replied_ns = clock_ns();
    s->status_report = reply->status_report;
}

/* Returns whether the peer has announced the exchange (tag, sequence), or a later exchange with
 * the same tag. `slot` is this rank's op slot for the exchange, or NULL. */
static bool has_announced(epic_group *group, int from, const op_slot *slot, uint64_t tag,
                          uint64_t sequence)
{
    const peer *p = &group->peers[from];
    if (slot && atomic_load_explicit(&slot->has_header[from], memory_order_relaxed))
        return true;
    if (p->operation && p->tag == tag && p->sequence >= sequence) return true;
    for (uint32_t i = 0; p->num_early && i < group->max_early; i++)
        if (p->early[i].is_used && p->early[i].tag == tag && p->early[i].sequence >= sequence)
            return true;
    return false;
}

static void copy_header_status(epic_group *group, int from, epic_peer_status *out)
{
    const peer *p = &group->peers[from];
    out->operation = p->operation;
    out->tag = p->tag;
    out->sequence = p->sequence;
    out->is_inside = p->operation && op_slots_find(group, p->tag, p->sequence);
}

/* Copies a report to *out. Copies the phase in any case, because the peer has at least reached
 * this phase. Only a report that is at most FRESH_NS old (`fresh` is true) shows that the peer
 * still waits. */
static void copy_report(const status_report *a, bool fresh, epic_peer_status *out)
{
    out->phase = a->phase;
    if (!fresh) return;
    out->is_waiting = a->is_waiting;
    memcpy(out->waits_for, a->waits_for, sizeof out->waits_for);
    out->operation = a->operation;
    out->tag = a->tag;
    out->sequence = a->sequence;
    out->is_inside = a->is_inside;
}

/* Implements epic_transport.look: fills in *out from the peer's last op header and last status
 * report. Also sends a new status request. */
void peer_status_read(epic_group *group, int from, uint64_t tag, uint64_t sequence,
                      epic_peer_status *out)
{
    memset(out, 0, sizeof *out);
    const int64_t now = clock_ns();
    op_slot *slot = op_slots_find(group, tag, sequence);
    out->has_announced = has_announced(group, from, slot, tag, sequence);
    liveness_check(group, now);
    out->has_closed = group->peers[from].closed;
    out->is_gone = liveness_is_gone(group, from);
    copy_header_status(group, from, out);
    if (slot && slot->statuses[from].replied_ns)
        copy_report(&slot->statuses[from].status_report, is_fresh(&slot->statuses[from], now),
                    out);
    if (slot && !out->is_gone) send_request(group, slot, from, now);
}
