/* SPDX-License-Identifier: Apache-2.0 */
/* The whole layer on CUDA contexts: random layers against plain float64 loops, their gradients
 * against central differences of those (tests/unit/moe_values.h), and both against the layer on
 * host contexts; half of them in a captured graph.  And what it refuses.
 *   api_layer [CASES] [MOST_RANKS] [SEED] */
#include <cuda_runtime_api.h>

#include "copies.h"
#include "unit/moe_values.h"

enum { MOST_MIRRORS = 64 };

/* ------------------------------------------------------------------------- both sides ---- */

typedef struct mirror { /* an array of the host's, and where it is on the device */
    void *host, *device;
    size_t bytes;
    bool out;
} mirror;

typedef struct device_part {
    part *t;
    mirror arrays[MOST_MIRRORS];
    int num;
    cudaStream_t stream;
} device_part;

static void must(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    _exit(1); /* peers would wait for us */
}

static void *to_device(device_part *d, void *host, int64_t bytes, bool out)
{
    if (host == NULL) return NULL;
    mirror *m = &d->arrays[d->num++];
    *m = (mirror){host, NULL, (size_t)bytes, out};
    must(cudaMalloc(&m->device, m->bytes + 1), "memory"); /* an address also for no bytes */
    must(copy_in(m->device, host, m->bytes), "a copy");
    return m->device;
}

static void *poisoned_device(device_part *d, int64_t bytes)
{
    mirror *m = &d->arrays[d->num++];
    *m = (mirror){NULL, NULL, (size_t)bytes, false};
    must(cudaMalloc(&m->device, m->bytes + 1), "memory");
    must(fill_in(m->device, 0xff, m->bytes), "poison");
    return m->device;
}

/* The rank's call, with every array on the device. */
static void move_in(device_part *d)
{
    part *t = d->t;
    const problem *p = t->p;
    void *given[NUM_GIVEN], *gradient[NUM_GIVEN];
    const int64_t row = convert_bytes(row_type(p)), loss = convert_bytes(loss_type(p));
    const int64_t rows = t->tokens * p->experts.hidden * row;
    const int64_t experts = p->layer.num_experts;
    for (int i = 0; i < NUM_GIVEN; i++) {
        const int64_t n = numbers_here(t, i);
        const int64_t unit = i == X ? row : convert_bytes(real_type(p));
        given[i] = to_device(d, t->given[i], n * convert_bytes(p->given[i].type), false);
        gradient[i] = to_device(d, t->gradient[i], n * unit, true);
    }
    t->weights = (epic_moe_weights){.w_gate = given[W_GATE],
                                    .b_gate = given[B_GATE],
                                    .w_gate_up = given[W_GATE_UP],
                                    .w_down = given[W_DOWN],
                                    .b_gate_up = given[B_GATE_UP],
                                    .b_down = given[B_DOWN],
                                    .shared_gate_up = given[SHARED_GATE_UP],
                                    .shared_down = given[SHARED_DOWN],
                                    .shared_b_gate_up = given[SHARED_B_GATE_UP],
                                    .shared_b_down = given[SHARED_B_DOWN]};
    if (p->bias_given)
        t->weights.bias = to_device(d, (void *)(uintptr_t)p->bias, columns_of(p) * 4, false);
    t->gradients = (epic_moe_gradients){.w_gate = gradient[W_GATE],
                                        .b_gate = gradient[B_GATE],
                                        .w_gate_up = gradient[W_GATE_UP],
                                        .w_down = gradient[W_DOWN],
                                        .b_gate_up = gradient[B_GATE_UP],
                                        .b_down = gradient[B_DOWN],
                                        .shared_gate_up = gradient[SHARED_GATE_UP],
                                        .shared_down = gradient[SHARED_DOWN],
                                        .shared_b_gate_up = gradient[SHARED_B_GATE_UP],
                                        .shared_b_down = gradient[SHARED_B_DOWN]};
    epic_moe_args *f = &t->forward;
    f->call.stream = d->stream;
    if (f->x.data) f->x.data = given[X]; /* without tokens the calls get {NULL, 0, 0} */
    if (f->out.data) f->out.data = to_device(d, t->out, rows, true);
    f->token_ids = to_device(d, t->token_ids, t->tokens * (p->wide_ids ? 8 : 4), false);
    f->table = to_device(d, p->table, p->table_rows * (int64_t)p->layer.top_k * 4, false);
    f->loss = to_device(d, f->loss, loss, true);
    f->balance_loss = to_device(d, f->balance_loss, loss, true);
    f->z_loss = to_device(d, f->z_loss, loss, true);
    f->load = to_device(d, f->load, experts * 4, true);
    f->demand = to_device(d, f->demand, 4, true);
    f->saved = poisoned_device(d, t->memory.cuda_saved_bytes);
    f->saved_bytes = t->memory.cuda_saved_bytes;
    f->workspace = poisoned_device(d, t->memory.cuda_forward_bytes);
    f->workspace_bytes = t->memory.cuda_forward_bytes;
    epic_moe_backward_args *b = &t->backward;
    b->call.stream = d->stream;
    b->x.data = f->x.data;
    if (b->d_out.data) b->d_out.data = to_device(d, t->d_out, rows, false);
    if (b->d_x.data) b->d_x.data = gradient[X];
    b->d_loss = to_device(d, (void *)(uintptr_t)b->d_loss, loss, false);
    b->d_balance_loss = to_device(d, (void *)(uintptr_t)b->d_balance_loss, loss, false);
    b->d_z_loss = to_device(d, (void *)(uintptr_t)b->d_z_loss, loss, false);
    b->saved = f->saved;
    b->saved_bytes = f->saved_bytes;
    b->workspace = poisoned_device(d, t->memory.cuda_backward_bytes);
    b->workspace_bytes = t->memory.cuda_backward_bytes;
}

