/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of the experts: what they are given, and how they are launched.  Plain C.  They talk
 * to no peer.  All counts are on the device: a launch knows capacities only. */
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

/* Where the slabs lie, worked out once for a call by p2p_launch_slabs. */
typedef struct p2p_slabs {
    const int32_t
        *expert_rows; /* [num_experts], the caller's; NULL: all slots are one expert's */
    const int32_t *expert_tokens; /* NULL: expert_rows */
    int32_t *num_tiles;           /* [1] */
    slab_tile *tiles;             /* [most_tiles] */
    slab_place *slabs;            /* [num_experts] */
    int64_t num_slots;
    int32_t num_experts;
    int32_t most_tiles;
} p2p_slabs;

/* A product over slabs.  Of e4m3 the tensor cores want both factors with the steps of the sum side by
 * side, so weights lie turned there: FORWARD takes [experts, n, k], INPUT as always [experts, k, n];
 * WEIGHT is for other types. */
typedef struct p2p_gemm {
    p2p_slabs slabs;
    const void *a;    /* FORWARD: x [slots, k]; INPUT: d_y [slots, n]; WEIGHT: x [slots, k] */
    const void *b;    /* FORWARD, INPUT: weights [experts, k, n]; WEIGHT: d_y [slots, n] */
    void *out;        /* FORWARD: [slots, n]; INPUT: [slots, k]; WEIGHT: [experts, k, n] */
    const void *bias; /* FORWARD: [experts, n], added to rows that carry a token; NULL: none */
    const float *bias_weights; /* [slots], of the bias; NULL: 1 */
    const float *a_scales;     /* E4M3: [slots, blocks], one for each 128 numbers of a row */
    const float *b_scales;     /* E4M3: [experts, blocks, blocks], one for each 128 x 128 */
    const void *also;          /* INPUT: rows of out's type that are added, too; NULL: none */
    int64_t k, n;
    uint32_t pass;     /* an epic_gemm_pass */
    uint32_t row_type; /* of x and d_x */
    uint32_t y_type;   /* of y and d_y; 0: row_type */
    /* Of b but in WEIGHT, and of bias; E4M3 with row_type E4M3 only, with bias of y_type. */
    uint32_t weight_type;
    uint32_t out_type;  /* WEIGHT: of out */
    int32_t accumulate; /* WEIGHT, INPUT: out is added to */
    int32_t sms;        /* most CTAs */
    int32_t group;      /* rows of tiles that take turns over all columns; 0: chosen */
    int32_t alone;      /* 1: CTAs do not work in pairs.  For tests */
    int32_t slices; /* > 1: sums of one slab that fills all slots are cut into as many, which */
    float *parts;   /* [slices, lines of out, columns] keeps, and added in order */
} p2p_gemm;

/* The rows between two products: activations and their gradients. */
typedef struct p2p_activation_job {
    p2p_slabs slabs;
    epic_experts experts;      /* defaults filled in */
    const void *gate_up;       /* [slots, width]: x W, before weight and bias */
    const void *bias;          /* [experts, width]; NULL: none */
    const float *slot_weights; /* NULL: EPIC_WEIGHT_LATE */
    void *activations;         /* [slots, inner]; backward: their gradient comes in */
    /* Forward: of activations, e4m3 then, [slots, blocks of 128]; NULL: row_type. */
    float *scales;
    void *d_gate_up;    /* backward: [slots, width] */
    const void *d_y;    /* backward, for b_down's part in EPIC_WEIGHT_EARLY: [slots, hidden] */
    const void *b_down; /* backward: [experts, hidden]; NULL: none */
    float *d_slot_weights; /* backward; NULL: not wanted */
    int32_t aligned;       /* 1: rows are whole vectors of 16 bytes */
    int32_t weigh_d;       /* backward, EPIC_WEIGHT_INPUT: d_gate_up comes out weighted */
    int32_t sms;
    int32_t pad;
} p2p_activation_job;

/* out[e] = the sum of the rows of expert e that carry a token, each times its weight. */
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

/* Rows times a weight, or plus one, in place: what a product of the caller's own leaves to do. */
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

