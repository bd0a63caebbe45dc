/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments ("jobs") and launchers of the experts' kernels, for the host code of
 * src/backend/p2p. This header is plain C.
 *
 * A *slab* is the contiguous rows of one local expert in the receive buffer. A *tile* is up to
 * EXPERTS_TILE_ROWS rows of one slab. "Product" means a GEMM. "x" is the matrix that a forward
 * product multiplies by weights, and "y" is the result. "d_x" is the gradient of x, and "d_y"
 * is the gradient of y. In shapes, `slots` is p2p_slabs.num_slots, the number of rows of the
 * receive buffer. `inner` is the number of columns of the activations. `width` is inner, or 2 *
 * inner for experts with a gate.
 *
 * All arrays are in device memory of this rank; no kernel accesses a peer's memory. Only the
 * device knows the number of rows of each expert. So a launcher chooses the grid for the
 * maximum number of rows, and each kernel reads the actual number of rows. Every launcher
 * enqueues on `stream` and returns the error of the launch. */
#ifndef EPIC_CUDA_GROUPED_H
#define EPIC_CUDA_GROUPED_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "epic/epic.h"
#include "rules/experts_layout.h"
#include "rules/gate_layout.h"
#include "rules/rule.h"

/* number of terms of a sum that kernels without tensor cores add per step
 * (experts/grouped_plain.cu) */
#define EXPERTS_PLAIN_STEP 16
/* maximum number of rows of the kernel for few rows (experts/grouped_few.cu) */
#define EXPERTS_FEW_ROWS 128

/* With split-K, the kernels without tensor cores divide a sum of `depth` terms into `slices`
 * slices. Returns the number of terms of one slice, a multiple of EXPERTS_PLAIN_STEP. The last
 * slices may be shorter or empty. */
RULE int64_t experts_plain_slice(int64_t depth, int64_t slices)
{
    const int64_t cut = slices * EXPERTS_PLAIN_STEP;
    return (depth + cut - 1) / cut * EXPERTS_PLAIN_STEP;
}

