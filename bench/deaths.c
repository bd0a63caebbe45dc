/* SPDX-License-Identifier: Apache-2.0 */
/* Measures how long a group takes to notice that one of its ranks is gone.
 *
 *     build/bench/deaths [--ranks 8] [--rounds 9] [--backend shm]
 *
 * All ranks of a group sum in a loop. With backend shm the ranks are processes, and the program
 * kills one of them with SIGKILL. With backend threads one rank closes its context instead,
 * because the end of a process would end all its threads. Each other rank measures the time
 * until its sum returns an error.
 *
 * Prints two medians over the rounds: of the median rank and of the slowest rank. Each round
 * opens a new group and loses another rank. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "epic/epic.h"

#define MAX_RANKS 256
#define MAX_ROUNDS 101
#define WARM_SUMS 20       /* sums of every rank before a rank is lost */
#define SETTLE_NS 20000000 /* time between the last warm-up sum and the loss */
#define POLL_NS 1000000    /* time between two checks whether all ranks are warm */
#define TIMEOUT_MS 60000   /* deadline of the group; a rank that is lost is noticed earlier */
#define FIRST_PORT 20000
#define NUM_PORTS 12000 /* the ports below those that the system hands out */

typedef struct options {
    int ranks, rounds;
    const char *backend;
} options;

/* State of one round, in memory that all ranks share. */
typedef struct board {
    _Atomic int num_sums[MAX_RANKS];
    _Atomic int num_errors;
    _Atomic double lost_us;             /* time at which the rank was lost */
    _Atomic double error_us[MAX_RANKS]; /* time of the first error of each other rank */
} board;

typedef struct seat {
    const options *o;
    board *board;
    epic_bootstrap bootstrap;
    int rank, victim;
} seat;

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "deaths: %s: %s\n", what, why);
    exit(1);
}

static void wait_until_warm(const board *b, int ranks)
{
    for (int r = 0; r < ranks; r++)
        while (b->num_sums[r] < WARM_SUMS) nap(POLL_NS);
    nap(SETTLE_NS);
}

static epic_result sum_once(epic_context *ctx)
{
    float one = 1;
    return epic_allreduce_sum(ctx, &(epic_allreduce_sum_args){.data = &one, .count = 1});
}

/* Waits until all ranks have got their error. The teardown of a rank takes longer than the
 * error, and would delay the ranks that have not got it yet. */
static void wait_for_all_errors(const board *b, int ranks)
{
    for (int left = TIMEOUT_MS; b->num_errors < ranks - 1 && left > 0; left--) nap(POLL_NS);
}

/* Sums until a call fails, and stores the time of the error. */
static void sum_until_error(seat *s, epic_context *ctx)
{
    epic_result result = EPIC_OK;
    while ((result = sum_once(ctx)) == EPIC_OK) s->board->num_sums[s->rank]++;
    s->board->error_us[s->rank] = now_us();
    if (result != EPIC_EPEER) fail("sum", epic_error(ctx));
    s->board->num_errors++;
    wait_for_all_errors(s->board, s->o->ranks);
}

/* Takes part in the warm-up sums, and then closes the context while the other ranks sum. */
static void close_in_between(seat *s, epic_context *ctx)
{
    for (int i = 0; i < WARM_SUMS; i++) {
        if (sum_once(ctx) != EPIC_OK) fail("sum", epic_error(ctx));
        s->board->num_sums[s->rank]++;
    }
    wait_until_warm(s->board, s->o->ranks);
    s->board->lost_us = now_us();
}

static void *run_rank(void *self)
{
    seat *s = self;
    epic_context *ctx;
    const epic_config config = {.max_tokens = 64,
                                .max_row_bytes = 4096,
                                .timeout_ms = TIMEOUT_MS,
                                .backend = s->o->backend};
    if (epic_open(&ctx, &s->bootstrap, &config) != EPIC_OK) fail("open", epic_error(ctx));
    if (s->rank == s->victim)
        close_in_between(s, ctx);
    else
        sum_until_error(s, ctx);
    epic_close(ctx);
    return NULL;
}

