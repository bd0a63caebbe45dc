/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a layer that are computed per token: zero-experts (whose output is their input),
 * the shared expert's gate, and the sum of the output. Also checks plans. */
#include "backend/p2p/p2p.h"
#include "base/error.h"
#include "cuda/experts/dense_tokens.h"
#include "cuda/experts/grouped.h"
#include "rules/experts_layout.h"

static cudaStream_t stream_of(epic_stream stream)
{
    return (cudaStream_t)stream;
}

epic_result p2p_mask_zero_experts(epic_group *group, epic_stream stream,
                                  const layer_tokens *tokens, int32_t *to)
{
    return p2p_cuda(p2p_launch_sent(tokens, to, group->device_sms, stream_of(stream)),
                    "launching the layer's choices");
}

epic_result p2p_shared_gate(epic_group *group, epic_stream stream, const layer_tokens *tokens)
{
    return p2p_cuda(p2p_launch_shared_gate(tokens, group->device_sms, stream_of(stream)),
                    "launching the shared expert's gate");
}

/* Implements the backward pass of the shared expert's gate (p2p.h). The gradient of
 * w_shared_gate is the sum of the rows of x, each multiplied by its element of
 * d_shared_weights. The gradient of a bias is such a weighted sum too, so the kernel for the
 * gradients of biases computes it. */
epic_result p2p_shared_gate_backward(epic_group *group, epic_stream stream,
                                     const layer_tokens *tokens, float *gradient,
                                     bool accumulate, void *workspace)
{
    experts_layout at;
    uint8_t *work = workspace;
    experts_lay_tiles(&at, 1, tokens->num_tokens);
    const p2p_slabs slabs = {.num_tiles = (int32_t *)(void *)work,
                             .tiles = (slab_tile *)(void *)(work + at.tiles),
                             .slabs = (slab_range *)(void *)(work + at.slabs),
                             .num_slots = tokens->num_tokens,
                             .num_experts = 1,
                             .most_tiles = at.most_tiles};
    const p2p_bias_job sum = {.slabs = slabs,
                              .rows = tokens->x,
                              .weights = tokens->d_shared_weights,
                              .out = gradient,
                              .n = tokens->hidden,
                              .row_type = tokens->row_type,
                              .out_type = EPIC_F32,
                              .accumulate = accumulate};
    TRY(p2p_cuda(p2p_launch_shared_slope(tokens, group->device_sms, stream_of(stream)),
                 "launching the shared expert's gate's backward"));
    if (!gradient) return EPIC_OK;
    TRY(p2p_cuda(p2p_launch_slabs(&slabs, stream_of(stream)), "launching the tokens' slab"));
    return p2p_cuda(p2p_launch_bias(&sum, stream_of(stream)),
                    "launching the shared expert's gate's gradient");
}

epic_result p2p_zero_weights(epic_group *group, epic_stream stream, const layer_tokens *tokens)
{
    return p2p_cuda(p2p_launch_zero_weights(tokens, group->device_sms, stream_of(stream)),
                    "launching the zero-experts' gradients");
}

epic_result p2p_add_local_rows(epic_group *group, epic_stream stream,
                               const layer_tokens *tokens, const layer_rows *rows)
{
    return p2p_cuda(p2p_launch_finish(tokens, rows, group->device_sms, stream_of(stream)),
                    "launching the sums of the layer's rows");
}

epic_result p2p_check_plan_fits(epic_group *group, const epic_plan_args *args,
                                uint32_t num_local)
{
    const p2p_fits_job job = {.self = group->self,
                              .plan = args->plan,
                              .expert_rows = args->expert_rows,
                              .expert_tokens = args->expert_tokens,
                              .num_local = (int32_t)num_local};
    return p2p_cuda(p2p_launch_fits(&job, stream_of(args->call.stream)),
                    "launching a look at the layer's plan");
}
