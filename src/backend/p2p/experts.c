/* SPDX-License-Identifier: Apache-2.0 */
/* Experts: turns checked arguments into kernel launches. The kernels run on this rank alone and
 * wait for no peer.
 *
 * x [slots, hidden] are the input rows of the experts, and y [slots, hidden] their output rows.
 * W_gate_up [hidden, width] and W_down [inner, hidden] are the weights of the expert that owns
 * the slot, and f is the activation function. width is 2 * inner if the experts have a gate,
 * and inner if not. The gradient of an array A is called d_A. Forward computes:
 *
 *    saved       = x W_gate_up
 *    activations = f(saved)
 *    y           = activations W_down
 *
 * Backward computes, in this order:
 *
 *    d           = d_y W_down^T         the gradient of the activations
 *    d_gate_up, activations             from d and saved; the activations overwrite d
 *    d_w_down    = activations^T d_y
 *    d_w_gate_up = x^T d_gate_up
 *    d_x         = d_gate_up W_gate_up^T
 *
 * No kernel reads rows that have no token. So the GEMMs need not write such rows of saved,
 * activations and d and, with EPIC_LEAVE_PADDING, of y and d_x.
 *
 * If the weights are e4m3, forward also quantizes the activations to e4m3, and backward
 * quantizes d_y and d_gate_up before it multiplies them by weights. */
#include "backend/p2p/p2p.h"
#include "backend/p2p/ranges.h"
#include "base/error.h"
#include "cuda/experts/grouped.h"

typedef struct experts_call { /* arguments that forward and backward have in common */
    epic_experts experts;
    epic_call how;
    p2p_slabs slabs;
    experts_layout at;
    uint8_t *work;
    /* the output of the first GEMM, x W_gate_up; forward stores it for backward */
    const void *saved;
    const float *slot_weights;
    const void *b_gate_up;
    int64_t hidden, inner, width;
    bool scaled; /* true: weights are e4m3, and experts.weight_type is the type of the biases */
    int sms;
    cudaStream_t stream;
} experts_call;

static epic_result begin_experts(epic_group *g, experts_call *c, const epic_experts *experts,
                                 const epic_call *how, int64_t num_slots, bool backward)
{
    TRY(p2p_check_group(g));
    if (experts->row_type == EPIC_F64)
        return epic_fail(EPIC_ENOTSUP,
                         "experts.row_type is EPIC_F64: must be another type in CUDA contexts; "
                         "use host memory for float64");
    c->experts = *experts;
    c->how = *how;
    c->at = experts_layout_of(experts, num_slots, backward);
    c->scaled = experts->weight_type == EPIC_E4M3;
    if (c->scaled) c->experts.weight_type = experts->row_type;
    c->hidden = experts->hidden;
    c->inner = experts->inner;
    c->width = c->inner * (experts->ungated ? 1 : 2);
    c->stream = (cudaStream_t)how->stream;
    c->sms = how->max_sms && how->max_sms < (uint32_t)g->device_sms ? (int)how->max_sms
                                                                    : g->device_sms;
    return EPIC_OK;
}

/* Returns the addresses of two lists in the workspace: the slabs (a slab is the rows of one
 * expert), and the tiles into which the GEMMs divide the slabs. */
static p2p_slabs slabs_of(const experts_call *c, const int32_t *expert_rows,
                          const int32_t *expert_tokens, int64_t num_slots)
{
    return (p2p_slabs){.expert_rows = expert_rows,
                       .expert_tokens = expert_tokens,
                       .num_tiles = (int32_t *)(void *)c->work,
                       .tiles = (slab_tile *)(void *)(c->work + c->at.tiles),
                       .slabs = (slab_range *)(void *)(c->work + c->at.slabs),
                       .num_slots = num_slots,
                       .num_experts = (int32_t)c->experts.num_local_experts,
                       .most_tiles = c->at.most_tiles};
}

/* Returns the address of the activations [slots, inner] in the workspace. Backward first stores
 * the gradient of the activations there. */
static void *activations_of(const experts_call *c)
{
    return c->work + c->at.activations;
}

static void *d_gate_up_of(const experts_call *c)
{
    return c->work + c->at.d_gate_up;
}

/* Adds g->bias to g->out, because the caller's own GEMM function (experts.gemm) does not add
 * it. */
static epic_result add_bias(const experts_call *c, const p2p_gemm *g)
{
    const p2p_scale_job job = {.slabs = c->slabs,
                               .rows = g->out,
                               .weights = g->bias_weights,
                               .bias = g->bias,
                               .n = g->n,
                               .row_type = g->row_type,
                               .weight_type = g->weight_type,
                               .sms = c->sms};
    return p2p_cuda(p2p_launch_scale(&job, c->stream), "launching the experts' bias");
}

