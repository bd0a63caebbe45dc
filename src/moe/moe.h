/* SPDX-License-Identifier: Apache-2.0 */
/* One call of the MoE layer: its checked arguments, its sizes and the addresses of its buffers.
 *
 * The layer works in blocks of tokens.  A rank has one block, or with EPIC_TREE its share of the
 * group's `leaves` blocks.  Each sum over tokens (a loss, a gradient of a replicated weight) is
 * computed per block.  The block sums are then added in a binary tree, first on the rank and then
 * by epic_allreduce_sum over the ranks.  The tree depends on `leaves` only, so the result has the
 * same bits for every number of ranks.
 *
 * "Real" is the type of the arithmetic: float64 if rows are F64, else float32.  The "dense part"
 * is what every rank holds a copy of: the gate, its bias, scale_of_expert and the shared expert. */
#ifndef EPIC_MOE_H
#define EPIC_MOE_H

#include <stdbool.h>

#include "context/context.h"
#include "exchange/layer_options.h"

#define GATE_TILE 512 /* number of columns of x that gate_forward() converts at once */

/* Buffers inside `saved`, which forward writes and backward reads. */
typedef struct moe_saved {
    void *plan;
    void *logits;      /* [tokens, columns] real */
    int32_t *topk_idx; /* [tokens, top_k], with choices of zero-experts */
    void *weights;     /* [tokens, top_k] real */
    /* [capacity, hidden]: rows that dispatch delivered.  With EPIC_DISPATCH_AGAIN they are in the
     * workspace instead, in forward of an E4M3 layer as e4m3. */
    void *recv;
    void *slot_weights; /* [capacity] real */
    float *slot_k; /* float64 layers: [capacity], position of the slot in its token's top_k */
    int32_t *expert_rows, *expert_tokens, *load, *logical_load;
    int64_t *total_tokens; /* -1 if forward failed */
    /* Data that epic_experts_forward saves.  `shared` has one part per block.  With EPIC_RECOMPUTE both
     * are in the workspace instead, and `shared` has room for one block. */
    void *experts, *shared;
} moe_saved;

/* Buffers inside `workspace`, which are valid during one call. */
typedef struct moe_work {
    void *experts, *shared, *router; /* workspaces of the calls inside */
    float *recv_scales;              /* E4M3 forward: [capacity, experts_blocks(hidden)] */
    /* Forward: [tokens, top_k], topk_idx with -1 for zero-experts.  Devices have it only if the
     * layer has zero-experts. */
    int32_t *plan_idx;
    void *tile; /* host: [block, GATE_TILE] real */
    void *rows; /* host: [2, hidden] real, in backward [block + 1, hidden] */
    /* [block, hidden]: the shared expert's output.  Backward: its d_x, on devices together with
     * the zero-experts' part of d_x. */
    void *shared_y;
    void *shared_weights;   /* [block] real: gate value of the shared expert */
    void *d_shared_weights; /* backward: [block] real */
    void *losses;           /* [2, blocks] real */
    float *choice_k;        /* float64 forward: [tokens, top_k], numbers 0 to top_k - 1 */
    double *recv_weights; /* float64 forward: [capacity, top_k], weights of the slot's token */
    void *y;              /* forward: [capacity, hidden], output of the experts */
    /* Backward: [capacity, hidden], gradient of y.  Afterwards the buffer holds the rows that
     * carry weight gradients home (f64_weights.c), and a d_x that the caller does not want. */
    void *d_y;
    void *d_recv;         /* backward: [capacity, hidden] */
    void *d_slot_weights; /* backward: [capacity] real */
    void *d_weights;      /* backward: [tokens, top_k] real */
    void *d_logits;       /* backward: [block, columns] real */
    /* Backward: [dense_levels, dense_count] real, gradients of the dense part, one row per level
     * of the tree.  Devices have it only if EPIC_SUM_DENSE or EPIC_TREE sums them. */
    unsigned char *dense;
    float *d_scale; /* backward on devices: [columns], gradient of scale_of_expert */
    void *gate;     /* devices: workspace of the gate's kernels (rules/gate_layout.h) */
} moe_work;

typedef struct moe_job {
    epic_context *ctx;
    epic_call call;
    epic_moe moe;
    epic_layer layer;
    epic_router router;
    epic_experts experts, shared; /* shared: the shared expert, if has_shared */
    bool has_shared;
    bool
        is_by_hosts; /* the caller asked for EPIC_BY_HOSTS; `layer` has the order chosen for it */
    epic_moe_weights weights;
    layer_options options; /* options that must be equal on all ranks */

    bool is_device; /* arrays are in device memory, so the host must not read them */
    bool is_f64;    /* real is float64 */
    /* Rows and weights of the experts are e4m3 in forward.  experts.weight_type is then the type
     * of the biases, and of the weights in backward unless is_e4m3_backward. */
    bool is_e4m3;
    bool is_e4m3_backward; /* weights of the experts are e4m3 in backward too */
    int64_t real_bytes;
    uint32_t real_type; /* EPIC_F32 or EPIC_F64 */
    int64_t row_bytes;
    int64_t tokens, hidden, capacity, top_k;
    int64_t columns;       /* experts and zero-experts: the width of the logits */
    int64_t blocks, block; /* number of blocks, and tokens of one */
    int64_t plan_bytes;
    epic_experts_memory_info experts_memory;
    epic_experts_memory_info shared_memory; /* for one block */
    int64_t router_bytes;
    int64_t dense_count; /* reals in the gradients of the dense part */
    int64_t
        dense_levels; /* levels of the tree of blocks; 0: gradients go to the caller at once */
    double d_balance, d_z; /* backward on the host: incoming gradient of each loss */
    uint32_t grad_type;    /* backward: type of the experts' weight gradients */
    moe_saved saved;
    moe_work work;
    int64_t saved_bytes, work_bytes;
    epic_const_rows x;
} moe_job;

