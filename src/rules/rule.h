/* SPDX-License-Identifier: Apache-2.0 */
/* Rules that host and CUDA follow alike.  Plain C. */
#ifndef EPIC_ROUTER_RULE_H
#define EPIC_ROUTER_RULE_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

#if defined(__CUDACC__)
#define RULE static inline __host__ __device__
#else
#define RULE static inline
#endif

/* A loss adds its tokens in runs: LOSS_RUNS runs of equally many tokens, in float64, each in
 * ascending order; then run i + distance is added to run i, distances LOSS_RUNS / 2 ... 1. */
#define LOSS_RUNS 2048

RULE int64_t loss_run_tokens(int64_t num_tokens)
{
    return (num_tokens + LOSS_RUNS - 1) / LOSS_RUNS;
}

/* Choose on the logits?  They rise with the selection values. */
RULE bool router_on_logits(const epic_router *r, bool has_bias)
{
    return r->score == EPIC_SCORE_LOGITS ||
           (!has_bias && (r->num_groups == 0 || r->group_score == EPIC_GROUP_MAX));
}

/* What becomes of experts of groups not kept, EPIC_OTHERS_OUT?  On logits that stand for
 * scores, too: scores are above 0, so the others never win. */
RULE bool router_others_out(const epic_router *r, bool on_logits)
{
    return r->group_others == EPIC_OTHERS_OUT || (on_logits && r->score != EPIC_SCORE_LOGITS);
}

#endif
