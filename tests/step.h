/* SPDX-License-Identifier: Apache-2.0 */
/* A small set of operations with results that are easy to check. Each operation can be
 * called with correct arguments or with one mistake. */
#ifndef STEP_H
#define STEP_H

#include <stdbool.h>

#include "epic/epic.h"

/* smallest number of experts; a step has the next multiple of its number of ranks */
#define STEP_EXPERTS 24
#define STEP_TOP_K 2
#define STEP_MAX_TOKENS 64
#define STEP_MAX_ROW_BYTES 8192

/* Arrays of one rank. */
typedef struct step {
    epic_context *ctx;
    int rank, num_ranks;
    int64_t tokens, hidden, slots, count;
    epic_layer layer;
    unsigned char *plan;
    int64_t plan_bytes;
    int32_t *topk_idx; /* [tokens, top_k] */
    int32_t *expert_rows, *expert_tokens, *load, *demand;
    float *x, *recv, *out, *d_out, *d_rows, *d_tokens; /* rows */
    float *weights, *slot_weights, *d_weights, *d_slot_weights;
    float *sum; /* [count] */
} step;

/* Makes the arrays; calls nothing of EPIC. The layer is EPIC_EXPERT_MAJOR and EPIC_BY_RANK;
 * the caller may change it to EPIC_FLAT or EPIC_TREE afterwards. */
void step_open(step *s, epic_context *ctx, int64_t tokens, int64_t hidden);
void step_close(step *s);

/* Return the correct arguments of each operation. */
epic_plan_args step_plan(step *s, uint64_t tag);
epic_dispatch_args step_dispatch(step *s, uint64_t tag);
epic_combine_args step_combine(step *s, uint64_t tag);
epic_dispatch_backward_args step_dispatch_backward(step *s, uint64_t tag);
epic_combine_backward_args step_combine_backward(step *s, uint64_t tag);
epic_allreduce_sum_args step_sum(step *s, uint64_t tag);

enum step_change {
    STEP_SAME,
    STEP_OTHER_SHAPE, /* rows of half the width, one choice less, fewer floats to sum */
    STEP_EMPTY        /* no tokens on this rank, which is valid; for plan only */
};

/* Calls one operation, an epic_operation. All except plan and sum need a plan. */
epic_result step_call(step *s, uint32_t operation, const epic_call *call,
                      enum step_change change);

/* Collective. Calls every operation and checks the results; returns false if a check failed. */
bool step_all(step *s, uint64_t tag);
bool step_works(epic_context *ctx, uint64_t tag);

#endif
