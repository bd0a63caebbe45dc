/* SPDX-License-Identifier: Apache-2.0 */
/* State of one call of the router: the checked options, and the workspace for one token.
 *
 * A *logit* is an output of the gate. A token has one logit for each *column*. The first
 * num_experts columns are the experts. The next zero_experts columns are the zero-experts,
 * whose output is the token itself. If num_groups is not 0, the columns form num_groups groups
 * of equal size. Only the topk_groups best groups of a token are kept. Depending on an option,
 * the columns of other groups cannot be chosen, or can be chosen with the value 0. */
#ifndef EPIC_ROUTER_CONFIG_H
#define EPIC_ROUTER_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"
#include "exchange/op_header.h"

#define MAX_COLUMNS 65536 /* maximum number of experts and zero-experts together */

/* State of one call of the router or of a loss. Arrays with the type void * contain float32
 * elements, or float64 elements if the logits are F64. */
typedef struct router_job {
    epic_router router;  /* the caller's options, with defaults filled in */
    int64_t num_columns; /* num_experts + zero_experts */
    /* [num_columns]: added to the scores when experts are chosen, but not when weights are
     * computed; NULL: no bias */
    const float *bias;
    const void *scale_of_expert; /* [num_columns] of weights_type, or NULL */
    uint32_t type;               /* epic_type of the logits */
    uint32_t weights_type;       /* epic_type of weights, scale_of_expert and scores */
    uint32_t grad_type;          /* epic_type of d_logits */
    bool accumulate;             /* EPIC_ACCUMULATE is set: the call adds to the gradients */
    /* true: experts are chosen by their logits, which have the same order as the values */
    bool on_logits;
    /* [LOSS_RUNS]: partial sums of a loss, each over a range of tokens (rules/rule.h) */
    double *runs;
    double *scale_sums; /* [num_columns]: gradient of scale_of_expert, summed over tokens */
    /* The members from here on are the workspace for one token. The tokens are handled one
     * after the other, and all use the same workspace. */
    void *logits; /* [num_columns]: logits of the token */
    void *scores; /* [num_columns]: scores of the columns */
    /* [num_columns]: values by which experts are chosen; scratch memory in backward */
    void *values;
    /* in the forward pass: scores of the groups [num_groups]; in the backward pass: gradients
     * [num_columns] */
    void *spare;
    int32_t *order;         /* [num_columns]: columns or groups, in the order of their values */
    uint8_t *is_kept_group; /* [num_groups]: 1 if this group of columns is kept for the token */
} router_job;

/* Arguments that the calls of the router and of the losses have in common. */
typedef struct router_common {
    const epic_router *router;
    const void *logits;
    int64_t num_tokens;
    void *workspace;
    int64_t workspace_bytes;
    uint32_t type;
    uint32_t flags;
    uint32_t known_flags; /* flags that the call accepts */
} router_common;

/* Checks the common arguments and fills in *job, except bias, weights_type and grad_type.
 * Returns EPIC_OK or EPIC_EINVAL. */
epic_result router_job_init(router_job *job, const router_common *common);

/* Checks weights_type and stores it in *job. A weights_type of 0 means EPIC_F32. Returns
 * EPIC_OK or EPIC_EINVAL. */
epic_result router_job_set_weights_type(router_job *job, uint32_t weights_type);
/* Checks grad_type and stores it in *job. A grad_type of 0 means the type of the logits.
 * Returns EPIC_OK or EPIC_EINVAL. */
epic_result router_job_set_grad_type(router_job *job, uint32_t grad_type);

int64_t router_job_workspace_bytes(const router_job *job);

const void *router_job_logits_row(const router_job *job, const void *logits, int64_t token);
void *router_job_d_logits_row(const router_job *job, void *d_logits, int64_t token);

/* Checks the arguments of epic_router_forward and fills in *job. Does not read the arrays
 * token_ids, table and topk_idx_in, because they may be in device memory. Returns EPIC_OK or
 * EPIC_EINVAL. */
epic_result router_prepare_forward(router_job *job, const epic_router_args *args);

/* Returns the first value that is out of range: a token id, an entry of the table or a forced
 * expert id. If all values are valid, returns a fault whose `error` is DATA_OK. Requires that
 * the arrays of *args are in host memory. */
data_fault router_find_fault(const router_job *job, const epic_router_args *args);

/* Returns EPIC_EINVAL if an expert id is num_columns or higher. Negative ids are valid and mean
 * that the choice has no expert. */
epic_result router_check_ids(const router_job *job, const int32_t *topk_idx,
                             int64_t num_tokens);

#endif
