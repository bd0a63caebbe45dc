/* SPDX-License-Identifier: Apache-2.0 */
/* A call's router, checked, and its workspace, cut up. */
#ifndef EPIC_ROUTER_CONFIG_H
#define EPIC_ROUTER_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"
#include "exchange/op_header.h"

#define MAX_COLUMNS 65536 /* experts and zero-experts together */

typedef struct router_job {
    epic_router router;  /* defaults filled in */
    int64_t num_columns; /* num_experts + zero_experts */
    const float *bias;
    const void *scale_of_expert; /* [num_columns] of weights_type, or NULL */
    uint32_t type;
    uint32_t weights_type;
    uint32_t grad_type;
    bool accumulate;
    bool on_logits;     /* choose on the logits: they rise with the selection values */
    double *runs;       /* [LOSS_RUNS] */
    double *scale_sums; /* [num_columns] the gradient of scale_of_expert so far */
    /* Of one token at a time, float32 or float64 as it is computed. */
    void *logits;   /* [num_columns] */
    void *scores;   /* [num_columns] */
    void *values;   /* [num_columns] */
    void *spare;    /* [num_columns] */
    int32_t *order; /* [num_columns] */
    uint8_t *kept;  /* [num_groups] */
} router_job;

/* What every call brings: the router, the logits, the workspace. */
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

/* Checks these and sets up the job, without bias, weights_type and grad_type.  EPIC_EINVAL. */
epic_result router_job_init(router_job *job, const router_common *common);

/* Fills in weights_type and grad_type; 0 is the default of each. */
epic_result router_job_set_weights_type(router_job *job, uint32_t weights_type);
epic_result router_job_set_grad_type(router_job *job, uint32_t grad_type);

/* The workspace that it needs. */
int64_t router_job_workspace_bytes(const router_job *job);

/* The logits of one token. */
const void *router_job_logits_row(const router_job *job, const void *logits, int64_t token);
void *router_job_d_logits_row(const router_job *job, void *d_logits, int64_t token);

/* What epic_router_forward can check without looking at ids; EPIC_EINVAL. */
epic_result router_prepare_forward(router_job *job, const epic_router_args *args);

/* The first token id or table entry that is none, in host memory. */
data_fault router_find_fault(const router_job *job, const epic_router_args *args);

/* Every id below num_columns?  Negative ones are. */
epic_result router_check_ids(const router_job *job, const int32_t *topk_idx,
                             int64_t num_tokens);

#endif
