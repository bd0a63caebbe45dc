/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs and launchers of the experts' kernels, for the host code of src/backend/p2p.  Plain C.
 * The kernels talk to no peer.  All counts are on the device, so a launcher knows only
 * capacities.  Every launcher enqueues on `stream` and returns CUDA's error. */
#ifndef EPIC_CUDA_GROUPED_H
#define EPIC_CUDA_GROUPED_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "epic/epic.h"
#include "rules/experts_layout.h"
#include "rules/gate_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The places of the slabs, which p2p_launch_slabs computes once for a call. */
typedef struct p2p_slabs {
    const int32_t
        *expert_rows; /* [num_experts], the caller's; NULL: one expert has all slots */
    const int32_t *expert_tokens; /* NULL: expert_rows */
    int32_t *num_tiles;           /* [1] */
    slab_tile *tiles;             /* [most_tiles] */
    slab_place *slabs;            /* [num_experts] */
    int64_t num_slots;
    int32_t num_experts;
    int32_t most_tiles;
} p2p_slabs;

/* A matrix product over slabs.  For e4m3 the tensor cores need both factors with the numbers of
 * one sum contiguous, so FORWARD then reads transposed weights [experts, n, k].  INPUT reads
 * [experts, k, n] for every type.  WEIGHT does not support e4m3. */
typedef struct p2p_gemm {
    p2p_slabs slabs;
    const void *a;    /* FORWARD: x [slots, k]; INPUT: d_y [slots, n]; WEIGHT: x [slots, k] */
    const void *b;    /* FORWARD, INPUT: weights [experts, k, n]; WEIGHT: d_y [slots, n] */
    void *out;        /* FORWARD: [slots, n]; INPUT: [slots, k]; WEIGHT: [experts, k, n] */
    const void *bias; /* FORWARD: [experts, n], added to rows that carry a token; NULL: none */
    const float *bias_weights; /* [slots], of the bias; NULL: 1 */
    const float *a_scales;     /* E4M3: [slots, blocks], one for each 128 numbers of a row */
    const float *b_scales;     /* E4M3: [experts, blocks, blocks], one for each 128 x 128 */
    const void *also;          /* INPUT: more rows of out's type to add to the result; NULL:
                                  none */
    int64_t k, n;
    uint32_t pass;     /* an epic_gemm_pass */
    uint32_t row_type; /* of x and d_x */
    uint32_t y_type;   /* of y and d_y; 0: row_type */
    /* Type of b (not in WEIGHT) and of bias.  E4M3 only with row_type E4M3; bias has y_type
     * then. */
    uint32_t weight_type;
    uint32_t out_type;  /* WEIGHT: of out */
    int32_t accumulate; /* WEIGHT, INPUT: add the result to out */
    int32_t sms;        /* largest number of CTAs */
    int32_t group;      /* rows of tiles that are computed together, column by column; 0:
                           chosen */
    int32_t alone;      /* 1: no clusters of two CTAs.  For tests */
    int32_t slices; /* > 1: cut each sum into this many slices.  One slab must fill all slots */
    float *parts;   /* with slices: [slices, lines of out, columns], one partial sum each */
} p2p_gemm;

/* The rows between two products: activations and their gradients. */
typedef struct p2p_activation_job {
    p2p_slabs slabs;
    epic_experts experts;      /* defaults filled in */
    const void *gate_up;       /* [slots, width]: x W, before weight and bias */
    const void *bias;          /* [experts, width]; NULL: none */
    const float *slot_weights; /* NULL: EPIC_WEIGHT_LATE */
    void *activations;         /* [slots, inner]; backward: in: their gradient */
    /* Forward: scales [slots, blocks of 128] of activations, which are e4m3 then; NULL: they
     * have row_type. */
    float *scales;
    void *d_gate_up;    /* backward: [slots, width] */
    const void *d_y;    /* backward, for b_down's part in EPIC_WEIGHT_EARLY: [slots, hidden] */
    const void *b_down; /* backward: [experts, hidden]; NULL: none */
    float *d_slot_weights; /* backward; NULL: not wanted */
    int32_t aligned;       /* 1: rows are whole vectors of 16 bytes */
    int32_t weigh_d;       /* backward, EPIC_WEIGHT_INPUT: multiply d_gate_up by the weight */
    int32_t sms;
    int32_t pad;
} p2p_activation_job;

/* Bias gradients: out[e] = sum of weight * row over the rows of expert e that carry a token. */
typedef struct p2p_bias_job {
    p2p_slabs slabs;
    const void *rows;     /* [slots, n] of row_type */
    const float *weights; /* [slots]; NULL: 1 */
    void *out;            /* [experts, n] of out_type */
    int64_t n;
    uint32_t row_type, out_type;
    int32_t accumulate;
    int32_t pad;
} p2p_bias_job;

/* Multiplies rows by weights, or adds a bias, in place.  Used after a matrix product of the
 * caller's own, which does neither. */
