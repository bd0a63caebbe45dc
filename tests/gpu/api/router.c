/* SPDX-License-Identifier: Apache-2.0 */
/* Tests router, losses and bias update on a CUDA context against the same calls on host memory,
 * which tests/unit/router.c compares with float64. Experts and bits must be equal; losses and
 * the gradient of the z-loss may differ in the last bit of float64. Random routers; half of the
 * cases run from a captured graph.
 *
 *   usage: router [CASES] [SEED] [MOST_EXPERTS] */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epic/epic.h"
#include "losses.h"
#include "router_draw.h"
#include "scaled_cases.h"

enum { GUARD = 64, POISON = 0xab };

typedef struct buffer { /* the same bytes on host and device, followed by a guard */
    void *host, *device, *back;
    size_t room, bytes;
} buffer;

static buffer logits, bias, scale, token_ids, table, workspace, topk_idx, weights, scores,
    d_weights, d_logits, d_scale, load, d_loss, loss;
static buffer *const all[] = {&logits,    &bias,     &scale,   &token_ids, &table,
                              &workspace, &topk_idx, &weights, &scores,    &d_weights,
                              &d_logits,  &d_scale,  &load,    &d_loss,    &loss};
enum { BUFFERS = sizeof all / sizeof *all };

static epic_context *ctx;
static cudaStream_t stream;
static int failures;
static long one_bit; /* number of results that differ by rounding where this is allowed */

static void must_succeed(int good, const char *what)
{
    if (good) return;
    fprintf(stderr, "router: %s: %s, %s\n", what, epic_error(ctx),
            cudaGetErrorString(cudaGetLastError()));
    exit(1);
}

static void make_buffer(buffer *b, size_t room)
{
    b->room = room + GUARD;
    b->host = aligned_alloc(64, (b->room + 63) / 64 * 64);
    b->back = aligned_alloc(64, (b->room + 63) / 64 * 64);
    must_succeed(b->host && b->back && cudaMalloc(&b->device, b->room) == cudaSuccess,
                 "memory");
}

/* Sets the bytes that a case uses, and the guard after them, to poison. */
static void *use_case(buffer *b, size_t bytes)
{
    must_succeed(bytes + GUARD <= b->room, "a buffer is too small");
    b->bytes = bytes;
    memset(b->host, POISON, bytes + GUARD);
    return b->host;
}

static void push_to_device(const buffer *b)
{
    must_succeed(cudaMemcpyAsync(b->device, b->host, b->bytes + GUARD, cudaMemcpyHostToDevice,
                                 stream) == cudaSuccess,
                 "a copy");
}

static void pull_from_device(const buffer *b)
{
    must_succeed(cudaMemcpyAsync(b->back, b->device, b->bytes + GUARD, cudaMemcpyDeviceToHost,
                                 stream) == cudaSuccess,
                 "a copy");
}

/* ------------------------------------------------------------------------------ a case ---- */

static void fill_logits(const problem *p)
{
    const int kind = (int)router_below(8);
    for (int64_t i = 0; i < p->tokens * p->n; i++)
        router_put(logits.host, p->type, i, router_logit(kind));
}

static void fill_random(const problem *p)
{
    const int64_t k = p->router.top_k, ids = 50;
    const int64_t grad = router_type_bytes(p->grad_type ? p->grad_type : p->type);
    use_case(&logits, (size_t)(p->tokens * p->n * router_type_bytes(p->type)));
    fill_logits(p);
    float *b = use_case(&bias, (size_t)p->n * 4);
    for (int64_t i = 0; i < p->n; i++) b[i] = router_below(3) ? 0.1f * router_normal() : 0;
    float *factors = use_case(&scale, (size_t)p->n * 4),
          *d_factors = use_case(&d_scale, (size_t)p->n * 4);
    for (int64_t i = 0; i < p->n; i++) factors[i] = router_normal();
    /* results that the call adds to */
    for (int64_t i = 0; i < p->n; i++) d_factors[i] = router_normal();
    int32_t *rows = use_case(&table, (size_t)(ids * k * 4));
    for (int64_t i = 0; i < ids * k; i++)
        rows[i] = (int32_t)router_below((uint32_t)p->n + 1) - 1;
    use_case(&token_ids, (size_t)p->tokens * 8);
    for (int64_t t = 0; t < p->tokens; t++) {
        const int64_t id = router_below((uint32_t)ids);
        if (p->id_type == EPIC_I64) ((int64_t *)token_ids.host)[t] = id;
        if (p->id_type == EPIC_I32) ((int32_t *)token_ids.host)[t] = (int32_t)id;
    }
    int64_t workspace_bytes;
    must_succeed(epic_router_workspace(&p->router, &workspace_bytes) == EPIC_OK,
                 "a router is wrong");
    use_case(&workspace, (size_t)workspace_bytes);
    use_case(&topk_idx, (size_t)(p->tokens * k * 4));
    use_case(&weights, (size_t)(p->tokens * k * 4));
    use_case(&scores, (size_t)(p->tokens * p->n * 4));
    float *d = use_case(&d_weights, (size_t)(p->tokens * k * 4));
    for (int64_t i = 0; i < p->tokens * k; i++) d[i] = router_normal();
    use_case(&d_logits, (size_t)(p->tokens * p->n * grad));
    int32_t *counts = use_case(&load, (size_t)p->n * 4);
    for (int64_t i = 0; i < p->n; i++) counts[i] = (int32_t)router_below(100);
    *(float *)use_case(&d_loss, 4) = router_normal();
    use_case(&loss, 8);
}

