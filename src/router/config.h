/* SPDX-License-Identifier: Apache-2.0 */
/* The router's configuration of one call: checked options, and the workspace of one token.
 *
 * A router has `num_columns` columns: num_experts experts, then zero_experts zero-experts
 * (which return the token itself). "Logits" are the outputs of the gate, one per column. */
#ifndef EPIC_ROUTER_CONFIG_H
#define EPIC_ROUTER_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"
#include "exchange/op_header.h"

#define MAX_COLUMNS 65536 /* experts and zero-experts together */

/* One call of the router or of a loss. Arrays below the comment "one token" hold float32 or
 * float64 numbers, the type in which the token is computed. */
typedef struct router_job {
    epic_router router;  /* defaults filled in */
    int64_t num_columns; /* num_experts + zero_experts */
    const float *bias;
    const void *scale_of_expert; /* [num_columns] of weights_type, or NULL */
    uint32_t type;
    uint32_t weights_type;
    uint32_t grad_type;
    bool accumulate;
    bool on_logits;     /* choose by the logits, whose order is that of the selection values */
    double *runs;       /* [LOSS_RUNS], partial sums of a loss */
    double *scale_sums; /* [num_columns], sums over tokens of the gradient of scale_of_expert */
    /* one token */
    void *logits;   /* [num_columns] */
    void *scores;   /* [num_columns] */
    void *values;   /* [num_columns], selection values; scratch space in backward */
    void *spare;    /* [num_columns], group scores; gradients in backward */
    int32_t *order; /* [num_columns], columns or groups in order of their values */
    uint8_t *kept;  /* [num_groups], 1 if the group is kept */
} router_job;

/* Arguments that all calls have in common. */
typedef struct router_common {
    const epic_router *router;
    const void *logits;
    int64_t num_tokens;
    void *workspace;
    int64_t workspace_bytes;
    uint32_t type;
    uint32_t flags;
    uint32_t known_flags;
} router_common;

/* Checks these arguments and fills in *job, except bias, weights_type and grad_type.
 * EPIC_EINVAL. */
epic_result router_job_init(router_job *job, const router_common *common);

/* Checks and sets job->weights_type; 0: EPIC_F32. EPIC_EINVAL. */
epic_result router_job_set_weights_type(router_job *job, uint32_t weights_type);
/* Checks and sets job->grad_type; 0: the type of the logits. EPIC_EINVAL. */
epic_result router_job_set_grad_type(router_job *job, uint32_t grad_type);

/* Returns the bytes of workspace that a call needs. */
int64_t router_job_workspace_bytes(const router_job *job);

/* Returns the row of a token in `logits` [tokens, num_columns]. */
const void *router_job_logits_row(const router_job *job, const void *logits, int64_t token);
/* Returns the row of a token in `d_logits` [tokens, num_columns]. */
void *router_job_d_logits_row(const router_job *job, void *d_logits, int64_t token);

/* Checks the arguments of epic_router_forward, except the contents of token_ids and table,
 * and fills in *job. EPIC_EINVAL. */
epic_result router_prepare_forward(router_job *job, const epic_router_args *args);

/* Returns the first token id or table entry that is out of range. Reads host memory. */
data_fault router_find_fault(const router_job *job, const epic_router_args *args);

/* Checks that every id is below num_columns. Negative ids are valid: no choice. EPIC_EINVAL. */
epic_result router_check_ids(const router_job *job, const int32_t *topk_idx,
                             int64_t num_tokens);

#endif
