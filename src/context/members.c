/* SPDX-License-Identifier: Apache-2.0 */
/* Each generation (group with fixed members) makes one decision: which members the next
 * generation has. The decision is one instance of Paxos, and its acceptors are the members of
 * the current generation. The leader is the lowest seat that is not dead and that the other
 * seats have not given up on. docs/internals/members.md explains why the rules of this file
 * suffice, and tests/model/members.pml checks them. */
#include "context/members.h"

#include <string.h>

/* A seat gives up on a lower seat if no message from that seat has arrived for 3/2 of the
 * patience (members_call.patience_ns). The factor is more than 1, because a leader that is
 * alive may wait for the whole patience before it sends its next message. */
#define GIVE_UP_HALVES 3
#define CALL_PATIENCES 4 /* a call lasts at most this many times the patience */

static int ballot_compare(const members_ballot *a, const members_ballot *b)
{
    if (a->authority != b->authority) return a->authority < b->authority ? -1 : 1;
    if (a->round != b->round) return a->round < b->round ? -1 : 1;
    return a->seat == b->seat ? 0 : a->seat < b->seat ? -1 : 1;
}

static bool is_running(const members *m)
{
    return m->state == MEMBERS_DECIDING || m->state == MEMBERS_PREPARING;
}

static members_message make_message(const members *m, uint32_t kind)
{
    return (members_message){.kind = kind,
                             .generation = m->generation,
                             .ballot = m->ballot,
                             .proposal = m->proposal,
                             .dead = m->dead};
}

static void send_to(members *m, int to, const members_message *message, int64_t now)
{
    if (to == m->seat)
        members_receive(m, to, message, now);
    else if (!seat_set_has(&m->dead, to))
        m->send(m->self, to, message);
}

/* Sends a message to all seats of the set. Sends to this seat last, because this seat's reply
 * is handled at once and may end the phase. */
static void send_to_all(members *m, const seat_set *to, const members_message *message,
                        int64_t now)
{
    for (int s = 0; s < m->num_seats; s++)
        if (s != m->seat && seat_set_has(to, s)) send_to(m, s, message, now);
    if (seat_set_has(to, m->seat)) send_to(m, m->seat, message, now);
}

static void end_call(members *m, enum members_state state)
{
    m->state = state;
    m->phase = MEMBERS_FOLLOWS;
}

static void send_decision(members *m, int to, uint64_t generation, const members_ballot *ballot,
                          const members_proposal *decided, int64_t now)
{
    members_message commit = make_message(m, MEMBERS_COMMIT);
    commit.generation = generation;
    commit.ballot = *ballot;
    commit.proposal = *decided;
    send_to(m, to, &commit, now);
}

/* Sends the decision that created the current generation. */
static void send_last(members *m, int to, int64_t now)
{
    if (m->last_ballot.round)
        send_decision(m, to, m->generation - 1, &m->last_ballot, &m->last, now);
}

/* Makes the prepared decision the current generation. If the seat that sent the decision is not
 * a member of the new generation, it may die before it has sent the decision to all seats. The
 * new generation would not notice its death. So in this case this seat sends the decision to
 * all members now. */
static void enter_generation(members *m, int64_t now)
{
    const int from = m->decided_by;
    const seat_set next = m->pending.members;
    m->last = m->pending;
    m->last_ballot = m->pending_ballot;
    m->generation++;
    m->current = next;
    m->promised = m->accepted = (members_ballot){0};
    m->abandoned = 0;
    m->is_decided = false;
    end_call(m, MEMBERS_ENTERED);
    for (int s = 0; s < m->num_seats && !seat_set_has(&next, from); s++)
        if (s != m->seat && seat_set_has(&next, s)) send_last(m, s, now);
}

/* Returns whether `acks`, the seats that have accepted, suffice to decide on the set `next`. */
static bool is_quorum(const members *m, const seat_set *acks, const seat_set *next)
{
    if (m->ballot.authority) return seat_set_contains(acks, next);
    seat_set known = *acks;
    seat_set_unite(&known, &m->dead);
    if (seat_set_contains(&known, &m->current)) return true;
    return 2 * seat_set_count(acks) > seat_set_count(&m->current);
}

