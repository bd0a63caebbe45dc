/* SPDX-License-Identifier: Apache-2.0 */
/* The gate of a layer on CUDA, logits = x w_gate + b_gate, and operations on small arrays such
 * as losses and counts. The gate uses the GEMM kernels of the experts: it passes its tokens as
 * the rows of a single expert. The rows of one expert are called a *slab*.
 *
 * *Components*: for tensor cores, a float32 value is split into three bfloat16 values whose sum
 * is the float32 value. A GEMM that is computed from components is nearly as accurate as a
 * float32 GEMM.
 *
 * *Slices*: a GEMM may be computed as a split-K GEMM, which divides each sum into slices and
 * then adds the slices. */
#include "backend/p2p/p2p.h"
#include "base/error.h"
#include "cuda/experts/grouped.h"
#include "rules/gate_layout.h"

/* Returns the addresses of two arrays in the workspace: the gate's only slab, which contains
 * all tokens, and the list of the tiles into which the slab is divided. */
static p2p_slabs slabs_of(const epic_gate_args *gate)
{
    experts_layout at;
    experts_lay_tiles(&at, 1, gate->tokens);
    uint8_t *work = gate->workspace;
    return (p2p_slabs){.num_tiles = (int32_t *)(void *)work,
                       .tiles = (slab_tile *)(void *)(work + at.tiles),
                       .slabs = (slab_range *)(void *)(work + at.slabs),
                       .num_slots = gate->tokens,
                       .num_experts = 1,
                       .most_tiles = at.most_tiles};
}

/* Returns a GEMM of the gate, as a grouped GEMM with one group. The GEMM has three arrays: x
 * [tokens, hidden], w_gate [hidden, columns] and logits [tokens, columns], or their gradients.
 * `pass` selects which of these arrays is the result. The other two are the factors. */
static p2p_gemm product_of(const epic_group *g, const epic_gate_args *gate, uint32_t pass)
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
                      .slice_sums = (float *)(void *)((uint8_t *)gate->workspace +
                                                      experts_tiles_bytes(gate->tokens)),
                      .sms = g->device_sms};
}

static epic_result launch_product(const p2p_gemm *product, epic_stream stream)
{
    return p2p_cuda(p2p_launch_gemm(product, (cudaStream_t)stream),
                    "launching a product of the gate");
}

/* Returns a copy of the GEMM `product` in which three bfloat16 components replace each value of
 * one float32 factor. In the forward pass this factor is w_gate, in the backward pass the
 * gradient of the logits. */
static p2p_gemm product_of_components(const p2p_gemm *product, const epic_gate_args *gate)
{
    const bool forward = product->pass == EPIC_GEMM_FORWARD;
    const int64_t lines = forward ? gate->tokens : gate->hidden;
    const int64_t depth = forward ? gate->hidden : gate->tokens;
    const int32_t slices =
        gate->is_invariant && forward ? gate_component_slices(gate->hidden, gate->columns) : 1;
    const gate_components at =
        gate_components_of(gate->tokens, lines, gate->columns, depth, slices);
    uint8_t *work = gate->workspace;
    p2p_gemm components = *product;
    components.b = work + at.components;
    components.out = work + at.sums;
    components.bias = NULL;
    components.n = GATE_COMPONENTS * product->n;
    components.weight_type = EPIC_BF16;
    components.y_type = forward ? EPIC_F32 : EPIC_BF16;
    components.accumulate = 0;
    components.slices = slices;
    components.slice_sums = components.out;
    return components;
}

/* Lists of components, two bits each, the first component in the lowest bits. Component 0 of a
 * float32 has the high bits of its mantissa, component 1 the middle bits and component 2 the
 * low bits.
 *
 * IN_ORDER lists each component once, for a GEMM in which only one factor is split. If the left
 * and the right factor are split, the result is the sum of six GEMMs of components, added in
 * ascending i. GEMM i multiplies component PAIRS_LEFT[i] of the left factor by component
 * PAIRS_RIGHT[i] of the right factor: 0 x 2, 2 x 0, 1 x 1, 0 x 1, 1 x 0, 0 x 0. The other three
 * products of components (1 x 2, 2 x 1, 2 x 2) are left out, because they are smaller than the
 * last bit of a float32. */
enum { IN_ORDER = 0 | 1 << 2 | 2 << 4 };
enum { PAIRS_LEFT = 0 | 2 << 2 | 1 << 4 | 0 << 6 | 1 << 8 | 0 << 10 };
enum { PAIRS_RIGHT = 2 | 0 << 2 | 1 << 4 | 1 << 6 | 0 << 8 | 0 << 10 };

