/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the router for one token. row_f32.c and row_f64.c include this file, with
 * REAL defined as float or double. OF(name) appends _f32 or _f64 to a name that other files
 * use. Every sum has a fixed order (sum_block), so all processors compute the same bits. */
#include <string.h>

#include "router/row.h"
#include "rules/convert.h"
#include "rules/rule.h"
#include "rules/scalar.h"

#include "router/score_template.h"

/* the files below use functions of score_template.h */
#include "router/choose_template.h"
#include "router/loss_template.h"
#include "router/weigh_template.h"

/* Chooses the experts of a token and computes their weights. Computes the scores only if the
 * choice, the weights or the caller need them. */
static void choose_experts(const router_job *job, const void *logits, const int32_t *given,
                           int32_t *topk_idx, void *weights, void *scores)
{
    const epic_router *r = &job->router;
    const int64_t n = job->num_columns;
    const bool choosing_on_scores = given == NULL && !job->on_logits;
    load_row(job->logits, logits, job->type, n);
    if (scores != NULL || choosing_on_scores || r->weight_rule == EPIC_WEIGHT_OF_SCORE)
        make_scores(job->scores, job->logits, r->score, n);
    if (given != NULL)
        memcpy(topk_idx, given, r->top_k * sizeof *given);
    else
        select_experts(job, topk_idx);
    weigh_choices(job, topk_idx, weights);
    if (scores != NULL) store_row(scores, job->weights_type, job->scores, n);
}

static void choose_backward(const router_job *job, const void *logits, const int32_t *topk_idx,
                            const void *d_weights, void *d_logits)
{
    load_row(job->logits, logits, job->type, job->num_columns);
    if (job->router.weight_rule == EPIC_WEIGHT_OF_SCORE)
        make_scores(job->scores, job->logits, job->router.score, job->num_columns);
    weigh_backward(job, topk_idx, d_weights);
    store_d_logits(job, d_logits);
}

const router_row_ops OF(router_row_ops) = {
    .choose = choose_experts,
    .choose_backward = choose_backward,
    .balance = sum_balance,
    .balance_backward = balance_backward,
    .z_square = square_logsumexp,
    .z_backward = z_backward,
};
