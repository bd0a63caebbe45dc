/* SPDX-License-Identifier: Apache-2.0 */
/* Tests whole layers (epic_moe_forward and _backward) in groups that shrink (epic_regroup), with
 * sums by rank, in tree order, and with EPIC_INVARIANT. After each change of the members all
 * results must have the bits of a new group that has only the members. In replays of a CUDA
 * graph that was captured with all seats this holds for the rows and for the gradients of the
 * experts. Ranks are threads, and share the GPUs in turn.
 *
 *   api_regroup_layer */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "epic/epic.h"

enum { SEATS = 4, STAGES = 2, EXPERTS = 8, TOP_K = 2, WIDTH = 32, INNER = 16, TOKENS = 16 };
enum { GATE_UP = WIDTH * 2 * INNER, DOWN = INNER * WIDTH, SLOTS = SEATS * TOKENS * TOP_K };
enum { TIMEOUT_MS = 150000 };

static const uint32_t members_of[STAGES] = {0x6, 0x4};

typedef struct kind {
    const char *name;
    uint32_t order, leaves, flags;
} kind;

static const kind kinds[] = {{"by rank", EPIC_BY_RANK, 0, 0},
                             {"tree", EPIC_TREE, 0, 0},
                             {"tree with leaves", EPIC_TREE, 8, 0},
                             {"invariant", EPIC_TREE, 8, EPIC_INVARIANT}};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* The memory of a rank on the device that the caller of a layer fills in. */
typedef struct inputs {
    float x[TOKENS * WIDTH], d_out[TOKENS * WIDTH], w_gate[WIDTH * EXPERTS];
    float gate_up[EXPERTS][GATE_UP], down[EXPERTS][DOWN];
    int32_t owner[EXPERTS];
} inputs;

typedef struct results {
    float out[TOKENS * WIDTH], d_x[TOKENS * WIDTH];
    float d_gate_up[EXPERTS][GATE_UP], d_down[EXPERTS][DOWN];
    float d_gate[WIDTH * EXPERTS], loss;
} results;

typedef struct rank_state {
    int rank, num_members;
    int members[SEATS];
    cudaStream_t stream;
    inputs *in;
    results *out;
    unsigned char *saved, *workspace;
    int64_t bytes; /* of each of the two */
} rank_state;

static epic_bootstrap group_of[KINDS][SEATS], fresh_of[KINDS][STAGES][SEATS];
static pthread_barrier_t all_here, fresh_closed[STAGES];
static int num_gpus;

static void must(bool good, const char *what, const rank_state *s, const epic_context *ctx)
{
    if (good) return;
    fprintf(stderr, "regroup_layer: rank %d, %d members: %s: %s\n", s->rank, s->num_members,
            what, epic_error(ctx));
    fflush(NULL);
    _exit(1); /* peers would wait for this rank */
}

static void must_run(cudaError_t error, const char *what, const rank_state *s)
{
    if (error != cudaSuccess) fprintf(stderr, "%s\n", cudaGetErrorString(error));
    must(error == cudaSuccess, what, s, NULL);
}

static void copy(void *to, const void *from, size_t bytes, const rank_state *s)
{
    must_run(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, s->stream), "a copy", s);
    must_run(cudaStreamSynchronize(s->stream), "a copy", s);
}

static void fill(float *to, int count, uint32_t seed)
{
    for (int i = 0; i < count; i++) {
        uint32_t h = (seed * 2654435761u) ^ ((uint32_t)i * 2246822519u);
        h = (h ^ h >> 15) * 3266489917u;
        to[i] = (float)((h ^ h >> 13) % 2003) / 1001.0f - 1.0f;
    }
}

/* Fills in the inputs. Each member owns one block of experts. With `dense`, the owners are the
 * numbers of the members, as in a new group, and not their seats. */
static void fill_inputs(const rank_state *s, bool dense)
{
    inputs *in = calloc(1, sizeof *in);
    int local = 0;
    fill(in->x, TOKENS * WIDTH, (uint32_t)s->rank + 10);
    fill(in->d_out, TOKENS * WIDTH, (uint32_t)s->rank + 20);
    fill(in->w_gate, WIDTH * EXPERTS, 30);
    for (int e = 0; e < EXPERTS; e++) {
        const int member = s->num_members - 1 - e * s->num_members / EXPERTS;
        in->owner[e] = dense ? member : s->members[member];
        if (s->members[member] != s->rank) continue;
        fill(in->gate_up[local], GATE_UP, (uint32_t)e + 40);
        fill(in->down[local++], DOWN, (uint32_t)e + 60);
    }
    copy(s->in, in, sizeof *in, s);
    free(in);
}

