/* SPDX-License-Identifier: Apache-2.0 */
/* One call of the MoE layer: its checked arguments, its sizes and the addresses of its buffers.
 *
 * The layer computes in *blocks* of tokens. With EPIC_TREE the group has layer.leaves blocks,
 * and each rank has an equal number of blocks. With other sum orders, all tokens of a rank are
 * one block. Some results are sums over tokens, such as a loss or the gradient of a weight that
 * every rank has. Such a sum is computed for each block, then added over the blocks in a binary
 * tree, and then over the ranks by epic_allreduce_sum. The tree depends only on `leaves`.
 *
 * On a rank with T tokens and B blocks, block b begins at token floor(b * T / B). If the N
 * tokens of the group are divided equally among the ranks, block b of the `leaves` blocks
 * begins at token floor(b * N / leaves) of the group. This position does not depend on the
 * number of ranks, so the bits of the sums do not depend on it either. If the balance loss is
 * computed per sequence, blocks consist of whole sequences.
 *
 * A "real" is a float64 if the rows are float64, and a float32 if not. A "zero-expert" is an
 * expert whose output is its input. The "dense part" of the layer consists of the weights of
 * which every rank has a copy: the gate, its bias, scale_of_expert and the shared expert. Names
 * in shapes, such as [block, columns], are fields of moe_job. */
#ifndef EPIC_MOE_H
#define EPIC_MOE_H

#include <stdbool.h>

#include "context/context.h"
#include "exchange/layer_options.h"

#define GATE_TILE 512 /* number of columns of x that gate_forward() converts at a time */

/* Buffers inside `saved`, which forward writes and backward reads. */
typedef struct moe_saved {
    void *plan;        /* the bytes of the plan, as epic_plan wrote them */
    void *logits;      /* [tokens, columns] real: output of the gate */
    int32_t *topk_idx; /* [tokens, top_k]: expert ids, also of zero-experts */
    void *weights;     /* [tokens, top_k] real: weights of the choices */
    /* [capacity, hidden]: the received rows, which are E4M3 in forward of E4M3 layers. With
     * EPIC_DISPATCH_AGAIN they are in the workspace, not in `saved`. */
    void *recv;
    void *slot_weights; /* [capacity] real: weight of each slot's choice */
    float *slot_k;      /* [capacity]: index k of the slot's choice; only in float64 layers */
    /* expert_rows [num_local_experts]: number of slots of each local expert, with padding.
     * expert_tokens [num_local_experts]: number of slots without padding. load [num_experts]
     * and logical_load [num_logical]: number of choices of each expert in the whole group. */
    int32_t *expert_rows, *expert_tokens, *load, *logical_load;
    int64_t *total_tokens; /* number of tokens of all ranks; -1 if forward failed */
    /* data that forward saves for the experts, and for each block of the shared expert. With
     * EPIC_RECOMPUTE these data are in the workspace, and `shared` has room for one block. */
    void *experts, *shared;
} moe_saved;

/* Buffers inside `workspace`. Their contents are lost when the call returns. */
typedef struct moe_work {
    /* workspaces for the calls of the experts, the shared expert and the router */
    void *experts, *shared, *router;
    /* [capacity, experts_blocks(hidden)]: scales of rows; only in forward of E4M3 layers */
    float *recv_scales;
    /* [tokens, top_k], only in forward: a copy of topk_idx in which -1 replaces zero-experts,
     * because no rows are sent to zero-experts. On devices only for layers with
     * zero-experts. */
    int32_t *plan_idx;
    void *tile;    /* [block, GATE_TILE] real: converted columns of x; only on the host */
    void *product; /* memory for the gate's GEMMs; only on the host with EPIC_INVARIANT */
    /* rows of reals, only on the host: forward [2, hidden], backward [block + 1, hidden] */
    void *rows;
    /* forward: [block, hidden], output of the shared expert. backward: [batch, hidden], the
     * parts of d_x that come from the shared expert and, on devices, from the zero-experts and
     * the shared expert's gate */
    void *shared_y;
    void *shared_weights; /* [block] real: the shared expert's gate, sigmoid(x w_shared_gate) */
    void *d_shared_weights; /* [block] real: gradient of shared_weights; only in backward */
    void *losses;           /* [2, blocks] real: balance loss and z-loss of each block */
    /* [tokens, top_k]: index k of each choice; only in forward of float64 layers */
    float *choice_k;
    /* [capacity, top_k]: all weights of each slot's token; only in forward of float64 layers */
    double *recv_weights;
    void *y; /* [capacity, hidden]: output of the experts; only in forward */
    /* [capacity, hidden], only in backward: gradient of y; later reused for rows with gradients
     * of weights (f64_weights.c), and for d_x if the caller does not want d_x */
    void *d_y;
    void *d_recv;         /* [capacity, hidden]: gradient of recv; only in backward */
    void *d_slot_weights; /* [capacity] real: gradient of slot_weights; only in backward */
    void *d_weights; /* [tokens, top_k] real: gradient of saved.weights; only in backward */
    /* [batch, columns] real: gradient of the logits of a batch; only in backward */
    void *d_logits;
    /* [num_dense_levels, num_dense_grads] real, only in backward: gradients of the gate and the
     * shared expert, one row for each level of the binary tree over the blocks. On devices only
     * with EPIC_SUM_DENSE, with several batches, or with a shared expert and several blocks. */
    unsigned char *dense_grads;
    /* [blocks of a batch, columns]: gradients of scale_of_expert; backward on devices */
    float *d_scale;
    void *gate; /* workspace of the gate's kernels; only on devices */
} moe_work;

