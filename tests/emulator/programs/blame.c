/* SPDX-License-Identifier: Apache-2.0 */
/* Tests which ranks are named as culprits when ranks stop inside an operation. A rank is
 * stopped there by holding back all but the first CTAs of its kernels. Each rank is a process
 * with a GPU; with backend hosts it is a thread.
 *
 *   emulated_blame SCENARIO */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "copies.h"
#include "emulator.h"
#include "team.h"
#include "times.h"

#define TOKENS 200
#define ROW 1024
#define SLOTS (TOKENS * 3)
#define NO_RANK (-1)
#define NONE (-2)

typedef struct memory {
    int32_t *ids;
    uint8_t *plan, *tokens, *recv;
    size_t plan_bytes;
    epic_layer layer;
} memory;

typedef struct scenario {
    const char *name;
    int ranks;
    int to[4];            /* the rank to which each rank sends all its tokens, if it has any */
    bool one;             /* true: send only the first token there */
    uint32_t deadline[4]; /* deadline in ms of each rank's dispatch; play_lost_list(): plan */
    uint32_t sms;         /* SMs per rank; few, so that waits check their deadline often */
    uint32_t close_ms;    /* how many ms a rank that closes waits for the others */
    void (*play)(team_rank *me, memory *m);
} scenario;

static const scenario *now_played;
static bool bad;
static uint32_t scale = 1; /* factor for all deadlines: 4 when a scenario is repeated */

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static int64_t tokens_of(const team_rank *me)
{
    return now_played->to[me->rank] == NONE ? 0 : TOKENS;
}

static memory allocate_memory(const team_rank *me)
{
    memory m = {.layer = {.num_experts = (uint32_t)me->num_ranks, .top_k = 1}};
    int32_t ids[TOKENS];
    for (int i = 0; i < TOKENS; i++)
        ids[i] = i > 0 && now_played->one ? -1 : now_played->to[me->rank];
    m.plan_bytes = device_plan_bytes(me->num_ranks, TOKENS, m.layer.num_experts, 1);
    CHECK_CUDA(cudaMalloc((void **)&m.ids, sizeof ids));
    CHECK_CUDA(cudaMalloc((void **)&m.plan, m.plan_bytes));
    CHECK_CUDA(cudaMalloc((void **)&m.tokens, TOKENS * ROW));
    CHECK_CUDA(cudaMalloc((void **)&m.recv, SLOTS * ROW));
    CHECK_CUDA(copy_in(m.ids, ids, sizeof ids));
    CHECK_CUDA(fill_in(m.tokens, 1, TOKENS * ROW));
    return m;
}

static void make_plan(team_rank *me, memory *m, uint32_t timeout_ms)
{
    const epic_plan_args args = {.call = {.stream = me->stream, .timeout_ms = timeout_ms},
                                 .layer = &m->layer,
                                 .plan = m->plan,
                                 .plan_bytes = m->plan_bytes,
                                 .topk_idx = m->ids,
                                 .num_tokens = tokens_of(me)};
    if (p2p_ops.plan(me->group, &args) != EPIC_OK) team_stop();
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
}

static void dispatch_on(team_rank *me, memory *m, cudaStream_t stream)
{
    const epic_dispatch_args args = {
        .call = {.stream = stream, .timeout_ms = scale * now_played->deadline[me->rank]},
        .layer = &m->layer,
        .plan = m->plan,
        .plan_bytes = m->plan_bytes,
        .tokens = {m->tokens, tokens_of(me), ROW},
        .recv = {m->recv, SLOTS, ROW}};
    if (p2p_ops.dispatch(me->group, &args) != EPIC_OK) team_stop();
}

static void dispatch_rows(team_rank *me, memory *m)
{
    dispatch_on(me, m, me->stream);
}