/* Launches a layer forward and backward. */
static void launch_layer(rank_state *s, epic_context *ctx, const kind *k)
{
    const epic_layer layer = {
        .num_experts = EXPERTS, .top_k = TOP_K, .sum_order = k->order, .leaves = k->leaves};
    const epic_router router = {
        .num_experts = EXPERTS, .top_k = TOP_K, .normalize = EPIC_NORMALIZE_SUM};
    const epic_experts experts = {.num_local_experts = EXPERTS,
                                  .hidden = WIDTH,
                                  .inner = INNER,
                                  .row_type = EPIC_F32,
                                  .weight_type = EPIC_F32};
    const epic_moe moe = {.layer = &layer,
                          .router = &router,
                          .experts = &experts,
                          .balance_coeff = 0.1,
                          .z_coeff = 0.01,
                          .capacity = SLOTS,
                          .flags = EPIC_SUM_DENSE | k->flags};
    inputs *in = s->in;
    results *out = s->out;
    const int64_t row = WIDTH * sizeof(float);
    const epic_moe_weights weights = {
        .w_gate = in->w_gate, .w_gate_up = in->gate_up, .w_down = in->down};
    const epic_moe_gradients gradients = {
        .w_gate = out->d_gate, .w_gate_up = out->d_gate_up, .w_down = out->d_down};
    const epic_moe_args forward = {.call.stream = s->stream,
                                   .moe = &moe,
                                   .weights = &weights,
                                   .x = {in->x, TOKENS, row},
                                   .out = {out->out, TOKENS, row},
                                   .rank_of_expert = in->owner,
                                   .saved = s->saved,
                                   .saved_bytes = s->bytes,
                                   .workspace = s->workspace,
                                   .workspace_bytes = s->bytes,
                                   .loss = &out->loss};
    const epic_moe_backward_args backward = {.call.stream = s->stream,
                                             .moe = &moe,
                                             .weights = &weights,
                                             .x = forward.x,
                                             .d_out = {in->d_out, TOKENS, row},
                                             .d_x = {out->d_x, TOKENS, row},
                                             .gradients = &gradients,
                                             .saved = s->saved,
                                             .saved_bytes = s->bytes,
                                             .workspace = s->workspace,
                                             .workspace_bytes = s->bytes};
    must(epic_moe_forward(ctx, &forward) == EPIC_OK, k->name, s, ctx);
    must(epic_moe_backward(ctx, &backward) == EPIC_OK, k->name, s, ctx);
}

static void clear_results(const rank_state *s)
{
    must_run(cudaMemsetAsync(s->out, 0, sizeof *s->out, s->stream), "a fill", s);
    must_run(cudaStreamSynchronize(s->stream), "a fill", s);
}

static void read_results(const rank_state *s, epic_context *ctx, results *to)
{
    must_run(cudaStreamSynchronize(s->stream), "a layer", s);
    must(epic_check(ctx) == EPIC_OK, "a layer", s, ctx);
    copy(to, s->out, sizeof *to, s);
}

/* Runs the layer in a new group that has only the members. */
static void run_fresh(rank_state *s, const kind *k, int stage, const epic_config *config,
                      results *to)
{
    epic_config c = *config;
    epic_context *ctx;
    int member = 0;
    while (s->members[member] != s->rank) member++;
    epic_bootstrap *mine = &fresh_of[k - kinds][stage][member];
    c.num_ranks = (uint32_t)s->num_members;
    c.flags = 0; /* so the new group uses the kernels without vacant seats */
    fill_inputs(s, true);
    clear_results(s);
    must(epic_open(&ctx, mine, &c) == EPIC_OK, "open", s, NULL);
    launch_layer(s, ctx, k);
    read_results(s, ctx, to);
    epic_close(ctx);
    epic_bootstrap_close(mine);
}

static void check_stage(rank_state *s, epic_context *ctx, const kind *k, int stage,
                        cudaGraphExec_t graph, const epic_config *config)
{
    results *expected = malloc(sizeof *expected), *r = malloc(sizeof *r);
    run_fresh(s, k, stage, config, expected);
    /* epic_close frees memory, which waits for all kernels of the GPU. So no member may launch a
     * kernel that waits for a member that is still closing the new group. */
    pthread_barrier_wait(&fresh_closed[stage]);
    must(expected->out[0] != 0 && expected->d_gate[0] != 0, "empty results", s, ctx);
    fill_inputs(s, false);
    for (int i = 0; i < 4; i++) {
        const bool replays = i % 2 == 0;
        /* a graph with `leaves` 0 has as many leaves as seats, and a new group has fewer */
        const bool equal = !replays || k->order == EPIC_BY_RANK || k->leaves;
        clear_results(s);
        if (replays)
            must_run(cudaGraphLaunch(graph, s->stream), "a replay", s);
        else
            launch_layer(s, ctx, k);
        read_results(s, ctx, r);
        const size_t bytes = replays ? offsetof(results, d_gate) : sizeof *r;
        must(!equal || !memcmp(r, expected, bytes), replays ? "replay" : "call", s, ctx);
    }
    free(expected);
    free(r);
}

