/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the decision on the next generation (src/context/members.c): single cases by hand, then
 * random deaths, stops and delays in a simulated group. */
#include "members.h"

#include "check.h"
#include "run.h"

static unsigned set_of(const sim *s, int r)
{
    return (unsigned)s->seats[r].machine.current.words[0];
}

/* Checks that a seat is in the next generation, with these members. */
static void expect_entered(const sim *s, int r, unsigned members)
{
    const struct members *m = &s->seats[r].machine;
    CHECK_SAY(m->state == MEMBERS_ENTERED && m->generation > SIM_GENERATION &&
                  set_of(s, r) == members,
              "seat %d: state %d, generation %d, members %#x, not %#x", r, (int)m->state,
              (int)m->generation, set_of(s, r), members);
}

static void expect_state(const sim *s, int r, enum members_state state)
{
    CHECK_SAY(s->seats[r].machine.state == state, "seat %d: state %d, not %d", r,
              (int)s->seats[r].machine.state, (int)state);
}

static void begin_all(sim *s)
{
    for (int r = 0; r < s->num_seats; r++) sim_begin(s, r);
}

/* --------------------------------------------------------------------------- single cases
 * -- */

static void one_dies(void)
{
    for (int dead = 0; dead < 4; dead++) {
        sim *s = sim_new(4);
        sim_kill(s, dead);
        begin_all(s);
        sim_settle(s, 1, false);
        for (int r = 0; r < 4; r++) {
            if (r == dead) continue;
            expect_entered(s, r, 0xfu & ~(1u << dead));
            CHECK_EQ(s->seats[r].machine.last.least_step, dead == 0 ? 101 : 100);
            CHECK_EQ(s->seats[r].machine.last.greatest_step, dead == 3 ? 102 : 103);
            CHECK_EQ(s->seats[r].machine.last.group_id, dead == 0 ? 1001 : 1000);
        }
        free(s);
    }
}

/* If all members live, the call is a barrier, and no seat waits for its patience to end. */
static void no_member_dies(void)
{
    sim *s = sim_new(3);
    begin_all(s);
    for (int i = 0; i < 20; i++)
        for (int a = 0; a < 9; a++) sim_deliver(s, a / 3, a % 3);
    CHECK_EQ(s->now, 0);
    for (int r = 0; r < 3; r++) expect_entered(s, r, 7);
    free(s);
}

/* The leader leaves and dies while it sends the decision. Seat 1 has it, seat 2 not.
 * Nothing else would make seat 1 call again, because the leader is no member of its
 * generation. */
static void leaver_dies_amid_commits(void)
{
    sim *s = sim_new(3);
    s->seats[0].call.leaving = true;
    s->seats[0].sends_left = 5; /* two PREPARE, two PROPOSE, one COMMIT */
    begin_all(s);
    sim_settle(s, 1, false);
    CHECK(s->seats[0].is_dead);
    for (int r = 1; r < 3; r++) {
        expect_entered(s, r, 6);
        CHECK_EQ(s->seats[r].machine.generation, SIM_GENERATION + 1);
    }
    free(s);
}

/* As before, but the leader wants to stay. Seat 1 enters a generation with the dead leader, and
 * takes seat 2 along. */
static void leader_dies_amid_commits(void)
{
    for (int sends = 0; sends < 8; sends++) {
        sim *s = sim_new(4);
        s->seats[0].sends_left = sends;
        begin_all(s);
        sim_settle(s, 2, false);
        CHECK(s->seats[0].is_dead);
        for (int r = 1; r < 4; r++) expect_entered(s, r, 0xe);
        free(s);
    }
}

/* The majority evicts a stopped seat. When it wakes, it receives that decision. */
static void stopped_is_evicted(void)
{
    for (int stopped = 0; stopped < 5; stopped++) {
        sim *s = sim_new(5);
        s->seats[stopped].is_stopped = true;
        begin_all(s);
        sim_settle(s, 1, false);
        for (int r = 0; r < 5; r++)
            if (r != stopped) expect_entered(s, r, 0x1fu & ~(1u << stopped));
        s->seats[stopped].is_stopped = false;
        sim_begin(s, stopped);
        sim_settle(s, 0, false);
        expect_state(s, stopped, MEMBERS_OUT);
        free(s);
    }
}