/* State of one call of the layer. */
typedef struct moe_job {
    epic_context *ctx;
    epic_call call;
    epic_moe moe;
    epic_layer layer;
    epic_router router;
    /* shared: options of the shared expert, if has_shared is true */
    epic_experts experts, shared;
    bool has_shared;
    epic_moe_weights weights;
    /* hashes of the layer's options and weights; the ranks compare the hashes in op headers */
    layer_options options;

    bool is_device; /* arrays are in device memory, which the host must not read */
    bool is_f64;    /* real is float64 */
    /* EPIC_INVARIANT: the bits of a token's result must not depend on the number of tokens */
    bool is_invariant;
    /* true: rows and weights of the experts are E4M3 in forward. experts.weight_type is the
     * type of the biases and, unless is_e4m3_backward is true, of the weights in backward. */
    bool is_e4m3;
    bool is_e4m3_backward; /* weights of the experts are E4M3 in backward too */
    int64_t real_bytes;
    uint32_t real_type; /* EPIC_F32 or EPIC_F64 */
    int64_t row_bytes;
    /* tokens: number of tokens of this rank. capacity: number of slots of this rank. */
    int64_t tokens, hidden, capacity, top_k;
    /* number of experts plus number of zero-experts: the width of the logits */
    int64_t columns;
    /* blocks: number of blocks of this rank. block: maximum number of tokens in a block. */
    int64_t blocks, block;
    /* maximum number of tokens in a batch: up to GATE_BLOCKS blocks (backward on devices) */
    int64_t batch;
    int64_t deciding_tokens;
    /* Each block begins at a multiple of this many tokens: the length of a sequence if the
     * balance loss is computed per sequence, and 1 if not. */
    int64_t sequence_unit;
    int64_t plan_bytes;
    epic_experts_memory_info experts_memory;
    epic_experts_memory_info shared_memory; /* memory of the shared expert for one block */
    int64_t router_bytes;
    /* number of reals in the gradients of the gate and the shared expert together */
    int64_t num_dense_grads;
    /* number of levels of the binary tree in which the blocks' gradients are added; 0:
     * work.dense_grads is not used */
    int64_t num_dense_levels;
    /* Only in backward on the host: gradients of the balance loss and of the z-loss. Each is
     * the caller's gradient of that loss plus d_loss, the caller's gradient of the sum of the
     * two losses. */
    double d_balance, d_z;
    uint32_t grad_type; /* epic_type of the experts' weight gradients; only in backward */
    moe_saved saved;
    moe_work work;
    int64_t saved_bytes, work_bytes;
    epic_const_rows x;
} moe_job;

/* Reads and checks `moe`, and computes all sizes for `tokens` tokens on this rank. num_members
 * is the number of ranks that are members of the group. The caller must have set j->is_device.
 * Returns EPIC_OK, EPIC_EINVAL or EPIC_ENOTSUP. */
epic_result moe_read_config(moe_job *j, const epic_config *config, int32_t num_members,
                            const epic_moe *moe, size_t size, int64_t tokens);

/* Sets the pointers in j->saved and j->work to buffers at `saved` and `workspace`. Sets
 * j->saved_bytes and j->work_bytes to the sizes. If the addresses are NULL, only sets the
 * sizes. */
void moe_layout_buffers(moe_job *j, const void *saved, void *workspace, bool backward);

static inline void *moe_real_at(const moe_job *j, const void *base, int64_t index)
{
    return (char *)(uintptr_t)base + index * j->real_bytes;
}

/* Returns the index of the first token of block `block`. If `block` is j->blocks, returns the
 * number of tokens. */
static inline int64_t moe_block_begin(const moe_job *j, int64_t block)
{
    return block * (j->tokens / j->sequence_unit) / j->blocks * j->sequence_unit;
}

