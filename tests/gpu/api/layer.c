/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the whole layer on CUDA contexts: random layers against plain float64 loops, their
 * gradients against central differences of these (tests/unit/moe_values.h), and both against
 * the layer on host contexts. Half of the cases run in a captured graph; some weight gradients
 * have the type of the rows; some layers have the exact capacity that epic_moe_plan returns.
 * Layers also run in a captured graph whose capacity_limit changes.
 *
 *   api_layer [CASES] [MOST_RANKS] [SEED] */
#include "layer_part.h"
#include "scaled_cases.h"
#include "unit/moe_values.h"

static bool captured; /* the calls are captured in a graph that runs once */
static bool planned;  /* epic_moe_plan returns the capacity */

/* Replaces `saved` and the workspaces by new ones for the current moe.capacity. */
static void renew_memory(device_part *d)
{
    part *t = d->t;
    CHECK(epic_moe_memory(NULL, &t->config, &t->moe, &t->memory) == EPIC_OK, "%s",
          epic_error(NULL));
    t->forward.saved = poisoned_device(d, t->memory.saved_bytes);
    t->backward.saved = t->forward.saved;
    t->forward.saved_bytes = t->backward.saved_bytes = t->memory.saved_bytes;
    t->forward.workspace = poisoned_device(d, t->memory.forward_bytes);
    t->forward.workspace_bytes = t->memory.forward_bytes;
    t->backward.workspace = poisoned_device(d, t->memory.backward_bytes);
    t->backward.workspace_bytes = t->memory.backward_bytes;
}

/* Makes the plan, and prepares the calls for the number of slots that it needs. */
static void make_plan(device_part *d, epic_context *ctx)
{
    part *t = d->t;
    int64_t slots = -1;
    int32_t demand = -1;
    t->moe.capacity = EPIC_CAPACITY_EXACT;
    renew_memory(d);
    const void *old = t->forward.saved;
    const size_t kept = (size_t)t->memory.saved_bytes;
    CHECK(epic_moe_plan(ctx, &t->forward, &slots) == EPIC_OK, "%s: %s", t->p->name,
          epic_error(ctx));
    must_succeed(cudaMemcpy(&demand, t->forward.demand, sizeof demand, cudaMemcpyDeviceToHost),
                 "a copy");
    CHECK(t->p->layer.overflow == EPIC_OVERFLOW_DROP ? slots <= demand : slots == demand,
          "%s: %lld slots for a demand of %d", t->p->name, (long long)slots, demand);
    t->moe.capacity = slots;
    t->forward.flags = EPIC_PLANNED;
    renew_memory(d);
    must_succeed(
        cudaMemcpyAsync(t->forward.saved, old, kept, cudaMemcpyDeviceToDevice, d->stream),
        "a copy");
}

static void run_on_device(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    device_part d = device_part_make(what, rank, config);
    if (planned) make_plan(&d, ctx);
    if (captured)
        both_ways_captured(&d, ctx);
    else
        both_ways(d.t, ctx);
    must_succeed(cudaStreamSynchronize(d.stream), "the layer");
    CHECK(epic_check(ctx) == EPIC_OK, "%s: %s", d.t->p->name, epic_error(ctx));
    device_part_end(&d);
}

static void run_on_host(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    part *t = part_make(what, rank, config, 7);
    part_forget(t, t->memory.forward_bytes);
    CHECK(epic_moe_forward(ctx, &t->forward) == EPIC_OK, "%s", epic_error(ctx));
    part_forget(t, t->memory.backward_bytes);
    CHECK(epic_moe_backward(ctx, &t->backward) == EPIC_OK, "%s", epic_error(ctx));
    part_print_failure(t);
    part_free(t);
}

/* ------------------------------------------------------------------------------ limits ---- */

static void launch(device_part *d, cudaGraphExec_t exec, int32_t limit)
{
    void *to = (void *)(uintptr_t)d->t->forward.capacity_limit;
    if (to)
        must_succeed(
            cudaMemcpyAsync(to, &limit, sizeof limit, cudaMemcpyHostToDevice, d->stream),
            "a copy");
    must_succeed(cudaGraphLaunch(exec, d->stream), "a graph");
    must_succeed(cudaStreamSynchronize(d->stream), "a graph");
}

