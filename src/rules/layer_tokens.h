/* SPDX-License-Identifier: Apache-2.0 */
/* The part of a layer on a device that is computed for each token outside of the routed
 * experts: the gate of the shared expert, and zero-experts, whose ids start at num_experts. */
#ifndef EPIC_LAYER_TOKENS_H
#define EPIC_LAYER_TOKENS_H

#include <stdint.h>

typedef struct layer_tokens {
    int64_t num_tokens, hidden, top_k;
    int32_t num_experts;
    uint32_t row_type;
    const void *x;              /* [num_tokens, hidden] of row_type, like all rows here */
    const void *d_out;          /* backward; NULL: forward */
    const int32_t *topk_idx;    /* [num_tokens, top_k]; NULL: there are no zero-experts */
    const float *weights;       /* [num_tokens, top_k] */
    float *d_weights;           /* backward: [num_tokens, top_k] */
    const float *w_shared_gate; /* [hidden]; NULL: the shared expert is not gated */
    float *shared_weights;      /* [num_tokens]: its factor, a sigmoid */
    float *d_shared_weights;    /* backward: [num_tokens] */
} layer_tokens;

/* Computes to = a + b + the output of the zero-experts (of x; in backward, of d_out).
 * Backward also adds the gradient through the gate of the shared expert. `to` may be `a`. */
typedef struct layer_rows {
    void *to;
    const void *a, *b; /* NULL: none */
} layer_rows;

#endif
