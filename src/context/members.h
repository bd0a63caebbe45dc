/* SPDX-License-Identifier: Apache-2.0 */
/* Decides which members form the next generation of a group (docs/internals/members.md).
 *
 * A seat is a rank number of a group. A seat is vacant after its rank has left the group. A
 * generation is a period in which the members (the seats that are not vacant) stay the same.
 * This file is a pure state machine: the caller passes in messages, deaths and the time, and
 * the machine sends messages through `send`. It has no threads, locks or memory of its own, so
 * tests and a model checker can try all orders of events. epic_regroup (src/context/regroup.c)
 * runs the machine over the messages of a transport. */
#ifndef EPIC_MEMBERS_H
#define EPIC_MEMBERS_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/seat_set.h"

/* A ballot number of Paxos. Ballots are compared by authority, then by round, then by seat. If
 * all fields are 0, there is no ballot. */
typedef struct members_ballot {
    uint64_t
        /* The authority is a program outside of the group that decides which seats remain. This
         * is the number of its decision; a later decision has a greater number. 0: the seats
         * decide themselves. */
        authority;
    uint32_t round; /* from 1 */
    uint32_t seat;  /* the seat that leads the ballot */
} members_ballot;

/* The decision that a ballot proposes. */
typedef struct members_proposal {
    seat_set members; /* the members of the next generation */
    uint64_t group_id;
    /* minimum and maximum of the steps that these members passed to epic_regroup() */
    int64_t least_step, greatest_step;
} members_proposal;

enum members_kind {
    MEMBERS_PREPARE = 1, /* leader to all: asks for a promise to accept no lower ballot */
    MEMBERS_PROMISE,     /* reply, with the proposal that the seat has accepted earlier */
    /* reply: the seat has promised a higher ballot, or is in another generation */
    MEMBERS_BEHIND,
    /* leader to the seats that have promised: prepare `proposal` and accept it */
    MEMBERS_PROPOSE,
    MEMBERS_ACCEPT, /* reply: the seat has prepared and accepted the proposal */
    MEMBERS_REFUSE, /* reply: the seat cannot prepare the proposal, for example for lack of
                            memory */
    MEMBERS_COMMIT, /* leader to all: the proposal is decided */
    MEMBERS_FAIL    /* leader to the seats that have promised: the call has failed */
};

typedef struct members_message {
    uint32_t kind; /* enum members_kind */
    uint32_t flags;
    /* the sender's generation; in COMMIT: the generation that made the decision */
    uint64_t generation;
    members_ballot ballot; /* in BEHIND: the ballot that the sender has promised */
    /* in PROMISE: the ballot of `proposal`, or all 0 if there is no proposal */
    members_ballot accepted;
    members_proposal proposal; /* in FAIL: `members` is the set of seats that have promised */
    seat_set dead;             /* in PREPARE, PROMISE: seats that the sender knows to be dead */
    int64_t step;              /* in PROMISE: the step that the seat's caller passed */
} members_message;

#define MEMBERS_LEAVING 1u /* flag of PROMISE: the seat wants to leave */
/* Flag of FAIL: there are fewer members than min_members. A FAIL without this flag: too few
 * seats have promised or accepted. */
#define MEMBERS_FEW 1u

enum members_state {
    MEMBERS_IDLE,      /* no call is running */
    MEMBERS_DECIDING,  /* waits for messages */
    MEMBERS_PREPARING, /* the caller must prepare `pending` and then call members_answer() */
    MEMBERS_ENTERED,   /* the seat is in the new generation */
    /* the other seats continue without this seat, which wanted to leave or was evicted */
    MEMBERS_OUT,
    MEMBERS_NO_QUORUM, /* too few seats have promised; the call may be repeated */
    MEMBERS_TOO_FEW,   /* fewer members than min_members; the call may be repeated */
    MEMBERS_LATE       /* no decision was made before the deadline; the call may be repeated */
};

typedef struct members_call {
    int64_t patience_ns;  /* time to wait for seats that may be alive but send no message */
    int64_t step;         /* last finished step of this seat */
    uint32_t min_members; /* minimum number of members of the next generation */
    bool leaving;
    uint64_t group_id; /* identity of the next generation if this seat proposes it */
    /* number of the authority's decision (members_ballot); 0: the seats decide themselves */
    uint64_t authority;
    seat_set only; /* the members that the authority names; unused without an authority */
} members_call;

typedef void members_send(void *self, int to, const members_message *message);

enum members_phase { MEMBERS_FOLLOWS, MEMBERS_GATHERS, MEMBERS_PROPOSES };

/* The machine of one seat. Callers read `state`, `pending`, `current`, `generation`, `last`. */
typedef struct members {
    int seat, num_seats;
    members_send *send;
    void *self; /* argument of send() */

    enum members_state state;
    uint64_t generation;
    seat_set current;      /* members of this generation */
    seat_set dead;         /* seats whose death is proven; a death is never taken back */
    members_proposal last; /* the decision that made this generation */
    members_ballot last_ballot;

    members_call call;
    int64_t begin_ns;
    int64_t heard_ns[SEAT_SET_MAX]; /* time at which a seat last sent a message in this call */

    /* State of the seat as an acceptor of Paxos. It is kept from call to call until the
     * generation ends. */
    members_ballot promised, accepted;
    members_proposal accepted_proposal;
    members_ballot pending_ballot;
    members_proposal pending;
    bool is_decided; /* true: `pending` is decided, so the seat enters when it has prepared */
    int decided_by;  /* the seat that has sent the decision */

    enum members_phase phase; /* From here on: state of the seat as a leader of a ballot. */
    int64_t phase_ns;
    members_ballot ballot;
    /* last round that this seat led and abandoned because a seat refused the proposal */
    uint32_t abandoned;
    /* came: seats that have promised `ballot` (in state MEMBERS_NO_QUORUM: the ballot that
     * failed). acks: seats that have accepted `ballot`. */
    seat_set came, acks;
    seat_set leaving, refused; /* seats that must not be in a new proposal */
    int64_t steps[SEAT_SET_MAX];
    members_ballot best; /* the highest ballot that a seat in `came` had accepted */
    members_proposal proposal;
    /* true: `proposal` comes from a seat that accepted it in an earlier ballot */
    bool is_adopted;
} members;

/* Initializes the machine of `seat` in generation `generation` with members `current`. */
void members_init(members *m, int seat, int num_seats, uint64_t generation,
                  const seat_set *current);
/* Begins a call. Requires that this seat has no operation of the group in flight. */
void members_begin(members *m, const members_call *call, int64_t now_ns);
/* Handles a message. Ignores a message that no state machine could have sent. */
void members_receive(members *m, int from, const members_message *message, int64_t now_ns);
/* Reports a proven death: the process of the seat has exited, or has closed its context. */
void members_report_dead(members *m, int seat, int64_t now_ns);
/* Passes the time to the machine. Must be called at least every patience_ns / 4. */
void members_tick(members *m, int64_t now_ns);
/* Reports whether the caller could prepare `pending`. Must be called in state
 * MEMBERS_PREPARING, before any other function of this file, because a message may replace
 * `pending`. */
void members_answer(members *m, bool is_prepared, int64_t now_ns);

#endif
