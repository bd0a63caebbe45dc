/* SPDX-License-Identifier: Apache-2.0 */
/* Rules of the router and the losses that host and CUDA share, in plain C. */
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

/* Returns true if experts may be chosen by logits, which have the order of the selection
 * values. */
RULE bool router_on_logits(const epic_router *r, bool has_bias)
{
    return r->score == EPIC_SCORE_LOGITS ||
           (!has_bias && (r->num_groups == 0 || r->group_score == EPIC_GROUP_MAX));
}

/* Returns true if experts of groups that are not kept are left out (EPIC_OTHERS_OUT).  They are
 * left out as well where logits replace scores: scores are above 0, so the others never win. */
RULE bool router_others_out(const epic_router *r, bool on_logits)
{
    return r->group_others == EPIC_OTHERS_OUT || (on_logits && r->score != EPIC_SCORE_LOGITS);
}

#endif