static void fail_for_all(members *m, uint32_t flags, int64_t now)
{
    members_message fail = make_message(m, MEMBERS_FAIL);
    fail.flags = flags;
    fail.proposal.members = m->came;
    m->phase = MEMBERS_FOLLOWS;
    send_to_all(m, &m->came, &fail, now);
}

/* Returns whether this seat has given up on the lower seat `seat` (GIVE_UP_HALVES). */
static bool is_given_up(const members *m, int seat, int64_t now)
{
    return now - m->heard_ns[seat] >= m->call.patience_ns * GIVE_UP_HALVES / 2;
}

/* Begins a ballot in a round above all rounds that this seat has seen. */
static void begin_ballot(members *m, int64_t now)
{
    uint32_t round = m->ballot.round > m->promised.round ? m->ballot.round : m->promised.round;
    m->ballot = (members_ballot){m->call.authority, round + 1, (uint32_t)m->seat};
    m->phase = MEMBERS_GATHERS;
    m->phase_ns = now;
    m->came = m->acks = m->leaving = (seat_set){{0}};
    m->best = (members_ballot){0};
    m->proposal = (members_proposal){{{0}}, 0, 0, 0};
    const members_message prepare = make_message(m, MEMBERS_PREPARE);
    send_to_all(m, &m->current, &prepare, now);
}

/* Fills in a new proposal. Without an authority, its members are the seats that have promised,
 * except those that leave, cannot prepare or are dead. With an authority, its members are the
 * set that the authority named. */
static void make_proposal(members *m)
{
    seat_set next = m->came;
    seat_set_subtract(&next, &m->leaving);
    seat_set_subtract(&next, &m->refused);
    seat_set_subtract(&next, &m->dead);
    if (m->call.authority) next = m->call.only;
    m->proposal = (members_proposal){next, m->call.group_id, INT64_MAX, INT64_MIN};
    for (int s = 0; s < m->num_seats; s++) {
        if (!seat_set_has(&next, s)) continue;
        if (m->steps[s] < m->proposal.least_step) m->proposal.least_step = m->steps[s];
        if (m->steps[s] > m->proposal.greatest_step) m->proposal.greatest_step = m->steps[s];
    }
}

/* Returns whether the leader need not wait for more promises: each seat has promised, is dead
 * or was given up on. If the leader has given up on seats, the seats that have promised must
 * also be a quorum. The reason: several seats may give up on the same leader at the same time,
 * and then also on each other. */
static bool has_gathered(const members *m, int64_t now)
{
    seat_set known = m->came, heard;
    seat_set_unite(&known, &m->dead);
    heard = known;
    for (int s = 0; s < m->seat; s++)
        if (is_given_up(m, s, now)) seat_set_add(&known, s);
    if (!seat_set_contains(&known, &m->current)) return false;
    const seat_set *next = m->best.round       ? &m->proposal.members
                           : m->call.authority ? &m->call.only
                                               : &m->came;
    return seat_set_contains(&heard, &m->current) || is_quorum(m, &m->came, next);
}

/* Sends the proposal when has_gathered() is true, or when the patience has passed. */
static void finish_gathering(members *m, int64_t now)
{
    if (!has_gathered(m, now) && now < m->phase_ns + m->call.patience_ns) return;
    m->is_adopted = m->best.round != 0;
    if (!m->is_adopted) make_proposal(m);
    const seat_set *next = &m->proposal.members;
    if (!m->is_adopted && seat_set_count(next) < (int)m->call.min_members) {
        fail_for_all(m, MEMBERS_FEW, now);
    } else if (!is_quorum(m, &m->came, next)) {
        fail_for_all(m, 0, now);
    } else {
        m->phase = MEMBERS_PROPOSES;
        m->phase_ns = now;
        const members_message propose = make_message(m, MEMBERS_PROPOSE);
        send_to_all(m, &m->came, &propose, now);
    }
}

/* Decides when each seat that has promised has accepted or is dead, or when the patience has
 * passed. A majority that has accepted would be enough to decide earlier. But then a seat that
 * has not prepared yet would receive the decision, and would be left out if it cannot
 * prepare. */
