/* SPDX-License-Identifier: Apache-2.0 */
/* Decides which members form the next generation of a group (docs/internals/members.md).
 *
 * A seat is a place of a group, numbered like its rank. A generation is a set of seats that
 * does not change. This is a pure state machine: the caller passes in messages, deaths and the
 * time, and the machine passes out messages through `send`. It has no threads, locks or memory
 * of its own, so tests and a model checker can try all orders of events. epic_regroup
 * (src/regroup) runs it over the messages of a transport. */
#ifndef EPIC_MEMBERS_H
#define EPIC_MEMBERS_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/seat_set.h"

/* Ballots are ordered by authority, then round, then seat. All 0: no ballot. */
typedef struct members_ballot {
    uint64_t
        /* identity of the authority that named the members; a later authority has a greater
         * one; 0: the seats decide */
        authority;
    uint32_t round; /* from 1 */
    uint32_t seat;  /* the leader of the ballot */
} members_ballot;

/* The decision that a ballot proposes. */
typedef struct members_proposal {
    seat_set members; /* the members of the next generation */
    uint64_t group_id;
    /* lowest and highest step that one of these members passed to its call */
    int64_t least_step, greatest_step;
} members_proposal;

enum members_kind {
    MEMBERS_PREPARE = 1, /* leader to all: promise to accept no lower ballot */
    MEMBERS_PROMISE,     /* reply, with the proposal that the seat has accepted before */
    MEMBERS_BEHIND,      /* reply: the seat has promised a higher ballot, or is of another
                            generation */
    MEMBERS_PROPOSE, /* leader to the seats that have promised: prepare this and accept it */
    MEMBERS_ACCEPT,  /* reply */
    MEMBERS_REFUSE,  /* reply: the seat cannot prepare the proposal, for example for lack of
                            memory */
    MEMBERS_COMMIT,  /* leader to all: the proposal is decided */
    MEMBERS_FAIL     /* leader to the seats that have promised: it gives up */
};

typedef struct members_message {
    uint32_t kind; /* enum members_kind */
    uint32_t flags;
    /* the sender's generation; in COMMIT: the generation that took the decision */
    uint64_t generation;
    members_ballot ballot;     /* in BEHIND: the ballot that the sender has promised */
    members_ballot accepted;   /* in PROMISE: the ballot of `proposal`, all 0: none */
    members_proposal proposal; /* in FAIL: `members` are the seats that have promised */
    seat_set dead;             /* in PREPARE, PROMISE: seats whose death the sender knows */
    int64_t step;              /* in PROMISE: the step that the seat's caller passed */
} members_message;

#define MEMBERS_LEAVING 1u /* flag of PROMISE: the seat wants to leave */
#define MEMBERS_FEW 1u     /* flag of FAIL: fewer members than min_members, else no quorum */

enum members_state {
    MEMBERS_IDLE,      /* no call is running */
    MEMBERS_DECIDING,  /* waits for messages */
    MEMBERS_PREPARING, /* the caller must prepare `pending` and call members_answer() */
    MEMBERS_ENTERED,   /* the seat is in the new generation */
    MEMBERS_OUT, /* the others go on without this seat: it wanted to leave or was evicted */
    MEMBERS_NO_QUORUM, /* too few seats came; the call may be repeated */
    MEMBERS_TOO_FEW,   /* fewer members than min_members; the call may be repeated */
    MEMBERS_LATE       /* no decision until the deadline; the call may be repeated */
};

/* Arguments of one call. */
typedef struct members_call {
    int64_t patience_ns;  /* how long to wait for seats that may live and do not come */
    int64_t step;         /* last finished step of this seat */
    uint32_t min_members; /* minimum number of members of the next generation */
    bool leaving;         /* true: this seat leaves */
    uint64_t group_id;    /* identity of the next generation if this seat proposes it */
    /* identity of the authority, greater for each later one; 0: the seats decide */
    uint64_t authority;
    seat_set only; /* with an authority: the members that it names */
} members_call;

typedef void members_send(void *self, int to, const members_message *message);

enum members_phase { MEMBERS_FOLLOWS, MEMBERS_GATHERS, MEMBERS_PROPOSES };

/* The machine of one seat. Callers read `state`, `pending`, `current`, `generation` and
 * `last`. */
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
    int64_t heard_ns[SEAT_SET_MAX]; /* when a seat last sent a message in this call */

    /* The seat as an acceptor. Kept from call to call until the generation ends. */
    members_ballot promised, accepted;
    members_proposal accepted_proposal;
    members_ballot pending_ballot;
    members_proposal pending; /* the proposal to prepare */
    bool is_decided;          /* true: `pending` is decided; the seat enters once prepared */
    int decided_by;           /* the seat that has sent the decision */

    /* The seat as a leader. */
    enum members_phase phase;
    int64_t phase_ns; /* when the phase began */
    members_ballot ballot;
    uint32_t abandoned; /* last own round that was given up because a seat refused */
    /* seats that have promised, or accepted, this ballot. In MEMBERS_NO_QUORUM: `came` are
     * those that had promised the ballot that failed */
    seat_set came, acks;
    seat_set leaving, refused; /* seats that must not be in a new proposal */
    int64_t steps[SEAT_SET_MAX];
    members_ballot best; /* the highest ballot that a seat of `came` has accepted */
    members_proposal proposal;
    bool is_adopted; /* true: `proposal` was accepted in an earlier ballot */
} members;

/* Initializes the machine of `seat` in generation `generation` with the members `current`. */
void members_init(members *m, int seat, int num_seats, uint64_t generation,
                  const seat_set *current);
/* Begins a call. The seat has stopped all work of the group. */
void members_begin(members *m, const members_call *call, int64_t now_ns);
/* Handles a message. Ignores a message that no machine could have sent. */
void members_receive(members *m, int from, const members_message *message, int64_t now_ns);
/* Reports a proven death: the process of the seat has exited, or has closed its context. */
void members_report_dead(members *m, int seat, int64_t now_ns);
/* Reports the time. Must be called at least every quarter of the patience. */
void members_tick(members *m, int64_t now_ns);
/* Reports whether the caller could prepare `pending`. Must be called in state MEMBERS_PREPARING
 * and before any other function of this file: a message may replace `pending`. */
void members_answer(members *m, bool is_prepared, int64_t now_ns);

#endif
