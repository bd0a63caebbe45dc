/* SPDX-License-Identifier: Apache-2.0 */
/* One random case: a plan and every operation that uses it, each compared with the oracle. */
#ifndef SUITE_CASE_H
#define SUITE_CASE_H

#include "suite_memory.h"
#include "world.h"

#define CASE_MOST_ARRAYS 20
#define CASE_POISON 0xab

/* An array that a call reads or writes. */
typedef struct case_array {
    unsigned char *here; /* host copy, in which it is made and checked */
    void *base;          /* memory for the running call, or NULL */
    void *there;         /* copy that the running call uses */
    int64_t bytes;
} case_array;

/* One rank in one case. */
typedef struct seat {
    epic_context *ctx;
    const epic_bootstrap *bootstrap;
    const world *w;
    int rank; /* number of the member */
    uint64_t tag;
    bool delays; /* sleeps before operations */
    run_random own;
    run_random places; /* draws which arrays lie in windows */
    unsigned char *plan;
    int64_t plan_bytes;
    case_array arrays[CASE_MOST_ARRAYS]; /* arrays of the plan, then those of one phase */
    int num_arrays;
    int64_t shift; /* distance in bytes of the rows of a call from an address that 16 divides */
    bool absent;   /* the backend does not support this layer */
    int64_t first_token, num_tokens, num_slots;
    uint64_t plan_id;
    long failed_before;
} seat;

void case_begin(seat *s, epic_context *ctx, const epic_bootstrap *bootstrap, const world *w,
                uint64_t tag, bool delays);

/* Runs phase number `phase`, in an order that is equal on all ranks. Returns false if no
 * phase is left. */
bool case_phase(seat *s, int phase);

void case_end(seat *s);

/* Runs all phases of a case. */
void case_run(epic_context *ctx, const epic_bootstrap *bootstrap, const world *w, uint64_t tag,
              bool delays);

/* Runs a plan with an invalid choice on rank `victim`: an id out of range, or, where ids are
 * distinct, an id that its token has already. Every rank must get an error that names the
 * choice, dispatch must move nothing, and the group must stay usable. The victim must have
 * tokens. */
void case_bad_choice(epic_context *ctx, const epic_bootstrap *bootstrap, const world *w,
                     uint64_t tag, int victim);

/* Runs rounds of the dispatcher (epic_dispatcher_open) on a context of the caller. */
void case_easy(epic_context *ctx, const epic_bootstrap *bootstrap, int rounds, bool gradients);

/* Returns whether `mine` is true on all ranks. The ranks meet through the bootstrap, without
 * EPIC. */
bool case_agree(const epic_bootstrap *bootstrap, bool mine);

/* Number of calls that all ranks refused because the backend lacks a feature. */
long case_num_lacked(void);

/* Make arrays that live until the end of the phase. */
epic_rows case_rows(seat *s, int64_t num_rows, int64_t row_bytes); /* filled with poison */
void *case_copy(seat *s, const void *from, int64_t bytes);
void case_drop(seat *s);

/* Chooses whether the rows of the phase are at addresses that only their elements divide.
 * `quantize`: rows have scales of 4 bytes. */
void case_choose_shift(seat *s, const run_random *common, uint32_t type, bool quantize);

/* Adds a window to a context of this rank, from which arrays of its calls are then taken.
 * case_windows_close() is called before the context closes. */
void case_windows_open(epic_context *ctx);
void case_windows_close(const epic_context *ctx);

/* Around a call: case_lend() copies an array to the memory of the backend and returns the
 * address for the call. case_return() copies all lent arrays back and returns the result of
 * the call. `needs` has bits of suite_need. */
void *case_lend(seat *s, const void *here);
epic_rows case_lend_rows(seat *s, epic_rows here);
epic_const_rows case_lend_const_rows(seat *s, epic_const_rows here);
epic_plan_args case_lend_plan(seat *s, const epic_plan_args *args);
epic_call case_call(const seat *s);
epic_result case_return(seat *s, epic_result result, uint32_t needs);

/* Returns whether the call was refused because the backend lacks a feature. Then there is
 * nothing to check. */
bool case_lacks(uint32_t needs);

/* Helpers of the phases. */
void case_nap(seat *s);
bool case_poisoned(const void *bytes, int64_t count); /* still filled with poison? */
bool case_zero(const void *bytes, int64_t count);
void case_refused(seat *s, epic_result result, epic_result expected);
int64_t case_hidden(seat *s, run_random *common,
                    uint32_t type); /* number of elements in a row */
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
