/* SPDX-License-Identifier: Apache-2.0 */
/* Measures how long a group takes to go on without one of its ranks.
 *
 *     build/bench/regroup [--ranks 8] [--rounds 9]
 *
 * The ranks are processes (backend shm), which sum in a loop. In half of the rounds the program
 * kills a rank with SIGKILL. The others get an error, make the next generation with
 * epic_regroup, and sum again. In the other half the rank leaves by epic_regroup. Each round
 * opens a new group and loses another rank.
 *
 * Prints medians over the rounds, of the slowest rank: from SIGKILL to the error, to the next
 * generation and to the first sum, and from the last sum before a planned leave to the first
 * one after it. Also prints the CPU time that all members together use from the error, or from
 * the last sum, to the first sum in the next generation. With few cores it limits the other
 * times. Every sum must have the right value. */
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

/* The times that a rank stores, in microseconds. USED is a duration of CPU time. */
enum { LOST, FAILED, ENTERED, SUMMED, USED, NUM_TIMES };

/* State of one round, in memory that all ranks share. */
typedef struct board {
    int num_ranks, victim;
    bool leaves; /* true: the victim leaves; false: it is killed */
    uint32_t port;
    _Atomic int num_sums[MAX_RANKS];
    _Atomic int num_done;
    _Atomic double lost_us; /* time of SIGKILL */
    double times[MAX_RANKS][NUM_TIMES];
} board;

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "regroup: %s: %s\n", what, why);
    exit(1);
}

/* Returns the CPU time of this process in microseconds. */
static double cpu_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* Adds 1 over the members. The sum must be their number. */
static epic_result sum_once(epic_context *ctx, int num_members)
{
    float one = 1;
    const epic_result result =
        epic_allreduce_sum(ctx, &(epic_allreduce_sum_args){.data = &one, .count = 1});
    if (result == EPIC_OK && one != (float)num_members) fail("sum", "the value is wrong");
    return result;
}

/* Sums until a call fails, or in a round with a leave for WARM_SUMS times. */
static void sum_before(board *b, epic_context *ctx)
{
    const int rank = epic_rank(ctx);
    epic_result result = EPIC_OK;
    while (!b->leaves || b->num_sums[rank] < WARM_SUMS) {
        b->times[rank][LOST] = now_us();
        if ((result = sum_once(ctx, b->num_ranks)) != EPIC_OK) break;
        b->num_sums[rank]++;
    }
    b->times[rank][FAILED] = now_us();
    if (b->leaves)
        b->times[rank][LOST] = b->times[rank][FAILED];
    else if (result != EPIC_EPEER)
        fail("sum", epic_error(ctx));
    else
        b->times[rank][LOST] = b->lost_us;
}

/* Makes the next generation and the first sum in it. The ranks close their contexts only when
 * all have summed, because closing takes longer. */
static void go_on(board *b, epic_context *ctx)
{
    const int rank = epic_rank(ctx), num_members = b->num_ranks - 1;
    const epic_regroup_args args = {.leaving = b->leaves && rank == b->victim};
    epic_members_info info;
    const double used_before = cpu_us();
    if (epic_regroup(ctx, &args, &info) != EPIC_OK) fail("epic_regroup", epic_error(ctx));
    if (args.leaving) return;
    b->times[rank][ENTERED] = now_us();
    if (info.num_members != num_members) fail("epic_regroup", "the members are wrong");
    if (sum_once(ctx, num_members) != EPIC_OK) fail("sum", epic_error(ctx));
    b->times[rank][SUMMED] = now_us();
    b->times[rank][USED] = cpu_us() - used_before;
    b->num_done++;
    for (int left = TIMEOUT_MS; b->num_done < num_members && left > 0; left--) nap(POLL_NS);
}

static void run_rank(board *b, int rank)
{
    epic_bootstrap bootstrap;
    epic_context *ctx;
    const epic_tcp tcp = {
        .rank = rank, .num_ranks = b->num_ranks, .port = b->port, .timeout_ms = TIMEOUT_MS};
    const epic_config config = {
        .max_tokens = 64, .max_row_bytes = 4096, .timeout_ms = TIMEOUT_MS, .backend = "shm"};
    if (epic_bootstrap_tcp(&bootstrap, &tcp) != EPIC_OK) fail("bootstrap", epic_error(NULL));
    if (epic_open(&ctx, &bootstrap, &config) != EPIC_OK) fail("open", epic_error(ctx));
    sum_before(b, ctx);
    go_on(b, ctx);
    epic_close(ctx);
    epic_bootstrap_close(&bootstrap);
    _exit(0);
}