/* ----------------------------------------------------------------------- the two sides ---- */

typedef struct side {
    const problem *p;
    int device;
} side;

static void *data_of(const side *s, const buffer *b)
{
    return s->device ? b->device : b->host;
}

static epic_result call_forward(const side *s)
{
    const problem *p = s->p;
    const epic_router_args args = {.router = &p->router,
                                   .logits = data_of(s, &logits),
                                   .num_tokens = p->tokens,
                                   .bias = p->has_bias ? data_of(s, &bias) : NULL,
                                   .scale_of_expert = p->has_scale ? data_of(s, &scale) : NULL,
                                   .token_ids = p->has_table ? data_of(s, &token_ids) : NULL,
                                   .table = p->has_table ? data_of(s, &table) : NULL,
                                   .table_rows = 50,
                                   .workspace = data_of(s, &workspace),
                                   .workspace_bytes = workspace.bytes,
                                   .topk_idx = data_of(s, &topk_idx),
                                   .weights = data_of(s, &weights),
                                   .scores = p->has_scores ? data_of(s, &scores) : NULL,
                                   .type = p->type,
                                   .token_id_type = p->id_type,
                                   .call.stream = s->device ? stream : NULL};
    return epic_router_forward(s->device ? ctx : NULL, &args);
}

static epic_result call_backward(const side *s)
{
    const problem *p = s->p;
    const epic_router_backward_args args = {
        .router = &p->router,
        .logits = data_of(s, &logits),
        .num_tokens = p->tokens,
        .topk_idx = data_of(s, &topk_idx),
        .scale_of_expert = p->has_scale ? data_of(s, &scale) : NULL,
        .d_scale_of_expert = p->has_scale ? data_of(s, &d_scale) : NULL,
        .d_weights = data_of(s, &d_weights),
        .workspace = data_of(s, &workspace),
        .workspace_bytes = workspace.bytes,
        .d_logits = data_of(s, &d_logits),
        .type = p->type,
        .grad_type = p->grad_type,
        .flags = p->flags,
        .call.stream = s->device ? stream : NULL};
    return epic_router_backward(s->device ? ctx : NULL, &args);
}

static loss_args args_of(const side *s, int back)
{
    const problem *p = s->p;
    return (loss_args){.router = &p->router,
                       .logits = data_of(s, &logits),
                       .num_tokens = p->tokens,
                       .total_tokens = p->total,
                       .load = data_of(s, &load),
                       .topk_idx = data_of(s, &topk_idx),
                       .sequence_tokens = p->sequence,
                       .coeff = p->coeff,
                       .d_loss = back && p->has_d_loss ? data_of(s, &d_loss) : NULL,
                       .workspace = data_of(s, &workspace),
                       .workspace_bytes = workspace.bytes,
                       .loss = back ? NULL : data_of(s, &loss),
                       .d_logits = back ? data_of(s, &d_logits) : NULL,
                       .type = p->type,
                       .loss_type = p->loss_type,
                       .grad_type = p->grad_type,
                       .flags = back ? p->flags : 0,
                       .call.stream = s->device ? stream : NULL};
}

static epic_result call_balance_loss(const side *s)
{
    const loss_args args = args_of(s, 0);
    return balance_loss_forward(s->device ? ctx : NULL, &args);
}

