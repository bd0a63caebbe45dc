/* SPDX-License-Identifier: Apache-2.0 */
/* Tests processes that die or stop at random points, with the public calls. The other ranks get
 * an error that names the rank: within a second after a death, or at the deadline after a stop.
 * Afterwards a matrix product is correct in them, and a new group of these ranks opens and
 * works.
 *
 *   api_deaths RANKS GPUS FAULTS [FIRST [DEADLINE of ranks that stop, in ms]] */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "epic/epic.h"
#include "product.h"
#include "rounds.h"
#include "victim.h"

enum { MOST_STEPS = 200000, NUM_FAULTS = EXITED + 1 };
#ifndef BACKEND
#define BACKEND "p2p"
#endif
/* deadline for a rank that dies; its death must be noticed much earlier */
#define PATIENCE_MS 20000u

static double deadline_ms = 400; /* deadline for a rank that stops */

typedef struct place { /* shared by all ranks */
    double fault_ms;   /* time of the fault */
    int began;         /* number of ranks that have finished their first round */
    int passed[MAX_RANKS];
} place;
static place *shared;

/* Joins the others through the port `at` and opens a context. */
static void take_seat(rounds *s, int rank, int ranks, unsigned at)
{
    const epic_tcp tcp = {.rank = rank, .num_ranks = ranks, .port = at, .timeout_ms = 30000};
    const epic_config config = {.max_tokens = ROUND_TOKENS,
                                .max_row_bytes = ROUND_ROW,
                                .num_ranks = (uint32_t)ranks,
                                .timeout_ms =
                                    fault == STOPPED ? (uint32_t)deadline_ms : PATIENCE_MS,
                                .backend = BACKEND};
    epic_bootstrap bootstrap;
    must_succeed(!epic_bootstrap_tcp(&bootstrap, &tcp), "bootstrap", NULL);
    must_succeed(!epic_open(&s->ctx, &bootstrap, &config), "open", s->ctx);
    epic_bootstrap_close(&bootstrap);
    must_succeed(round_seat(s, &config), "memory and a stream", NULL);
}

/* Runs rounds until the error. Returns how late the error was, in ms. */
static double work_until_error(rounds *s)
{
    epic_result result = EPIC_OK;
    double begin = 0;
    for (int i = 0; i < MOST_STEPS && result == EPIC_OK; i++) {
        begin = now_ms();
        result = round_run(s);
    }
    const double end_ms = now_ms();
    epic_failure_info f;
    must_succeed(!epic_failure(s->ctx, &f), "failure", s->ctx);
    must_succeed(f.result == (fault == STOPPED ? EPIC_ETIMEOUT : EPIC_EPEER), "another error",
                 s->ctx);
    must_succeed(f.num_culprits == 1 && f.culprits[0] == victim, "another culprit", s->ctx);
    must_succeed(epic_check(s->ctx) == (epic_result)f.result, "a later call", s->ctx);
    return end_ms - (fault == STOPPED && begin > shared->fault_ms ? begin : shared->fault_ms);
}

static int survive_fault(rounds *s, int rank)
{
    const double late = work_until_error(s);
    const double most = (fault == STOPPED ? deadline_ms * 1.125 : 1000) + slack_ms();
    if (late > most)
        fprintf(stderr, "rank %d: %s of rank %d seen after %.0f ms\n", rank, fault_names[fault],
                victim, late);
    must_succeed(product_is_right(), "a matrix product", NULL);
    epic_close(s->ctx);
    take_seat(s, rank - (rank > victim), num_ranks - 1, port + 1);
    for (int i = 0; i < 5; i++) must_succeed(!round_run(s), "a step of the new group", s->ctx);
    epic_close(s->ctx);
    printf("  rank %d: %s of rank %d after %.1f ms, seen %.0f ms later\n", rank,
           fault_names[fault], victim, delay_us / 1e3, late);
    fflush(stdout);
    return late <= most;
}

static void run_rank(int rank)
{
    rounds s = {0};
    pthread_t thread;
    own_rank = rank;
    must_succeed(cudaSetDevice(rank % num_gpus) == cudaSuccess, "cudaSetDevice", NULL);
    take_seat(&s, rank, num_ranks, port);
    must_succeed(!round_run(&s), "the first step", s.ctx);
    __atomic_add_fetch(&shared->began, 1, __ATOMIC_RELAXED);
    if (rank != victim) {
        shared->passed[rank] = survive_fault(&s, rank);
        fflush(NULL);
        _exit(0);
    }
    /* With backend hosts, the data that the rank has sent may still be in flight. */
    while (__atomic_load_n(&shared->began, __ATOMIC_RELAXED) < num_ranks) usleep(100);
    pthread_create(&thread, NULL, end_process, &shared->fault_ms);
    while (round_run(&s) == EPIC_OK) continue;
    for (;;) pause(); /* the peers finished before the fault, so this attempt does not count */
}

static int inject_fault(int i)
{
    pid_t pids[MAX_RANKS];
    int passed = 1, status;
    fault = (enum fault)(i % NUM_FAULTS);
    draw_victim(i);
    memset(shared, 0, sizeof *shared);
    fflush(NULL);
    for (int r = 0; r < num_ranks; r++)
        if (!(pids[r] = fork())) run_rank(r);
    for (int r = 0; r < num_ranks; r++)
        /* the victim stays a zombie until the others have ended */
        if (r != victim) waitpid(pids[r], &status, 0);
    kill(pids[victim], SIGKILL);
    waitpid(pids[victim], &status, 0);
    for (int r = 0; r < num_ranks; r++) passed &= r == victim || shared->passed[r];
    return passed;
}

int main(int argc, char **argv)
{
    if (argc > 5) deadline_ms = atof(argv[5]);
    shared = map_shared(sizeof *shared);
    return shared ? run_trials("api_deaths", argc, argv, inject_fault) : 2;
}
