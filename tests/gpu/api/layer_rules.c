/* SPDX-License-Identifier: Apache-2.0 */
/* Tests properties of the layer on CUDA contexts other than its values (see api_layer). With
 * EPIC_TREE 1, 2 and 4 ranks have equal bits, whatever is saved. epic_sum_replicas adds the
 * gradients of replicas. The caller can pass a product. epic_check reports invalid tables and
 * ranks that differ. Wrong arguments are refused. epic-info prints the kernels of the experts
 * on this GPU.
 *
 *   api_layer_rules [CASES] [SEED] */
#define MOST_NUMBERS (1 << 10)
#include "api/api.h"
#include "layer_part.h"
#include "own_product.h"
#include "scaled_cases.h"
#include "unit/moe_bits.h"

/* -------------------------------------------------------------------------------- bits ---- */

/* workspace: has space for the largest gradient of an expert. */
static void sum_replicas(device_part *d, epic_context *ctx, void *workspace)
{
    const part *t = d->t;
    void *const gradients[] = {t->gradients.w_gate_up, t->gradients.w_down,
                               t->gradients.b_gate_up, t->gradients.b_down};
    for (int i = W_GATE_UP; i <= B_DOWN; i++) {
        const int64_t bytes = numbers_of(t->p, i) * (int64_t)sizeof(float);
        if (!bytes) continue;
        const epic_sum_replicas_args args = {
            .call.stream = d->stream,
            .plan = t->forward.saved,
            .plan_bytes = t->forward.saved_bytes,
            .data = {gradients[i - W_GATE_UP], t->experts.num_local_experts, bytes},
            .workspace = workspace};
        CHECK(epic_sum_replicas(ctx, &args) == EPIC_OK, "%s: %s", t->p->name, epic_error(ctx));
    }
}

