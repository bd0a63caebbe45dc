/* SPDX-License-Identifier: Apache-2.0 */
/* Trials in which one rank, the victim, dies or stops while all ranks work. Each rank is a
 * process, and a fork copies these variables to it. */
#ifndef EPIC_TEST_VICTIM_H
#define EPIC_TEST_VICTIM_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "epic/epic.h"
#include "times.h"

enum { MAX_RANKS = 16 };
enum fault { KILLED, STOPPED, EXITED, LEFT, TWO_KILLED };
static const char *const fault_names[] = {"SIGKILL", "SIGSTOP", "exit", "leave", "two SIGKILL"};

static int num_ranks, num_gpus, victim;
static int own_rank; /* of this process */
static enum fault fault;
static unsigned delay_us; /* from the call of end_process() to the fault */
static unsigned port;     /* of the bootstrap; port + 1 is free, too */

static void must_succeed(int good, const char *what, const epic_context *ctx)
{
    if (good) return;
    fprintf(stderr, "%s of rank %d, rank %d: %s: %s\n", fault_names[fault], victim, own_rank,
            what, epic_error(ctx));
    _exit(1);
}

/* Draws the victim, the delay and the port of trial i. */
static void draw_victim(int i)
{
    unsigned seed = 77 + (unsigned)i;
    victim = rand_r(&seed) % num_ranks;
    delay_us = (unsigned)rand_r(&seed) % 20000;
    /* below the range from which the system chooses ports for connections */
    port = 20000 + ((unsigned)getpid() * 7 + (unsigned)i * 2) % 12000;
}

/* A thread of the victim, which ends or stops the process. fault_ms: a double that all ranks
 * share, which receives the time of the fault. */
static void *end_process(void *fault_ms)
{
    usleep(delay_us);
    *(double *)fault_ms = now_ms();
    if (fault == KILLED || fault == TWO_KILLED) raise(SIGKILL);
    if (fault == EXITED) _exit(0);
    kill(getpid(), SIGSTOP); /* this thread may continue for a moment before it stops */
    return NULL;
}

/* Returns memory that the ranks share, or NULL. */
static void *map_shared(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

/* Runs the trials of the command line RANKS GPUS TRIALS [FIRST]. `run` returns 1 if trial i has
 * passed. Returns the exit status of the program. */
static int run_trials(const char *name, int argc, char **argv, int (*run)(int i))
{
    if (argc < 4) return 2;
    num_ranks = atoi(argv[1]);
    num_gpus = atoi(argv[2]);
    const int trials = atoi(argv[3]), first = argc > 4 ? atoi(argv[4]) : 0;
    int passed = 0;
    if (num_ranks < 2 || num_ranks > MAX_RANKS) return 2;
    for (int i = first; i < first + trials; i++) passed += run(i);
    printf("%s %d processes, %d GPUs: %d of %d faults handled correctly\n", name, num_ranks,
           num_gpus, passed, trials);
    return passed != trials;
}

#endif
