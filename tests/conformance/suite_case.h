/* SPDX-License-Identifier: Apache-2.0 */
/* One random case: a plan and every operation that uses it, each checked against the oracle. */
#ifndef SUITE_CASE_H
#define SUITE_CASE_H

#include "world.h"

/* One rank in one case. */
typedef struct seat {
    epic_context *ctx;
    const world *w;
    int rank;
    uint64_t tag;
    bool delays; /* sleeps before operations */
    run_random own;
    unsigned char *plan, *plan_memory;
    size_t plan_bytes;
    int64_t first_token, num_tokens, num_slots;
    uint64_t plan_id;
    long failed_before;
} seat;

void case_begin(seat *s, epic_context *ctx, const world *w, uint64_t tag, bool delays);

/* The operations of a case, in an order that all ranks share; false: there is none left. */
bool case_phase(seat *s, int phase);

void case_end(seat *s);

/* All of a case. */
void case_run(epic_context *ctx, const world *w, uint64_t tag, bool delays);

/* What the phases are made of. */
void case_nap(seat *s);
epic_rows case_rows(int64_t num_rows, int64_t row_bytes); /* poisoned memory */
bool case_poisoned(const void *bytes, int64_t count);     /* untouched? */
bool case_zero(const void *bytes, int64_t count);
void case_refused(seat *s, epic_result result, epic_result expected);
int64_t case_hidden(seat *s, run_random *common, uint32_t type); /* elements of a row */
uint32_t case_type(run_random *common, bool wide);

void case_plan(seat *s, run_random *common);
void case_plan_dispatch(seat *s, run_random *common);
void case_dispatch(seat *s, run_random *common);
void case_combine(seat *s, run_random *common);
void case_combine_backward(seat *s, run_random *common);
void case_dispatch_backward(seat *s, run_random *common);
void case_sum(seat *s, run_random *common);

#endif
