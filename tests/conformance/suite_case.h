/* SPDX-License-Identifier: Apache-2.0 */
/* One random case: a plan and every operation that uses it, each checked against the oracle. */
#ifndef SUITE_CASE_H
#define SUITE_CASE_H

#include "suite_memory.h"
#include "world.h"

#define CASE_MOST_ARRAYS 16
#define CASE_POISON 0xab

/* An array of a call. */
typedef struct case_array {
    unsigned char *here; /* where it is made and checked */
    void *there;         /* what the running call has of it, or NULL */
    int64_t bytes;
} case_array;

/* One rank in one case. */
typedef struct seat {
    epic_context *ctx;
    const epic_bootstrap *bootstrap;
    const world *w;
    int rank;
    uint64_t tag;
    bool delays; /* sleeps before operations */
    run_random own;
    unsigned char *plan;
    int64_t plan_bytes;
    case_array arrays[CASE_MOST_ARRAYS]; /* the plan, then those of one phase */
    int num_arrays;
    bool absent; /* the backend lacks this layer */
    int64_t first_token, num_tokens, num_slots;
    uint64_t plan_id;
    long failed_before;
} seat;

void case_begin(seat *s, epic_context *ctx, const epic_bootstrap *bootstrap, const world *w,
                uint64_t tag, bool delays);

/* The operations of a case, in an order that all ranks share; false: there is none left. */
bool case_phase(seat *s, int phase);

void case_end(seat *s);

/* All of a case. */
void case_run(epic_context *ctx, const epic_bootstrap *bootstrap, const world *w, uint64_t tag,
              bool delays);

/* A plan with an id that is no expert, or where ids are distinct one that its token has already, on
 * rank `victim`: every rank is told whose, nothing is moved with it, and the group is whole.  It
 * has tokens; the case goes well otherwise. */
void case_bad_choice(epic_context *ctx, const epic_bootstrap *bootstrap, const world *w,
                     uint64_t tag, int victim);

/* Rounds of the simple step (epic_dispatcher_open), on a context of the caller's. */
void case_easy(epic_context *ctx, const epic_bootstrap *bootstrap, int rounds, bool gradients);

/* Do all ranks say so?  They meet here, outside of EPIC. */
bool case_agree(const epic_bootstrap *bootstrap, bool mine);

/* Calls that were refused as what the backend lacks, by all ranks. */
long case_num_lacked(void);

/* Arrays of a phase, which end with it. */
epic_rows case_rows(seat *s, int64_t num_rows, int64_t row_bytes); /* poisoned memory */
void *case_copy(seat *s, const void *from, int64_t bytes);
void case_drop(seat *s);

/* A call: its arrays are lent to it, by the addresses that the phase knows, and are back, with
 * what it wrote, when it has returned.  `needs`: of suite_need. */
void *case_lend(seat *s, const void *here);
epic_rows case_lend_rows(seat *s, epic_rows here);
epic_plan_args case_lend_plan(seat *s, const epic_plan_args *args);
epic_call case_call(const seat *s);
epic_result case_return(seat *s, epic_result result, uint32_t needs);

/* Was it refused as what the backend lacks?  There is nothing to check then. */
bool case_lacks(uint32_t needs);

/* What the phases are made of. */
void case_nap(seat *s);
bool case_poisoned(const void *bytes, int64_t count); /* untouched? */
bool case_zero(const void *bytes, int64_t count);
void case_refused(seat *s, epic_result result, epic_result expected);
int64_t case_hidden(seat *s, run_random *common, uint32_t type); /* elements of a row */
uint32_t case_type(run_random *common, bool wide);

void case_plan(seat *s, run_random *common);
void case_plan_dispatch(seat *s, run_random *common);
void case_dispatch(seat *s, run_random *common);
void case_dispatch_planned(seat *s, run_random *common, const epic_plan_args *plan);
void case_combine(seat *s, run_random *common);
void case_combine_backward(seat *s, run_random *common);
void case_dispatch_backward(seat *s, run_random *common);
void case_sum_replicas(seat *s, run_random *common);
void case_sum(seat *s, run_random *common);

#endif