static void finish_proposing(members *m, int64_t now)
{
    seat_set known = m->acks;
    seat_set_unite(&known, &m->dead);
    const bool all = seat_set_contains(&known, &m->came);
    if (!all && now < m->phase_ns + m->call.patience_ns) return;
    if (!is_quorum(m, &m->acks, &m->proposal.members)) {
        fail_for_all(m, 0, now);
        return;
    }
    const members_message commit = make_message(m, MEMBERS_COMMIT);
    const seat_set everyone = m->current;
    m->phase = MEMBERS_FOLLOWS;
    send_to_all(m, &everyone, &commit, now);
}

/* Begins to lead if all lower members are dead or this seat has given up on them. If not, stops
 * leading, so that two leaders do not outbid each other forever. */
static void choose_leader(members *m, int64_t now)
{
    for (int s = 0; s < m->seat; s++) {
        if (!seat_set_has(&m->current, s) || seat_set_has(&m->dead, s)) continue;
        if (is_given_up(m, s, now)) continue;
        m->phase = MEMBERS_FOLLOWS;
        return;
    }
    if (m->phase == MEMBERS_FOLLOWS && m->promised.authority <= m->call.authority)
        begin_ballot(m, now);
}

/* Performs the steps that are due in the current phase at the time `now`. */
static void make_progress(members *m, int64_t now)
{
    if (!is_running(m)) return;
    if (now >= m->begin_ns + CALL_PATIENCES * m->call.patience_ns) {
        end_call(m, MEMBERS_LATE);
        return;
    }
    if (m->is_decided) return;
    choose_leader(m, now);
    if (is_running(m) && m->phase == MEMBERS_GATHERS) finish_gathering(m, now);
    if (is_running(m) && m->phase == MEMBERS_PROPOSES) finish_proposing(m, now);
}

/* If a promise contains a proposal that its sender has accepted earlier, the proposal may be
 * decided already. Of these proposals, adopts the one that was accepted in the highest ballot.
 * Ignores proposals that cannot be decided: those that this leader itself has abandoned, and
 * those with another authority number. */
static void keep_accepted(members *m, const members_message *promise)
{
    const members_ballot *b = &promise->accepted;
    const bool mine = (int)b->seat == m->seat && b->round <= m->abandoned;
    if (b->round == 0 || mine || b->authority != m->ballot.authority) return;
    if (ballot_compare(b, &m->best) <= 0) return;
    m->best = *b;
    m->proposal = promise->proposal;
}

static void handle_promise(members *m, int from, const members_message *promise)
{
    if (m->phase != MEMBERS_GATHERS || ballot_compare(&promise->ballot, &m->ballot) != 0)
        return;
    seat_set_add(&m->came, from);
    if (promise->flags & MEMBERS_LEAVING) seat_set_add(&m->leaving, from);
    m->steps[from] = promise->step;
    keep_accepted(m, promise);
}

static void handle_behind(members *m, const members_message *behind, int64_t now)
{
    if (m->phase == MEMBERS_FOLLOWS || ballot_compare(&behind->ballot, &m->ballot) <= 0) return;
    m->ballot.round = behind->ballot.round;
    m->phase = MEMBERS_FOLLOWS;
    if (behind->ballot.authority <= m->call.authority) choose_leader(m, now);
}

static void handle_reply(members *m, int from, const members_message *reply, int64_t now)
{
    if (m->phase != MEMBERS_PROPOSES || ballot_compare(&reply->ballot, &m->ballot) != 0) return;
    if (reply->kind == MEMBERS_ACCEPT) {
        seat_set_add(&m->acks, from);
    } else if (!m->is_adopted && !m->call.authority) {
        seat_set_add(&m->refused, from);
        m->abandoned = m->ballot.round;
        begin_ballot(m, now);
    }
}

/* Returns whether this seat may promise or accept the message's ballot. If not, replies with
 * the higher ballot. */