/* Captures the calls once, and launches the graph with a small limit, then with the limit of
 * the problem. */
static void run_with_limits(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    device_part d = device_part_make(p, rank, config);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    must_succeed(cudaStreamBeginCapture(d.stream, cudaStreamCaptureModeThreadLocal), "capture");
    both_ways(d.t, ctx);
    must_succeed(cudaStreamEndCapture(d.stream, &graph), "capture");
    must_succeed(cudaGraphInstantiate(&exec, graph, 0), "a graph");
    launch(&d, exec, 1);
    launch(&d, exec, p->limit_of[rank]);
    CHECK(epic_check(ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    device_part_end(&d);
}

/* A captured layer with a limit has the bits of a layer with this capacity. */
static void test_limits(uint32_t seed, int num_ranks)
{
    problem given = draw(seed, num_ranks, EPIC_F32);
    const int32_t half = (int32_t)(given.total * given.layer.top_k / num_ranks / 2);
    const int32_t limits[] = {half + 1, 0, (int32_t)given.moe.capacity + 3};
    given.backward_flags = 0;
    drop_choices(&given);
    for (int i = 0; i < 3; i++) {
        problem limited = given, plain = given;
        limited.is_limited = true;
        for (int r = 0; r < num_ranks; r++) limited.limit_of[r] = limits[i];
        plain.is_limited = false;
        plain.moe.capacity = slots_in(&limited, 0);
        epic_config config = config_of(&given);
        config.backend = "p2p";
        make_results(&limited);
        make_results(&plain);
        team_threads(run_with_limits, &limited, &config);
        team_threads(run_with_limits, &plain, &config);
        compare_bits(&plain, &limited, "of a layer with capacity_limit");
        free_results(&limited);
        free_results(&plain);
    }
    free_given(&given);
}

/* ------------------------------------------------------------------------------- tests ---- */

/* Returns true if no rank can need more slots than moe.capacity. */
static bool fits_all(const problem *p)
{
    const int64_t padding = p->layer.alignment ? p->layer.alignment - 1 : 0;
    return p->moe.capacity >= p->total * p->layer.top_k + p->layer.num_experts * padding;
}

static void test_random(uint32_t seed, int num_ranks)
{
    static const uint32_t types[] = {EPIC_F32, EPIC_BF16, EPIC_F16};
    problem p = draw(seed, num_ranks, types[seed % 3]), host;
    epic_config config = config_of(&p);
    p.narrow_gradients = types[seed % 3] != EPIC_F32 && seed % 2 && !p.backward_flags;
    make_results(&p);
    host = p;
    host.narrow_gradients = false;
    make_results(&host);
    team_threads(run_on_host, &host, &config);
    config.backend = "p2p";
    captured = seed / 3 % 2;
    planned = !captured && fits_all(&p);
    team_threads(run_on_device, &p, &config);
    check_values(&p, seed);
    compare_results(&host, &p);
    free_results(&host);
    free_results(&p);
    free_given(&p);
}

int main(int argc, char **argv)
{
    const uint32_t count = (uint32_t)scaled_cases(argc > 1 ? atoi(argv[1]) : 36);
    const int most = argc > 2 ? atoi(argv[2]) : 4;
    const uint32_t first = argc > 3 ? (uint32_t)atoi(argv[3]) : 0;
    failures = share(sizeof *failures);
    for_devices = true;
    for (uint32_t i = 0; i < count; i++)
        test_random(first + i, 1 + (int)((first + i) / 2) % most);
    for (uint32_t i = 0; i < (count + 5) / 6; i++)
        test_limits(first + i, 1 + (int)(first + i) % most);
    printf("layer: %u cases, largest error %.2g of the tolerance: %s\n", count, worst,
           *failures ? "WRONG" : "good");
    return *failures != 0;
}