static void run_summed(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    device_part d = device_part_make(p, rank, config);
    const int64_t most = 2 * (int64_t)MOST_NUMBERS + 2 * p->experts.hidden + 300;
    void *workspace = poisoned_device(&d, most * (int64_t)sizeof(float));
    both_ways(d.t, ctx);
    if (!p->placed) sum_replicas(&d, ctx, workspace);
    must_succeed(cudaStreamSynchronize(d.stream), "the layer");
    CHECK(epic_check(ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    device_part_end(&d);
}

static void run_on_host(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    part *t = part_make(p, rank, config, 3);
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    if (!p->placed) CHECK(part_sum_replicas(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    part_print_failure(t);
    part_free(t);
}

static void run_team(rank_work *work, void *what, const problem *p, const char *backend)
{
    epic_config config = config_of(p);
    config.backend = backend;
    team_threads(work, what, &config);
}

/* Sums of 16-bit rows are rounded up to five times: see moe_values.h. */
static void compare_with_host(const problem *host, const problem *p)
{
    const double allowed = row_type(p) == EPIC_F32 ? 1e-4 : 0.05;
    for (int which = 0; which < NUM_GIVEN; which++) {
        double error = 0, size = 1e-3;
        for (int64_t i = 0; i < numbers_in_all(p, which); i++) {
            const double want = gradient_of(host, which, i);
            const double off = fabs(gradient_of(p, which, i) - want);
            error = off <= error ? error : off; /* keeps a NaN */
            size = fmax(size, fabs(want));
        }
        CHECK(error <= allowed * size, "%s: %s is off by %g of %g from the host's", p->name,
              given_names[which], error, size);
    }
}

static void test_bits(uint32_t seed, uint32_t multiple)
{
    problem given = draw_of(seed, multiple);
    /* with 16 leaves one rank has two batches of blocks (src/moe/moe.h) */
    if (given.layer.num_experts % 16 == 0 && seed % 3) given.layer.leaves = 16;
    problem one = spread(&given, 1, seed), host = spread(&given, 2, seed);
    run_team(run_summed, &one, &one, "p2p");
    run_team(run_on_host, &host, &host, NULL);
    compare_with_host(&host, &one);
    for (int ranks = 2; ranks <= 4; ranks *= 2) {
        problem many = spread(&given, ranks, seed);
        run_team(run_summed, &many, &many, "p2p");
        compare(&one, &many);
        free_results(&many);
    }
    free_results(&host);
    free_results(&one);
    free_given(&given);
}

/* ----------------------------------------------------------------------- less is saved ---- */

/* Values that are not saved are computed again and have the same bits. */
static void test_less_saved(uint32_t seed)
{
    problem given = draw(seed), whole = spread(&given, 2, seed);
    run_team(run_summed, &whole, &whole, "p2p");
    const epic_config config = config_of(&whole);
    check_saved_bytes(&whole, &config);
    for (uint32_t i = 1; i <= 3; i++) {
        problem less = whole;
        less.moe.flags |= i * EPIC_RECOMPUTE; /* first one flag, then the other, then both */
        make_results(&less);
        run_team(run_summed, &less, &less, "p2p");
        compare_bits(&whole, &less, i == 1 ? "recomputed" : "with rows dispatched again");
        free_results(&less);
    }
    free_results(&whole);
    free_given(&given);
}

/* ----------------------------------------------------------------------- what is wrong ---- */

static problem small_problem(int num_ranks)
{
    source s = source_of(3);
    problem p = {.name = "a small layer", .num_ranks = num_ranks, .placed = num_ranks > 1};
    p.layer = (epic_layer){.num_experts = 4, .top_k = 2, .alignment = 4};
    p.router = (epic_router){.num_experts = 4, .top_k = 2, .normalize = EPIC_NORMALIZE_SUM};
    p.experts =
        (epic_experts){.num_local_experts = 1, .hidden = 8, .inner = 4, .row_type = EPIC_F32};
    for (int r = 0; r < num_ranks; r++) p.tokens_of[r] = 6;
    for (int e = 0; e < 4; e++) p.rank_of_expert[e] = e % num_ranks;
    make_given(&p, &s);
    p.moe.capacity = p.total * 2 + 4 * 3;
    make_results(&p);
    return p;
}

static void free_problem(problem *p)
{
    free_results(p);
    free_given(p);
}

typedef struct wrong {
    problem p;
    const int32_t *table; /* a table that does not fit the layer; NULL: a valid placement */
    const char *why;      /* words of the error that epic_check must return */
} wrong;

static void put_table(const device_part *d, const int32_t *table)
{
    void *to = (void *)(uintptr_t)d->t->forward.rank_of_expert;
    if (!to) return;
    must_succeed(
        cudaMemcpyAsync(to, table, 4 * sizeof *table, cudaMemcpyHostToDevice, d->stream),
        "a copy");
    must_succeed(cudaStreamSynchronize(d->stream), "a copy");
}

/* Uses the rank's own stream, because a peer's may already be in the next call. */
static bool all_zeros(const device_part *d, const void *device, int64_t count)
{
    float *numbers = malloc((size_t)count * sizeof *numbers);
    bool zeros = true;
    must_succeed(
        cudaMemcpyAsync(numbers, device, (size_t)count * 4, cudaMemcpyDeviceToHost, d->stream),
        "a copy");
    must_succeed(cudaStreamSynchronize(d->stream), "a copy");
    for (int64_t i = 0; i < count; i++) zeros = zeros && numbers[i] == 0;
    free(numbers);
    return zeros;
}

/* Every rank gets the reason, rows and gradients are zeros, and the context stays usable. */
static void run_wrong(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const wrong *w = what;
    device_part d = device_part_make(&w->p, rank, config);
    const part *t = d.t;
    if (w->table) put_table(&d, w->table);
    both_ways(d.t, ctx);
    must_succeed(cudaStreamSynchronize(d.stream), "the layer");
    CHECK(epic_check(ctx) == EPIC_EINVAL && strstr(epic_error(ctx), w->why), "%s: %s", w->why,
          epic_error(ctx));
    CHECK(epic_check(ctx) == EPIC_OK, "once: %s", epic_error(ctx));
    CHECK(all_zeros(&d, t->forward.out.data, t->tokens * 8), "%s: out", w->why);
    CHECK(all_zeros(&d, t->gradients.w_down, 32), "%s: the gradient of w_down", w->why);
    if (w->table) {
        put_table(&d, w->p.rank_of_expert);
        both_ways(d.t, ctx);
        must_succeed(cudaStreamSynchronize(d.stream), "the layer");
        CHECK(epic_check(ctx) == EPIC_OK, "%s: %s", w->why, epic_error(ctx));
        CHECK(!all_zeros(&d, t->forward.out.data, t->tokens * 8), "%s: no out", w->why);
    }
    device_part_end(&d);
}

static void test_wrong(void)
{
    static const int32_t crowded[] = {0, 0, 0, 1};
    wrong tables = {small_problem(2), crowded,
                    "moe.experts.num_local_experts is 2: must be at least 3"};
    run_team(run_wrong, &tables, &tables.p, "p2p");
    free_problem(&tables.p);
}

/* Options of a layer that must be equal on all ranks. Rank 1 gets the change. */
typedef struct differing {
    problem p;
    const char *name;
    void (*change)(problem *p);
} differing;

static void change_router(problem *p)
{
    p->router.normalize = EPIC_NORMALIZE_NONE;
}

static void change_activation(problem *p)
{
    p->experts.activation = EPIC_GELU;
}

static void change_loss(problem *p)
{
    p->moe.balance_coeff = 0.5;
}

/* The ranks compare a hash of all options when the layer makes its plan. Every rank gets
 * EPIC_EMISMATCH. A rank that comes late gets it from the call, not from the device. */
static void run_differing(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const differing *w = what;
    problem p = w->p;
    if (rank == 1) w->change(&p);
    device_part d = device_part_make(&p, rank, config);
    const epic_result result = epic_moe_forward(ctx, &d.t->forward);
    CHECK(result == EPIC_OK || result == EPIC_EMISMATCH, "%s: %s", w->name, epic_error(ctx));
    (cudaStreamSynchronize(d.stream), "the layer");
    CHECK(epic_check(ctx) == EPIC_EMISMATCH, "%s differs, rank %d: %s", w->name, rank,
          epic_error(ctx));
    device_part_end(&d);
}

static void test_differing(void)
{
    static const struct {
        const char *name;
        void (*change)(problem *p);
    } cases[] = {{"router.normalize", change_router},
                 {"experts.activation", change_activation},
                 {"balance_coeff", change_loss}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        differing w = {small_problem(2), cases[i].name, cases[i].change};
        run_team(run_differing, &w, &w.p, "p2p");
        free_problem(&w.p);
    }
}

/* A function of the caller computes the products: six per rank, with the host's results. */
static void test_own_product(void)
{
    atomic_int calls = 0;
    const epic_gemm own = {own_multiply, &calls};
    problem p = small_problem(2), host = p;
    make_results(&host);
    run_team(run_on_host, &host, &host, NULL);
    p.experts.gemm = &own;
    run_team(run_summed, &p, &p, "p2p");
    CHECK(calls == 6 * 2, "%d calls", calls);
    compare_with_host(&host, &p);
    free_results(&host);
    free_problem(&p);
}

/* A layer with memory for one more expert than it has. This expert has no rows, whatever the
 * memory contains. */
static void run_roomy(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    device_part d = device_part_make(what, rank, config);
    part *t = d.t;
    const int64_t up = 8 * 8, down = 4 * 8; /* elements per expert */
    t->experts.num_local_experts = 5;
    CHECK(epic_moe_memory(NULL, config, &t->moe, &t->memory) == EPIC_OK, "%s",
          epic_error(NULL));
    t->weights.w_gate_up = poisoned_device(&d, 5 * up * 4);
    t->weights.w_down = poisoned_device(&d, 5 * down * 4);
    t->gradients.w_gate_up = poisoned_device(&d, 5 * up * 4);
    t->gradients.w_down = poisoned_device(&d, 5 * down * 4);
    const int64_t saved = t->memory.saved_bytes;
    t->forward.saved_bytes = t->backward.saved_bytes = saved;
    t->forward.saved = poisoned_device(&d, saved);
    t->backward.saved = t->forward.saved;
    t->forward.workspace_bytes = t->memory.forward_bytes;
    t->forward.workspace = poisoned_device(&d, t->memory.forward_bytes);
    t->backward.workspace_bytes = t->memory.backward_bytes;
    t->backward.workspace = poisoned_device(&d, t->memory.backward_bytes);
    must_succeed(cudaMemsetAsync(t->forward.saved, 1, (size_t)saved, d.stream),
                 "another poison");
    both_ways(t, ctx);
    must_succeed(cudaStreamSynchronize(d.stream), "the layer");
    CHECK(epic_check(ctx) == EPIC_OK, "%s", epic_error(ctx));
    CHECK(all_zeros(&d, (float *)t->gradients.w_gate_up + 4 * up, up), "w_gate_up");
    CHECK(all_zeros(&d, (float *)t->gradients.w_down + 4 * down, down), "w_down");
    device_part_end(&d);
}

static void test_roomy(void)
{
    problem p = small_problem(1);
    run_team(run_roomy, &p, &p, "p2p");
    free_problem(&p);
}

/* --------------------------------------------------------------------- what it refuses ---- */

static void expect_refusal(const part *t, epic_context *ctx, epic_result result,
                           const char *what)
{
    CHECK(epic_moe_forward(ctx, &t->forward) == result, "%s: %s", what, epic_error(ctx));
    CHECK(strstr(epic_error(ctx), what) != NULL, "%s is not named: %s", what, epic_error(ctx));
}

/* Each error names its argument and is returned before a peer is involved. The context stays
 * usable. */
static void run_refused(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    problem p = *(const problem *)what;
    device_part d = device_part_make(&p, rank, config);
    part *t = d.t;
    const epic_gemm theirs = {0};
    epic_experts shared = t->experts;
    int64_t slots;
    t->forward.saved_bytes = t->forward.workspace_bytes = INT64_C(1) << 40;
    shared.num_local_experts = 1;
    shared.gemm = &theirs;
    t->moe.shared = &shared;
    t->weights.shared_gate_up = t->weights.w_gate_up;
    t->weights.shared_down = t->weights.w_down;
    expect_refusal(t, ctx, EPIC_ENOTSUP, "moe.shared.gemm");
    t->moe.shared = NULL;
    t->experts.num_local_experts--;
    expect_refusal(t, ctx, EPIC_EINVAL, "moe.experts.num_local_experts is 3: must be at least");
    t->experts.num_local_experts++;
    t->moe.capacity = EPIC_CAPACITY_EXACT;
    cudaGraph_t graph;
    must_succeed(cudaStreamBeginCapture(d.stream, cudaStreamCaptureModeThreadLocal), "capture");
    CHECK(epic_moe_plan(ctx, &t->forward, &slots) == EPIC_ENOTSUP, "%s", epic_error(ctx));
    CHECK(strstr(epic_error(ctx), "call.stream is being captured"), "%s", epic_error(ctx));
    must_succeed(cudaStreamEndCapture(d.stream, &graph), "capture");
    cudaGraphDestroy(graph);
    t->moe.capacity = p.moe.capacity;
    t->forward.saved_bytes = t->memory.saved_bytes;
    t->forward.workspace_bytes = t->memory.forward_bytes - 1;
    expect_refusal(t, ctx, EPIC_EINVAL, "workspace_bytes");
    t->forward.workspace_bytes++;
    both_ways(t, ctx);
    must_succeed(cudaStreamSynchronize(d.stream), "the layer");
    CHECK(epic_check(ctx) == EPIC_OK, "%s", epic_error(ctx));
    device_part_end(&d);
}

static void test_refused(void)
{
    problem p = small_problem(1);
    run_team(run_refused, &p, &p, "p2p");
    free_problem(&p);
}

static void check_description(void *what, int rank, epic_context *ctx,
                              const epic_config *config)
{
    struct cudaDeviceProp gpu;
    char text[4096];
    (void)what, (void)rank, (void)config;
    must_succeed(cudaGetDeviceProperties(&gpu, 0), "properties");
    ctx->backend->describe(text, sizeof text);
    const bool none = gpu.major != 9 || !strcmp(gpu.name, "a GPU of threads");
    CHECK(strstr(text, none ? "experts on plain kernels" : "experts on tensor cores"), "%s",
          text);
}

static void test_described(void)
{
    problem p = small_problem(1);
    run_team(check_description, &p, &p, "p2p");
    free_problem(&p);
}

int main(int argc, char **argv)
{
    const uint32_t count = (uint32_t)scaled_cases(argc > 1 ? atoi(argv[1]) : 30);
    const uint32_t first = argc > 2 ? (uint32_t)atoi(argv[2]) : 0;
    failures = share(sizeof *failures);
    test_refused();
    test_wrong();
    test_differing();
    test_roomy();
    test_own_product();
    test_described();
    /* every third one has a form for tensor cores */
    for (uint32_t i = 0; i < count; i++) test_bits(first + i, i % 3 == 2 ? 8 : 1);
    for (uint32_t i = 0; i < (count + 1) / 2; i++) test_less_saved(first + i);
    printf("layer_rules: %u cases: %s\n", count, *failures ? "WRONG" : "good");
    return *failures != 0;
}