static void run_threads(const options *o, board *b, int victim)
{
    epic_bootstrap bootstraps[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    seat seats[MAX_RANKS];
    if (epic_bootstrap_threads(bootstraps, o->ranks, TIMEOUT_MS) != EPIC_OK)
        fail("bootstrap", epic_error(NULL));
    for (int r = 0; r < o->ranks; r++) {
        seats[r] = (seat){o, b, bootstraps[r], r, victim};
        if (pthread_create(&threads[r], NULL, run_rank, &seats[r]) != 0) fail("thread", "none");
    }
    for (int r = 0; r < o->ranks; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < o->ranks; r++) epic_bootstrap_close(&bootstraps[r]);
}

static pid_t fork_rank(const options *o, board *b, int rank, uint32_t port)
{
    const pid_t pid = fork();
    if (pid != 0) return pid;
    seat s = {.o = o, .board = b, .rank = rank, .victim = -1};
    const epic_tcp tcp = {
        .rank = rank, .num_ranks = o->ranks, .port = port, .timeout_ms = TIMEOUT_MS};
    if (epic_bootstrap_tcp(&s.bootstrap, &tcp) != EPIC_OK) fail("bootstrap", epic_error(NULL));
    run_rank(&s);
    epic_bootstrap_close(&s.bootstrap);
    exit(0);
}

static void run_processes(const options *o, board *b, int victim, uint32_t port)
{
    pid_t pids[MAX_RANKS];
    for (int r = 0; r < o->ranks; r++)
        if ((pids[r] = fork_rank(o, b, r, port)) < 0) fail("fork", "no process");
    wait_until_warm(b, o->ranks);
    b->lost_us = now_us();
    kill(pids[victim], SIGKILL);
    for (int r = 0, status; r < o->ranks; r++)
        if (waitpid(pids[r], &status, 0) != pids[r] || (r != victim && status != 0))
            fail("a rank", "failed");
}

static int compare_times(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(double *times, int count)
{
    qsort(times, (size_t)count, sizeof *times, compare_times);
    return times[count / 2];
}

/* Runs one round. Returns the times of the median rank and of the slowest rank. */
static void run_round(const options *o, board *b, int round, double *median, double *slowest)
{
    const int victim = (5 * round + 1) % o->ranks;
    double times[MAX_RANKS];
    int count = 0;
    memset(b, 0, sizeof *b);
    if (!strcmp(o->backend, "threads"))
        run_threads(o, b, victim);
    else
        run_processes(o, b, victim,
                      FIRST_PORT + ((uint32_t)getpid() + (uint32_t)round) % NUM_PORTS);
    for (int r = 0; r < o->ranks; r++)
        if (r != victim) times[count++] = b->error_us[r] - b->lost_us;
    *median = median_of(times, count);
    *slowest = times[count - 1];
}

static bool read_options(options *o, int argc, char **argv)
{
    for (int i = 1; i < argc; i += 2) {
        int *number = !strcmp(argv[i], "--ranks")    ? &o->ranks
                      : !strcmp(argv[i], "--rounds") ? &o->rounds
                                                     : NULL;
        const int most = number == &o->ranks ? MAX_RANKS : MAX_ROUNDS;
        if (i + 1 == argc || (!number && strcmp(argv[i], "--backend"))) return false;
        if (!number)
            o->backend = argv[i + 1];
        else if ((*number = atoi(argv[i + 1])) < 1 || *number > most)
            return false;
    }
    return o->ranks >= 2 && (!strcmp(o->backend, "shm") || !strcmp(o->backend, "threads"));
}

int main(int argc, char **argv)
{
    options o = {.ranks = 8, .rounds = 9, .backend = "shm"};
    double medians[MAX_ROUNDS], slowest[MAX_ROUNDS];
    if (!read_options(&o, argc, argv)) {
        fprintf(stderr, "usage: deaths [--ranks N] [--rounds N] [--backend shm|threads]\n");
        return 2;
    }
    board *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b == MAP_FAILED) fail("memory", "none");
    for (int i = 0; i < o.rounds; i++) run_round(&o, b, i, &medians[i], &slowest[i]);
    printf("%s, %d ranks on %ld cores, %d rounds: ms from %s to the error, median rank %.2f, "
           "slowest rank %.2f (medians)\n",
           o.backend, o.ranks, sysconf(_SC_NPROCESSORS_ONLN), o.rounds,
           !strcmp(o.backend, "threads") ? "epic_close" : "SIGKILL",
           median_of(medians, o.rounds) / 1e3, median_of(slowest, o.rounds) / 1e3);
    return 0;
}