/* Reads and checks `moe` and computes all sizes for `tokens` tokens, rounded up to whole blocks.
 * Set j->is_device before.  Returns EPIC_EINVAL or EPIC_ENOTSUP for options that are invalid. */
epic_result moe_read_config(moe_job *j, const epic_config *config, const epic_moe *moe,
                            size_t size, int64_t tokens);

/* Sets j->saved and j->work to addresses inside `saved` and `workspace`, and j->saved_bytes and
 * j->work_bytes to their sizes.  NULL addresses: computes the sizes only. */
void moe_layout_buffers(moe_job *j, const void *saved, void *workspace, bool backward);

/* Returns the address of element `index` of an array of reals. */
static inline void *moe_real_at(const moe_job *j, const void *base, int64_t index)
{
    return (char *)(uintptr_t)base + index * j->real_bytes;
}

/* Return the rows of block `block` of `rows`, an array with a row per token of the rank: for reading (x,
 * d_out) and for writing (out, d_x). */
static inline epic_const_rows moe_block_rows(const moe_job *j, const epic_const_rows *rows,
                                             int64_t block)
{
    return (epic_const_rows){(const char *)rows->data + block * j->block * j->row_bytes,
                             j->block, j->row_bytes};
}

static inline epic_rows moe_block_out_rows(const moe_job *j, const epic_rows *rows,
                                           int64_t block)
{
    return (epic_rows){(char *)rows->data + block * j->block * j->row_bytes, j->block,
                       j->row_bytes};
}

/* Offsets, in reals, of each gradient of the dense part in one buffer.  Optional biases have a
 * place even if the caller has none, so that every rank sums the same number of reals. */
typedef struct dense_offsets {
    int64_t w_gate, b_gate, scale, gate_up, down, b_gate_up, b_down, w_shared_gate, end;
} dense_offsets;

/* Returns the offsets for the shapes of the layer. */
dense_offsets moe_dense_offsets(const moe_job *j);

/* One block of tokens: its rows of x and of what forward saved. */
typedef struct dense_block {
    const moe_job *job;
    epic_const_rows x;
    const void *logits;      /* [block, columns] real; gate_forward() writes them */
    const int32_t *topk_idx; /* [block, top_k] */
    const void *weights;     /* [block, top_k] real */
} dense_block;

/* Returns block b, 0 <= b < j->blocks. */
dense_block moe_get_block(const moe_job *j, int64_t b);

/* Host arithmetic of the dense part on one block: dense_f32.c and dense_f64.c. */
typedef struct dense_ops {
    /* logits = x W_gate + b_gate */
    void (*gate_forward)(const dense_block *b, void *logits);
    /* Adds to `out` what this rank computes without dispatch: weight * x for each zero-expert that
     * a token chose, and the rows shared_y of the shared expert (NULL: the layer has none). */
    void (*add_local_experts)(const dense_block *b, const epic_rows *out, const void *shared_y);
    /* weights [block] = sigmoid(x w_shared_gate), the factor of the shared expert's output */
    void (*shared_gate_forward)(const dense_block *b, void *weights);
    /* d_weights of choices of zero-experts = dot(d_out, x); the other elements stay */
    void (*zero_expert_d_weights)(const dense_block *b, const epic_const_rows *d_out,
                                  void *d_weights);
    /* Writes at `dense` the gradients of the gate, its bias and the shared expert's gate.  Adds to
     * d_x (NULL: not wanted) d_logits W_gate^T, weight * d_out for zero-experts, and d_shared, the
     * shared expert's part (NULL: none). */
    void (*gate_backward)(const dense_block *b, const void *d_logits,
                          const epic_const_rows *d_out, const void *d_shared,
                          const epic_rows *d_x, void *dense);
    /* to[i] += from[i], n reals */
    void (*add_reals)(void *to, const void *from, int64_t n);
    /* Returns the sum of values[0 .. n), added in a binary tree. */
    double (*sum_in_tree)(const void *values, int64_t n);
} dense_ops;

extern const dense_ops dense_f32, dense_f64;

/* Returns the operations for the layer's real type. */
static inline const dense_ops *moe_dense_ops(const moe_job *j)
{
    return j->is_f64 ? &dense_f64 : &dense_f32;
}

#endif
