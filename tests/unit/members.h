/* SPDX-License-Identifier: Apache-2.0 */
/* A simulated group of seats that decide on the next generation (src/context/members.c). A
 * source of choices decides which message arrives next, which seat dies, stops or goes on, and
 * when time passes. Messages between two seats keep their order. */
#ifndef MEMBERS_SIM_H
#define MEMBERS_SIM_H

#include <stdlib.h>
#include <string.h>

#include "context/members.h"

#define SIM_SEATS 7
#define SIM_QUEUE 64
#define SIM_PATIENCE 1000
#define SIM_GENERATION 5 /* generation of the group at the beginning */

typedef struct sim_queue {
    members_message messages[SIM_QUEUE];
    int first, count;
} sim_queue;

typedef struct sim_seat {
    members machine;
    struct sim *sim;
    members_call call;
    bool is_dead, is_stopped, refuses;
    unsigned reported; /* seats whose death this seat knows */
    int sends_left;    /* the seat dies after this many sends; -1: it does not */
} sim_seat;

typedef struct sim {
    int num_seats;
    int64_t now;
    sim_seat seats[SIM_SEATS];
    sim_queue queues[SIM_SEATS][SIM_SEATS]; /* [from][to] */
    bool overflow;                          /* true: a queue was full */
} sim;

static inline void sim_kill(sim *s, int seat)
{
    s->seats[seat].is_dead = true;
}

static inline void sim_send(void *self, int to, const members_message *message)
{
    sim_seat *seat = self;
    sim *s = seat->sim;
    sim_queue *q = &s->queues[seat->machine.seat][to];
    if (seat->is_dead) return;
    if (seat->sends_left == 0) {
        sim_kill(s, seat->machine.seat);
        return;
    }
    if (seat->sends_left > 0) seat->sends_left--;
    if (q->count == SIM_QUEUE) {
        s->overflow = true;
        return;
    }
    q->messages[(q->first + q->count++) % SIM_QUEUE] = *message;
}

/* Returns a group of `num_seats` seats whose calls have not begun. */
static inline sim *sim_new(int num_seats)
{
    sim *s = calloc(1, sizeof *s);
    seat_set all = {{(UINT64_C(1) << num_seats) - 1}};
    s->num_seats = num_seats;
    for (int r = 0; r < num_seats; r++) {
        sim_seat *seat = &s->seats[r];
        *seat = (sim_seat){.sim = s, .sends_left = -1};
        seat->machine.send = sim_send;
        seat->machine.self = seat;
        seat->call = (members_call){
            .patience_ns = SIM_PATIENCE, .step = 100 + r, .group_id = 1000 + (uint64_t)r};
        members_init(&seat->machine, r, num_seats, SIM_GENERATION, &all);
    }
    return s;
}

/* Returns whether events of this seat can happen. */
static inline bool sim_acts(const sim *s, int r)
{
    return !s->seats[r].is_dead && !s->seats[r].is_stopped;
}

static inline bool sim_is_in_call(const sim *s, int r)
{
    const enum members_state state = s->seats[r].machine.state;
    return sim_acts(s, r) && (state == MEMBERS_DECIDING || state == MEMBERS_PREPARING);
}

/* Answers a request to prepare, as the caller of a machine does. */
static inline void sim_answer(sim *s, int r)
{
    sim_seat *seat = &s->seats[r];
    while (!seat->is_dead && seat->machine.state == MEMBERS_PREPARING)
        members_answer(&seat->machine, !seat->refuses, s->now);
}

static inline void sim_begin(sim *s, int r)
{
    if (!sim_acts(s, r) || sim_is_in_call(s, r)) return;
    members_begin(&s->seats[r].machine, &s->seats[r].call, s->now);
    sim_answer(s, r);
}

static inline void sim_report(sim *s, int r, int dead)
{
    if (!sim_acts(s, r) || !s->seats[dead].is_dead || s->seats[r].reported >> dead & 1) return;
    s->seats[r].reported |= 1u << dead;
    members_report_dead(&s->seats[r].machine, dead, s->now);
    sim_answer(s, r);
}

/* Delivers the oldest message between two seats. Returns false if there is none, or if the
 * receiver reads no messages now. */
static inline bool sim_deliver(sim *s, int from, int to)
{
    sim_queue *q = &s->queues[from][to];
    if (!sim_is_in_call(s, to) || q->count == 0) return false;
    const members_message message = q->messages[q->first];
    q->first = (q->first + 1) % SIM_QUEUE;
    q->count--;
    members_receive(&s->seats[to].machine, from, &message, s->now);
    sim_answer(s, to);
    return true;
}

static inline void sim_pass_time(sim *s, int64_t ns)
{
    s->now += ns;
    for (int r = 0; r < s->num_seats; r++) {
        if (!sim_is_in_call(s, r)) continue;
        members_tick(&s->seats[r].machine, s->now);
        sim_answer(s, r);
    }
}

/* Returns whether the operations of a seat fail, so that it begins the next call: at once
 * if it knows that a member of its generation is dead; and, with `timeouts`, at a deadline
 * if a member is in another generation. */
static inline bool sim_is_broken(const sim *s, int r, bool timeouts)
{
    const members *m = &s->seats[r].machine;
    for (int q = 0; q < s->num_seats; q++) {
        const members *peer = &s->seats[q].machine;
        if (!seat_set_has(&m->current, q)) continue;
        if (s->seats[r].reported >> q & 1) return true;
        if (timeouts && (peer->state == MEMBERS_OUT || peer->generation != m->generation))
            return true;
    }
    return false;
}

/* Delivers everything, reports all deaths, and lets time pass, until nothing changes any
 * more. Seats whose generation is broken, or whose call has failed, call again, up to
 * `calls` times. */
static inline void sim_settle(sim *s, int calls, bool timeouts)
{
    for (int idle = 0; idle < 64 * (calls + 1); idle++) {
        for (bool again = true; again;) {
            again = false;
            for (int r = 0; r < s->num_seats; r++)
                for (int q = 0; q < s->num_seats; q++) again |= sim_deliver(s, q, r);
            for (int r = 0; r < s->num_seats; r++)
                for (int q = 0; q < s->num_seats; q++) sim_report(s, r, q);
        }
        for (int r = 0; r < s->num_seats; r++) {
            const enum members_state state = s->seats[r].machine.state;
            if (state >= MEMBERS_NO_QUORUM ||
                (state == MEMBERS_ENTERED && sim_is_broken(s, r, timeouts)))
                sim_begin(s, r);
        }
        sim_pass_time(s, SIM_PATIENCE / 16);
    }
}

/* Returns whether no two living seats are in the same generation with different members. */
static inline bool sim_agrees(const sim *s)
{
    for (int a = 0; a < s->num_seats; a++)
        for (int b = 0; b < a; b++) {
            const members *x = &s->seats[a].machine, *y = &s->seats[b].machine;
            if (s->seats[a].is_dead || s->seats[b].is_dead) continue;
            if (x->state == MEMBERS_OUT || y->state == MEMBERS_OUT) continue;
            if (x->generation == y->generation && !seat_set_equal(&x->current, &y->current))
                return false;
        }
    return true;
}

#endif