static void set_up(rank_state *s)
{
    s->bytes = 8 << 20;
    must_run(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking), "a stream", s);
    must_run(cudaMalloc((void **)&s->in, sizeof *s->in), "memory", s);
    must_run(cudaMalloc((void **)&s->out, sizeof *s->out), "memory", s);
    must_run(cudaMalloc((void **)&s->saved, (size_t)s->bytes), "memory", s);
    must_run(cudaMalloc((void **)&s->workspace, (size_t)s->bytes), "memory", s);
}

static cudaGraphExec_t capture(rank_state *s, epic_context *ctx, const kind *k)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    must_run(cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal), "capture", s);
    launch_layer(s, ctx, k);
    must_run(cudaStreamEndCapture(s->stream, &graph), "capture", s);
    must_run(cudaGraphInstantiate(&exec, graph, 0), "a graph", s);
    must_run(cudaGraphDestroy(graph), "a graph", s);
    return exec;
}

static void run_kind(rank_state *s, const kind *k, uint32_t max_sms)
{
    results *r = malloc(sizeof *r);
    epic_context *ctx;
    const epic_config config = {.max_tokens = TOKENS,
                                .max_row_bytes = WIDTH * sizeof(float),
                                .num_ranks = SEATS,
                                .timeout_ms = TIMEOUT_MS,
                                .max_sms = max_sms,
                                .flags = EPIC_CAN_REGROUP,
                                .backend = "p2p"};
    must(!epic_open(&ctx, &group_of[k - kinds][s->rank], &config), "open", s, NULL);
    s->num_members = SEATS;
    for (int r = 0; r < SEATS; r++) s->members[r] = r;
    fill_inputs(s, false);
    const cudaGraphExec_t graph = capture(s, ctx, k);
    pthread_barrier_wait(&all_here);
    must_run(cudaGraphLaunch(graph, s->stream), "a replay", s);
    read_results(s, ctx, r);
    for (int stage = 0; stage < STAGES; stage++) {
        const epic_regroup_args args = {.leaving = !(members_of[stage] >> s->rank & 1)};
        must(epic_regroup(ctx, &args, NULL) == EPIC_OK, "regroup", s, ctx);
        if (args.leaving) break;
        s->num_members = 0;
        for (int r = 0; r < SEATS; r++)
            if (members_of[stage] >> r & 1) s->members[s->num_members++] = r;
        check_stage(s, ctx, k, stage, graph, &config);
    }
    pthread_barrier_wait(&all_here); /* no kernel runs when a rank frees its memory */
    epic_close(ctx);
    epic_bootstrap_close(&group_of[k - kinds][s->rank]);
    free(r);
}

static void *run_rank(void *argument)
{
    rank_state s = {.rank = (int)(intptr_t)argument};
    int sms;
    must_run(cudaSetDevice(s.rank % num_gpus), "cudaSetDevice", &s);
    must_run(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, s.rank % num_gpus),
             "the GPU", &s);
    /* a rank has up to two contexts */
    const int share = sms * 3 / 4 / ((SEATS + num_gpus - 1) / num_gpus) / 2;
    set_up(&s);
    pthread_barrier_wait(&all_here);
    for (int k = 0; k < KINDS; k++) {
        run_kind(&s, &kinds[k], share > 1 ? (uint32_t)share : 1);
        pthread_barrier_wait(&all_here);
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[SEATS];
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* kernels of ranks must run together */
    if (cudaGetDeviceCount(&num_gpus) != cudaSuccess || !num_gpus) {
        puts("no GPU can be used here");
        return 77;
    }
    int good = 1;
    for (int k = 0; k < KINDS; k++) {
        good &= !epic_bootstrap_threads(group_of[k], SEATS, TIMEOUT_MS);
        for (int i = 0; i < STAGES; i++)
            good &= !epic_bootstrap_threads(fresh_of[k][i], __builtin_popcount(members_of[i]),
                                            TIMEOUT_MS);
    }
    if (!good) return 1;
    pthread_barrier_init(&all_here, NULL, SEATS);
    for (int i = 0; i < STAGES; i++)
        pthread_barrier_init(&fresh_closed[i], NULL,
                             (unsigned)__builtin_popcount(members_of[i]));
    for (int r = 0; r < SEATS; r++)
        pthread_create(&threads[r], NULL, run_rank, (void *)(intptr_t)r);
    for (int r = 0; r < SEATS; r++) pthread_join(threads[r], NULL);
    printf("regroup_layer: %d kinds of layers passed\n", KINDS);
    return 0;
}