static epic_result launch_split(const p2p_components_job *job, epic_stream stream)
{
    return p2p_cuda(p2p_launch_split(job, (cudaStream_t)stream),
                    "launching the gate's components");
}

/* Computes product->a times product->b with bfloat16 components, in three steps:
 * 1. Split product->b into components: each of its columns becomes three columns.
 * 2. Multiply product->a by all these columns on tensor cores.
 * 3. Add the three columns of the result that belong to one column of product->b.
 *
 * With EPIC_INVARIANT, the forward pass uses split-K on tensor cores: step 2 computes all
 * slices of each sum in parallel, and step 3 also adds the slices. */
static epic_result multiply_components(const p2p_gemm *product, const p2p_gemm *components,
                                       const epic_gate_args *gate)
{
    const bool forward = product->pass == EPIC_GEMM_FORWARD;
    const cudaStream_t stream = (cudaStream_t)gate->stream;
    const p2p_components_job split = {.from = product->b,
                                      .to = (void *)(uintptr_t)components->b,
                                      .rows = forward ? gate->hidden : gate->tokens,
                                      .columns = gate->columns,
                                      .places = GATE_COMPONENTS,
                                      .order = IN_ORDER,
                                      .sms = product->sms};
    const p2p_components_job fold = {.from = components->out,
                                     .to = product->out,
                                     .bias = product->bias,
                                     .rows = forward ? gate->tokens : gate->hidden,
                                     .columns = gate->columns,
                                     .accumulate = product->accumulate,
                                     .sms = product->sms};
    TRY(launch_split(&split, gate->stream));
    if (components->slices > 1 && !p2p_gemm_is_slow(components)) {
        TRY(p2p_cuda(p2p_launch_hopper_slices(components, stream),
                     "launching a product of the gate in slices"));
        return p2p_cuda(p2p_launch_fold_slices(&fold, components->slices, stream),
                        "launching the sum of the gate's slices");
    }
    p2p_gemm whole = *components;
    whole.slices = 0;
    TRY(launch_product(&whole, gate->stream));
    return p2p_cuda(p2p_launch_fold(&fold, stream),
                    "launching the sum of the gate's components");
}

/* Returns the number of tokens by which the gate decides between float32 values and bfloat16
 * components (epic_gate_args.deciding_tokens). */
static int64_t deciding_tokens(const epic_gate_args *gate)
{
    return gate->deciding_tokens ? gate->deciding_tokens : gate->block;
}

/* Returns whether the GEMM of pass EPIC_GEMM_FORWARD or EPIC_GEMM_WEIGHT uses bfloat16
 * components, which are faster if the GEMM is large. The choice does not depend on the number
 * of ranks, so the bits of the result do not depend on it either. With is_invariant, the
 * forward pass uses components for every size. `components` is the GEMM that would be
 * launched. */
static bool has_components(const p2p_gemm *components, const epic_gate_args *gate)
{
    const int64_t tokens = deciding_tokens(gate), hidden = gate->hidden;
    const bool forward = components->pass == EPIC_GEMM_FORWARD;
    const bool is_large = forward ? gate_is_large(tokens, gate->columns, hidden)
                                  : gate_is_large(hidden, gate->columns, tokens);
    if (gate->always_split) return true;
    return (is_large || (gate->is_invariant && forward)) && !p2p_gemm_is_slow(components);
}

/* Returns the number of split-K slices of a GEMM without components, for pass EPIC_GEMM_FORWARD
 * or EPIC_GEMM_WEIGHT. The number depends on gate->block or, in a forward pass with
 * is_invariant, only on `hidden`. */
static int32_t plain_slices(const p2p_gemm *product, const epic_gate_args *gate)
{
    if (product->pass != EPIC_GEMM_FORWARD)
        return gate_slices(gate->hidden, gate->columns, gate->block);
    return gate->is_invariant ? gate_fixed_slices(gate->hidden)
                              : gate_slices(gate->block, gate->columns, gate->hidden);
}

static epic_result multiply_forward_or_weight(p2p_gemm *product, const epic_gate_args *gate)
{
    const p2p_gemm components = product_of_components(product, gate);
    if (has_components(&components, gate))
        return multiply_components(product, &components, gate);
    product->slices = plain_slices(product, gate);
    return launch_product(product, gate->stream);
}

/* Adds the product d_logits w_gate^T to d_x (EPIC_GEMM_INPUT). For this, first splits each
 * value of d_logits and of w_gate into components, which are values of lower precision whose
 * sum is the value. */