/* Expects that the rank's dispatch has returned `result` and that the error names `culprit`. */
static void expect_failure(team_rank *me, epic_result result, int culprit)
{
    epic_failure_info f;
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    p2p_ops.poll_failure(me->group, &f);
    const bool named = culprit == NO_RANK ? f.num_culprits == 0
                                          : f.num_culprits == 1 && f.culprits[0] == culprit;
    if ((epic_result)f.result == result && named) return;
    fprintf(stderr, "%s: rank %d: %u, not %d: %s\n", now_played->name, me->rank, f.result,
            result, f.sentence);
    bad = true;
}

/* Rank 0 has sent and received everything, closes and ends. Rank 1 still waits for rows of rank
 * 2. */
static void play_closed(team_rank *me, memory *m)
{
    if (me->rank == 2) emulator_hold(me->rank, 1);
    dispatch_rows(me, m);
    if (me->rank == 2) {
        while (!p2p_is_dead(me->group, 0)) sleep_ms(1);
        sleep_ms(300);
        emulator_hold(me->rank, 0);
    }
    expect_failure(me, EPIC_OK, NO_RANK);
}

/* Rank 0 closes, and the others continue without it. */
static void play_left(team_rank *me, memory *m)
{
    if (me->rank == 0) return;
    const double begin = now_ms();
    dispatch_rows(me, m);
    expect_failure(me, EPIC_EPEER, 0);
    if (now_ms() - begin > 1000 + slack_ms()) bad = true;
}

/* Rank 2 stops. Rank 1 waits for it, and rank 0 for rank 1. The time limit of rank 0 ends
 * first, after rank 1 has published that it waits. */
static void play_waiting(team_rank *me, memory *m)
{
    if (me->rank == 2) emulator_hold(me->rank, 1);
    team_barrier(me);
    dispatch_rows(me, m);
    if (me->rank != 2) expect_failure(me, EPIC_ETIMEOUT, 2);
    team_barrier(me);
    emulator_hold(me->rank, 0);
}

/* Rank 2 does not come. Rank 1 stops after it has announced, so that rank 0 waits for rows of
 * rank 1, too. The rank that has not announced must be blamed alone. */
static void play_absent(team_rank *me, memory *m)
{
    if (me->rank == 1) emulator_hold(me->rank, 1);
    team_barrier(me);
    if (me->rank != 2) dispatch_rows(me, m);
    if (me->rank == 0) expect_failure(me, EPIC_ETIMEOUT, 2);
    team_barrier(me);
    emulator_hold(me->rank, 0);
    if (me->rank == 1) expect_failure(me, EPIC_ETIMEOUT, 2);
}

/* Ranks 0 and 1 both stop and wait for each other. The rank that reports names the other one.
 */
static void play_circle(team_rank *me, memory *m)
{
    epic_failure_info f;
    emulator_hold(me->rank, 1);
    team_barrier(me);
    dispatch_rows(me, m);
    const double end = now_ms() + 20000 * scale;
    while (p2p_ops.poll_failure(me->group, &f) == EPIC_OK && now_ms() < end) sleep_ms(5);
    emulator_hold(me->rank, 0);
    expect_failure(me, EPIC_ETIMEOUT, 1 - f.rank);
}

/* The CTAs of rank 1 begin one by one, each a quarter of the time limit after the previous one.
 * The operation takes one and a half times the limit and never stops. A busy machine may add
 * the rest. */
static void play_long(team_rank *me, memory *m)
{
    if (me->rank == 1) emulator_hold(me->rank, 1);
    team_barrier(me);
    dispatch_rows(me, m);
    for (int ctas = 2; ctas < (int)now_played->sms && me->rank == 1; ctas++) {
        sleep_ms((long)(scale * now_played->deadline[1]) / 4);
        emulator_hold(me->rank, ctas);
    }
    emulator_hold(me->rank, 0);
    expect_failure(me, EPIC_OK, NO_RANK);
}

/* Rank 1 passes bytes that are not a plan, so the ranks differ. The error of rank 1 gives the
 * reason. */