static epic_result balance_backward(const side *s)
{
    const loss_args args = args_of(s, 1);
    return balance_loss_backward(s->device ? ctx : NULL, &args);
}

static epic_result call_z_loss(const side *s)
{
    const loss_args args = args_of(s, 0);
    return z_loss_forward(s->device ? ctx : NULL, &args);
}

static epic_result z_backward(const side *s)
{
    const loss_args args = args_of(s, 1);
    return z_loss_backward(s->device ? ctx : NULL, &args);
}

static epic_result call_bias_update(const side *s)
{
    const epic_bias_update_args args = {.call.stream = s->device ? stream : NULL,
                                        .bias = data_of(s, &bias),
                                        .load = data_of(s, &load),
                                        .num_experts = s->p->n,
                                        .rate = 0.001f};
    return epic_bias_update(s->device ? ctx : NULL, &args);
}

/* -------------------------------------------------------------------------- comparison ---- */

/* slack 0: the bits must be equal. All NaNs count as equal. */
static int check_agreement(const buffer *b, uint32_t type, int64_t i, double slack)
{
    const int64_t size = router_type_bytes(type);
    if (!memcmp((char *)b->host + i * size, (char *)b->back + i * size, (size_t)size)) return 1;
    const double want = router_get(b->host, type, i), got = router_get(b->back, type, i);
    if (want != want && got != got) return 1;
    one_bit++;
    return slack > 0 && fabs(want - got) <= slack * fabs(want) + (type == EPIC_F16 ? 1.01 : 0);
}

static void compare_bits(const char *what, const buffer *b, uint32_t type, double slack)
{
    const int64_t size = router_type_bytes(type), count = (int64_t)b->bytes / size;
    for (int64_t i = 0; i < count; i++) {
        if (check_agreement(b, type, i, slack)) continue;
        fprintf(stderr, "%s: number %lld is %.17g, on the host %.17g\n", what, (long long)i,
                router_get(b->back, type, i), router_get(b->host, type, i));
        failures++;
        return;
    }
    if (memcmp((char *)b->host + b->bytes, (char *)b->back + b->bytes, GUARD)) {
        fprintf(stderr, "%s: written past the end\n", what);
        failures++;
    }
}

typedef struct step {
    const char *what;
    epic_result (*run)(const side *);
    buffer *outs[3]; /* outputs of the call */
    double slack;
} step;

static const step steps[] = {
    {"router_forward", call_forward, {&topk_idx, &weights, &scores}, 0},
    {"router_backward", call_backward, {&d_logits, &d_scale}, 0},
    {"balance_loss_forward", call_balance_loss, {&loss}, 1e-12},
    {"balance_loss_backward", balance_backward, {&d_logits}, 0},
    {"z_loss_forward", call_z_loss, {&loss}, 1e-12},
    {"z_loss_backward", z_backward, {&d_logits}, 1e-6},
    {"bias_update", call_bias_update, {&bias}, 0},
};
enum { STEPS = sizeof steps / sizeof *steps };

static uint32_t type_of(const problem *p, const buffer *b)
{
    if (b == &loss) return p->loss_type;
    return b == &d_logits ? (p->grad_type ? p->grad_type : p->type) : EPIC_F32;
}

static double slack_of(const problem *p, const step *s, const buffer *b)
{
    if (s->slack == 0) return 0;
    const uint32_t type = type_of(p, b);
    return type == EPIC_F64 ? s->slack : type == EPIC_BF16 ? 0x1p-7 : 0x1p-22;
}

static void launch_case(const step *s, const side *there, int captured)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    if (!captured) {
        must_succeed(s->run(there) == EPIC_OK, s->what);
        return;
    }
    must_succeed(!cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    must_succeed(s->run(there) == EPIC_OK, s->what);
    must_succeed(!cudaStreamEndCapture(stream, &graph), "capture");
    must_succeed(!cudaGraphInstantiate(&exec, graph, 0), "a graph");
    must_succeed(!cudaGraphLaunch(exec, stream), "a graph");
    must_succeed(!cudaStreamSynchronize(stream), "a graph");
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
}