/* Returns the address of row `row` of `data`. If there are no rows, `data` may be NULL and
 * `row` is 0. For row 0 nothing is added to `data`, because C does not allow an addition to
 * NULL. */
static inline const char *moe_row_at(const moe_job *j, const void *data, int64_t row)
{
    return row ? (const char *)data + row * j->row_bytes : (const char *)data;
}

/* `rows` is an array with one row per token of this rank, an input (x, d_out) or an output
 * (out, d_x). Return the rows of block `block`. */
static inline epic_const_rows moe_block_rows(const moe_job *j, const epic_const_rows *rows,
                                             int64_t block)
{
    const int64_t first = moe_block_begin(j, block);
    return (epic_const_rows){moe_row_at(j, rows->data, first),
                             moe_block_begin(j, block + 1) - first, j->row_bytes};
}

static inline epic_rows moe_block_out_rows(const moe_job *j, const epic_rows *rows,
                                           int64_t block)
{
    const int64_t first = moe_block_begin(j, block);
    return (epic_rows){(void *)(uintptr_t)moe_row_at(j, rows->data, first),
                       moe_block_begin(j, block + 1) - first, j->row_bytes};
}

/* Offsets, in reals, of the gradients of the gate and the shared expert in a row of
 * work.dense_grads. Biases that the layer does not have get offsets too, so that the sizes are
 * equal on all ranks. At gate_padding and shared_padding, zeros fill up the row to the next
 * multiple of DENSE_GRAD_ALIGNMENT reals. This aligns gate_up in each row: a GPU uses other,
 * faster kernels for aligned results, and the bits of their sums may differ. */
typedef struct dense_grad_offsets {
    int64_t w_gate, b_gate, scale, gate_padding;
    int64_t gate_up, down, b_gate_up, b_down, w_shared_gate, shared_padding, end;
} dense_grad_offsets;

#define DENSE_GRAD_ALIGNMENT 4 /* 16 bytes of float32, as the copies of tensor cores need */

dense_grad_offsets moe_dense_grad_offsets(const moe_job *j);

/* A block of tokens: its rows of x, and the addresses of its rows in the arrays of `saved`. */
typedef struct token_block {
    const moe_job *job;
    epic_const_rows x;
    /* first: index of the first token. tokens: number of tokens, 0 for an empty block. */
    int64_t first, tokens;
    const void *logits;      /* [tokens, columns] real; gate_forward() writes them */
    const int32_t *topk_idx; /* [tokens, top_k]: expert ids of the choices */
    const void *weights;     /* [tokens, top_k] real: weights of the choices */
} token_block;

token_block moe_get_block(const moe_job *j, int64_t b);
/* Returns the tokens of `count` blocks, starting at block `first`, as one block. */
token_block moe_get_blocks(const moe_job *j, int64_t first, int64_t count);

/* Functions for one block of tokens on the host: the gate, the zero-experts and the shared
 * expert's gate. dense_f32.c and dense_f64.c each define a table. */
typedef struct dense_ops {
    /* Computes the logits [tokens, columns]: x W_gate + b_gate. */
    void (*gate_forward)(const token_block *b, void *logits);
    /* For each zero-expert that a token has chosen, adds weight * x to the token's row of
     * `out`. Unless shared_y is NULL, also adds the token's row of shared_y. */
    void (*add_local_experts)(const token_block *b, const epic_rows *out, const void *shared_y);
    /* Computes the factors of the shared expert's output: sigmoid(x w_shared_gate) [block]. */
    void (*shared_gate_forward)(const token_block *b, void *weights);
    /* Writes the gradients dot(d_out, x) of the weights of zero-experts to d_weights. Other
     * elements keep their values. */
    void (*zero_expert_d_weights)(const token_block *b, const epic_const_rows *d_out,
                                  void *d_weights);
    /* Writes the gradients of the gate, its bias and the shared expert's gate to `dense_grads`.
     * If d_x is not NULL, adds four terms to d_x:
     * - d_logits W_gate^T.
     * - weight * d_out for each zero-expert.
     * - The gradient of x through the shared expert's gate.
     * - d_shared, the gradient of x through the shared expert, if d_shared is not NULL. */
    void (*gate_backward)(const token_block *b, const void *d_logits,
                          const epic_const_rows *d_out, const void *d_shared,
                          const epic_rows *d_x, void *dense_grads);
    void (*add_reals)(void *to, const void *from, int64_t n);
    double (*sum_in_tree)(const void *values, int64_t n);
} dense_ops;

extern const dense_ops dense_f32, dense_f64;

static inline const dense_ops *moe_dense_ops(const moe_job *j)
{
    return j->is_f64 ? &dense_f64 : &dense_f32;
}

#endif
