/* SPDX-License-Identifier: Apache-2.0 */
/* A call of the experts, checked, and its workspace, cut up. */
#ifndef EPIC_EXPERTS_CONFIG_H
#define EPIC_EXPERTS_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

/* Numbers are float32 in what follows, float64 if the rows are F64. */
typedef struct experts_job {
    epic_experts experts; /* defaults filled in */
    int64_t hidden;
    int64_t inner;
    int64_t width;        /* of the first product: 2 * inner, or inner */
    bool is_f64;          /* float64 */
    bool is_e4m3;         /* E4M3 weights, and x */
    bool has_f64_weights; /* of slots: float64 */
    bool accumulate;
    bool is_recompute;  /* forward: nothing else is made */
    bool is_bf16;       /* BF16 rows and weights, multiplied as they lie: what lies between the
                           two products is rounded to BF16 */
    bool is_device;     /* of a CUDA context: nothing but arguments can be looked at here */
    uint32_t grad_type; /* of the gradients of weights and biases */

    const void *x;
    const int32_t *expert_rows;
    const int32_t *expert_tokens;
    const void *slot_weights;
    const void *w_gate_up;
    const void *w_down;
    const void *b_gate_up;
    const void *b_down;

    void *saved;          /* forward: out */
    void *y;              /* forward: out */
    const void *saved_in; /* backward: saved */
    const void *d_y;      /* backward */
    void *d_x, *d_w_gate_up, *d_w_down, *d_b_gate_up, *d_b_down;
    void *d_slot_weights;

    /* Workspace, of one slab at a time. */
    void *rows;         /* [slots, hidden], unless the caller's rows can be used as they are */
    void *activations;  /* [slots, inner] */
    void *d_gate_up;    /* backward: [slots, width] */
    void *weights_tile; /* one tile of weights, converted */
    void *line;         /* [2 * max(hidden, inner)], then one row of an operand */
    void *bias;         /* [max(width, hidden)], converted */
} experts_job;

/* The slots of one local expert. */
typedef struct slab {
    int64_t expert;
    int64_t first;  /* slot */
    int64_t rows;   /* padding included */
    int64_t tokens; /* the first of them, which are not padding */
} slab;

/* The type of weights' gradients that a caller asks for, 0: the usual one; EPIC_EINVAL. */
epic_result experts_read_grad_type(uint32_t *type, uint32_t row_type, bool device);

/* Takes the caller's struct; EPIC_EINVAL. */
epic_result experts_read_config(experts_job *job, const epic_experts *theirs, size_t size);

static inline bool experts_is_clamped(const epic_experts *ex)
{
    return ex->activation == EPIC_CLAMPED_SWIGLU || ex->activation == EPIC_CLAMPED_SILU;
}

/* Can the caller's rows (weights) be multiplied as they lie? */
bool experts_has_ready_rows(const experts_job *job);
bool experts_has_ready_weights(const experts_job *job);

/* Columns (or rows) of a weight matrix that are converted at once: n of them with k numbers
 * each.  A matter of shapes alone, so that bits do not depend on anything else. */
int64_t experts_tile_size(int64_t k, int64_t n);

/* Fills in *out for num_slots slots, on a CUDA device or on the host.  Errors: EPIC_EINVAL;
 * EPIC_ENOTSUP for E4M3 weights on the host and F64 rows on a device. */
epic_result experts_memory(const epic_experts *experts, size_t experts_size, int64_t num_slots,
                           bool on_device, epic_experts_memory_info *out);

/* Bytes of saved and workspace; experts_layout_workspace cuts what it asked for, on the host. */
int64_t experts_saved_bytes(const experts_job *job, int64_t num_slots);
int64_t experts_workspace_bytes(const experts_job *job, int64_t num_slots, bool backward);
void experts_layout_workspace(experts_job *job, int64_t num_slots, bool backward,
                              void *workspace);

/* The work on one slab, in float32 and in float64. */
void experts_forward_f32(const experts_job *job, const slab *slab);
void experts_forward_f64(const experts_job *job, const slab *slab);
void experts_backward_f32(const experts_job *job, const slab *slab);
void experts_backward_f64(const experts_job *job, const slab *slab);

#endif
