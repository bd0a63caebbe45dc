/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that a rank notices the loss of a peer at once. The tests measure no time. They
 * make each sleep longer than the test, so that only a wake-up ends it. Also after ranks have
 * ended, in the next generation of the group. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/shared/shared.h"
#include "check.h"
#include "context/context.h"
#include "exchange/exchange.h"
#include "run.h"

#define RANKS 5
#define TEST_S 20
#define LONG_MS 600000 /* a sleep that is longer than the test */

static const epic_transport *real;

static epic_result sum_once(epic_context *ctx)
{
    float one = 1;
    return epic_allreduce_sum(ctx, &(epic_allreduce_sum_args){.data = &one, .count = 1});
}

static bool open_group(epic_context **ctx, const epic_bootstrap *bootstrap, const char *backend)
{
    const epic_config config = {.max_tokens = 4,
                                .max_row_bytes = 64,
                                .timeout_ms = LONG_MS,
                                .max_in_flight = 1,
                                .backend = backend};
    return CHECK_SAY(epic_open(ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(*ctx));
}

/* -------------------------------------------------------------- a peer has closed before
 * ---- */

static int num_waits, num_sleeps; /* calls of wait(), and those that may sleep */

static void count_wait(epic_group *group, int op_slot, uint32_t phase,
                       const uint64_t *waits_for, uint32_t ms)
{
    num_waits++;
    num_sleeps += ms > 0;
    real->wait(group, op_slot, phase, waits_for, 0);
}

static void close_or_sum(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    epic_context *ctx;
    if (!open_group(&ctx, bootstrap, "threads")) return;
    if (bootstrap->rank == 0) {
        epic_transport counting = *ctx->backend->transport;
        real = ctx->backend->transport;
        counting.wait = count_wait;
        ctx->exchanges[0].transport = &counting;
        while (!real->any_gone(ctx->group)) run_nap_us(1000);
        CHECK(sum_once(ctx) == EPIC_EPEER);
        CHECK(num_waits > 0);
        CHECK_EQ(num_sleeps, 0);
    }
    epic_close(ctx);
}

/* ------------------------------------------------------------------ processes are killed
 * ---- */

typedef struct trial {
    unsigned vacant;  /* ranks that are lost before, so that the others make a new generation */
    bool leaves;      /* true: these ranks leave and live on; false: their processes end */
    unsigned victims; /* ranks that are killed, a bit for each */
    unsigned stopped; /* ranks that are stopped before, so that their watchers see nothing */
    int num_left;     /* number of ranks that are neither killed nor stopped */
    bool in_call;     /* true: these ranks wait in a call */
    _Atomic int num_open;
    _Atomic int num_noticed; /* ranks that have noticed the end of all victims */
} trial;

static bool has_rank(unsigned ranks, int rank)
{
    return ranks >> rank & 1;
}

/* Makes each sleep long, so that only a wake-up ends it. */
static void wait_long(epic_group *group, int op_slot, uint32_t phase, const uint64_t *waits_for,
                      uint32_t ms)
{
    real->wait(group, op_slot, phase, waits_for, ms ? LONG_MS : 0);
}

static void sum_with_long_sleeps(epic_context *ctx)
{
    epic_transport sleepy = *ctx->backend->transport;
    real = ctx->backend->transport;
    sleepy.wait = wait_long;
    ctx->exchanges[0].transport = &sleepy;
    ctx->group->slice_ns = LONG_MS * 1000000ll;
    CHECK_EQ(sum_once(ctx), EPIC_EPEER);
}

/* Returns whether the segment shows the end of all victims and of no other rank. This rank does
 * not check their processes itself. */
static bool knows_ends(const epic_group *g, unsigned victims)
{
    unsigned gone = 0;
    for (int r = 0; r < RANKS; r++) gone |= (unsigned)shared_is_known_gone(g, r) << r;
    return gone == victims;
}

static void be_rank(const epic_bootstrap *bootstrap, trial *t)
{
    epic_context *ctx;
    run_alarm(TEST_S);
    if (!open_group(&ctx, bootstrap, "shm")) _exit(1);
    const bool is_vacant = has_rank(t->vacant, bootstrap->rank);
    if (is_vacant && !t->leaves) _exit(0);
    if (t->vacant) {
        const epic_regroup_args args = {.step = 1, .leaving = is_vacant};
        CHECK_SAY(epic_regroup(ctx, &args, NULL) == EPIC_OK, "%s", epic_error(ctx));
    }
    while (is_vacant) pause();
    t->num_open++;
    while (has_rank(t->victims | t->stopped, bootstrap->rank)) pause();
    if (t->in_call)
        sum_with_long_sleeps(ctx);
    else
        while (!knows_ends(ctx->group, t->victims)) run_nap_us(1000);
    t->num_noticed++;
    /* the end of this process would be one more end for the other ranks */
    while (t->num_noticed < t->num_left) run_nap_us(1000);
    _exit(0);
}

static void send_signal(const pid_t *pids, unsigned ranks, int number)
{
    for (int r = 0; r < RANKS; r++)
        if (has_rank(ranks, r)) CHECK(kill(pids[r], number) == 0);
}

/* Runs a group with a copy of *given. */
static void lose_ranks(const trial *given)
{
    const unsigned vacant = given->vacant, victims = given->victims, stopped = given->stopped;
    const unsigned gone = vacant | victims | stopped;
    int num_members = 0;
    trial *t = run_share(sizeof *t);
    run_rendezvous *rendezvous = run_rendezvous_new(RANKS);
    pid_t pids[RANKS];
    *t = *given;
    for (int r = 0; r < RANKS; r++) t->num_left += !has_rank(gone, r);
    for (int r = 0; r < RANKS; r++) num_members += !has_rank(vacant, r);
    for (int r = 0; r < RANKS; r++)
        if ((pids[r] = run_fork()) == 0) {
            const epic_bootstrap bootstrap = run_rendezvous_seat(rendezvous, r);
            be_rank(&bootstrap, t);
        }
    while (t->num_open < num_members) run_nap_us(1000);
    run_nap_us(20000); /* usually the other ranks sleep by then */
    send_signal(pids, stopped, SIGSTOP);
    send_signal(pids, victims, SIGKILL);
    for (int r = 0, status; r < RANKS; r++)
        if (!has_rank(gone, r))
            CHECK_SAY(waitpid(pids[r], &status, 0) == pids[r] && status == 0,
                      "rank %d did not notice that ranks %#x ended", r, victims);
    send_signal(pids, stopped | vacant, SIGKILL);
    for (int r = 0; r < RANKS; r++)
        if (has_rank(gone, r)) waitpid(pids[r], NULL, 0);
    run_rendezvous_free(rendezvous);
    run_unshare(t, sizeof *t);
}

int main(void)
{
    check_begin();
    run_alarm(2 * TEST_S);
    run_threads(2, close_or_sum, NULL);
    for (int in_call = 0; in_call < 2; in_call++) {
        lose_ranks(&(trial){.victims = 1u << 2, .in_call = in_call});
        lose_ranks(&(trial){.victims = 1u << 2, .stopped = 1u << 1, .in_call = in_call});
        lose_ranks(&(trial){.victims = 1u << 3 | 1u << 4, .in_call = in_call});
        lose_ranks(&(trial){.victims = 0xf, .in_call = in_call});
        /* all ranks between the last two are vacant */
        for (int leaves = 0; leaves < 2; leaves++)
            lose_ranks(&(trial){
                .vacant = 0xe, .leaves = leaves, .victims = 1u << 4, .in_call = in_call});
    }
    return check_end();
}
