/* SPDX-License-Identifier: Apache-2.0 */
/* The kinds of faults, and the part of one rank in a group that has a fault. */
#ifndef FAULTS_RANK_H
#define FAULTS_RANK_H

#include <stdatomic.h>
#include <stdint.h>

#include "faults.h"
#include "step.h"

#define FEW_RANKS 4  /* largest number of ranks, unless the way has many ranks */
#define MAX_RANKS 64 /* largest number that a way may have */

enum kind {
    KILLED,    /* ended by SIGKILL */
    EXITED,    /* exits without epic_close */
    CLOSED,    /* calls epic_close instead of the operation */
    STOPPED,   /* SIGSTOP for longer than the deadline */
    PAUSED,    /* SIGSTOP and SIGCONT within the deadline: no error */
    SKIPPED,   /* leaves out the call */
    SHAPE,     /* passes another shape */
    OPERATION, /* calls another operation */
    LATE,      /* late by less than the deadline: no error */
    EMPTY,     /* passes no tokens: no error */
    ABORTED,   /* calls epic_abort */
    NUM_KINDS
};

typedef struct fault_kind {
    const char *name;
    bool needs_process, dies, middle; /* middle: may also happen while operations run */
    epic_result result;               /* result of the other ranks */
} fault_kind;

extern const fault_kind kinds[NUM_KINDS];

typedef struct fault {
    enum kind kind;
    bool middle;
    uint32_t operation, other;
    int num_ranks, victim;
    uint32_t deadline_ms;
    long late_us;  /* how long the victim is paused or late */
    long delay_us; /* time until a fault in the middle of operations */
    uint64_t seed;
    char name[128];
} fault;

/* Memory that the ranks of one fault and their parent share. */
typedef struct stage {
    _Atomic int opened, done, closed; /* numbers of ranks that reached this point */
    _Atomic pid_t victim;
    _Atomic uint64_t begin_ns;   /* when the fault happened */
    _Atomic long passed, failed; /* checks of ranks that a launcher started */
    _Atomic int late;            /* number of errors that came after the promised time */
    char lateness[256];          /* description of the first late error */
} stage;

/* Counts over all faults. again: faults that were repeated because errors came late. */
typedef struct tally {
    _Atomic int faults, hangs, wrong_results, wrong_culprits, late, again;
    _Atomic int of_kind[NUM_KINDS];
    _Atomic long slowest_ms[NUM_KINDS]; /* slowest error; for a deadline, the time after it */
} tally;

extern const faults_way *way;
extern tally *totals;
extern long slack_ms; /* extra time that limits allow, because cores are shared */

typedef struct rank_of_fault {
    const fault *f;
    stage *stage;
    epic_bootstrap bootstrap, again;
    epic_context *ctx;
    step step;
    bool victim;
} rank_of_fault;

void choose(fault *f, uint64_t seed);
void wait_for(_Atomic int *count, int many);
void be_rank(rank_of_fault *r);

#endif
