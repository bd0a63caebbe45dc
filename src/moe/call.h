/* SPDX-License-Identifier: Apache-2.0 */
/* What forward and backward have in common. */
#ifndef EPIC_MOE_CALL_H
#define EPIC_MOE_CALL_H

#include "moe/moe.h"

/* Reads weights, rows and memory of a call; EPIC_EINVAL. */
typedef struct moe_call {
    const epic_moe *moe;
    size_t moe_size;
    const epic_moe_weights *weights;
    size_t weights_size;
    const epic_rows *x, *y; /* y: out, or d_out */
    const char *y_name;
    const void *saved;
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    bool backward;
} moe_call;

epic_result moe_begin(moe_job *j, epic_context *ctx, const epic_call *call, const moe_call *c);

/* Block b of the tokens, with what was saved of it. */
dense_block moe_block(const moe_job *j, int64_t b);

/* The struct that the losses of a block take. */
epic_loss_args moe_loss_args(const moe_job *j, const dense_block *block);

#endif
