/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments of the device kernels for the parts of a layer that each rank computes for its own
 * tokens without dispatch: the gate of the shared expert, and the zero-experts, whose output is
 * their input. The ids of zero-experts start at num_experts. */
#ifndef EPIC_LAYER_TOKENS_H
#define EPIC_LAYER_TOKENS_H

#include <stdint.h>

typedef struct layer_tokens {
    int64_t num_tokens, hidden, top_k;
    int32_t num_experts, num_columns; /* num_columns includes the zero-experts */
    uint32_t row_type;
    const void *x;              /* [num_tokens, hidden] of row_type */
    const void *d_out;          /* backward: [num_tokens, hidden] of row_type; else NULL */
    const int32_t *topk_idx;    /* [num_tokens, top_k]; NULL: the layer has no zero-experts */
    const float *weights;       /* [num_tokens, top_k]: weights of the choices */
    float *d_weights;           /* backward: [num_tokens, top_k], gradient of `weights` */
    const float *w_shared_gate; /* [hidden]; NULL: the shared expert has no gate */
    /* [num_tokens]: output of the shared expert's gate, sigmoid(x w_shared_gate) */
    float *shared_weights;
    float *d_shared_weights; /* backward: [num_tokens], gradient of shared_weights */
} layer_tokens;

/* Arguments of the kernel that adds up a layer's output. All arrays are [num_tokens, hidden] of
 * row_type, and `to` may be `a`. Forward: to = a + b + the outputs of the zero-experts.
 * Backward: to = a + b + the gradients of x through the zero-experts and the shared expert's
 * gate. */
typedef struct layer_rows {
    void *to;
    const void *a, *b; /* NULL: zeros */
} layer_rows;

#endif
