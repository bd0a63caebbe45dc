/* SPDX-License-Identifier: Apache-2.0 */
/* The experts' configuration of one call: checked options and arguments, and the workspace
 * of one slab.
 *
 * A "slab" is the consecutive slots of one local expert. An expert is an MLP: gate_up = x
 * W_gate_up + b_gate_up [slots, width], a = activation(gate) * up [slots, inner], y = a
 * W_down + b_down [slots, hidden]. Without a gate, width is inner and a =
 * activation(gate_up). */
#ifndef EPIC_EXPERTS_CONFIG_H
#define EPIC_EXPERTS_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

/* One call of the experts. Numbers in the workspace are float32, or float64 if rows are F64. */
typedef struct experts_job {
    epic_experts experts; /* defaults filled in */
    int64_t hidden;
    int64_t inner;
    int64_t width;        /* of the first product: 2 * inner, or inner without a gate */
    bool is_f64;          /* rows and weights are F64 */
    bool is_e4m3;         /* weights are E4M3, and x is in forward */
    bool has_f64_weights; /* slot_weights are float64 */
    bool accumulate;
    bool is_recompute; /* forward with EPIC_RECOMPUTE: computes `saved` only */
    /* BF16 rows and weights are multiplied without a conversion, and activations are rounded to
     * BF16. */
    bool is_bf16;
    bool is_device;     /* arrays are in device memory, so the host must not read them */
    uint32_t grad_type; /* type of the gradients of weights and biases */

    const void *x;
    const int32_t *expert_rows;
    const int32_t *expert_tokens;
    const void *slot_weights;
    const void *w_gate_up;
    const void *w_down;
    const void *b_gate_up;
    const void *b_down;

    void *saved;          /* forward only */
    void *y;              /* forward only */
    const void *saved_in; /* backward: `saved` of forward */
    const void *d_y;      /* backward */
    void *d_x, *d_w_gate_up, *d_w_down, *d_b_gate_up, *d_b_down;
    void *d_slot_weights;

    /* Workspace of one slab. */
    void *rows;         /* [slots, hidden], unless the caller's rows can be used as they are */
    void *activations;  /* [slots, inner] */
    void *d_gate_up;    /* backward: [slots, width] */
    void *weights_tile; /* one tile of weights, converted */
    void *line;         /* [2 * max(hidden, inner)], followed by one row of an operand */
    void *bias;         /* [max(width, hidden)], converted */
} experts_job;

/* The slots of one local expert. */
typedef struct slab {
    int64_t expert;
    int64_t first;  /* slot */
    int64_t rows;   /* padding included */
    int64_t tokens; /* rows before the padding */
} slab;

/* Checks *type, the type of weight gradients that the caller wants, and replaces 0 by the
 * default (float32, or float64 with F64 rows). EPIC_EINVAL. */
epic_result experts_read_grad_type(uint32_t *type, uint32_t row_type, bool device);

/* Reads and checks the caller's struct into *job. EPIC_EINVAL. */
epic_result experts_read_config(experts_job *job, const epic_experts *theirs, size_t size);

/* Does the activation clamp its inputs to the limit? */
static inline bool experts_is_clamped(const epic_experts *ex)
{
    return ex->activation == EPIC_CLAMPED_SWIGLU || ex->activation == EPIC_CLAMPED_SILU;
}

/* Can a matrix product read the caller's rows (weights) without a conversion? */
bool experts_has_ready_rows(const experts_job *job);
bool experts_has_ready_weights(const experts_job *job);

/* Returns how many columns (or rows) of a weight matrix are converted at once: at most n, of
 * k numbers each. It depends on the shapes alone, because the bits of a product may depend
 * on how it is cut. */
int64_t experts_tile_size(int64_t k, int64_t n);

/* Fills in *out for num_slots slots, on a CUDA device or on the host.  Errors: EPIC_EINVAL;
 * EPIC_ENOTSUP for E4M3 weights on the host and F64 rows on a device. */
epic_result experts_memory(const epic_experts *experts, size_t experts_size, int64_t num_slots,
                           bool on_device, epic_experts_memory_info *out);

/* Return the bytes of `saved` and of the workspace for num_slots slots, on the host or on a
 * device (job->is_device). */
int64_t experts_saved_bytes(const experts_job *job, int64_t num_slots);
int64_t experts_workspace_bytes(const experts_job *job, int64_t num_slots, bool backward);
/* Sets the workspace pointers of *job to places inside `workspace`. Host only. */
void experts_layout_workspace(experts_job *job, int64_t num_slots, bool backward,
                              void *workspace);

/* Run forward or backward on one slab, in float32 or float64. Between experts_blas_enter()
 * and experts_blas_leave() only. */
void experts_forward_f32(const experts_job *job, const slab *slab);
void experts_forward_f64(const experts_job *job, const slab *slab);
void experts_backward_f32(const experts_job *job, const slab *slab);
void experts_backward_f64(const experts_job *job, const slab *slab);

#endif