static void deliver_all(sim *s)
{
    for (bool again = true; again;) {
        again = false;
        for (int r = 0; r < s->num_seats; r++)
            for (int q = 0; q < s->num_seats; q++) again |= sim_deliver(s, q, r);
    }
}

/* The leader is stopped, and all other seats give up on it, and on each other, before any
 * message of a new leader arrives. The call still succeeds, also if an authority has named the
 * others as the next members. */
static void all_give_up_at_once(bool with_authority)
{
    for (int num_seats = 3; num_seats <= SIM_SEATS; num_seats++) {
        sim *s = sim_new(num_seats);
        s->seats[0].is_stopped = true;
        for (int r = 1; with_authority && r < num_seats; r++) {
            s->seats[r].call.authority = 1;
            s->seats[r].call.only.words[0] = (1u << num_seats) - 2;
        }
        begin_all(s);
        deliver_all(s);
        for (int i = 0; i < 4 * 16; i++) {
            s->now += SIM_PATIENCE / 16;
            for (int r = num_seats - 1; r > 0; r--) {
                if (sim_is_in_call(s, r)) members_tick(&s->seats[r].machine, s->now);
                sim_answer(s, r);
            }
            deliver_all(s);
        }
        for (int r = 1; r < num_seats; r++) expect_entered(s, r, (1u << num_seats) - 2);
        free(s);
    }
}

/* The leader dies after it has sent the decision to seat 1 alone, and seat 1 is stopped. The
 * others must decide the same, and may evict both in the generation after. */
static void accepted_is_kept(void)
{
    sim *s = sim_new(5);
    s->seats[0].sends_left = 9; /* four PREPARE, four PROPOSE, one COMMIT */
    begin_all(s);
    for (int i = 0; i < 100 && s->seats[1].machine.state != MEMBERS_ENTERED; i++)
        for (int r = 0; r < 5; r++) {
            sim_deliver(s, 0, r);
            sim_deliver(s, r, 0);
        }
    expect_entered(s, 1, 0x1f);
    s->seats[1].is_stopped = true;
    sim_settle(s, 2, false);
    CHECK(sim_agrees(s));
    for (int r = 2; r < 5; r++) {
        expect_entered(s, r, 0x1c);
        CHECK_EQ(s->seats[r].machine.generation, SIM_GENERATION + 2);
    }
    s->seats[1].is_stopped = false;
    sim_begin(s, 1);
    sim_settle(s, 0, false);
    expect_state(s, 1, MEMBERS_OUT);
    free(s);
}

/* All promise, but three of five stop before they accept. Promises do not decide. */
static void promises_do_not_decide(void)
{
    sim *s = sim_new(5);
    begin_all(s);
    for (int r = 1; r < 5; r++) sim_deliver(s, 0, r);
    for (int r = 1; r < 5; r++) sim_deliver(s, r, 0);
    for (int r = 2; r < 5; r++) s->seats[r].is_stopped = true;
    for (int i = 0; i < 40; i++) {
        sim_deliver(s, 0, 1);
        sim_deliver(s, 1, 0);
        sim_pass_time(s, SIM_PATIENCE / 8);
    }
    expect_state(s, 0, MEMBERS_NO_QUORUM);
    expect_state(s, 1, MEMBERS_NO_QUORUM);
    free(s);
}