static void move_out(device_part *d)
{
    for (int i = 0; i < d->num; i++) {
        const mirror *m = &d->arrays[i];
        if (m->out)
            must(cudaMemcpy(m->host, m->device, m->bytes, cudaMemcpyDeviceToHost), "a copy");
        cudaFree(m->device);
    }
}

static void both_ways(part *t, epic_context *ctx)
{
    CHECK(epic_moe_forward(ctx, &t->forward) == EPIC_OK, "%s: %s", t->p->name, epic_error(ctx));
    CHECK(epic_moe_backward(ctx, &t->backward) == EPIC_OK, "%s: %s", t->p->name,
          epic_error(ctx));
}

static bool captured; /* the calls are, in a graph that runs once */

static void run_captured(device_part *d, epic_context *ctx)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    must(cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal), "capture");
    both_ways(d->t, ctx);
    must(cudaStreamEndCapture(d->stream, &graph), "capture");
    must(cudaGraphInstantiate(&exec, graph, 0), "a graph");
    must(cudaGraphLaunch(exec, d->stream), "a graph");
    must(cudaStreamSynchronize(d->stream), "a graph");
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
}

static void run_on_device(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    device_part d = {.t = part_make(what, rank, config, 7)};
    must(cudaStreamCreateWithFlags(&d.stream, cudaStreamNonBlocking), "a stream");
    move_in(&d);
    must(cudaMemsetAsync((void *)d.t->forward.saved, 0xff, 8, d.stream), "a first work");
    must(cudaStreamSynchronize(d.stream), "a first work");
    if (captured)
        run_captured(&d, ctx);
    else
        both_ways(d.t, ctx);
    must(cudaStreamSynchronize(d.stream), "the layer");
    CHECK(epic_check(ctx) == EPIC_OK, "%s: %s", d.t->p->name, epic_error(ctx));
    move_out(&d);
    part_tell(d.t);
    cudaStreamDestroy(d.stream);
    part_free(d.t);
}

static void run_on_host(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    part *t = part_make(what, rank, config, 7);
    part_forget(t, t->memory.forward_bytes);
    CHECK(epic_moe_forward(ctx, &t->forward) == EPIC_OK, "%s", epic_error(ctx));
    part_forget(t, t->memory.backward_bytes);
    CHECK(epic_moe_backward(ctx, &t->backward) == EPIC_OK, "%s", epic_error(ctx));
    part_tell(t);
    part_free(t);
}