/* Rows that carry a token to e4m3, with a scale for each 128 numbers. */
typedef struct p2p_quantize_job {
    p2p_slabs slabs;
    const void *rows; /* [slots, n] of row_type */
    uint8_t *to;      /* [slots, n] */
    float *scales;    /* [slots, blocks of n] */
    int64_t n;
    uint32_t row_type;
    int32_t sms;
} p2p_quantize_job;

/* The dense part of a layer, beside its products. */
typedef struct p2p_rows_job { /* to += from, numbers of `type` */
    void *to;
    const void *from; /* NULL: zeros */
    int64_t count;
    uint32_t type;
    int32_t replace; /* to = from */
} p2p_rows_job;

typedef struct p2p_losses_job { /* one float each; NULL: not wanted, or not there */
    const float *first, *second;
    float *sum, *to_first, *to_second;
} p2p_losses_job;

typedef struct p2p_incoming_job {   /* to = {all + balance, all + z} */
    const float *all, *balance, *z; /* NULL: 1, 0, 0 */
    float *to;
} p2p_incoming_job;

typedef struct p2p_pieces_job { /* experts/grouped_pieces.cu */
    const float *from;          /* split: [rows, columns]; fold: [rows, GATE_PIECES, columns] */
    void *to;          /* split: bf16 [rows, places, columns]; fold: float32 [rows, columns] */
    const float *bias; /* fold: [columns]; NULL: none */
    int64_t rows, columns;
    int32_t places;     /* split */
    uint32_t order;     /* split: which piece each place has, two bits for each, lowest first */
    int32_t accumulate; /* fold: to is added to */
    int32_t sms;
} p2p_pieces_job;

cudaError_t p2p_launch_split(const p2p_pieces_job *job, cudaStream_t stream);
cudaError_t p2p_launch_fold(const p2p_pieces_job *job, cudaStream_t stream);
cudaError_t p2p_load_pieces(void);

/* values [2, n], n a power of two: {the sum of the first row, that of the second}, in binary trees. */
cudaError_t p2p_launch_trees(float *values, int64_t n, cudaStream_t stream);
cudaError_t p2p_launch_rows(const p2p_rows_job *job, int sms, cudaStream_t stream);
cudaError_t p2p_launch_losses(const p2p_losses_job *job, cudaStream_t stream);
cudaError_t p2p_launch_incoming(const p2p_incoming_job *job, cudaStream_t stream);
cudaError_t p2p_load_dense(void);

cudaError_t p2p_launch_slabs(const p2p_slabs *slabs, cudaStream_t stream);

/* On tensor cores where the GPU and the shapes let it (p2p_gemm_is_fast), else the plain one. */
cudaError_t p2p_launch_gemm(const p2p_gemm *job, cudaStream_t stream);
p2p_gemm p2p_as_input(p2p_gemm scaled); /* the same product, as one of the pass INPUT */
cudaError_t p2p_launch_plain_gemm(const p2p_gemm *job, cudaStream_t stream);
cudaError_t p2p_launch_hopper_gemm(const p2p_gemm *job, cudaStream_t stream);

/* Can this GPU's tensor cores do it, and if not, why: NULL, or a few words. */
const char *p2p_gemm_is_slow(const p2p_gemm *job);

/* Has this build products for tensor cores of GPUs of that generation? */
int p2p_gemm_is_built(int major, int minor);

cudaError_t p2p_launch_activation(const p2p_activation_job *job, cudaStream_t stream);
cudaError_t p2p_launch_activation_backward(const p2p_activation_job *job, cudaStream_t stream);
cudaError_t p2p_launch_quantize(const p2p_quantize_job *job, cudaStream_t stream);
cudaError_t p2p_launch_bias(const p2p_bias_job *job, cudaStream_t stream);
cudaError_t p2p_launch_scale(const p2p_scale_job *job, cudaStream_t stream);

cudaError_t p2p_load_slabs(void);
cudaError_t p2p_load_activation(void);
cudaError_t p2p_load_plain_gemm(void);
cudaError_t p2p_load_hopper_gemm(void);

#ifdef __cplusplus
}
#endif
#endif