/* Half of the seats are no majority. When the others wake, all go on together. */
static void half_is_no_quorum(void)
{
    sim *s = sim_new(4);
    s->seats[2].is_stopped = s->seats[3].is_stopped = true;
    begin_all(s);
    for (int i = 0; i < 40; i++) {
        sim_deliver(s, 0, 1);
        sim_deliver(s, 1, 0);
        sim_pass_time(s, SIM_PATIENCE / 8);
    }
    expect_state(s, 0, MEMBERS_NO_QUORUM);
    expect_state(s, 1, MEMBERS_NO_QUORUM);
    s->seats[2].is_stopped = s->seats[3].is_stopped = false;
    begin_all(s);
    sim_settle(s, 2, false);
    for (int r = 0; r < 4; r++) expect_entered(s, r, 0xf);
    free(s);
}

/* The dead count where a seat that may live is left out: of 5 seats, 2 left do not suffice. */
static void dead_count(void)
{
    sim *s = sim_new(5);
    sim_kill(s, 0);
    sim_kill(s, 1);
    s->seats[4].is_stopped = true;
    begin_all(s);
    sim_settle(s, 1, false);
    for (int r = 2; r < 4; r++) CHECK_EQ(s->seats[r].machine.generation, SIM_GENERATION);
    s->seats[4].is_stopped = false;
    sim_begin(s, 4);
    sim_settle(s, 2, false);
    for (int r = 2; r < 5; r++) expect_entered(s, r, 0x1c);
    free(s);
}

/* An authority's set needs no majority, and exactly its seats. */
static void authority_decides(void)
{
    sim *s = sim_new(4);
    s->seats[0].is_stopped = s->seats[2].is_stopped = true;
    for (int r = 0; r < 4; r++) {
        s->seats[r].call.authority = 9;
        s->seats[r].call.only = (seat_set){{0xa}};
    }
    begin_all(s);
    sim_settle(s, 1, false);
    expect_entered(s, 1, 0xa);
    expect_entered(s, 3, 0xa);
    s->seats[0].is_stopped = s->seats[2].is_stopped = false;
    s->seats[0].call.authority = s->seats[2].call.authority = 0; /* they know of no authority */
    begin_all(s);
    sim_settle(s, 1, false);
    for (int r = 0; r < 4; r += 2) CHECK_EQ(s->seats[r].machine.generation, SIM_GENERATION);
    free(s);
}

/* Seat 1 has entered a decision when the authority names it. Then the decision holds for the
 * other seats that the authority names, because seat 1 cannot go back. */
static void authority_comes_late(void)
{
    sim *s = sim_new(3);
    s->seats[0].sends_left = 5; /* one COMMIT, to seat 1 */
    begin_all(s);
    for (int i = 0; i < 6; i++)
        for (int r = 0; r < 3; r++) {
            sim_deliver(s, 0, r);
            sim_deliver(s, r, 0);
        }
    expect_entered(s, 1, 7);
    for (int r = 1; r < 3; r++) {
        s->seats[r].call.authority = 9;
        s->seats[r].call.only = (seat_set){{6}};
    }
    s->seats[2].machine.state = MEMBERS_LATE; /* its caller calls again, now with the set */
    begin_all(s);
    sim_settle(s, 2, false);
    expect_entered(s, 1, 6);
    expect_entered(s, 2, 6);
    CHECK_EQ(s->seats[1].machine.generation, SIM_GENERATION + 2);
    CHECK_EQ(s->seats[2].machine.generation, SIM_GENERATION + 2);
    free(s);
}

/* A seat that cannot prepare the new generation is left out. */
static void refuser_is_left_out(void)
{
    for (int refuser = 0; refuser < 3; refuser++) {
        sim *s = sim_new(3);
        s->seats[refuser].refuses = true;
        begin_all(s);
        sim_settle(s, 0, false);
        for (int r = 0; r < 3; r++)
            if (r != refuser) expect_entered(s, r, 7u & ~(1u << refuser));
        expect_state(s, refuser, MEMBERS_OUT);
        free(s);
    }
}