static epic_result multiply_pairs(const p2p_gemm *product, const p2p_gemm *pairs,
                                  const epic_gate_args *gate)
{
    p2p_components_job split = {.from = product->a,
                                .to = (void *)(uintptr_t)pairs->a,
                                .rows = gate->tokens,
                                .columns = gate->columns,
                                .places = GATE_PAIRS,
                                .order = PAIRS_LEFT,
                                .sms = product->sms};
    TRY(launch_split(&split, gate->stream));
    split.from = product->b;
    split.to = (void *)(uintptr_t)pairs->b;
    split.rows = gate->hidden;
    split.order = PAIRS_RIGHT;
    TRY(launch_split(&split, gate->stream));
    return launch_product(pairs, gate->stream);
}

/* Launches the GEMM of pass EPIC_GEMM_INPUT. Splits float32 values into bfloat16 components if
 * is_invariant is set, or if components are faster for the number of tokens that
 * deciding_tokens() returns. So the choice does not depend on the number of ranks. */
static epic_result multiply_input(const p2p_gemm *product, const epic_gate_args *gate)
{
    const gate_pairs at = gate_pairs_of(gate->tokens, gate->hidden, gate->columns);
    const bool large =
        gate->is_invariant || gate_is_large(deciding_tokens(gate), gate->columns, gate->hidden);
    uint8_t *work = gate->workspace;
    p2p_gemm pairs = *product;
    pairs.a = work + at.d_logits;
    pairs.b = work + at.weights;
    pairs.n = GATE_PAIRS * product->n;
    pairs.weight_type = pairs.y_type = EPIC_BF16;
    if (gate->always_split || (large && !p2p_gemm_is_slow(&pairs)))
        return multiply_pairs(product, &pairs, gate);
    return launch_product(product, gate->stream);
}

/* Launches the kernel that divides the tokens into tiles for the gate's GEMMs. All tokens
 * together are one slab. */
static epic_result launch_gate_slab(epic_group *g, const epic_gate_args *gate)
{
    TRY(p2p_check_group(g));
    const p2p_slabs slabs = slabs_of(gate);
    return p2p_cuda(p2p_launch_slabs(&slabs, (cudaStream_t)gate->stream),
                    "launching the gate's slab");
}

/* Returns whether the forward GEMM reads the list of tiles. A GEMM with few rows does not read
 * it. */
static bool reads_tiles(const p2p_gemm *product, const epic_gate_args *gate)
{
    const p2p_gemm components = product_of_components(product, gate);
    p2p_gemm plain = *product;
    plain.slices = plain_slices(product, gate);
    return has_components(&components, gate) || !p2p_gemm_has_few_rows(&plain);
}

epic_result p2p_gate(epic_group *group, const epic_gate_args *gate)
{
    p2p_gemm product = product_of(group, gate, EPIC_GEMM_FORWARD);
    product.out = gate->logits;
    product.bias = gate->b_gate;
    if (gate->tokens == 0) return EPIC_OK;
    if (reads_tiles(&product, gate))
        TRY(launch_gate_slab(group, gate));
    else
        TRY(p2p_check_group(group));
    return multiply_forward_or_weight(&product, gate);
}

/* Launches the kernel that computes the gradient of the bias: d_b_gate [columns] = the sum of
 * d_logits over all tokens. */
static epic_result bias_gradient(const epic_gate_args *gate)
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

static slab_range *ranges_at(const epic_gate_args *gate, int64_t at)
{
    return (slab_range *)(void *)((uint8_t *)gate->workspace + at);
}

static float *floats_at(const epic_gate_args *gate, int64_t at)
{
    return (float *)(void *)((uint8_t *)gate->workspace + at);
}

/* Returns a grouped GEMM that computes `count` gradients of w_gate: one for each of the `count`
 * elements of `slabs`. Each slab is a block of tokens, or a split-K slice of a block. `sums`:
 * offset of the results in the workspace. */
static p2p_gemm product_of_slabs(const p2p_gemm *product, const epic_gate_args *gate,
                                 slab_range *slabs, int64_t count, int64_t sums)
{
    p2p_gemm all = *product;
    all.slabs.slabs = slabs;
    all.slabs.num_experts = (int32_t)count;
    all.out = floats_at(gate, sums);
    all.accumulate = all.slices = 0;
    return all;
}

static epic_result launch_leaves(const p2p_leaves_job *job, epic_stream stream)
{
    return p2p_cuda(p2p_launch_leaves(job, (cudaStream_t)stream),
                    "launching the sum of the gate's blocks");
}

