/* SPDX-License-Identifier: Apache-2.0 */
/* The dense part of a layer: products with one slab, which all tokens are, and small sums. */
#include "backend/p2p/p2p.h"
#include "base/error.h"
#include "cuda/grouped.h"
#include "rules/gate_layout.h"

static p2p_slabs slabs_of(const epic_gate *gate)
{
    experts_layout at;
    experts_lay_tiles(&at, 1, gate->tokens);
    uint8_t *work = gate->workspace;
    return (p2p_slabs){.num_tiles = (int32_t *)(void *)work,
                       .tiles = (slab_tile *)(void *)(work + at.tiles),
                       .slabs = (slab_place *)(void *)(work + at.slabs),
                       .num_slots = gate->tokens,
                       .num_experts = 1,
                       .most_tiles = at.most_tiles};
}

/* x [tokens, hidden], logits [tokens, columns] and w_gate are those of one expert's product. */
static p2p_gemm product_of(const epic_group *g, const epic_gate *gate, uint32_t pass)
{
    return (p2p_gemm){.slabs = slabs_of(gate),
                      .a = pass == EPIC_GEMM_INPUT ? (const void *)gate->logits : gate->x,
                      .b = pass == EPIC_GEMM_WEIGHT ? gate->logits : gate->w_gate,
                      .k = gate->hidden,
                      .n = gate->columns,
                      .pass = pass,
                      .row_type = gate->row_type,
                      .y_type = EPIC_F32,
                      .weight_type = EPIC_F32,
                      .out_type = EPIC_F32,
                      .parts = (float *)(void *)((uint8_t *)gate->workspace +
                                                 experts_tiles_bytes(gate->tokens)),
                      .sms = g->device_sms};
}

static epic_result multiply(const p2p_gemm *product, epic_stream stream)
{
    return p2p_cuda(p2p_launch_gemm(product, (cudaStream_t)stream),
                    "launching a product of the gate");
}

static epic_result begin(epic_group *g, const epic_gate *gate)
{
    TRY(p2p_whole(g));
    const p2p_slabs slabs = slabs_of(gate);
    return p2p_cuda(p2p_launch_slabs(&slabs, (cudaStream_t)gate->stream),
                    "launching the gate's slab");
}

epic_result p2p_gate(epic_group *group, const epic_gate *gate)
{
    p2p_gemm product = product_of(group, gate, EPIC_GEMM_FORWARD);
    product.out = gate->logits;
    product.bias = gate->b_gate;
    product.slices = gate_slices(gate->block, gate->columns, gate->hidden);
    if (gate->tokens == 0) return EPIC_OK;
    TRY(begin(group, gate));
    return multiply(&product, gate->stream);
}

static epic_result bias_gradient(const epic_gate *gate)
{
    const p2p_bias_job job = {.slabs = slabs_of(gate),
                              .rows = gate->logits,
                              .out = gate->d_b_gate,
                              .n = gate->columns,
                              .row_type = EPIC_F32,
                              .out_type = EPIC_F32,
                              .accumulate = (int32_t)gate->accumulate};
    return p2p_cuda(p2p_launch_bias(&job, (cudaStream_t)gate->stream),
                    "launching the gate's bias's gradient");
}

/* Also without a token: gradients are zeros then. */
epic_result p2p_gate_backward(epic_group *group, const epic_gate *gate)
{
    p2p_gemm weight = product_of(group, gate, EPIC_GEMM_WEIGHT);
    weight.out = gate->d_w_gate;
    weight.accumulate = (int32_t)gate->accumulate;
    weight.slices = gate_slices(gate->hidden, gate->columns, gate->block);
    p2p_gemm input = product_of(group, gate, EPIC_GEMM_INPUT);
    input.out = gate->d_x;
    input.also = gate->also;
    input.accumulate = 1;
    TRY(begin(group, gate));
    if (gate->d_b_gate) TRY(bias_gradient(gate));
    if (gate->d_w_gate) TRY(multiply(&weight, gate->stream));
    return gate->d_x && gate->tokens ? multiply(&input, gate->stream) : EPIC_OK;
}

epic_result p2p_add(epic_group *group, epic_stream stream, void *to, const void *from,
                    int64_t count, uint32_t type, bool replace)
{
    const p2p_rows_job job = {to, from, count, type, replace};
    return p2p_cuda(p2p_launch_rows(&job, group->device_sms, (cudaStream_t)stream),
                    "launching a sum of the layer");
}

epic_result p2p_trees(epic_group *group, epic_stream stream, float *values, int64_t n)
{
    (void)group;
    return p2p_cuda(p2p_launch_trees(values, n, (cudaStream_t)stream),
                    "launching the sums of the layer's losses");
}

epic_result p2p_give_losses(epic_group *group, epic_stream stream, const float *losses,
                            const epic_moe_args *args)
{
    (void)group;
    const p2p_losses_job job = {losses, losses ? losses + 1 : NULL, args->loss,
                                args->balance_loss, args->z_loss};
    return p2p_cuda(p2p_launch_losses(&job, (cudaStream_t)stream),
                    "launching the layer's losses");
}

epic_result p2p_take_losses(epic_group *group, epic_stream stream, float *d_losses,
                            const epic_moe_backward_args *args)
{
    (void)group;
    const p2p_incoming_job job = {args->d_loss, args->d_balance_loss, args->d_z_loss, d_losses};
    return p2p_cuda(p2p_launch_incoming(&job, (cudaStream_t)stream),
                    "launching the losses' gradients");
}