static void few_are_refused(void)
{
    sim *s = sim_new(3);
    sim_kill(s, 2);
    for (int r = 0; r < 3; r++) s->seats[r].call.min_members = 3;
    begin_all(s);
    sim_report(s, 0, 2);
    for (int i = 0; i < 8; i++)
        for (int r = 0; r < 2; r++) sim_deliver(s, r, 1 - r);
    expect_state(s, 0, MEMBERS_TOO_FEW);
    expect_state(s, 1, MEMBERS_TOO_FEW);
    free(s);
}

/* --------------------------------------------------------------------------- random cases
 * -- */

/* Begins a call, as long as the seat has a reason: a caller that lost nothing would wait for
 * seats that work. With stops, callers also call without a reason. */
static void begin_if_needed(sim *s, int r, bool stops)
{
    if (s->seats[r].machine.state != MEMBERS_ENTERED || stops || sim_is_broken(s, r, false))
        sim_begin(s, r);
}

static void random_event(sim *s, run_random *random, bool stops)
{
    const int a = (int)run_below(random, s->num_seats),
              b = (int)run_below(random, s->num_seats);
    const int64_t what = run_below(random, 100);
    if (what < 70)
        sim_deliver(s, a, b);
    else if (what < 80)
        sim_report(s, a, b);
    else if (what < 90)
        begin_if_needed(s, a, stops);
    else if (what < 94 && stops)
        sim_pass_time(s, run_between(random, 1, SIM_PATIENCE / 4));
    else if (what < 95 && s->seats[a].sends_left < 0)
        s->seats[a].sends_left = (int)run_below(random, 12); /* dies after these sends */
    else if (what < 96 && stops)
        s->seats[a].is_stopped = !s->seats[a].is_stopped;
}

/* Checks that the seats that live have ended: they are in one generation, of which no member is
 * dead, or they are out. */
static void check_end_state(const sim *s, bool stops)
{
    unsigned living = 0, in = 0, members = 0;
    uint64_t generation = 0;
    for (int r = 0; r < s->num_seats; r++) {
        const struct members *m = &s->seats[r].machine;
        if (s->seats[r].is_dead) continue;
        living |= 1u << r;
        if (m->state == MEMBERS_OUT) continue;
        in |= 1u << r;
        CHECK_SAY(m->state == MEMBERS_ENTERED || stops, "seat %d: state %d", r, (int)m->state);
        if (m->state != MEMBERS_ENTERED) continue;
        if (members) CHECK_EQ(set_of(s, r), members);
        if (members) CHECK_EQ(m->generation, generation);
        members = set_of(s, r);
        generation = m->generation;
    }
    if (stops) return;
    CHECK_EQ(in, living);
    CHECK_EQ(members, living);
}

static void run_case(uint64_t seed, bool stops)
{
    run_random random = {seed};
    sim *s = sim_new((int)run_between(&random, 2, SIM_SEATS));
    const int events = (int)run_between(&random, 10, 1500);
    check_seed = seed;
    for (int i = 0; i < events; i++) {
        random_event(s, &random, stops);
        if (!CHECK(sim_agrees(s))) break;
    }
    for (int r = 0; r < s->num_seats; r++) {
        s->seats[r].is_stopped = false;
        s->seats[r].sends_left = -1;
        begin_if_needed(s, r, stops);
    }
    sim_settle(s, 12, stops);
    CHECK(sim_agrees(s));
    CHECK(!s->overflow);
    check_end_state(s, stops);
    free(s);
}

int main(void)
{
    check_begin();
    run_alarm(300);
    one_dies();
    no_member_dies();
    leaver_dies_amid_commits();
    leader_dies_amid_commits();
    stopped_is_evicted();
    all_give_up_at_once(false);
    all_give_up_at_once(true);
    accepted_is_kept();
    promises_do_not_decide();
    half_is_no_quorum();
    dead_count();
    authority_decides();
    authority_comes_late();
    refuser_is_left_out();
    few_are_refused();
    for (int64_t i = 0; i < run_scaled(2000); i++) {
        run_case(run_mix(run_seed(), (uint64_t)i), false);
        run_case(run_mix(run_seed() + 1, (uint64_t)i), true);
    }
    return check_end();
}
