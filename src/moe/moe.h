/* SPDX-License-Identifier: Apache-2.0 */
/* A call of the layer, checked, and the caller's memory, cut up.
 *
 * Everything over tokens is done in blocks: one block, or with EPIC_TREE the rank's share of
 * `leaves` blocks of the group's tokens.  Sums over tokens are one partial for each block, added
 * in a binary tree here and, by epic_allreduce_sum, over the ranks: the same bits for every number of
 * ranks. */
#ifndef EPIC_MOE_H
#define EPIC_MOE_H

#include <stdbool.h>

#include "context/context.h"
#include "exchange/layer_options.h"

#define GATE_TILE 512 /* columns of x that are converted at once */

typedef struct moe_saved { /* from forward to backward */
    void *plan;
    void *logits;       /* [tokens, columns] real */
    int32_t *topk_idx;  /* [tokens, top_k], zero-experts included */
    void *weights;      /* [tokens, top_k] real */
    void *recv;         /* [capacity, hidden]; EPIC_DISPATCH_AGAIN: in the workspace, e4m3
                           if forward is scaled */
    void *slot_weights; /* [capacity] real */
    float *slot_k;      /* [capacity], wide: which choice of its token a slot is */
    int32_t *expert_rows, *expert_tokens, *load, *logical_load;
    int64_t *total_tokens;  /* -1: forward failed */
    void *experts, *shared; /* what epic_experts saves; shared: block after block.
                               EPIC_RECOMPUTE: in the workspace, shared: of one block */
} moe_saved;

typedef struct moe_work {
    void *experts, *shared, *router; /* their workspaces */
    float *recv_scales;              /* forward, scaled: [capacity, blocks of hidden] */
    int32_t *plan_idx; /* forward: topk_idx without zero-experts; devices: if there are any */
    void *tile;        /* [block, GATE_TILE] real */
    void *rows;        /* [block, hidden] real */
    void *shared_y;    /* [block, hidden]; backward: its d_x, on devices with
                                        zero-experts' part */
    void *shared_weights;   /* gated: [block] real, of the shared expert */
    void *d_shared_weights; /* backward, gated: [block] real */
    void *losses;           /* [2, blocks] real */
    float *choice_k;        /* forward, wide: [tokens, top_k], 0 to top_k - 1 */
    double *recv_weights;   /* forward, wide: [capacity, top_k] of a slot's token */
    void *y;                /* forward: [capacity, hidden] */
    void *d_y;    /* backward: [capacity, hidden]; then what comes home of weights, and d_x that
                  nobody wants */
    void *d_recv; /* [capacity, hidden] */
    void *d_slot_weights; /* [capacity] real */
    void *d_weights;      /* [tokens, top_k] real */
    void *d_logits;       /* [block, columns] real */
    unsigned char *dense; /* [levels, dense_count] real: gradients of the dense part; on devices
                             only what EPIC_SUM_DENSE or EPIC_TREE sums */
    float *d_scale;       /* backward, devices: [columns], of scale_of_expert */
    void *gate;           /* devices: the gate's list of tiles, and parts of its sums */
} moe_work;

typedef struct moe_job {
    epic_context *ctx;
    epic_call call;
    epic_moe moe;
    epic_layer layer;
    epic_router router;
    epic_experts experts, shared;
    bool has_shared;
    bool is_by_hosts; /* the layer's was EPIC_BY_HOSTS */
    epic_moe_weights weights;
    layer_options options; /* what must be equal on all ranks */

    bool is_device; /* arrays are a device's: nothing but arguments can be looked at here */
    bool is_f64;    /* reals are float64 */
    bool is_e4m3;   /* forward: rows and weights of experts are e4m3; experts.weight_type says
                    what biases are, and in backward weights */
    bool is_e4m3_backward; /* but in backward weights are e4m3, too */
    int64_t real_bytes;
    uint32_t real_type;
    int64_t row_bytes;
    int64_t tokens, hidden, columns, top_k, capacity;
    int64_t blocks, block; /* how many, tokens of one */
    int64_t plan_bytes;
    epic_experts_memory_info experts_memory, shared_memory; /* shared: of one block */
    int64_t router_bytes;
    int64_t dense_count, dense_levels;
    double d_balance, d_z; /* backward: what comes in for each loss */
    uint32_t grad_type;    /* backward: of the experts' gradients */
    moe_saved saved;
    moe_work work;
    int64_t saved_bytes, work_bytes;
    epic_rows x;
} moe_job;

/* Reads and checks the layer, for `tokens` tokens or the next number that makes whole blocks;
 * EPIC_EINVAL. */
epic_result moe_read_config(moe_job *j, const epic_config *config, const epic_moe *moe,
                            size_t size, int64_t tokens);

/* Lays out saved memory and workspace at these addresses, or only counts them (NULL). */
void moe_layout_buffers(moe_job *j, const void *saved, void *workspace, bool backward);

/* Number `index` of an array of reals. */
static inline void *moe_real_at(const moe_job *j, const void *base, int64_t index)
{
    return (char *)(uintptr_t)base + index * j->real_bytes;
}

/* The rows of a block. */
static inline epic_rows moe_block_rows(const moe_job *j, const epic_rows *rows, int64_t block)
{
    return (epic_rows){(char *)rows->data + block * j->block * j->row_bytes, j->block,
                       j->row_bytes};
}

/* Where the parts of the dense gradients begin, in reals.  Biases have a place also where the
 * caller has none: on every rank the same count is summed. */
typedef struct dense_offsets {
    int64_t w_gate, b_gate, scale, gate_up, down, b_gate_up, b_down, w_shared_gate, end;
} dense_offsets;

dense_offsets moe_dense_offsets(const moe_job *j);

/* The arithmetic of one block, in float32 and in float64. */
typedef struct dense_block {
    const moe_job *job;
    epic_rows x;        /* of the block */
    const void *logits; /* of the block, out in forward */
    const int32_t *topk_idx;
    const void *weights; /* real */
} dense_block;

/* Block b of the tokens, with what was saved of it. */
dense_block moe_get_block(const moe_job *j, int64_t b);

typedef struct dense_ops {
    /* logits = x W_gate + b_gate */
    void (*gate_forward)(const dense_block *b, void *logits);
    /* out += w * x for zero-experts, and the rows of the shared expert (NULL: none) */
    void (*add_local_experts)(const dense_block *b, const epic_rows *out, const void *shared_y);
    /* weights = sigmoid(x w_shared_gate), what the shared expert is multiplied by */
    void (*shared_gate_forward)(const dense_block *b, void *weights);
    /* d_weights of zero-experts = <d_out, x> */
    void (*zero_expert_d_weights)(const dense_block *b, const epic_rows *d_out,
                                  void *d_weights);
    /* gradients of the gates and the bias at `dense`, and d_x (NULL: not wanted) += d_logits W_gate^T +
     * w * d_out for zero-experts + d_shared */
    void (*gate_backward)(const dense_block *b, const void *d_logits, const epic_rows *d_out,
                          const void *d_shared, const epic_rows *d_x, void *dense);
    /* to += from */
    void (*add_reals)(void *to, const void *from, int64_t n);
    /* values[0 .. n) in a binary tree */
    double (*sum_in_tree)(const void *values, int64_t n);
} dense_ops;

extern const dense_ops dense_f32, dense_f64;

static inline const dense_ops *moe_dense_ops(const moe_job *j)
{
    return j->is_f64 ? &dense_f64 : &dense_f32;
}

#endif