static void play_damaged(team_rank *me, memory *m)
{
    epic_failure_info f;
    if (me->rank == 1) CHECK_CUDA(fill_in(m->plan + 40, 0x77, 6));
    dispatch_rows(me, m);
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    const epic_result result = p2p_ops.poll_failure(me->group, &f);
    if (result == EPIC_EMISMATCH &&
        (me->rank == 0 || strstr(f.sentence, "here plan: these are not the bytes")))
        return;
    fprintf(stderr, "damaged: rank %d: %d: %s\n", me->rank, result, f.sentence);
    bad = true;
}

/* Rank 1 dispatches on two streams that do not wait for each other. The first kernel uses all
 * SMs and waits for one row of rank 2. When some of its CTAs end, CTAs of the second kernel
 * begin. */
static void play_overlap(team_rank *me, memory *m)
{
    cudaStream_t second;
    CHECK_CUDA(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    if (me->rank == 2) emulator_hold(me->rank, 1);
    team_barrier(me);
    dispatch_rows(me, m);
    if (me->rank != 2) {
        dispatch_on(me, m, me->rank == 1 ? second : me->stream);
        expect_failure(me, EPIC_EMISMATCH, 1);
        CHECK_CUDA(cudaStreamSynchronize(second));
    }
    team_barrier(me);
    emulator_hold(me->rank, 0);
    expect_failure(me, EPIC_EMISMATCH, 1);
    CHECK_CUDA(cudaStreamDestroy(second));
}

/* Two hosts of two ranks. Rows of rank 1 for rank 2 go through rank 3, which stops when it has
 * them all; rank 1 has ended its operation. */
static void play_relay(team_rank *me, memory *m)
{
    if (me->rank == 3) emulator_hold(me->rank, 1);
    team_barrier(me);
    dispatch_rows(me, m);
    if (me->rank < 2) expect_failure(me, EPIC_OK, NO_RANK);
    if (me->rank == 2) expect_failure(me, EPIC_ETIMEOUT, 3);
    team_barrier(me);
    emulator_hold(me->rank, 0);
}

/* Like play_relay(), but rank 1 stops. Rank 3 has published to rank 2 that it waits. */
static void play_far(team_rank *me, memory *m)
{
    if (me->rank == 1) emulator_hold(me->rank, 1);
    team_barrier(me);
    dispatch_rows(me, m);
    if (me->rank >= 2) expect_failure(me, EPIC_ETIMEOUT, 1);
    team_barrier(me);
    emulator_hold(me->rank, 0);
}

/* Two hosts of two ranks, in the libraries for many ranks. Announcements of rank 0 for rank 2
 * go through ranks 1 and 3. One of these three does not come, and rank 2 must blame it alone,
 * although it also misses announcements of other ranks. Its time limit ends first. */
static void play_without(team_rank *me, memory *m, int absent)
{
    team_barrier(me);
    if (me->rank != absent) dispatch_rows(me, m);
    if (me->rank != absent) expect_failure(me, EPIC_ETIMEOUT, absent);
    team_barrier(me);
}

static void play_no_sender(team_rank *me, memory *m)
{
    play_without(me, m, 0);
}

static void play_no_relay(team_rank *me, memory *m)
{
    play_without(me, m, 1);
}

static void play_no_near_relay(team_rank *me, memory *m)
{
    play_without(me, m, 3);
}

/* Two hosts of two ranks, in the libraries for many ranks. The list of records of rank 0 for
 * rank 2 is lost. Rank 2 should expand it, also for rank 3. */
static void play_lost_list(team_rank *me, memory *m, int culprit)
{
    team_barrier(me);
    make_plan(me, m, scale * now_played->deadline[me->rank]);
    if (me->rank < 2) expect_failure(me, EPIC_OK, NO_RANK);
    if (me->rank == 3) expect_failure(me, EPIC_ETIMEOUT, culprit);
    team_barrier(me);
}

/* Rank 2 has published to rank 3 that it waits for rank 0. */
static void play_no_list(team_rank *me, memory *m)
{
    play_lost_list(me, m, 0);
}

/* The time limit of rank 2 is long, so it publishes nothing, like a rank that has stopped. */
static void play_no_mate(team_rank *me, memory *m)
{
    play_lost_list(me, m, 2);
}

static const scenario scenarios[] = {
    {"closed", 3, {-1, -1, 1}, false, {20000, 20000, 20000}, 2, 300, play_closed},
    {"left", 3, {1, 2, 0}, false, {20000, 20000, 20000}, 2, 300, play_left},
    {"waiting", 3, {-1, 0, 1}, false, {7200, 8000, 8000}, 2, 20000, play_waiting},
    {"absent", 3, {-1, 0, -1}, false, {3000, 20000, 20000}, 2, 20000, play_absent},
    {"circle", 2, {1, 0, 0}, false, {2000, 2000, 0}, 2, 20000, play_circle},
    {"long", 2, {1, 0, 0}, false, {6000, 6000, 0}, 8, 20000, play_long},
    {"damaged", 2, {1, 0, 0}, false, {20000, 20000, 0}, 2, 20000, play_damaged},
    {"overlap", 3, {-1, -1, 1}, true, {20000, 20000, 20000}, 8, 20000, play_overlap},
    {"relay", 4, {NONE, 2, NONE, NONE}, false, {8000, 8000, 3000, 8000}, 2, 20000, play_relay},
    {"far", 4, {NONE, 2, NONE, NONE}, false, {8000, 8000, 7200, 8000}, 2, 20000, play_far},
    {"no_sender",
     4,
     {1, 2, 3, 0},
     false,
     {20000, 20000, 3000, 20000},
     2,
     20000,
     play_no_sender},
    {"no_relay", 4, {1, 2, 3, 0}, false, {20000, 20000, 3000, 20000}, 2, 20000, play_no_relay},
    {"no_near_relay",
     4,
     {1, 2, 3, 0},
     false,
     {20000, 20000, 3000, 20000},
     2,
     20000,
     play_no_near_relay},
    {"no_list", 4, {3, 2, 1, 0}, false, {8000, 8000, 8000, 7200}, 2, 3000, play_no_list},
    {"no_mate", 4, {3, 2, 1, 0}, false, {20000, 20000, 20000, 3000}, 2, 3000, play_no_mate},
};

static int run_rank(team_rank *me)
{
    memory m = allocate_memory(me);
    if (now_played->play != play_no_list && now_played->play != play_no_mate)
        make_plan(me, &m, 30000);
    team_barrier(me);
    now_played->play(me, &m);
    void *const parts[] = {m.ids, m.plan, m.tokens, m.recv};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) CHECK_CUDA(cudaFree(parts[i]));
    return bad;
}

/* Runs the scenario once. Returns 0 if all ranks found what they expect. */
static int run_scenario(void)
{
    const team t = {.num_ranks = now_played->ranks,
                    .num_gpus = now_played->ranks,
                    .ranks_per_process = HOSTS ? 0 : 1,
                    .max_tokens = TOKENS,
                    .lowlat_tokens = TEAM_LOWLAT_TOKENS,
                    .max_row_bytes = ROW,
                    .timeout_ms = now_played->close_ms,
                    .max_sms = now_played->sms,
                    .work = run_rank};
    bad = false;
    return team_run(&t);
}

/* On a busy machine a rank may start late and miss what another rank publishes before its
 * deadline. So a scenario that fails is repeated once, with deadlines four times as long. */
int main(int argc, char **argv)
{
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios && argc > 1; i++)
        if (!strcmp(argv[1], scenarios[i].name)) now_played = &scenarios[i];
    if (!now_played) return 2;
    int failed = run_scenario();
    if (failed) {
        printf("%s went wrong; repeated with longer deadlines\n", now_played->name);
        fflush(stdout);
        scale = 4;
        failed = run_scenario();
    }
    printf("emulated_blame %s: %s\n", now_played->name, failed ? "WRONG" : "good");
    return failed != 0;
}
