/* SPDX-License-Identifier: Apache-2.0 */
/* State of one call of the experts: the checked options and arguments, and the workspace.
 *
 * A slab is the slots of one local expert. The slots of a slab are contiguous. Each expert is
 * an MLP of two GEMMs:
 *
 * - First GEMM: gate_up [slots, width] = x W_gate_up + b_gate_up.
 * - Activation: a [slots, inner] = activation(gate) * up. Without a gate, a =
 *   activation(gate_up).
 * - Second GEMM: y [slots, hidden] = a W_down + b_down.
 *
 * width is 2 * inner with a gate, and inner without one. On the host, forward and backward
 * convert weight matrices to float32 or float64, the type of the sums, one tile at a time. A
 * tile is a range of columns or rows of a weight matrix. */
#ifndef EPIC_EXPERTS_CONFIG_H
#define EPIC_EXPERTS_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

/* State of one call of epic_experts_forward or epic_experts_backward. The workspace holds
 * float32 elements, or float64 elements if the rows are F64. */
typedef struct experts_job {
    epic_experts experts; /* the caller's options, with defaults filled in */
    int64_t hidden;
    int64_t inner;
    int64_t width; /* number of columns of the first GEMM: 2 * inner, or inner without a gate */
    bool is_f64;   /* rows and weights are F64 */
    bool is_e4m3;  /* weights are E4M3; in forward, x is E4M3 too */
    bool has_f64_weights; /* slot_weights are float64 */
    bool accumulate;      /* EPIC_ACCUMULATE is set: the call adds to the gradients */
    /* EPIC_RECOMPUTE is set: forward computes only `saved`, which backward reads */
    bool is_recompute;
    /* EPIC_INVARIANT is set: the bits of a GEMM do not depend on the number of rows */
    bool is_invariant;
    /* true: rows and weights are BF16, and oneDNN multiplies them without conversion; inputs of
     * later GEMMs, such as activations, are rounded to BF16 */
    bool is_bf16;
    /* true: gemm_few() computes the GEMMs of experts with at most HOST_FEW_ROWS rows */
    bool has_few;
    bool is_device;     /* arrays are in device memory, which the host must not read */
    uint32_t grad_type; /* epic_type of the gradients of weights and biases; only in backward */

    /* The arguments of the caller. In the shapes, `local` is num_local_experts. Biases and
     * expert_tokens may be NULL. */
    const void *x;                /* [slots, hidden]: input rows of the experts */
    const int32_t *expert_rows;   /* [local]: number of slots of each expert, with padding */
    const int32_t *expert_tokens; /* [local]: number of slots of each expert, without padding */
    const void *slot_weights;     /* [slots], or NULL with EPIC_WEIGHT_LATE */
    const void *w_gate_up;        /* [local, hidden, width]: weights of the first GEMM */
    const void *w_down;           /* [local, inner, hidden]: weights of the second GEMM */
    const void *b_gate_up;        /* [local, width]: bias of the first GEMM */
    const void *b_down;           /* [local, hidden]: bias of the second GEMM */

    void *saved;          /* output of forward: the result of the first GEMM */
    void *y;              /* output of forward: the result of the second GEMM */
    const void *saved_in; /* input of backward: the array `saved` of forward */
    const void *d_y;      /* input of backward: the gradient of y */
    void *d_x, *d_w_gate_up, *d_w_down, *d_b_gate_up, *d_b_down;
    void *d_slot_weights;

    /* The workspace. The slabs are computed one after the other, and all use the same
     * workspace. */
    /* [slots, hidden]: input rows, converted to the type of the sums and, with
     * EPIC_WEIGHT_INPUT, multiplied by their weights; empty if GEMMs can read the caller's
     * rows */
    void *rows;
    void *activations; /* [slots, inner]: input of the second GEMM */
    void *d_gate_up;   /* [slots, width], used by backward */
    /* one tile (some columns or rows) of a weight matrix, converted to float32 */
    void *weights_tile;
    /* Scratch memory in two parts. The first part, [2 * max(hidden, inner)], is for the row of
     * results that a GEMM is computing. The second part is for one input row of a GEMM,
     * converted to float32. */
    void *row_scratch;
    /* [max(width, hidden)]: a bias of the current expert, converted to the type of the sums */
    void *bias;
    /* the argument `memory` of gemm_few(), gemm_invariant_f32() and gemm_invariant_f64() */
    void *product_memory;
} experts_job;

/* The slots of one local expert. */
typedef struct slab {
    int64_t expert;
    int64_t first;  /* index of the first slot */
    int64_t rows;   /* number of slots, with padding */
    int64_t tokens; /* number of slots before the padding */
} slab;

/* Checks *type, the caller's type for the gradients of weights and biases, and replaces 0 by
 * the default: float64 for F64 rows, and float32 for all others. On a device *type may also be
 * row_type. Returns EPIC_OK or EPIC_EINVAL. */
epic_result experts_read_grad_type(uint32_t *type, uint32_t row_type, bool device);

/* Copies the caller's epic_experts of `size` bytes into job->experts, fills in its defaults and
 * checks it. Sets the sizes and the type flags of *job. Returns EPIC_OK or EPIC_EINVAL. */
epic_result experts_read_config(experts_job *job, const epic_experts *theirs, size_t size);

/* Returns true if the activation limits its inputs to experts.limit. */
static inline bool experts_is_clamped(const epic_experts *ex)
{
    return ex->activation == EPIC_CLAMPED_SWIGLU || ex->activation == EPIC_CLAMPED_SILU;
}

/* experts_has_ready_rows() returns whether GEMMs can read the caller's rows without conversion.
 * experts_has_ready_weights() returns the same for the caller's weights. */
bool experts_has_ready_rows(const experts_job *job);
bool experts_has_ready_weights(const experts_job *job);

/* Returns the size of a tile: the number of columns (or rows) of a weight matrix that are
 * multiplied at a time. The matrix has n columns (or rows) with k elements each. The bits of a
 * GEMM can depend on the size of the tiles. The tile size depends only on k and n, so GEMMs
 * with the same shape and the same inputs always have the same bits. */
int64_t experts_tile_size(int64_t k, int64_t n);

/* Writes the sizes in bytes of `saved` and of the workspaces of forward and backward to *out,
 * for num_slots slots. on_device is true for a CUDA device and false for the host. Errors:
 * EPIC_EINVAL, and EPIC_ENOTSUP for E4M3 weights on the host or F64 rows on a device. */
epic_result experts_memory(const epic_experts *experts, size_t experts_size, int64_t num_slots,
                           bool on_device, epic_experts_memory_info *out);

/* Return sizes in bytes for num_slots slots: the size of `saved`, and the size of the workspace
 * of forward or, if `backward` is true, of backward. The sizes depend on job->is_device. */
int64_t experts_saved_bytes(const experts_job *job, int64_t num_slots);
int64_t experts_workspace_bytes(const experts_job *job, int64_t num_slots, bool backward);
/* Sets the workspace pointers of *job to parts of `workspace`. Requires a host context. */
void experts_layout_workspace(experts_job *job, int64_t num_slots, bool backward,
                              void *workspace);

/* Run the forward or backward pass on one slab, in float32 or float64. Requires that
 * experts_blas_enter() was called, and experts_blas_leave() was not called yet. */
void experts_forward_f32(const experts_job *job, const slab *slab);
void experts_forward_f64(const experts_job *job, const slab *slab);
void experts_backward_f32(const experts_job *job, const slab *slab);
void experts_backward_f64(const experts_job *job, const slab *slab);

#endif