static epic_result multiply_blocks_in_components(const p2p_gemm *weight,
                                                 const p2p_gemm *components,
                                                 const epic_gate_args *gate)
{
    const int64_t columns = gate->columns;
    const p2p_components_job split = {.from = weight->b,
                                      .to = (void *)(uintptr_t)components->b,
                                      .rows = gate->tokens,
                                      .columns = columns,
                                      .places = GATE_COMPONENTS,
                                      .order = IN_ORDER,
                                      .sms = weight->sms};
    const p2p_leaves_job leaves = {.from = (const float *)components->out +
                                           (GATE_COMPONENTS - 1) * columns,
                                   .to = weight->out,
                                   .rows = gate->hidden,
                                   .columns = columns,
                                   .leaf_stride = gate->hidden * GATE_COMPONENTS * columns,
                                   .term_stride = -columns,
                                   .row_stride = GATE_COMPONENTS * columns,
                                   .leaves = (int32_t)gate->blocks.count,
                                   .terms = GATE_COMPONENTS,
                                   .accumulate = weight->accumulate,
                                   .sms = weight->sms};
    if (gate->tokens) TRY(launch_split(&split, gate->stream));
    TRY(launch_product(components, gate->stream));
    return launch_leaves(&leaves, gate->stream);
}

/* Launches the kernels that compute the gradient of w_gate for several blocks in float32. This
 * is one grouped GEMM, in which each split-K slice of each block is one group (slab). */
static epic_result multiply_slices(const p2p_gemm *weight, const epic_gate_args *gate,
                                   const gate_leaves *at)
{
    const int64_t count = gate->blocks.count * at->slices;
    const int64_t numbers = gate->hidden * gate->columns;
    const p2p_gemm product =
        product_of_slabs(weight, gate, ranges_at(gate, at->cuts), count, at->sums);
    const p2p_leaves_job leaves = {.from = product.out,
                                   .to = weight->out,
                                   .rows = gate->hidden,
                                   .columns = gate->columns,
                                   .leaf_stride = at->slices * numbers,
                                   .term_stride = numbers,
                                   .row_stride = gate->columns,
                                   .leaves = (int32_t)gate->blocks.count,
                                   .terms = at->slices,
                                   .accumulate = weight->accumulate,
                                   .sms = weight->sms};
    TRY(launch_product(&product, gate->stream));
    return launch_leaves(&leaves, gate->stream);
}

static epic_result bias_gradient_of_blocks(const epic_group *g, const p2p_slabs *slabs,
                                           const epic_gate_args *gate, const gate_leaves *at)
{
    const p2p_bias_job job = {.slabs = *slabs,
                              .rows = gate->logits,
                              .out = floats_at(gate, at->bias),
                              .n = gate->columns,
                              .row_type = EPIC_F32,
                              .out_type = EPIC_F32};
    const p2p_leaves_job leaves = {.from = job.out,
                                   .to = gate->d_b_gate,
                                   .rows = 1,
                                   .columns = gate->columns,
                                   .leaf_stride = gate->columns,
                                   .row_stride = gate->columns,
                                   .leaves = (int32_t)gate->blocks.count,
                                   .terms = 1,
                                   .accumulate = (int32_t)gate->accumulate,
                                   .sms = g->device_sms};
    TRY(p2p_cuda(p2p_launch_bias(&job, (cudaStream_t)gate->stream),
                 "launching the gate's bias's gradient"));
    return launch_leaves(&leaves, gate->stream);
}

/* Computes the gradients of w_gate and b_gate for each of several blocks of tokens, and adds
 * them in a tree. has_components(), the number of slices and the order of all sums do not
 * depend on the number of blocks in a call. So the result has the same bits as calls with one
 * block each. */
static epic_result gradients_of_blocks(const epic_group *g, const p2p_gemm *weight,
                                       const epic_gate_args *gate)
{
    const int64_t count = gate->blocks.count;
    gate_leaves at =
        gate_leaves_of(gate->tokens, gate->block, count, gate->hidden, gate->columns, true);
    p2p_gemm components =
        product_of_slabs(weight, gate, ranges_at(gate, at.slabs), count, at.sums);
    components.b = floats_at(gate, at.components);
    components.n = GATE_COMPONENTS * weight->n;
    components.weight_type = components.y_type = EPIC_BF16;
    const bool split = has_components(&components, gate);
    if (!split)
        at = gate_leaves_of(gate->tokens, gate->block, count, gate->hidden, gate->columns,
                            false);
    const p2p_gate_blocks_job job = {.all = weight->slabs,
                                     .slabs = ranges_at(gate, at.slabs),
                                     .cuts = ranges_at(gate, at.cuts),
                                     .blocks = gate->blocks,
                                     .slices = at.slices};
    TRY(p2p_cuda(p2p_launch_gate_blocks(&job, (cudaStream_t)gate->stream),
                 "launching the gate's blocks"));
    if (gate->d_b_gate) TRY(bias_gradient_of_blocks(g, &components.slabs, gate, &at));
    if (!gate->d_w_gate) return EPIC_OK;
    return split ? multiply_blocks_in_components(weight, &components, gate)
                 : multiply_slices(weight, gate, &at);
}