typedef struct p2p_scale_job {
    p2p_slabs slabs;
    void *rows;           /* [slots, n] of row_type; those without a token become 0 */
    const float *weights; /* [slots]; NULL: 1 */
    /* [experts, n] of weight_type: rows + weight * bias; NULL: weight * rows. */
    const void *bias;
    int64_t n;
    uint32_t row_type, weight_type;
    int32_t sms;
    int32_t pad;
} p2p_scale_job;

/* Quantizes rows that carry a token to e4m3, with a scale for each 128 numbers. */
typedef struct p2p_quantize_job {
    p2p_slabs slabs;
    const void *rows; /* [slots, n] of row_type */
    uint8_t *to;      /* [slots, n] */
    float *scales;    /* [slots, blocks of n] */
    int64_t n;
    uint32_t row_type;
    int32_t sms;
} p2p_quantize_job;

/* Small kernels of the dense part of a layer (experts/dense.cu). */
/* to += from, `count` numbers of `type`. */
typedef struct p2p_rows_job {
    void *to;
    const void *from; /* NULL: zeros */
    int64_t count;
    uint32_t type;
    int32_t replace; /* 1: to = from */
} p2p_rows_job;

/* Losses of a layer: one float each; NULL: not wanted, or not computed. */
typedef struct p2p_losses_job {
    const float *first, *second;
    float *sum, *to_first, *to_second;
} p2p_losses_job;

/* Gradients of the losses: to = {all + balance, all + z}. */
typedef struct p2p_incoming_job {
    const float *all, *balance, *z; /* NULL: 1, 0, 0 */
    float *to;
} p2p_incoming_job;

/* Three bf16 pieces of float32 numbers (experts/grouped_pieces.cu). */
typedef struct p2p_pieces_job {
    const float *from; /* split: [rows, columns]; fold: [rows, GATE_PIECES, columns] */
    void *to;          /* split: bf16 [rows, places, columns]; fold: float32 [rows, columns] */
    const float *bias; /* fold: [columns]; NULL: none */
    int64_t rows, columns;
    int32_t places; /* split */
    uint32_t
        order; /* split only: which piece (0 to 2) is stored at position i of the output, in
                           bits 2i and 2i + 1 */
    int32_t accumulate; /* fold: add to `to` */
    int32_t sms;
} p2p_pieces_job;

/* Split float32 into pieces, and add the sums of the pieces. */
cudaError_t p2p_launch_split(const p2p_pieces_job *job, cudaStream_t stream);
cudaError_t p2p_launch_fold(const p2p_pieces_job *job, cudaStream_t stream);
cudaError_t p2p_load_pieces(void);

/* values [2, n], n a power of two: writes the sums of the two rows to values[0] and values[1],
 * each added in a binary tree. */
cudaError_t p2p_launch_trees(float *values, int64_t n, cudaStream_t stream);
cudaError_t p2p_launch_rows(const p2p_rows_job *job, int sms, cudaStream_t stream);
cudaError_t p2p_launch_losses(const p2p_losses_job *job, cudaStream_t stream);
cudaError_t p2p_launch_incoming(const p2p_incoming_job *job, cudaStream_t stream);
cudaError_t p2p_load_dense(void);

/* Computes places of slabs and tiles from the counts (experts/slabs.cu). */
cudaError_t p2p_launch_slabs(const p2p_slabs *slabs, cudaStream_t stream);

/* Run a product: on tensor cores if GPU, types and shapes allow it (p2p_gemm_is_slow), else by
 * plain loops. */
cudaError_t p2p_launch_gemm(const p2p_gemm *job, cudaStream_t stream);
/* Returns the e4m3 product as one of the pass INPUT: with transposed weights FORWARD is the
 * same sum. */
p2p_gemm p2p_as_input(p2p_gemm scaled);
cudaError_t p2p_launch_plain_gemm(const p2p_gemm *job, cudaStream_t stream);
cudaError_t p2p_launch_hopper_gemm(const p2p_gemm *job, cudaStream_t stream);

/* Returns NULL if this GPU's tensor cores can run the product, else the reason in a few
 * words. */
const char *p2p_gemm_is_slow(const p2p_gemm *job);

/* Returns 1 if this build has tensor-core kernels for GPUs of that compute capability. */
int p2p_gemm_is_built(int major, int minor);

/* The kernels of experts/rows.cu. */
cudaError_t p2p_launch_activation(const p2p_activation_job *job, cudaStream_t stream);
cudaError_t p2p_launch_activation_backward(const p2p_activation_job *job, cudaStream_t stream);
cudaError_t p2p_launch_quantize(const p2p_quantize_job *job, cudaStream_t stream);
cudaError_t p2p_launch_bias(const p2p_bias_job *job, cudaStream_t stream);
cudaError_t p2p_launch_scale(const p2p_scale_job *job, cudaStream_t stream);

/* Load the kernels, so that no later launch has to. */
cudaError_t p2p_load_slabs(void);
cudaError_t p2p_load_activation(void);
cudaError_t p2p_load_plain_gemm(void);
cudaError_t p2p_load_hopper_gemm(void);

#ifdef __cplusplus
}
#endif
#endif