static epic_result launch_caller_product(const experts_call *c, const p2p_gemm *g)
{
    const epic_gemm *theirs = c->experts.gemm;
    const epic_gemm_args args = {
        .call = c->how,
        .a = g->a,
        .b = g->b,
        .out = g->out,
        .expert_rows = c->slabs.expert_rows,
        .expert_tokens = c->slabs.expert_tokens ? c->slabs.expert_tokens : c->slabs.expert_rows,
        .num_slots = c->slabs.num_slots,
        .k = g->k,
        .n = g->n,
        .num_experts = c->experts.num_local_experts,
        .pass = g->pass,
        .row_type = g->row_type,
        .weight_type = g->weight_type,
        .out_type = g->out_type,
        .flags = g->accumulate ? EPIC_ACCUMULATE : 0};
    const epic_result result = theirs->multiply(theirs->self, &args);
    if (result != EPIC_OK)
        return epic_fail(result, "experts.gemm: multiply has returned %d in pass %u",
                         (int)result, g->pass);
    return g->bias ? add_bias(c, g) : EPIC_OK;
}

/* Launches one GEMM. If the caller has set its own GEMM function (experts.gemm), uses that
 * function; if not, uses EPIC's kernels. */
static epic_result launch_product(const experts_call *c, p2p_gemm g)
{
    const bool scaled = c->scaled && g.pass != EPIC_GEMM_WEIGHT;
    g.slabs = c->slabs;
    g.row_type = scaled ? EPIC_E4M3 : c->experts.row_type;
    g.y_type = c->experts.row_type;
    g.weight_type = scaled ? EPIC_E4M3 : c->experts.weight_type;
    g.sms = c->sms;
    if (c->experts.gemm) return launch_caller_product(c, &g);
    return p2p_cuda(p2p_launch_gemm(&g, c->stream), "launching a product of the experts");
}

