/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of the router and of the losses that host code and CUDA kernels share. */
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

/* The sum of a loss over the tokens is divided into this many partial sums, the runs. Each run
 * adds an equal number of consecutive tokens in ascending order, in float64. Then run i +
 * distance is added to run i, for the distances LOSS_RUNS / 2, LOSS_RUNS / 4 and so on to 1. */
#define LOSS_RUNS 2048

RULE int64_t loss_run_tokens(int64_t num_tokens)
{
    return (num_tokens + LOSS_RUNS - 1) / LOSS_RUNS;
}

/* Returns true if the logits have the same order as the selection values
 * (router/choose_template.h), so that experts may be chosen by their logits. */
RULE bool router_on_logits(const epic_router *r, bool has_bias)
{
    return r->score == EPIC_SCORE_LOGITS ||
           (!has_bias && (r->num_groups == 0 || r->group_score == EPIC_GROUP_MAX));
}

/* Returns true if experts that are not in one of the kept groups can never be chosen. on_logits
 * is the result of router_on_logits().
 *
 * EPIC_OTHERS_OUT excludes these experts. With EPIC_OTHERS_ZERO their score is 0, so they are
 * never chosen if all scores in the kept groups are above 0. This is the case if on_logits is
 * true and the score is not EPIC_SCORE_LOGITS. */
RULE bool router_others_out(const epic_router *r, bool on_logits)
{
    return r->group_others == EPIC_OTHERS_OUT || (on_logits && r->score != EPIC_SCORE_LOGITS);
}

#endif
