/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the layer of E4M3 experts on CUDA contexts: the bits of the public calls that it
 * consists of, if weights of choices are 1; its results and gradients compared with those of
 * the same weights in the type of the rows; and the arguments that it refuses.
 *
 *   api_layer_scaled */
#include <math.h>
#include <pthread.h>
#include <unistd.h>

#include "scaled.h"

enum { RANKS = 2, LOCAL = 3, EXPERTS = RANKS * LOCAL, TOKENS = 37, HIDDEN = 272, INNER = 80 };
enum { WIDTH = 2 * INNER, ALIGNMENT = 8, CAPACITY = 2 * RANKS * TOKENS + LOCAL * ALIGNMENT };
enum { D_X, D_W_GATE, D_GATE_UP, D_DOWN, D_B_GATE_UP, D_B_DOWN, GRADIENTS };

static const char *const gradients[] = {"x",      "w_gate",    "w_gate_up",
                                        "w_down", "b_gate_up", "b_down"};
static epic_bootstrap bootstraps[RANKS];
static pthread_barrier_t all;
static int failures;

typedef struct kind {
    uint32_t type, weighting, top_k, flags;
} kind;

typedef struct rank { /* one rank's part of a case */
    const kind *k;
    epic_context *ctx;
    int number;
    cudaStream_t stream;
    epic_layer layer;
    epic_router router;
    epic_experts experts;
    epic_moe moe;
    both x, d_out, w_gate, b_gate_up, b_down, gate_up, down, wide_gate_up, wide_down;
    scaled_weights of_gate_up, of_down;
} rank;

/* Memory is allocated and freed while no kernel runs: cudaFree waits for all kernels, and these
 * wait for this rank. */
static void wait_for_all(void)
{
    pthread_barrier_wait(&all);
}

static void report_wrong(const rank *r, const char *what, double value)
{
    fprintf(stderr, "type %u, weighting %u, top-%u, rank %d: %s: %.3e %s\n", r->k->type,
            r->k->weighting, r->k->top_k, r->number, what, value, epic_error(r->ctx));
    __atomic_add_fetch(&failures, 1, __ATOMIC_RELAXED);
}

static void expect_ok(const rank *r, epic_result result, const char *what)
{
    if (result == EPIC_OK) return;
    report_wrong(r, what, (double)result);
    _exit(1); /* otherwise the peer would wait */
}

/* ---------------------------------------------------------------------------- the case ---- */

/* Returns numbers of that type that are nearest to the values of e4m3 with scales. */
static both as_type(const both *b, uint32_t type)
{
    both wide = make_both(type, b->count);
    for (int64_t i = 0; i < b->count; i++) set_number(&wide, i, b->truth[i]);
    push_to_device(&wide);
    return wide;
}

/* Makes one rank after the other, because the numbers come from one generator. */
static void make_rank(rank *r)
{
    const kind *k = r->k;
    r->layer = (epic_layer){.num_experts = EXPERTS, .top_k = k->top_k, .alignment = ALIGNMENT};
    r->router = (epic_router){
        .num_experts = EXPERTS, .top_k = k->top_k, .normalize = EPIC_NORMALIZE_SUM};
    r->experts = (epic_experts){.num_local_experts = LOCAL,
                                .hidden = HIDDEN,
                                .inner = INNER,
                                .weighting = k->weighting,
                                .row_type = k->type};
    r->moe = (epic_moe){.layer = &r->layer,
                        .router = &r->router,
                        .experts = &r->experts,
                        .capacity = CAPACITY,
                        .flags = EPIC_DISPATCH_AGAIN | k->flags};
    r->x = pushed_both(k->type, TOKENS * HIDDEN, 1);
    r->d_out = pushed_both(k->type, TOKENS * HIDDEN, 1);
    random_state = 77; /* so that the gate is the same on all ranks */
    r->w_gate = pushed_both(EPIC_F32, HIDDEN * EXPERTS, 0.2);
    random_state = 99 + (uint64_t)r->number;
    r->b_gate_up = pushed_both(k->type, LOCAL * WIDTH, 0.5);
    r->b_down = pushed_both(k->type, LOCAL * HIDDEN, 0.5);
    r->gate_up = pushed_both(EPIC_E4M3, LOCAL * HIDDEN * WIDTH, 0.2);
    r->down = pushed_both(EPIC_E4M3, LOCAL * INNER * HIDDEN, 0.3);
    r->of_gate_up = scale_weights(&r->gate_up, LOCAL, HIDDEN, WIDTH);
    r->of_down = scale_weights(&r->down, LOCAL, INNER, HIDDEN);
    r->wide_gate_up = as_type(&r->gate_up, k->type);
    r->wide_down = as_type(&r->down, k->type);
}