static bool may_follow(members *m, int from, const members_message *message, int64_t now)
{
    members_message behind = make_message(m, MEMBERS_BEHIND);
    behind.ballot = m->promised;
    if (message->ballot.authority < m->call.authority)
        behind.ballot = (members_ballot){m->call.authority, m->promised.round, 0};
    if (ballot_compare(&message->ballot, &behind.ballot) >= 0) return true;
    send_to(m, from, &behind, now);
    return false;
}

static void handle_prepare(members *m, int from, const members_message *prepare, int64_t now)
{
    if (!may_follow(m, from, prepare, now)) return;
    m->promised = prepare->ballot;
    members_message promise = make_message(m, MEMBERS_PROMISE);
    promise.ballot = m->promised;
    promise.accepted = m->accepted;
    promise.proposal = m->accepted_proposal;
    promise.flags = m->call.leaving ? MEMBERS_LEAVING : 0;
    promise.step = m->call.step;
    send_to(m, from, &promise, now);
}

static void reply_to_proposal(members *m, bool is_prepared, int64_t now)
{
    members_message reply = make_message(m, is_prepared ? MEMBERS_ACCEPT : MEMBERS_REFUSE);
    reply.ballot = m->pending_ballot;
    if (is_prepared) {
        m->accepted = m->pending_ballot;
        m->accepted_proposal = m->pending;
    }
    m->state = MEMBERS_DECIDING;
    send_to(m, (int)m->pending_ballot.seat, &reply, now);
}

static void handle_propose(members *m, int from, const members_message *propose, int64_t now)
{
    if (!may_follow(m, from, propose, now)) return;
    m->promised = m->pending_ballot = propose->ballot;
    m->pending = propose->proposal;
    if (seat_set_has(&m->pending.members, m->seat))
        m->state = MEMBERS_PREPARING;
    else
        reply_to_proposal(m, true, now); /* there is nothing to prepare, so accept at once */
}

/* Returns whether this seat has prepared the decided proposal. A seat prepares a proposal
 * before it accepts it, so a seat that has accepted a proposal has also prepared it. */
static bool has_prepared(const members *m, const members_proposal *decided)
{
    return m->accepted.round && m->accepted_proposal.group_id == decided->group_id &&
           seat_set_equal(&m->accepted_proposal.members, &decided->members);
}

/* Handles a decision. If this seat has prepared it, enters the new generation now. If not, the
 * caller must prepare first. If this seat has promised a ballot with an authority, it ignores
 * decisions with a lower authority number, because the authority's set needs all its seats,
 * also this one. The exception is a decision that comes from a seat of that set, because that
 * seat has then already entered the new generation. */
static void handle_commit(members *m, int from, const members_message *commit, int64_t now)
{
    if (commit->ballot.authority < m->promised.authority && !seat_set_has(&m->call.only, from))
        return;
    if (!seat_set_has(&commit->proposal.members, m->seat)) {
        end_call(m, MEMBERS_OUT);
        return;
    }
    const bool is_prepared = has_prepared(m, &commit->proposal);
    m->pending = commit->proposal;
    m->pending_ballot = commit->ballot;
    m->is_decided = true;
    m->decided_by = from;
    m->state = MEMBERS_PREPARING;
    if (is_prepared) enter_generation(m, now);
}

static bool is_set_valid(const members *m, const seat_set *s)
{
    for (int seat = m->num_seats; seat < SEAT_SET_MAX; seat++)
        if (seat_set_has(s, seat)) return false;
    return true;
}

/* Returns whether the state machine of a seat of this group could have sent the message. */
static bool is_valid(const members *m, int from, const members_message *message)
{
    return from >= 0 && from < m->num_seats && message->kind >= MEMBERS_PREPARE &&
           message->kind <= MEMBERS_FAIL && message->ballot.seat < (uint32_t)m->num_seats &&
           message->accepted.seat < (uint32_t)m->num_seats &&
           message->ballot.round < UINT32_MAX / 2 &&
           is_set_valid(m, &message->proposal.members) && is_set_valid(m, &message->dead) &&
           !seat_set_has(&message->dead, from) && !seat_set_has(&message->dead, m->seat);
}