/* -------------------------------------------------------------------------------- tests ---- */

static void test_random(uint32_t seed, int num_ranks)
{
    static const uint32_t types[] = {EPIC_F32, EPIC_BF16, EPIC_F16};
    problem p = draw(seed, num_ranks, types[seed % 3]), host;
    epic_config config = config_of(&p);
    make_results(&p);
    host = p;
    make_results(&host);
    team_threads(run_on_host, &host, &config);
    config.backend = "p2p";
    captured = seed / 3 % 2;
    team_threads(run_on_device, &p, &config);
    check_values(&p, seed);
    compare_results(&host, &p);
    free_results(&host);
    free_results(&p);
    free_given(&p);
}

static void refuse(part *t, epic_context *ctx, const char *what)
{
    const epic_result result = epic_moe_forward(ctx, &t->forward);
    CHECK(result == EPIC_ENOTSUP, "%s: %d", what, (int)result);
    CHECK(strstr(epic_error(ctx), what) != NULL, "%s is not named: %s", what, epic_error(ctx));
}

/* Each by its name, and before any peer is called on: the context goes on. */
static void run_refused(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    problem p = *(const problem *)what;
    device_part d = {.t = part_make(&p, rank, config, 7)};
    part *t = d.t;
    int32_t places[64] = {0};
    int64_t slots;
    must(cudaStreamCreateWithFlags(&d.stream, cudaStreamNonBlocking), "a stream");
    move_in(&d);
    t->forward.rank_of_expert = places;
    refuse(t, ctx, "rank_of_expert");
    t->forward.rank_of_expert = NULL;
    p.layer.sum_order = EPIC_TREE;
    refuse(t, ctx, "EPIC_TREE");
    p.layer.sum_order = EPIC_BY_RANK;
    t->experts.num_local_experts++;
    t->forward.saved_bytes = t->forward.workspace_bytes = INT64_C(1) << 40;
    refuse(t, ctx, "num_local_experts");
    t->experts.num_local_experts--;
    p.router.zero_experts = 1;
    refuse(t, ctx, "zero_experts");
    p.router.zero_experts = 0;
    t->moe.capacity = EPIC_CAPACITY_EXACT;
    CHECK(epic_moe_plan(ctx, &t->forward, &slots) == EPIC_ENOTSUP, "%s", epic_error(ctx));
    t->moe.capacity = p.moe.capacity;
    t->forward.saved_bytes = t->memory.cuda_saved_bytes;
    t->forward.workspace_bytes = t->memory.cuda_forward_bytes - 1;
    CHECK(epic_moe_forward(ctx, &t->forward) == EPIC_EINVAL, "a workspace too small");
    t->forward.workspace_bytes++;
    both_ways(t, ctx);
    must(cudaStreamSynchronize(d.stream), "the layer");
    CHECK(epic_check(ctx) == EPIC_OK, "%s", epic_error(ctx));
    move_out(&d);
    cudaStreamDestroy(d.stream);
    part_free(t);
}

static void test_refused(void)
{
    problem p = draw(0, 1, EPIC_F32);
    epic_config config = config_of(&p);
    config.backend = "p2p";
    make_results(&p);
    team_threads(run_refused, &p, &config);
    free_results(&p);
    free_given(&p);
}

int main(int argc, char **argv)
{
    const uint32_t count = argc > 1 ? (uint32_t)atoi(argv[1]) : 36;
    const int most = argc > 2 ? atoi(argv[2]) : 4;
    const uint32_t first = argc > 3 ? (uint32_t)atoi(argv[3]) : 0;
    failures = share(sizeof *failures);
    for_devices = true;
    test_refused();
    for (uint32_t i = 0; i < count; i++)
        test_random(first + i, 1 + (int)((first + i) / 2) % most);
    printf("layer: %u cases, worst error %.2g of what is allowed: %s\n", count, worst,
           *failures ? "WRONG" : "good");
    return *failures != 0;
}