static int run_case(const problem *p, int captured)
{
    const int before = failures;
    fill_random(p);
    for (int i = 0; i < BUFFERS; i++) push_to_device(all[i]);
    for (int i = 0; i < STEPS; i++) {
        const side here = {p, 0}, there = {p, 1};
        if (steps[i].outs[0] == &d_logits) memset(d_logits.host, POISON, d_logits.bytes);
        if (steps[i].outs[0] == &loss) memset(loss.host, POISON, loss.bytes);
        if (i > 0 && steps[i].outs[0] != &bias) push_to_device(steps[i].outs[0]);
        launch_case(&steps[i], &there, captured);
        for (int b = 0; b < 3 && steps[i].outs[b]; b++) pull_from_device(steps[i].outs[b]);
        must_succeed(steps[i].run(&here) == EPIC_OK, steps[i].what);
        must_succeed(!cudaStreamSynchronize(stream), steps[i].what);
        for (int b = 0; b < 3 && steps[i].outs[b]; b++) {
            const buffer *out = steps[i].outs[b];
            const long rounded = one_bit;
            compare_bits(steps[i].what, out, type_of(p, out), slack_of(p, &steps[i], out));
            if (steps[i].slack == 0) one_bit = rounded;
        }
    }
    return failures == before;
}

static void print_problem(int i, const problem *p)
{
    const epic_router *r = &p->router;
    fprintf(
        stderr,
        "case %d: %u + %u experts, k %u, score %u, groups %u keep %u (score %u best %u "
        "others %u), rule %u, normalize %u, %lld tokens of type %u, sequence %lld, bias %d, "
        "table %d, scale %d\n",
        i, r->num_experts, r->zero_experts, r->top_k, r->score, r->num_groups, r->topk_groups,
        r->group_score, r->group_best, r->group_others, r->weight_rule, r->normalize,
        (long long)p->tokens, p->type, (long long)p->sequence, p->has_bias, p->has_table,
        p->has_scale);
}

/* A graph that was captured once must return the host's results for any later contents of its
 * arrays. */
