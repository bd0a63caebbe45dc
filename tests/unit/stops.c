/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that a deadline counts only the time in which this process ran. The first part passes
 * base/deadline.h the times that a stopped process would read. The second part makes one rank
 * pause at the two places outside of wait() where it reads the clock or the status of its
 * peers, as if it had been stopped there. Rank 1 comes after rank 0's deadline, but before the
 * one that starts after the stop. */
#include "base/deadline.h"
#include "check.h"
#include "exchange/exchange.h"
#include "run.h"

#define MS 1000000ull
#define TIMEOUT_MS 1000ull
#define START (5000 * MS)

/* ---------------------------------------------------------------------- times as given ---- */

/* Reads the clock every 50 ms for `ms` milliseconds from `now` on. Returns the time at which
 * the deadline passed, or 0. */
static uint64_t run_for(deadline *d, uint64_t now, uint64_t ms)
{
    for (const uint64_t end = now + ms * MS; now < end; now += 50 * MS) {
        if (deadline_look(d, now)) return now;
        deadline_sleep_ns(d, now, 50 * MS);
    }
    return 0;
}

static void check_without_stop(void)
{
    deadline d;
    deadline_start(&d, TIMEOUT_MS * MS, START);
    CHECK_EQ(run_for(&d, START, 5000), START + TIMEOUT_MS * MS);
}

static void check_stop(uint64_t before_ms, uint64_t stop_ms, bool anew)
{
    deadline d;
    deadline_start(&d, TIMEOUT_MS * MS, START);
    CHECK_EQ(run_for(&d, START, before_ms), 0);
    const uint64_t awake = START + (before_ms + stop_ms) * MS;
    const uint64_t expected = anew ? awake : START;
    CHECK_EQ(run_for(&d, awake, 5000), expected + TIMEOUT_MS * MS);
}

/* A sleep that was announced is no stop, but time beyond it is. */
static void check_long_sleep(void)
{
    deadline d;
    deadline_start(&d, TIMEOUT_MS * MS, START);
    CHECK(!deadline_look(&d, START));
    CHECK_EQ(deadline_sleep_ns(&d, START, 700 * MS), 700 * MS);
    CHECK_EQ(deadline_stopped_ns(&d, START + 790 * MS), 0);
    CHECK_EQ(deadline_stopped_ns(&d, START + 900 * MS), 200 * MS);
    CHECK(!deadline_look(&d, START + 700 * MS));
    CHECK_EQ(deadline_sleep_ns(&d, START + 700 * MS, 700 * MS), 300 * MS);
    CHECK(deadline_look(&d, START + 1000 * MS));
}

/* A process that is stopped again and again still reaches its deadline. */
static void check_endless_stops(void)
{
    deadline d;
    uint64_t now = START, ran_ms = 0;
    deadline_start(&d, TIMEOUT_MS * MS, now);
    while (!deadline_look(&d, now) && ran_ms < 100 * TIMEOUT_MS) {
        deadline_sleep_ns(&d, now, 100 * MS);
        now += 250 * MS;
        ran_ms += 100;
    }
    CHECK_SAY(ran_ms >= DEADLINE_RESTART_LIMIT * TIMEOUT_MS &&
                  ran_ms <= (DEADLINE_RESTART_LIMIT + 2) * TIMEOUT_MS,
              "late after %llu ms of running", (unsigned long long)ran_ms);
}

static void check_renewal(void)
{
    deadline d;
    deadline_start(&d, TIMEOUT_MS * MS, START);
    CHECK_EQ(run_for(&d, START, 800), 0);
    deadline_renew(&d); /* a row moved; then the process is away for longer than the timeout */
    CHECK_EQ(run_for(&d, START + 3000 * MS, 5000), START + (3000 + TIMEOUT_MS) * MS);
}

/* ------------------------------------------------------------ a rank that stands still ---- */

enum { DEADLINE_MS = 600, STILL_MS = 700 };

static _Thread_local const epic_transport *real;
static _Thread_local int still_announces, still_looks;
static _Thread_local uint64_t begin_ns; /* begin of the call */

static void stand_still(int *times)
{
    if (*times > 0) run_nap_us(STILL_MS * 1000);
    if (*times > 0) --*times;
}

static void announce(epic_group *group, int op_slot, uint64_t tag, uint64_t sequence,
                     const epic_op_header *header)
{
    real->announce(group, op_slot, tag, sequence, header);
    stand_still(&still_announces);
}

static void look(epic_group *group, int peer, uint64_t tag, uint64_t sequence,
                 epic_peer_status *out)
{
    real->look(group, peer, tag, sequence, out);
    if (run_now_ns() - begin_ns >= DEADLINE_MS * MS) stand_still(&still_looks);
}

typedef struct still {
    int announces, looks; /* how often rank 0 pauses at these places */
    int late_ms;          /* when rank 1 comes */
} still;

static void be_rank(const epic_bootstrap *bootstrap, void *self)
{
    const still *s = self;
    float one = 1;
    epic_context *ctx;
    epic_transport watched;
    const epic_config config = {
        .max_tokens = 8, .max_row_bytes = 64, .timeout_ms = DEADLINE_MS, .backend = "threads"};
    if (!CHECK_EQ(epic_open(&ctx, bootstrap, &config), EPIC_OK)) return;
    real = ctx->backend->transport;
    watched = *real;
    watched.announce = announce;
    watched.look = look;
    for (uint32_t i = 0; i < ctx->config.max_in_flight; i++)
        ctx->exchanges[i].transport = &watched;
    if (bootstrap->rank == 0) {
        still_announces = s->announces;
        still_looks = s->looks;
    } else {
        run_nap_us(s->late_ms * 1000l);
    }
    begin_ns = run_now_ns();
    const epic_allreduce_sum_args args = {.data = &one, .count = 1};
    const epic_result result = epic_allreduce_sum(ctx, &args);
    CHECK_SAY(result == EPIC_OK, "rank %d, still %d, %d: %s", bootstrap->rank, s->announces,
              s->looks, epic_error(ctx));
    epic_close(ctx);
}

int main(void)
{
    check_begin();
    run_alarm(60);
    check_without_stop();
    check_stop(500, 200, true);
    check_stop(500, 5000, true);
    check_stop(950, 10000, true);
    check_stop(500, 100, false); /* a busy machine */
    check_long_sleep();
    check_endless_stops();
    check_renewal();
    still before_the_wait = {.announces = 1, .late_ms = STILL_MS + DEADLINE_MS / 2};
    run_threads(2, be_rank, &before_the_wait);
    still judging = {.looks = 1, .late_ms = DEADLINE_MS + STILL_MS + DEADLINE_MS / 2};
    run_threads(2, be_rank, &judging);
    return check_end();
}