static void free_rank(rank *r)
{
    both *arrays[] = {&r->x,       &r->d_out, &r->w_gate,       &r->b_gate_up, &r->b_down,
                      &r->gate_up, &r->down,  &r->wide_gate_up, &r->wide_down};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free_both(arrays[i]);
    free_scaled(&r->of_gate_up);
    free_scaled(&r->of_down);
}

/* Returns the weights of forward, or in the layout for backward. */
static epic_moe_weights back_of(const rank *r)
{
    return (epic_moe_weights){.w_gate = r->w_gate.device,
                              .w_gate_up = r->gate_up.device,
                              .w_down = r->down.device,
                              .b_gate_up = r->b_gate_up.device,
                              .b_down = r->b_down.device,
                              .w_gate_up_scales = r->of_gate_up.scales.device,
                              .w_down_scales = r->of_down.scales.device};
}

static epic_moe_weights weights_of(const rank *r, bool scaled)
{
    epic_moe_weights w = {.w_gate = r->w_gate.device,
                          .w_gate_up = r->wide_gate_up.device,
                          .w_down = r->wide_down.device,
                          .b_gate_up = r->b_gate_up.device,
                          .b_down = r->b_down.device};
    if (!scaled) return w;
    w.w_gate_up = r->of_gate_up.turned.device;
    w.w_down = r->of_down.turned.device;
    w.w_gate_up_scales = r->of_gate_up.turned_scales.device;
    w.w_down_scales = r->of_down.turned_scales.device;
    return w;
}

/* --------------------------------------------------------------------------- the layer ---- */

typedef struct run { /* a run of a whole layer */
    both out, load, gradients[GRADIENTS], saved, workspace;
} run;

static both of_bytes(int64_t bytes)
{
    both b = make_both(EPIC_E4M3, bytes);
    push_to_device(&b);
    return b;
}