/* Computes the gradients of w_gate, b_gate and x (p2p.h). If this rank has no tokens, the
 * gradients of w_gate and b_gate are zeros. */
epic_result p2p_gate_backward(epic_group *group, const epic_gate_args *gate)
{
    p2p_gemm weight = product_of(group, gate, EPIC_GEMM_WEIGHT);
    weight.out = gate->d_w_gate;
    weight.accumulate = (int32_t)gate->accumulate;
    p2p_gemm input = product_of(group, gate, EPIC_GEMM_INPUT);
    input.out = gate->d_x;
    input.addend = gate->addend;
    input.accumulate = 1;
    if (gate->blocks.count > 1) {
        TRY(p2p_check_group(group));
        TRY(gradients_of_blocks(group, &weight, gate));
    } else {
        TRY(launch_gate_slab(group, gate));
        if (gate->d_b_gate) TRY(bias_gradient(gate));
        if (gate->d_w_gate) TRY(multiply_forward_or_weight(&weight, gate));
    }
    return gate->d_x && gate->tokens ? multiply_input(&input, gate) : EPIC_OK;
}

epic_result p2p_add(epic_group *group, epic_stream stream, void *to, const void *from,
                    int64_t count, uint32_t type, bool replace)
{
    const p2p_rows_job job = {to, from, count, type, replace};
    return p2p_cuda(p2p_launch_rows(&job, group->device_sms, (cudaStream_t)stream),
                    "launching a sum of the layer");
}

epic_result p2p_read_counts(epic_group *group, epic_stream stream, const int32_t *from,
                            int64_t count, int32_t *to)
{
    (void)group;
    const cudaStream_t s = (cudaStream_t)stream;
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    TRY(p2p_cuda(cudaStreamIsCapturing(s, &status), "asking whether a stream is captured"));
    if (status != cudaStreamCaptureStatusNone)
        return epic_fail(
            EPIC_ENOTSUP,
            "call.stream is being captured: epic_moe_plan makes the host wait, so a "
            "graph cannot contain it; set moe.capacity (epic_capacity_bound)");
    if (!count) return EPIC_OK;
    const size_t bytes = (size_t)count * sizeof *to;
    /* Waits before the copy. A copy to pageable memory holds a lock of the CUDA context until
     * the stream reaches the copy. A peer in another thread of this process needs this lock to
     * launch the kernel for which the stream waits. So without this wait, this thread and the
     * peer would deadlock. */
    cudaError_t error = cudaStreamSynchronize(s);
    if (error == cudaSuccess)
        error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, s);
    if (error == cudaSuccess) error = cudaStreamSynchronize(s);
    return p2p_cuda(error, "reading the counts of a plan");
}

epic_result p2p_sum_trees(epic_group *group, epic_stream stream, float *values, int64_t n)
{
    (void)group;
    return p2p_cuda(p2p_launch_trees(values, n, (cudaStream_t)stream),
                    "launching the sums of the layer's losses");
}

epic_result p2p_write_losses(epic_group *group, epic_stream stream, const float *losses,
                             const epic_moe_args *args)
{
    (void)group;
    const p2p_sum_losses_job job = {losses, losses ? losses + 1 : NULL, args->loss,
                                    args->balance_loss, args->z_loss};
    if (!args->loss && !args->balance_loss && !args->z_loss) return EPIC_OK;
    return p2p_cuda(p2p_launch_losses(&job, (cudaStream_t)stream),
                    "launching the layer's losses");
}

epic_result p2p_read_d_losses(epic_group *group, epic_stream stream, float *d_losses,
                              const epic_moe_backward_args *args)
{
    (void)group;
    const p2p_loss_gradients_job job = {args->d_loss, args->d_balance_loss, args->d_z_loss,
                                        d_losses};
    return p2p_cuda(p2p_launch_incoming(&job, (cudaStream_t)stream),
                    "launching the losses' gradients");
}