/* Runs one round. Writes to `found` the times since the loss, of the slowest rank, and the sum
 * of the CPU times. */
static void run_round(board *b, double *found)
{
    pid_t pids[MAX_RANKS];
    for (int r = 0; r < b->num_ranks; r++) {
        pids[r] = fork();
        if (pids[r] < 0) fail("fork", "no process");
        if (pids[r] == 0) run_rank(b, r);
    }
    if (!b->leaves) {
        for (int r = 0; r < b->num_ranks; r++)
            while (b->num_sums[r] < WARM_SUMS) nap(POLL_NS);
        nap(SETTLE_NS);
        b->lost_us = now_us();
        kill(pids[b->victim], SIGKILL);
    }
    for (int r = 0, status; r < b->num_ranks; r++)
        if (waitpid(pids[r], &status, 0) != pids[r] ||
            (status != 0 && (b->leaves || r != b->victim)))
            fail("a rank", "failed");
    memset(found, 0, NUM_TIMES * sizeof *found);
    for (int r = 0; r < b->num_ranks; r++) {
        if (r == b->victim) continue;
        for (int t = FAILED; t <= SUMMED; t++) {
            const double time = b->times[r][t] - b->times[r][LOST];
            if (time > found[t]) found[t] = time;
        }
        found[USED] += b->times[r][USED];
    }
}

static int compare_times(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Returns the median of the times `t` of all rounds, in milliseconds. */
static double median_ms(double (*times)[NUM_TIMES], int rounds, int t)
{
    double sorted[MAX_ROUNDS];
    for (int i = 0; i < rounds; i++) sorted[i] = times[i][t] / 1e3;
    qsort(sorted, (size_t)rounds, sizeof *sorted, compare_times);
    return sorted[rounds / 2];
}

static void run_rounds(board *b, bool leaves, int num_ranks, int rounds)
{
    double times[MAX_ROUNDS][NUM_TIMES];
    for (int i = 0; i < rounds; i++) {
        memset(b, 0, sizeof *b);
        b->num_ranks = num_ranks;
        b->victim = (5 * i + 1) % num_ranks;
        b->leaves = leaves;
        b->port = FIRST_PORT + ((uint32_t)getpid() + (uint32_t)(2 * i + leaves)) % NUM_PORTS;
        run_round(b, times[i]);
    }
    printf("shm, %d ranks on %ld cores, %d rounds, slowest rank, medians: ", num_ranks,
           sysconf(_SC_NPROCESSORS_ONLN), rounds);
    if (leaves)
        printf("ms of a planned leave to the next generation %.2f, to the first sum %.2f",
               median_ms(times, rounds, ENTERED), median_ms(times, rounds, SUMMED));
    else
        printf(
            "ms from SIGKILL to the error %.2f, to the next generation %.2f, to the first sum "
            "%.2f",
            median_ms(times, rounds, FAILED), median_ms(times, rounds, ENTERED),
            median_ms(times, rounds, SUMMED));
    printf(", CPU of all members %.2f\n", median_ms(times, rounds, USED));
}

int main(int argc, char **argv)
{
    int ranks = 8, rounds = 9;
    bool is_right = argc % 2;
    for (int i = 1; i + 1 < argc && is_right; i += 2) {
        const bool is_ranks = !strcmp(argv[i], "--ranks");
        *(is_ranks ? &ranks : &rounds) = atoi(argv[i + 1]);
        is_right = is_ranks || !strcmp(argv[i], "--rounds");
    }
    if (!is_right || ranks < 3 || ranks > MAX_RANKS || rounds < 1 || rounds > MAX_ROUNDS) {
        fprintf(stderr, "usage: regroup [--ranks N] [--rounds N]\n");
        return 2;
    }
    board *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b == MAP_FAILED) fail("memory", "none");
    for (int leaves = 0; leaves < 2; leaves++) run_rounds(b, leaves, ranks, rounds);
    return 0;
}