static run run_layer(rank *r, const epic_config *config, bool scaled, bool scaled_back)
{
    const int64_t row = HIDDEN * bytes_of(r->k->type);
    const int64_t counts[] = {TOKENS * HIDDEN,        HIDDEN * EXPERTS, LOCAL * HIDDEN * WIDTH,
                              LOCAL * INNER * HIDDEN, LOCAL * WIDTH,    LOCAL * HIDDEN};
    epic_moe_memory_info memory;
    run n = {.out = make_both(r->k->type, TOKENS * HIDDEN),
             .load = make_both(EPIC_F32, EXPERTS)};
    r->experts.weight_type = scaled ? EPIC_E4M3 : 0;
    expect_ok(r, epic_moe_memory(NULL, config, &r->moe, &memory), "memory");
    const epic_moe_weights ahead = weights_of(r, scaled);
    const epic_moe_weights back = scaled_back ? back_of(r) : weights_of(r, false);
    n.saved = of_bytes(memory.saved_bytes);
    n.workspace =
        of_bytes(memory.forward_bytes > memory.backward_bytes ? memory.forward_bytes
                                                              : memory.backward_bytes);
    for (int i = 0; i < GRADIENTS; i++)
        n.gradients[i] = make_both(i == D_X ? r->k->type : EPIC_F32, counts[i]);
    const epic_moe_args f = {.call.stream = r->stream,
                             .moe = &r->moe,
                             .weights = &ahead,
                             .x = {r->x.device, TOKENS, row},
                             .out = {n.out.device, TOKENS, row},
                             .load = n.load.device,
                             .saved = n.saved.device,
                             .saved_bytes = memory.saved_bytes,
                             .workspace = n.workspace.device,
                             .workspace_bytes = memory.forward_bytes};
    const epic_moe_gradients g = {.w_gate = n.gradients[D_W_GATE].device,
                                  .w_gate_up = n.gradients[D_GATE_UP].device,
                                  .w_down = n.gradients[D_DOWN].device,
                                  .b_gate_up = n.gradients[D_B_GATE_UP].device,
                                  .b_down = n.gradients[D_B_DOWN].device};
    const epic_moe_backward_args b = {.call.stream = r->stream,
                                      .moe = &r->moe,
                                      .weights = &back,
                                      .x = f.x,
                                      .d_out = {r->d_out.device, TOKENS, row},
                                      .d_x = {n.gradients[D_X].device, TOKENS, row},
                                      .gradients = &g,
                                      .saved = n.saved.device,
                                      .saved_bytes = memory.saved_bytes,
                                      .workspace = n.workspace.device,
                                      .workspace_bytes = memory.backward_bytes};
    wait_for_all();
    expect_ok(r, epic_moe_forward(r->ctx, &f), "forward");
    must_succeed(!cudaStreamSynchronize(r->stream), "forward");
    push_to_device(&n.workspace); /* filled with poison, because no call may keep data there */
    expect_ok(r, epic_moe_backward(r->ctx, &b), "backward");
    must_succeed(!cudaStreamSynchronize(r->stream), "backward");
    wait_for_all();
    expect_ok(r, epic_check(r->ctx), "check");
    pull_from_device(&n.out);
    pull_from_device(&n.load);
    for (int i = 0; i < GRADIENTS; i++) pull_from_device(&n.gradients[i]);
    return n;
}

static void free_run(run *n)
{
    both *arrays[] = {&n->out, &n->load, &n->saved, &n->workspace};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free_both(arrays[i]);
    for (int i = 0; i < GRADIENTS; i++) free_both(&n->gradients[i]);
}

/* Returns the distance of two results as vectors. */
static double vector_distance(const both *got, const both *want)
{
    double difference = 0, size = 0;
    for (int64_t i = 0; i < got->count; i++) {
        const double w = get_number(want->host, want->type, i),
                     d = get_number(got->host, got->type, i) - w;
        difference += d * d;
        size += w * w;
    }
    return difference == 0 ? 0 : sqrt(difference / size);
}

/* Compares with tolerances: e4m3 has four bits. Rows and activations are rounded. Weights are
 * not, because they are exactly the represented numbers. back_alone: with `again` only the
 * weights of backward differ. */
static void compare_results(const rank *r, const run *scaled, const run *wide, bool back_alone,
                            bool again)
{
    const double out = vector_distance(&scaled->out, &wide->out);
    const double d_x = vector_distance(&scaled->gradients[D_X], &wide->gradients[D_X]);
    if (!back_alone && !(out > 1e-3 && out < 6e-2)) report_wrong(r, "out", out);
    if (back_alone && out != 0) report_wrong(r, "out, of the same weights", out);
    if (back_alone && (d_x > 1e-3) != again) report_wrong(r, "d_x, quantized or not", d_x);
    for (int i = 0; i < GRADIENTS; i++) {
        const double far = vector_distance(&scaled->gradients[i], &wide->gradients[i]);
        if (!(far < 8e-2)) report_wrong(r, gradients[i], far);
    }
}

/* ----------------------------------------------------------------------- what it is of ---- */

/* Compares with dispatch, experts and combine on the layer's plan, which is the first part of
 * `saved`. */