#ifdef __cplusplus
extern "C" {
#endif

/* The slabs of the experts' rows, and the tiles of the slabs. p2p_launch_slabs() computes
 * `tiles` and `slabs` once for each call of the library. */
typedef struct p2p_slabs {
    /* [num_experts]: number of rows of each slab; NULL: one expert has all rows of the
     * buffer */
    const int32_t *expert_rows;
    /* [num_experts]: number of rows of each slab that hold a token and are not padding; NULL:
     * all rows hold a token */
    const int32_t *expert_tokens;
    int32_t *num_tiles; /* [1]: number of tiles of all slabs */
    /* [most_tiles]: the tiles of all slabs; a tile is up to EXPERTS_TILE_ROWS rows of one
     * slab */
    slab_tile *tiles;
    slab_range *slabs; /* [num_experts]: first row and number of tokens of each slab */
    int64_t num_slots;
    int32_t num_experts; /* number of local experts */
    int32_t most_tiles;  /* upper bound of *num_tiles; the host knows only this bound */
} p2p_slabs;

/* Arguments of a grouped GEMM. `pass` (epic_gemm_pass) selects FORWARD (computes y), INPUT (the
 * gradient of x) or WEIGHT (the gradient of the weights). FORWARD and INPUT read matrix b as
 * [experts, k, n]. Exception: FORWARD of e4m3 reads [experts, n, k], because the tensor cores
 * can read e4m3 only if the summed dimension (k) is contiguous. WEIGHT does not support
 * e4m3. */
typedef struct p2p_gemm {
    p2p_slabs slabs;
    const void *a; /* FORWARD: x [slots, k]; INPUT: d_y [slots, n]; WEIGHT: x [slots, k] */
    const void *b; /* FORWARD, INPUT: weights [experts, k, n]; WEIGHT: d_y [slots, n] */
    void *out;     /* FORWARD: [slots, n]; INPUT: [slots, k]; WEIGHT: [experts, k, n] */
    /* FORWARD: bias [experts, n], added to the rows that hold a token; NULL: none */
    const void *bias;
    /* [slots]: the bias is multiplied by this factor in each row; NULL: all factors are 1 */
    const float *bias_weights;
    /* only if row_type is EPIC_E4M3: the scales of a [slots, blocks], one for each block of 128
     * elements of a row */
    const float *a_scales;
    /* only if row_type is EPIC_E4M3: the scales of b [experts, blocks, blocks], one for each
     * block of 128 x 128 elements */
    const float *b_scales;
    /* INPUT: an array with the shape and type of out that is added to the result; NULL: none */
    const void *addend;
    int64_t k, n;
    uint32_t pass;     /* an epic_gemm_pass */
    uint32_t row_type; /* epic_type of x and d_x */
    uint32_t y_type;   /* epic_type of y and d_y; 0: the same type as row_type */
    /* epic_type of matrix b (in FORWARD and INPUT) and of bias. Must not be EPIC_E4M3 unless
     * row_type is EPIC_E4M3. If it is EPIC_E4M3, the bias has y_type. */
    uint32_t weight_type;
    /* WEIGHT: epic_type of out. In FORWARD out has y_type. In INPUT it has row_type or, if
     * row_type is EPIC_E4M3, y_type. */
    uint32_t out_type;
    /* only in WEIGHT and INPUT; 1: add the result to out; 0: overwrite out */
    int32_t accumulate;
    /* Only for FORWARD and INPUT. 0: rows of `out` without a token become zero. 1: they are
     * left as they are. */
    int32_t leave_padding;
    int32_t sms; /* maximum number of CTAs to launch */
    /* The kernel computes the tiles of `out` group by group, and the tiles of a group column by
     * column, so that the tiles of a column read the same part of matrix b from the L2 cache. A
     * group has this many rows of tiles or, with clusters of two CTAs, this many pairs of rows
     * of tiles. 0: the launcher chooses it. */
    int32_t group;
    int32_t no_clusters; /* 1: run without clusters of two CTAs; only tests set this */
    /* A value above 1 selects split-K: each sum is divided into this many slices, which
     * different CTAs compute. Requires a product with a single slab, which has all slots.
     * p2p_launch_plain_gemm() adds the sums of the slices. p2p_launch_hopper_slices() leaves
     * this addition to its caller. p2p_launch_hopper_gemm() does not support slices. */
    int32_t slices;
    /* with slices: [slices, rows of out, columns of out]: the sum of each slice */
    float *slice_sums;
} p2p_gemm;

/* Returns an INPUT product that computes the same sums as the e4m3 product `g`. Kernels for
 * e4m3 are compiled only for INPUT, so each FORWARD product must be converted. FORWARD of e4m3
 * already reads matrix b in the layout of INPUT, so it is enough to swap k and n. */
RULE p2p_gemm p2p_as_input(p2p_gemm g)
{
    const int64_t k = g.k;
    if (g.pass == EPIC_GEMM_INPUT) return g;
    g.pass = EPIC_GEMM_INPUT;
    g.k = g.n;
    g.n = k;
    return g;
}

/* Arguments of the kernels that run between the experts' two GEMMs. They compute the
 * activations (forward) or their gradients (backward). A comment that begins with "backward"
 * describes a field that only p2p_launch_activation_backward() uses. */
typedef struct p2p_activation_job {
    p2p_slabs slabs;
    epic_experts experts; /* the caller's description of the experts, with defaults filled in */
    /* [slots, width]: result of the first GEMM, before the input weight and the bias are
     * applied */
    const void *gate_up;
    const void *bias; /* [experts, width]; NULL: none */
    /* [slots]: weight of the choice in each slot; NULL with EPIC_WEIGHT_LATE */
    const float *slot_weights;
    /* [slots, inner]. Forward: output. Backward: on entry, the gradient of the activations; on
     * return, the activations themselves. */
    void *activations;
    /* Forward: output [slots, blocks of 128 elements]: the scales of the activations in e4m3.
     * NULL: the activations have row_type. */
    float *scales;
    /* backward: output [slots, width]: gradient of the first GEMM's result */
    void *d_gate_up;
    /* backward: [slots, hidden]: gradient of the experts' output. Used only with
     * EPIC_WEIGHT_EARLY and b_down, because dot(d_y, b_down) is then one term of
     * d_slot_weights. */
    const void *d_y;
    /* backward: [experts, hidden]: bias of the second GEMM; NULL: none */
    const void *b_down;
    float *d_slot_weights; /* backward: output [slots]; NULL: not computed */
    int32_t aligned;       /* 1: all rows start and end at multiples of 16 bytes */
    /* backward with EPIC_WEIGHT_INPUT. 1: the rows of d_gate_up are multiplied by the slots'
     * weights. */
    int32_t weigh_d;
    int32_t sms;
    int32_t pad;
} p2p_activation_job;

/* Arguments of p2p_launch_bias(), which computes the gradient of a bias: out[e] is the sum of
 * weight * row over all rows of expert e that hold a token. */
typedef struct p2p_bias_job {
    p2p_slabs slabs;
    const void *rows;     /* [slots, n] of row_type: the rows to add */
    const float *weights; /* [slots]; NULL: all weights are 1 */
    void *out;            /* [experts, n] of out_type */
    int64_t n;
    uint32_t row_type, out_type;
    int32_t accumulate; /* 1: add the sums to out; 0: overwrite out */
    int32_t pad;
} p2p_bias_job;

/* Arguments of p2p_launch_scale(), which multiplies rows by weights in place, or adds a
 * weighted bias to them. It runs after a GEMM that the caller computes (epic_experts.gemm). */
typedef struct p2p_scale_job {
    p2p_slabs slabs;
    void *rows;           /* [slots, n] of row_type; rows without a token stay unchanged */
    const float *weights; /* [slots]; NULL: all weights are 1 */
    /* bias [experts, n] of weight_type: the kernel computes rows += weight * bias. NULL: the
     * kernel computes rows *= weight. */
    const void *bias;
    int64_t n;
    uint32_t row_type, weight_type;
    int32_t sms; /* number of SMs of the GPU; the size of the grid depends on it */
    int32_t pad;
} p2p_scale_job;

/* Arguments of p2p_launch_quantize(), which quantizes the rows that hold a token to e4m3. */
typedef struct p2p_quantize_job {
    p2p_slabs slabs;
    const void *rows; /* [slots, n] of row_type */
    uint8_t *to;      /* [slots, n] of e4m3 */
    float *scales;    /* [slots, blocks]: one scale for each 128 elements of a row */
    int64_t n;
    uint32_t row_type;
    int32_t sms;
} p2p_quantize_job;

/* The jobs below are for experts/dense.cu: the gate, the shared expert and the losses. */

/* Arguments of p2p_launch_rows(), which adds the array `from` to the array `to`, or copies it
 * there. */
typedef struct p2p_rows_job {
    void *to;
    const void *from; /* NULL: zeros */
    int64_t count;    /* number of elements of each array */
    uint32_t type;    /* epic_type of the elements */
    int32_t replace;  /* 1: to = from; 0: to += from */
} p2p_rows_job;

/* Arguments of p2p_launch_losses(). It copies the balance loss (`first`) to to_first and the
 * z-loss (`second`) to to_second, and stores their sum to `sum`. Each pointer points to one
 * float. If an input is NULL, its value counts as 0. If an output is NULL, it is not
 * written. */
typedef struct p2p_sum_losses_job {
    const float *first, *second;
    float *sum, *to_first, *to_second;
} p2p_sum_losses_job;

/* Arguments of p2p_launch_incoming(), which computes the gradients of a layer's two losses.
 * `all`: gradient of the sum of the two losses. `balance`, `z`: gradients of the separate
 * losses. The kernel computes to[0] = `all` + `balance` and to[1] = `all` + `z`. */
typedef struct p2p_loss_gradients_job {
    const float *all, *balance, *z; /* NULL: 1 for `all`, 0 for `balance` and `z` */
    float *to;                      /* output [2]: the two gradients */
} p2p_loss_gradients_job;

/* Arguments of p2p_launch_split(), p2p_launch_fold() and p2p_launch_fold_slices()
 * (experts/grouped_components.cu), with which bf16 tensor cores multiply float32 matrices. The
 * comments call these functions split, fold and fold_slices. split converts each value to three
 * bf16 values, its components; the value is the sum of its components. The GEMM of the
 * components computes GATE_COMPONENTS sums for each result. fold adds these sums to get the
 * result. fold_slices does so after a GEMM with split-K: it adds the sums of all slices. */
typedef struct p2p_components_job {
    /* Input, float32. split: the values [rows, columns]. fold: the sums of the GEMM [rows,
     * GATE_COMPONENTS, columns]. fold_slices: the sums of the GEMM [slices, rows,
     * GATE_COMPONENTS, columns]. */
    const float *from;
    /* Output. split: bf16 [rows, places, columns]. fold, fold_slices: float32 [rows,
     * columns]. */
    void *to;
    /* [columns]: bias that is added to each row of the result; NULL: none; not used by split */
    const float *bias;
    int64_t rows, columns;
    /* split: number of components that are stored per value; the same component may be stored
     * several times */
    int32_t places;
    /* split: bits 2 * i and 2 * i + 1 select the component at position i: 0 is the high
     * component, 1 the middle component, and 2 the low component. */
    uint32_t order;
    /* fold: 1: add the result to `to`; 0: overwrite `to` */
    int32_t accumulate;
    int32_t sms;
} p2p_components_job;

/* These functions launch the kernels of p2p_components_job. p2p_launch_fold_slices() overwrites
 * `to`. It requires that columns is a multiple of 4, and that `from` and `to` are aligned to 16
 * bytes. */
cudaError_t p2p_launch_split(const p2p_components_job *job, cudaStream_t stream);
cudaError_t p2p_launch_fold(const p2p_components_job *job, cudaStream_t stream);
cudaError_t p2p_launch_fold_slices(const p2p_components_job *job, int32_t slices,
                                   cudaStream_t stream);
cudaError_t p2p_load_components(void);

/* Arguments of p2p_launch_gate_blocks(), which writes the slabs of several blocks of tokens. */
typedef struct p2p_gate_blocks_job {
    p2p_slabs all;     /* output: one slab with all tokens, and its tiles */
    slab_range *slabs; /* output [blocks.count]: the tokens of each block */
    /* output [blocks.count, slices]: the tokens of each slice (p2p_gemm.slices) of each
     * block */
    slab_range *cuts;
    gate_blocks blocks;
    int32_t slices;
    int32_t pad;
} p2p_gate_blocks_job;

/* Arguments of p2p_launch_leaves(). A leaf is one block of tokens, and consists of `terms`
 * arrays [rows, columns]. The kernel first adds the arrays of each leaf, and then adds all
 * leaves (at most GATE_BLOCKS) in a binary tree. Element [row, column] of term t of a leaf is
 * at from[leaf * leaf_stride + t * term_stride + row * row_stride + column]. */
typedef struct p2p_leaves_job {
    const float *from;
    float *to; /* [rows, columns]: the sum */
    int64_t rows, columns, leaf_stride, term_stride, row_stride;
    int32_t leaves, terms; /* leaves: a power of two */
    int32_t accumulate;    /* 1: add the result to `to`; 0: overwrite `to` */
    int32_t sms;
} p2p_leaves_job;

/* These functions launch and load the kernels of experts/gate_blocks.cu. */
cudaError_t p2p_launch_gate_blocks(const p2p_gate_blocks_job *job, cudaStream_t stream);
cudaError_t p2p_launch_leaves(const p2p_leaves_job *job, cudaStream_t stream);
cudaError_t p2p_load_gate_blocks(void);

/* Adds the n elements of each of the two rows of values [2, n] in a binary tree. Writes the two
 * sums to values[0] and values[1]. n must be a power of two. */
cudaError_t p2p_launch_trees(float *values, int64_t n, cudaStream_t stream);
cudaError_t p2p_launch_rows(const p2p_rows_job *job, int sms, cudaStream_t stream);
cudaError_t p2p_launch_losses(const p2p_sum_losses_job *job, cudaStream_t stream);
cudaError_t p2p_launch_incoming(const p2p_loss_gradients_job *job, cudaStream_t stream);
cudaError_t p2p_load_dense(void);

/* Computes slabs->slabs and slabs->tiles from the row and token counts that the caller passes
 * (experts/slabs.cu). Must run before all kernels that read them. */
cudaError_t p2p_launch_slabs(const p2p_slabs *slabs, cudaStream_t stream);

/* These functions launch a grouped GEMM. p2p_launch_gemm() uses tensor cores if
 * p2p_gemm_is_slow() returns NULL, otherwise plain loops. p2p_launch_plain_gemm() always uses
 * plain loops, and p2p_launch_hopper_gemm() always uses Hopper's tensor cores. */
cudaError_t p2p_launch_gemm(const p2p_gemm *job, cudaStream_t stream);
cudaError_t p2p_launch_plain_gemm(const p2p_gemm *job, cudaStream_t stream);
cudaError_t p2p_launch_hopper_gemm(const p2p_gemm *job, cudaStream_t stream);

/* Returns true if p2p_launch_plain_gemm() uses the kernel for few rows for this product. It
 * uses this kernel for FORWARD products of at most EXPERTS_FEW_ROWS rows with float32 weights
 * and slices, if the kernel is faster than plain_kernel. The kernel for few rows does not read
 * job->slabs.slabs and job->slabs.tiles. */
bool p2p_gemm_has_few_rows(const p2p_gemm *job);
/* Launches the kernel for few rows. It writes the sums of the slices to job->slice_sums. */
cudaError_t p2p_launch_few_rows(const p2p_gemm *job, cudaStream_t stream);

/* Launches a FORWARD product of bf16 matrices with float32 results on Hopper's tensor cores.
 * Splits each sum into slices of gate_slice_terms() terms (split-K). Requires that the tensor
 * cores support the product (p2p_gemm_is_slow() returns NULL). Writes the sums of the slices to
 * job->slice_sums, and does not use job->out. */
cudaError_t p2p_launch_hopper_slices(const p2p_gemm *job, cudaStream_t stream);

/* Returns NULL if this GPU's tensor cores support the product, otherwise a short text with the
 * reason. */
const char *p2p_gemm_is_slow(const p2p_gemm *job);

/* Returns 1 if this build contains tensor-core kernels for GPUs of compute capability
 * major.minor. */
int p2p_gemm_is_built(int major, int minor);

/* Launchers of the kernels in experts/rows.cu. */
cudaError_t p2p_launch_activation(const p2p_activation_job *job, cudaStream_t stream);
cudaError_t p2p_launch_activation_backward(const p2p_activation_job *job, cudaStream_t stream);
cudaError_t p2p_launch_quantize(const p2p_quantize_job *job, cudaStream_t stream);
cudaError_t p2p_launch_scale(const p2p_scale_job *job, cudaStream_t stream);
/* Launcher of the kernel in experts/bias.cu. */
cudaError_t p2p_launch_bias(const p2p_bias_job *job, cudaStream_t stream);

/* These functions load the kernels on the current device when a context is opened, so that no
 * later launch has to load them. */
cudaError_t p2p_load_slabs(void);
cudaError_t p2p_load_activation(void);
cudaError_t p2p_load_bias(void);
cudaError_t p2p_load_plain_gemm(void);
cudaError_t p2p_load_few_rows(void);
cudaError_t p2p_load_hopper_gemm(void);

#ifdef __cplusplus
}
#endif
#endif
