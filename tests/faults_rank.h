/* SPDX-License-Identifier: Apache-2.0 */
/* What can go wrong, and a rank of a group in which it does. */
#ifndef FAULTS_RANK_H
#define FAULTS_RANK_H

#include <stdatomic.h>
#include <stdint.h>

#include "faults.h"
#include "step.h"

#define MAX_RANKS 4

enum kind {
    KILLED,    /* by SIGKILL */
    EXITED,    /* without epic_close */
    CLOSED,    /* epic_close instead of the call */
    STOPPED,   /* SIGSTOP, for longer than the deadline */
    PAUSED,    /* SIGSTOP and SIGCONT within it: no fault at all */
    SKIPPED,   /* the call is not made */
    SHAPE,     /* the call has another shape */
    OPERATION, /* another call */
    LATE,      /* by less than the deadline: no fault */
    EMPTY,     /* no tokens: no fault */
    ABORTED,   /* epic_abort */
    NUM_KINDS
};

typedef struct fault_kind {
    const char *name;
    bool needs_process, dies, middle; /* can come in the middle of operations */
    epic_result result;               /* of the others */
} fault_kind;

extern const fault_kind kinds[NUM_KINDS];

typedef struct fault {
    enum kind kind;
    bool middle;
    uint32_t operation, other;
    int num_ranks, victim;
    uint32_t deadline_ms;
    long late_us;  /* of who is paused or late */
    long delay_us; /* until a fault in the middle */
    uint64_t seed;
    char name[128];
} fault;

/* What the ranks of one fault and their parent share. */
typedef struct stage {
    _Atomic int opened, done, closed; /* ranks that came so far */
    _Atomic pid_t victim;
    _Atomic uint64_t begin_ns;   /* when it went wrong */
    _Atomic long passed, failed; /* checks of ranks that were launched */
    _Atomic int late;            /* answers that came after the time that is promised, */
    char lateness[256];          /* the first of them */
} stage;

/* Over all faults.  again: those that were tried again, as answers were late. */
typedef struct tally {
    _Atomic int faults, hangs, wrong_results, wrong_culprits, late, again;
    _Atomic int of_kind[NUM_KINDS];
    _Atomic long slowest_ms[NUM_KINDS]; /* answer; for a deadline, after it */
} tally;

extern const faults_way *way;
extern tally *told;
extern long slack_ms; /* more than the limits allow, as cores are shared */

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