static void compare_parts(rank *r, const epic_config *config, const run *whole)
{
    enum { BLOCKS = (HIDDEN + 127) / 128 };
    const int64_t row = HIDDEN * bytes_of(r->k->type);
    int64_t plan_bytes;
    expect_ok(r, epic_plan_bytes(config, &r->layer, &plan_bytes), "plan_bytes");
    const int32_t *load = (const int32_t *)whole->load.host + r->number * LOCAL;
    epic_experts_memory_info memory;
    expect_ok(r, epic_experts_memory(r->ctx, NULL, &r->experts, CAPACITY, &memory), "memory");
    both recv = of_bytes(CAPACITY * HIDDEN), scales = of_bytes(CAPACITY * BLOCKS * 4);
    both saved = of_bytes(memory.saved_bytes), work = of_bytes(memory.forward_bytes);
    both y = make_both(r->k->type, CAPACITY * HIDDEN), counts = make_both(EPIC_F32, 2 * LOCAL);
    both out = make_both(r->k->type, TOKENS * HIDDEN);
    for (int e = 0; e < LOCAL; e++) {
        ((int32_t *)counts.host)[e] = (load[e] + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        ((int32_t *)counts.host)[LOCAL + e] = load[e];
    }
    push_to_device(&counts);
    const epic_dispatch_args dispatch = {.call.stream = r->stream,
                                         .layer = &r->layer,
                                         .plan = whole->saved.device,
                                         .plan_bytes = plan_bytes,
                                         .tokens = {r->x.device, TOKENS, row},
                                         .recv = {recv.device, CAPACITY, HIDDEN},
                                         .recv_scales = {scales.device, CAPACITY, BLOCKS * 4},
                                         .type = r->k->type,
                                         .quantize = EPIC_QUANTIZE_1X128};
    const epic_experts_args experts = {.call.stream = r->stream,
                                       .experts = &r->experts,
                                       .x = recv.device,
                                       .x_scales = scales.device,
                                       .num_slots = CAPACITY,
                                       .expert_rows = counts.device,
                                       .expert_tokens = (const int32_t *)counts.device + LOCAL,
                                       .w_gate_up = r->of_gate_up.turned.device,
                                       .w_down = r->of_down.turned.device,
                                       .w_gate_up_scales = r->of_gate_up.turned_scales.device,
                                       .w_down_scales = r->of_down.turned_scales.device,
                                       .b_gate_up = r->b_gate_up.device,
                                       .b_down = r->b_down.device,
                                       .saved = saved.device,
                                       .saved_bytes = memory.saved_bytes,
                                       .workspace = work.device,
                                       .workspace_bytes = memory.forward_bytes,
                                       .y = y.device};
    const epic_combine_args combine = {.call.stream = r->stream,
                                       .layer = &r->layer,
                                       .plan = whole->saved.device,
                                       .plan_bytes = plan_bytes,
                                       .rows = {y.device, CAPACITY, row},
                                       .out = {out.device, TOKENS, row},
                                       .type = r->k->type};
    wait_for_all();
    expect_ok(r, epic_dispatch(r->ctx, &dispatch), "dispatch");
    expect_ok(r, epic_experts_forward(r->ctx, &experts), "experts");
    expect_ok(r, epic_combine(r->ctx, &combine), "combine");
    must_succeed(!cudaStreamSynchronize(r->stream), "the parts");
    wait_for_all();
    pull_from_device(&out);
    if (memcmp(out.host, whole->out.host, TOKENS * (size_t)row) != 0)
        report_wrong(r, "not the bits of the single calls", vector_distance(&out, &whole->out));
    both *arrays[] = {&recv, &scales, &saved, &work, &y, &counts, &out};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free_both(arrays[i]);
}

/* ---------------------------------------------------------------------------- refusals ---- */

static void expect_refusal(const rank *r, epic_result result, epic_result want,
                           const char *word)
{
    if (result == want && strstr(epic_error(r->ctx), word)) return;
    report_wrong(r, word, (double)result);
}

/* The call is refused before it enqueues anything, so no peer is involved. */
static void refuse_product(rank *r, const epic_config *config)
{
    epic_moe_memory_info memory;
    epic_moe_weights w = weights_of(r, true);
    const epic_gemm gemm = {0};
    const epic_moe_args f = {.moe = &r->moe, .weights = &w};
    const epic_moe_backward_args b = {.moe = &r->moe, .weights = &w};
    r->experts.weight_type = EPIC_E4M3;
    r->moe.flags |= EPIC_RECOMPUTE;
    expect_refusal(r, epic_moe_backward(r->ctx, &b), EPIC_EINVAL,
                   "w_gate_up_scales is not NULL");
    r->moe.flags &= ~(uint32_t)EPIC_RECOMPUTE;
    w.w_gate_up_scales = NULL;
    expect_refusal(r, epic_moe_backward(r->ctx, &b), EPIC_EINVAL, "w_down_scales is not NULL");
    expect_refusal(r, epic_moe_forward(r->ctx, &f), EPIC_EINVAL, "w_gate_up_scales is NULL");
    r->experts.gemm = &gemm;
    expect_refusal(r, epic_moe_memory(NULL, config, &r->moe, &memory), EPIC_ENOTSUP,
                   "moe.experts.gemm");
    r->experts.gemm = NULL;
    r->moe.flags = 0;
    expect_refusal(r, epic_moe_memory(NULL, config, &r->moe, &memory), EPIC_EINVAL,
                   "EPIC_DISPATCH_AGAIN");
    r->moe.flags = EPIC_DISPATCH_AGAIN;
    r->experts.weight_type = 0;
    w.w_down_scales = r->of_down.scales.device;
    expect_refusal(r, epic_moe_forward(r->ctx, &f), EPIC_EINVAL, "w_down_scales is not NULL");
}

/* ------------------------------------------------------------------------------- ranks ---- */

static void run_kind(rank *r, const epic_config *config)
{
    for (int turn = 0; turn < RANKS; turn++) {
        wait_for_all();
        if (turn == r->number) make_rank(r);
        wait_for_all();
    }
    const bool again = !(r->k->flags & EPIC_RECOMPUTE);
    run wide = run_layer(r, config, false, false), scaled = run_layer(r, config, true, false);
    run back = run_layer(r, config, true, again);
    compare_results(r, &scaled, &wide, false, false);
    compare_results(r, &back, &scaled, true, again);
    if (r->k->top_k == 1) compare_parts(r, config, &scaled);
    if (r->k->top_k == 1) refuse_product(r, config);
    free_run(&wide);
    free_run(&scaled);
    free_run(&back);
    free_rank(r);
}

static const kind kinds[] = {{EPIC_BF16, EPIC_WEIGHT_LATE, 1, 0},
                             {EPIC_F16, EPIC_WEIGHT_LATE, 2, EPIC_RECOMPUTE},
                             {EPIC_F32, EPIC_WEIGHT_EARLY, 2, 0},
                             {EPIC_BF16, EPIC_WEIGHT_INPUT, 2, 0}};

static void *be_rank(void *number)
{
    rank r = {.number = (int)(intptr_t)number};
    const epic_config config = {.max_tokens = TOKENS,
                                .max_row_bytes = HIDDEN * 4,
                                .num_ranks = RANKS,
                                .timeout_ms = 60000,
                                .backend = "p2p"};
    int gpus = 1;
    must_succeed(!cudaGetDeviceCount(&gpus) && !cudaSetDevice(r.number % gpus), "a GPU");
    expect_ok(&r, epic_open(&r.ctx, &bootstraps[r.number], &config), "open");
    must_succeed(!cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking), "a stream");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        rank now = {.k = &kinds[i], .ctx = r.ctx, .number = r.number, .stream = r.stream};
        run_kind(&now, &config);
    }
    cudaStreamDestroy(r.stream);
    epic_close(r.ctx);
    return NULL;
}

int main(void)
{
    pthread_t threads[RANKS];
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* no kernel waits behind another rank's */
    pthread_barrier_init(&all, NULL, RANKS);
    must_succeed(epic_bootstrap_threads(bootstraps, RANKS, 20000) == EPIC_OK, "bootstrap");
    for (intptr_t i = 0; i < RANKS; i++) pthread_create(&threads[i], NULL, be_rank, (void *)i);
    for (int i = 0; i < RANKS; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < RANKS; i++) epic_bootstrap_close(&bootstraps[i]);
    printf("layer of e4m3: %s\n", failures ? "WRONG" : "good");
    return failures != 0;
}