static void test_replay(void)
{
    problem p = router_draw(256);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    const side here = {&p, 0}, there = {&p, 1};
    p.tokens = 33;
    p.total = 40;
    p.sequence = 11;
    p.flags = 0;
    fill_random(&p);
    must_succeed(!cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < STEPS; i++)
        must_succeed(steps[i].run(&there) == EPIC_OK, steps[i].what);
    must_succeed(!cudaStreamEndCapture(stream, &graph) &&
                     !cudaGraphInstantiate(&exec, graph, 0),
                 "a graph");
    for (int round = 0; round < 20; round++) {
        fill_random(&p);
        for (int i = 0; i < BUFFERS; i++) push_to_device(all[i]);
        must_succeed(!cudaGraphLaunch(exec, stream), "a graph");
        for (int i = 0; i < STEPS; i++)
            must_succeed(steps[i].run(&here) == EPIC_OK, steps[i].what);
        for (int i = 0; i < 4; i++) {
            buffer *const outs[] = {&topk_idx, &weights, &d_logits, &bias};
            const step *last = &steps[outs[i] == &d_logits ? 5 : 0];
            pull_from_device(outs[i]);
            must_succeed(!cudaStreamSynchronize(stream), "a graph");
            compare_bits("a replayed graph", outs[i], type_of(&p, outs[i]),
                         outs[i] == &d_logits ? slack_of(&p, last, outs[i]) : 0);
        }
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
}

static void expect_refusal(epic_result result, epic_result want, const char *word)
{
    if (result == want && strstr(epic_error(NULL), word)) return;
    fprintf(stderr, "%s: result %d, \"%s\"\n", word, result, epic_error(NULL));
    failures++;
}

static void test_refusals(void)
{
    problem p = {.router = {.num_experts = 8, .top_k = 2}, .n = 8, .tokens = 3, .total = 3};
    const side there = {&p, 1};
    p.type = EPIC_F32;
    fill_random(&p);
    p.type = EPIC_F64;
    expect_refusal(call_forward(&there), EPIC_ENOTSUP, "float64");
    expect_refusal(call_z_loss(&there), EPIC_ENOTSUP, "float64");
    p.type = EPIC_F32;
    p.router.weight_rule = EPIC_WEIGHT_SPARSEMIXER;
    expect_refusal(call_forward(&there), EPIC_ENOTSUP, "SPARSEMIXER");
    p.router.weight_rule = 0;
    p.router.num_experts = 5000;
    int64_t bytes;
    must_succeed(epic_router_workspace(&p.router, &bytes) == EPIC_OK, "a router is wrong");
    use_case(&workspace, (size_t)bytes);
    expect_refusal(call_forward(&there), EPIC_ENOTSUP, "5000");
    p.router.num_experts = 0;
    expect_refusal(call_forward(&there), EPIC_EINVAL, "num_experts");
    const epic_bias_update_args no_bias = {
        .call.stream = stream, .load = load.device, .num_experts = 8, .rate = 1};
    expect_refusal(epic_bias_update(ctx, &no_bias), EPIC_EINVAL, "bias");
}

/* Ids out of range in device arrays must be treated as no expert. */
static void test_wild_ids(void)
{
    problem p = {.router = {.num_experts = 8, .top_k = 2, .normalize = EPIC_NORMALIZE_SUM},
                 .n = 8,
                 .tokens = 4,
                 .total = 4,
                 .type = EPIC_F32,
                 .id_type = EPIC_I64,
                 .has_table = 1};
    const side there = {&p, 1};
    fill_random(&p);
    for (int i = 0; i < 32; i++) router_put(logits.host, EPIC_F32, i, router_normal());
    ((int64_t *)token_ids.host)[0] = 50;
    ((int64_t *)token_ids.host)[1] = -1;
    ((int64_t *)token_ids.host)[2] = INT64_MAX;
    ((int64_t *)token_ids.host)[3] = 7;
    ((int32_t *)table.host)[14] = 8;
    ((int32_t *)table.host)[15] = 3;
    for (int i = 0; i < BUFFERS; i++) push_to_device(all[i]);
    must_succeed(call_forward(&there) == EPIC_OK, "wild ids");
    pull_from_device(&topk_idx);
    pull_from_device(&weights);
    must_succeed(!cudaStreamSynchronize(stream), "wild ids");
    const int32_t *got = topk_idx.back;
    const float *w = weights.back;
    for (int i = 0; i < 8; i++) {
        if (got[i] == (i < 7 ? -1 : 3) && w[i] == (i < 7 ? 0.0f : 1.0f)) continue;
        fprintf(stderr, "wild ids: choice %d is %d with weight %g\n", i, got[i], w[i]);
        failures++;
    }
    for (int i = 0; i < 8; i++) ((int32_t *)topk_idx.host)[i] = i % 2 ? 100 : INT32_MAX;
    push_to_device(&topk_idx);
    p.sequence = 2;
    must_succeed(call_backward(&there) == EPIC_OK && call_balance_loss(&there) == EPIC_OK,
                 "wild ids");
    pull_from_device(&d_logits);
    must_succeed(!cudaStreamSynchronize(stream), "wild ids");
    for (int i = 0; i < 32; i++) failures += ((float *)d_logits.back)[i] != 0;
}

int main(int argc, char **argv)
{
    const int cases = scaled_cases(argc > 1 ? atoi(argv[1]) : 300);
    const uint32_t most = argc > 3 ? (uint32_t)atoi(argv[3]) : 4096;
    const uint64_t seed = argc > 2 ? (uint64_t)atoll(argv[2]) : 1;
    const epic_config config = {.max_tokens = 16, .max_row_bytes = 64, .backend = "p2p"};
    must_succeed(epic_open(&ctx, NULL, &config) == EPIC_OK, "open");
    must_succeed(!cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    for (int i = 0; i < BUFFERS; i++)
        make_buffer(all[i], (size_t)ROUTER_MOST_TOKENS * 1024 * 4 + (256 << 10));
    int good = 0;
    for (int i = 0; i < cases; i++) {
        router_seed(seed * 1000003 + (uint64_t)i);
        const problem p = router_draw(most);
        if (run_case(&p, i % 2))
            good++;
        else
            print_problem(i, &p);
        if (failures > 20) break;
    }
    for (int i = 0; i < 5; i++) test_replay();
    test_refusals();
    test_wild_ids();
    must_succeed(epic_check(ctx) == EPIC_OK, "check");
    for (int i = 0; i < BUFFERS; i++) {
        cudaFree(all[i]->device);
        free(all[i]->host);
        free(all[i]->back);
    }
    cudaStreamDestroy(stream);
    epic_close(ctx);
    printf(
        "router: %d of %d cases have the host's results (%ld numbers a rounding apart, where "
        "they may): %s\n",
        good, cases, one_bit, failures ? "WRONG" : "good");
    return failures != 0;
}