static bool is_16_byte_aligned(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

/* Returns the arguments of the activation kernel that are equal in forward and backward. */
static p2p_activation_job activation_of(const experts_call *c)
{
    const int64_t vector = c->experts.row_type == EPIC_F32 ? 4 : 8;
    return (p2p_activation_job){.slabs = c->slabs,
                                .experts = c->experts,
                                .gate_up = c->saved,
                                .bias = c->b_gate_up,
                                .slot_weights = c->slot_weights,
                                .activations = activations_of(c),
                                .aligned =
                                    c->inner % vector == 0 && is_16_byte_aligned(c->saved),
                                .sms = c->sms};
}

epic_result p2p_experts_forward(epic_group *group, const epic_experts_args *a)
{
    P2P_RANGE("epic_experts_forward");
    experts_call c = {.work = a->workspace,
                      .saved = a->saved,
                      .slot_weights = a->slot_weights,
                      .b_gate_up = a->b_gate_up};
    TRY(begin_experts(group, &c, a->experts, &a->call, a->num_slots, false));
    if (a->num_slots == 0) return EPIC_OK;
    c.slabs = slabs_of(&c, a->expert_rows, a->expert_tokens, a->num_slots);
    const bool early = c.experts.weighting == EPIC_WEIGHT_EARLY;
    float *const scales = c.scaled ? (float *)(void *)(c.work + c.at.scales) : NULL;
    const p2p_gemm first = {.pass = EPIC_GEMM_FORWARD,
                            .a = a->x,
                            .b = a->w_gate_up,
                            .a_scales = a->x_scales,
                            .b_scales = a->w_gate_up_scales,
                            .out = a->saved,
                            .leave_padding = true,
                            .k = c.hidden,
                            .n = c.width};
    const p2p_gemm second = {.pass = EPIC_GEMM_FORWARD,
                             .a = activations_of(&c),
                             .b = a->w_down,
                             .a_scales = scales,
                             .b_scales = a->w_down_scales,
                             .out = a->y,
                             .bias = a->b_down,
                             .bias_weights = early ? a->slot_weights : NULL,
                             .leave_padding = (a->flags & EPIC_LEAVE_PADDING) != 0,
                             .k = c.inner,
                             .n = c.hidden};
    p2p_activation_job between = activation_of(&c);
    between.scales = scales;
    TRY(p2p_cuda(p2p_launch_slabs(&c.slabs, c.stream), "launching the experts' slabs"));
    TRY(launch_product(&c, first));
    if (a->flags & EPIC_RECOMPUTE) return EPIC_OK;
    TRY(p2p_cuda(p2p_launch_activation(&between, c.stream), "launching the activation"));
    return launch_product(&c, second);
}

/* Computes the gradient of a bias: out [experts, n] = for each expert, the sum of its rows
 * [slots, n], each multiplied by its element of `weights` [slots] if `weights` is not NULL.
 * Does nothing if out is NULL. */
static epic_result bias_gradient(const experts_call *c, const epic_experts_backward_args *a,
                                 const void *rows, const float *weights, void *out, int64_t n)
{
    const p2p_bias_job job = {.slabs = c->slabs,
                              .rows = rows,
                              .weights = weights,
                              .out = out,
                              .n = n,
                              .row_type = c->experts.row_type,
                              .out_type = a->grad_type,
                              .accumulate = (a->flags & EPIC_ACCUMULATE) != 0};
    if (out == NULL) return EPIC_OK;
    return p2p_cuda(p2p_launch_bias(&job, c->stream), "launching a bias's gradient");
}

/* Computes the gradient of weights: out [experts, k, n] = rows^T d for each expert, with rows
 * [slots, k] and d [slots, n]. Does nothing if out is NULL. */
static epic_result weight_gradient(const experts_call *c, const epic_experts_backward_args *a,
                                   const void *rows, const void *d, void *out, int64_t k,
                                   int64_t n)
{
    const p2p_gemm job = {.pass = EPIC_GEMM_WEIGHT,
                          .a = rows,
                          .b = d,
                          .out = out,
                          .k = k,
                          .n = n,
                          .out_type = a->grad_type,
                          .accumulate = (a->flags & EPIC_ACCUMULATE) != 0};
    return out == NULL ? EPIC_OK : launch_product(c, job);
}

/* Computes the gradient of rows: out [slots, k] = rows [slots, n] times the expert's transposed
 * weights. With `leave_padding`, does not write rows of out that have no token. */
static epic_result row_gradient(const experts_call *c, const void *rows, const void *weights,
                                const float *scales, void *out, int64_t k, int64_t n,
                                bool leave_padding)
{
    p2p_gemm job = {.pass = EPIC_GEMM_INPUT,
                    .a = rows,
                    .b = weights,
                    .out = out,
                    .leave_padding = leave_padding,
                    .k = k,
                    .n = n};
    if (!c->scaled) return launch_product(c, job);
    const p2p_quantize_job quantize = {.slabs = c->slabs,
                                       .rows = rows,
                                       .to = c->work + c->at.quantized,
                                       .scales = (float *)(void *)(c->work + c->at.scales),
                                       .n = n,
                                       .row_type = c->experts.row_type,
                                       .sms = c->sms};
    job.a = quantize.to;
    job.a_scales = quantize.scales;
    job.b_scales = scales;
    TRY(p2p_cuda(p2p_launch_quantize(&quantize, c->stream), "launching rows to e4m3"));
    return launch_product(c, job);
}

/* Computes d_gate_up from the gradient of the activations. With EPIC_WEIGHT_INPUT, computes the
 * gradient of b_gate_up before it multiplies d_gate_up by the slot weights, because the
 * gradient of the bias needs the unweighted d_gate_up. */
static epic_result activation_backward(const experts_call *c,
                                       const epic_experts_backward_args *a)
{
    const bool early = c->experts.weighting == EPIC_WEIGHT_EARLY;
    const bool input = c->experts.weighting == EPIC_WEIGHT_INPUT;
    p2p_activation_job job = activation_of(c);
    job.d_gate_up = d_gate_up_of(c);
    job.d_y = a->d_y;
    job.b_down = early ? a->b_down : NULL;
    job.d_slot_weights = a->d_slot_weights;
    job.weigh_d = input && a->d_b_gate_up == NULL;
    TRY(p2p_cuda(p2p_launch_activation_backward(&job, c->stream),
                 "launching the activation's backward"));
    TRY(bias_gradient(c, a, job.d_gate_up, NULL, a->d_b_gate_up, c->width));
    if (!input || job.weigh_d) return EPIC_OK;
    const p2p_scale_job scale = {.slabs = c->slabs,
                                 .rows = job.d_gate_up,
                                 .weights = c->slot_weights,
                                 .n = c->width,
                                 .row_type = c->experts.row_type,
                                 .sms = c->sms};
    return p2p_cuda(p2p_launch_scale(&scale, c->stream), "launching the weights of the input");
}

epic_result p2p_experts_backward(epic_group *group, const epic_experts_backward_args *a)
{
    P2P_RANGE("epic_experts_backward");
    experts_call c = {.work = a->workspace,
                      .saved = a->saved,
                      .slot_weights = a->slot_weights,
                      .b_gate_up = a->b_gate_up};
    TRY(begin_experts(group, &c, a->experts, &a->call, a->num_slots, true));
    c.slabs = slabs_of(&c, a->expert_rows, a->expert_tokens, a->num_slots);
    const bool early = c.experts.weighting == EPIC_WEIGHT_EARLY;
    TRY(p2p_cuda(p2p_launch_slabs(&c.slabs, c.stream), "launching the experts' slabs"));
    TRY(bias_gradient(&c, a, a->d_y, early ? c.slot_weights : NULL, a->d_b_down, c.hidden));
    TRY(row_gradient(&c, a->d_y, a->w_down, a->w_down_scales, activations_of(&c), c.inner,
                     c.hidden, true));
    TRY(activation_backward(&c, a));
    TRY(weight_gradient(&c, a, activations_of(&c), a->d_y, a->d_w_down, c.inner, c.hidden));
    TRY(weight_gradient(&c, a, a->x, d_gate_up_of(&c), a->d_w_gate_up, c.hidden, c.width));
    if (!a->d_x) return EPIC_OK;
    return row_gradient(&c, d_gate_up_of(&c), a->w_gate_up, a->w_gate_up_scales, a->d_x,
                        c.hidden, c.width, (a->flags & EPIC_LEAVE_PADDING) != 0);
}
