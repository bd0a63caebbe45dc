/* SPDX-License-Identifier: Apache-2.0 */
/* Tests ranks of a TCP bootstrap that are stopped for longer than the time limit, for example
 * by Ctrl-Z or a suspended machine. The limit counts only the time in which a rank runs. If all
 * ranks are stopped together, the bootstrap must still open. A rank that never comes must still
 * be named. The "stranger" of a trial sends the signals. */
#include <stdatomic.h>

#include "bootstrap.h"

#define LIMIT_MS 1000
#define BEFORE_MS 200 /* time from the last start of a rank to the stop */
#define STOP_MS 1300
#define LATE_MS 300 /* time from the end of the stop until the late rank comes */

typedef struct stage {
    _Atomic pid_t pids[MOST];
    _Atomic int awake; /* 1: the stop has ended */
} stage;

static stage *shared;

static void enter_stage(const epic_tcp *tcp)
{
    atomic_store(&shared->pids[tcp->rank], getpid());
}

static void wait_until_awake(void)
{
    while (!atomic_load(&shared->awake)) nap(1);
    nap(LATE_MS);
}

/* Stops the ranks from `first` to `last`, after all ranks have started. */
static void stop_ranks(const trial *t, int first, int last)
{
    for (int r = 0; r < t->num_ranks; r++)
        while (atomic_load(&shared->pids[r]) == 0) nap(1);
    nap(BEFORE_MS);
    for (int r = first; r <= last; r++) kill(atomic_load(&shared->pids[r]), SIGSTOP);
    nap(STOP_MS);
    atomic_store(&shared->awake, 1);
    for (int r = first; r <= last; r++) kill(atomic_load(&shared->pids[r]), SIGCONT);
    for (;;) pause();
}

static void stop_all(const trial *t, uint32_t port)
{
    (void)port;
    stop_ranks(t, 0, t->num_ranks - 1);
}

static void stop_rank_1(const trial *t, uint32_t port)
{
    (void)port;
    stop_ranks(t, 1, 1);
}

/* The odd rank connects after the stop. */
static void late_to_bootstrap(const trial *t, epic_tcp *tcp, report *out)
{
    enter_stage(tcp);
    if (tcp->rank == t->odd) wait_until_awake();
    bootstrap_and_gather(t, tcp, out);
}

/* The odd rank connects, but comes to its gather only after the stop. */
static void late_to_gather(const trial *t, epic_tcp *tcp, report *out)
{
    epic_bootstrap bootstrap;
    out->result = epic_bootstrap_tcp(&bootstrap, tcp);
    enter_stage(tcp);
    if (tcp->rank == t->odd) wait_until_awake();
    if (out->result == EPIC_OK) out->result = gather(&bootstrap, 0, t->bytes, out);
    epic_bootstrap_close(&bootstrap);
}

/* The odd rank never connects. */
static void absent(const trial *t, epic_tcp *tcp, report *out)
{
    enter_stage(tcp);
    if (tcp->rank == t->odd)
        wait_until_awake();
    else
        bootstrap_and_gather(t, tcp, out);
}

/* The odd rank connects while rank 1, which has already joined, is stopped. */
static void late_but_in_time(const trial *t, epic_tcp *tcp, report *out)
{
    enter_stage(tcp);
    if (tcp->rank == t->odd) nap(BEFORE_MS + LATE_MS);
    bootstrap_and_gather(t, tcp, out);
}

static void run_stopped(const trial *t)
{
    memset(shared, 0, sizeof *shared);
    run(t);
}

static void test_all_stopped(void)
{
    trial t = {.name = "all stopped in the bootstrap",
               .num_ranks = 4,
               .rank = late_to_bootstrap,
               .stranger = stop_all,
               .timeout_ms = LIMIT_MS,
               .odd = 3,
               .bytes = 40,
               .num_gathers = 2};
    run_stopped(&t);
    for (int r = 0; r < 4; r++) expect(&t, r, EPIC_OK, NULL, NULL);

    t.name = "all stopped in the bootstrap, rank 0 is late";
    t.odd = 0;
    run_stopped(&t);
    for (int r = 0; r < 4; r++) expect(&t, r, EPIC_OK, NULL, NULL);

    t.name = "all stopped in a gather";
    t.rank = late_to_gather;
    t.odd = 3;
    run_stopped(&t);
    for (int r = 0; r < 4; r++) expect(&t, r, EPIC_OK, NULL, NULL);
}

static void test_absent(void)
{
    const trial t = {.name = "all stopped, rank 2 absent",
                     .num_ranks = 4,
                     .rank = absent,
                     .stranger = stop_all,
                     .timeout_ms = LIMIT_MS,
                     .odd = 2,
                     .bytes = 40,
                     .num_gathers = 1};
    run_stopped(&t);
    for (int r = 0; r < 4; r++)
        if (r != 2) expect(&t, r, EPIC_ETIMEOUT, "rank 2 did not connect", "1000 ms");
    expect_soon(&t, 10 * LIMIT_MS);
}

static void test_one_stopped(void)
{
    const trial t = {.name = "rank 1 stopped",
                     .num_ranks = 4,
                     .rank = late_but_in_time,
                     .stranger = stop_rank_1,
                     .timeout_ms = LIMIT_MS,
                     .odd = 3};
    run_stopped(&t);
    for (int r = 0; r < 4; r++) expect(&t, r, EPIC_OK, NULL, NULL);
}

int main(void)
{
    static void (*const tests[])(void) = {
        test_all_stopped,
        test_absent,
        test_one_stopped,
    };
    shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return run_tests(tests, sizeof tests / sizeof *tests);
}