/* Handles a message of another generation. If the sender is behind, sends it the decision that
 * it has missed. If this seat leads, also sends the ballot again, because the sender could not
 * reply to it in its old generation. */
static void handle_stranger(members *m, int from, const members_message *message, int64_t now)
{
    if (message->generation > m->generation) {
        if (message->kind == MEMBERS_COMMIT) {
            if (!seat_set_has(&message->proposal.members, m->seat)) end_call(m, MEMBERS_OUT);
            return;
        }
        members_message behind = make_message(m, MEMBERS_BEHIND);
        behind.ballot = (members_ballot){0};
        send_to(m, from, &behind, now);
        return;
    }
    if (message->kind == MEMBERS_COMMIT || message->kind == MEMBERS_FAIL) return;
    send_last(m, from, now);
    if (m->phase != MEMBERS_GATHERS || !seat_set_has(&m->current, from)) return;
    const members_message prepare = make_message(m, MEMBERS_PREPARE);
    send_to(m, from, &prepare, now);
}

static void handle_message(members *m, int from, const members_message *message, int64_t now)
{
    if (m->is_decided) {
        if (message->kind == MEMBERS_PREPARE || message->kind == MEMBERS_PROPOSE)
            send_decision(m, from, m->generation, &m->pending_ballot, &m->pending, now);
        return;
    }
    switch (message->kind) {
    case MEMBERS_PREPARE:
        handle_prepare(m, from, message, now);
        return;
    case MEMBERS_PROMISE:
        handle_promise(m, from, message);
        return;
    case MEMBERS_BEHIND:
        handle_behind(m, message, now);
        return;
    case MEMBERS_PROPOSE:
        handle_propose(m, from, message, now);
        return;
    case MEMBERS_ACCEPT:
    case MEMBERS_REFUSE:
        handle_reply(m, from, message, now);
        return;
    case MEMBERS_COMMIT:
        handle_commit(m, from, message, now);
        return;
    default:
        if (ballot_compare(&message->ballot, &m->promised) != 0) return;
        m->came = message->proposal.members;
        end_call(m, message->flags & MEMBERS_FEW ? MEMBERS_TOO_FEW : MEMBERS_NO_QUORUM);
    }
}

void members_init(members *m, int seat, int num_seats, uint64_t generation,
                  const seat_set *current)
{
    members_send *send = m->send;
    void *self = m->self;
    memset(m, 0, sizeof *m);
    m->send = send;
    m->self = self;
    m->seat = seat;
    m->num_seats = num_seats;
    m->generation = generation;
    m->current = *current;
}

void members_begin(members *m, const members_call *call, int64_t now)
{
    if (m->state == MEMBERS_OUT) return;
    m->call = *call;
    if (m->call.min_members == 0) m->call.min_members = 1;
    m->begin_ns = now;
    for (int s = 0; s < m->num_seats; s++) m->heard_ns[s] = now;
    m->phase = MEMBERS_FOLLOWS;
    m->refused = (seat_set){{0}};
    m->state = m->is_decided ? MEMBERS_PREPARING : MEMBERS_DECIDING;
    make_progress(m, now);
}

void members_receive(members *m, int from, const members_message *message, int64_t now)
{
    if (!is_running(m) || !is_valid(m, from, message)) return;
    m->heard_ns[from] = now;
    if (message->generation != m->generation) {
        handle_stranger(m, from, message, now);
        return;
    }
    if (!seat_set_has(&m->current, from)) return;
    seat_set_unite(&m->dead, &message->dead);
    handle_message(m, from, message, now);
    make_progress(m, now);
}

void members_report_dead(members *m, int seat, int64_t now)
{
    seat_set_add(&m->dead, seat);
    make_progress(m, now);
}

void members_tick(members *m, int64_t now)
{
    make_progress(m, now);
}

void members_answer(members *m, bool is_prepared, int64_t now)
{
    if (m->state != MEMBERS_PREPARING) return;
    if (!m->is_decided)
        reply_to_proposal(m, is_prepared, now);
    else if (is_prepared)
        enter_generation(m, now);
    else
        end_call(m, MEMBERS_OUT);
    make_progress(m, now);
}
