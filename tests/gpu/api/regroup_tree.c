/* SPDX-License-Identifier: Apache-2.0 */
/* Tests layers in tree order in groups that shrink (epic_regroup). Each rank captures its calls
 * in CUDA graphs while all seats have members. After each change of the members, it replays the
 * graphs and also makes the calls again. The results must be those of plain loops, bit for bit,
 * and those of a new group that has only the members. The errors must be those of a host group
 * that has shrunk in the same way. Ranks are threads, and share the GPUs in turn.
 *
 *   api_regroup_tree [CASE ...] */
#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "epic/epic.h"

enum { MAX_SEATS = 16, MAX_STAGES = 3, TOP_K = 4, TEXT = 512, TIMEOUT_MS = 150000 };

typedef struct test_case {
    const char *name;
    int seats, hidden, tokens;
    uint32_t leaves, layout;
    uint32_t members[MAX_STAGES]; /* the sets of seats after each change; 0: none */
} test_case;

static const test_case cases[] = {
    {"few", 4, 96, 9, 0, 0, {0x6, 0x4}},
    {"start", 8, 96, 9, 0, 0, {0xf0, 0xa0, 0x20}},
    {"middle", 8, 1024, 5, 16, 0, {0xd1, 0x81}},
    {"end", 8, 7, 9, 8, 0, {0x0f, 0x03}},
    {"three", 4, 96, 9, 0, 0, {0xd, 0x9}},
    {"leaves", 4, 512, 20, 16, 0, {0xa, 0x8}}, /* 4, 8 and 16 leaves on each member */
    {"unaligned", 4, 33, 20, 16, 0, {0x5, 0x1}},
    {"flat", 4, 96, 9, 4, EPIC_FLAT, {0x9, 0x8}},
    {"many", 4, 24, 1026, 4, 0, {0x3, 0x2}}, /* more tokens than low-latency kernels support */
    {"deep", 16, 48, 3, 0, 0, {0x5a5a, 0x5040, 0x4000}},
};

static const test_case *the_case;
static epic_bootstrap group_of[MAX_SEATS], host_of[MAX_SEATS], fresh_of[MAX_STAGES][MAX_SEATS];
static pthread_barrier_t all_here;
static int num_gpus;

typedef struct rank_state {
    int rank, num_members;
    int members[MAX_SEATS];
    epic_context *ctx, *host;
    cudaStream_t stream;
    cudaGraphExec_t step, plain; /* plain: a plan without a table */
    epic_layer layer;
    int64_t slots, plan_bytes, host_bytes;
    int32_t *owner; /* [num_experts] on the host */
    void *host_plan, *plan, *fresh_plan, *ids, *weights, *d_owner, *tokens, *recv,
        *slot_weights, *out, *d_tokens, *d_weights;
} rank_state;

static void fail(const rank_state *s, const char *what, const char *detail)
{
    fprintf(stderr, "regroup_tree: %s: rank %d, %d members: %s: %s\n", the_case->name, s->rank,
            s->num_members, what, detail);
    fflush(NULL);
    _exit(1); /* peers would wait for this rank */
}

static void must(bool good, const char *what, const rank_state *s, const epic_context *ctx)
{
    if (!good) fail(s, what, epic_error(ctx));
}

static void must_run(cudaError_t error, const char *what, const rank_state *s)
{
    if (error != cudaSuccess) fail(s, what, cudaGetErrorString(error));
}

/* ---------------------------------------------------------------------------- the data ---- */

static int num_experts(void)
{
    const int leaves = (int)the_case->leaves;
    return 2 * (leaves > the_case->seats ? leaves : the_case->seats);
}

/* Every third rank has no tokens, and the numbers of tokens of the others differ. */
static int tokens_of(int rank)
{
    return rank % 3 == 2 ? 0 : the_case->tokens - rank % 2;
}

static uint32_t hash(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t h = a * 2654435761u ^ b * 2246822519u ^ c * 3266489917u;
    h = (h ^ h >> 15) * 2246822519u;
    return h ^ h >> 13;
}

static float value_of(int rank, int token, int i)
{
    return (float)(hash((uint32_t)rank, (uint32_t)token, (uint32_t)i + 99) % 20011) / 997.0f -
           10.0f;
}

static float weight_of(int rank, int token, int k)
{
    return (float)(hash((uint32_t)rank + 7, (uint32_t)token, (uint32_t)k) % 1009) / 1013.0f;
}

static int expert_of(int rank, int token, int k)
{
    const uint32_t h = hash((uint32_t)rank + 31, (uint32_t)token, (uint32_t)k);
    return h % 13 == 0 ? -1 : (int)(h / 13 % (uint32_t)num_experts());
}

/* A node of a sum tree, which may be empty. */
typedef struct node {
    bool has;
    float x;
} node;

/* Returns the sum of a leaf: of the token's choices whose experts are in [first, end). With
 * EPIC_FLAT it is the token's row. */
static node sum_leaf(int rank, int token, int i, int first, int end, bool weighted)
{
    node sum = {false, 0};
    const float x = value_of(rank, token, i);
    for (int k = 0; k < TOP_K; k++) {
        const int e = expert_of(rank, token, k);
        if (e < first || e >= end) continue;
        if (the_case->layout == EPIC_FLAT) return (node){true, x};
        const float w = weighted ? weight_of(rank, token, k) : 1.0f;
        sum = (node){true, sum.has ? fmaf(w, x, sum.x) : w * x};
    }
    return sum;
}

/* Adds `leaves` leaves, which together have the experts [first, end), in a binary tree. */
static node sum_tree(int rank, int token, int i, int first, int end, int leaves, bool weighted)
{
    if (leaves == 1) return sum_leaf(rank, token, i, first, end, weighted);
    const int middle = (first + end) / 2;
    const node a = sum_tree(rank, token, i, first, middle, leaves / 2, weighted);
    const node b = sum_tree(rank, token, i, middle, end, leaves / 2, weighted);
    if (!a.has || !b.has) return a.has ? a : b;
    return (node){true, a.x + b.x};
}

/* ---------------------------------------------------------------------------- the calls ---- */

static epic_layer layer_with(uint32_t leaves)
{
    return (epic_layer){.num_experts = (uint32_t)num_experts(),
                        .top_k = TOP_K,
                        .layout = the_case->layout,
                        .sum_order = EPIC_TREE,
                        .leaves = leaves};
}

static bool is_weighted(void)
{
    return the_case->layout != EPIC_FLAT;
}

static epic_plan_args plan_args(const rank_state *s, const epic_layer *layer, void *plan)
{
    return (epic_plan_args){.call.stream = s->stream,
                            .layer = layer,
                            .plan = plan,
                            .plan_bytes = s->plan_bytes,
                            .topk_idx = s->ids,
                            .rank_of_expert = s->d_owner,
                            .num_tokens = tokens_of(s->rank),
                            .capacity = s->slots};
}

/* Launches a plan, dispatch, combine and dispatch_backward. */
static epic_result launch_step(const rank_state *s, epic_context *ctx, const epic_layer *layer,
                               void *plan)
{
    const int64_t tokens = tokens_of(s->rank), row = the_case->hidden * 4;
    const epic_plan_args planning = plan_args(s, layer, plan);
    const epic_dispatch_args dispatch = {.tokens = {s->tokens, tokens, row},
                                         .recv = {s->recv, s->slots, row},
                                         .weights = is_weighted() ? s->weights : NULL,
                                         .slot_weights = is_weighted() ? s->slot_weights : NULL,
                                         .type = EPIC_F32};
    const epic_combine_args combine = {.call.stream = s->stream,
                                       .layer = layer,
                                       .plan = plan,
                                       .plan_bytes = s->plan_bytes,
                                       .rows = {s->recv, s->slots, row},
                                       .out = {s->out, tokens, row},
                                       .slot_weights = dispatch.slot_weights,
                                       .type = EPIC_F32};
    const epic_dispatch_backward_args backward = {.call.stream = s->stream,
                                                  .layer = layer,
                                                  .plan = plan,
                                                  .plan_bytes = s->plan_bytes,
                                                  .d_recv = combine.rows,
                                                  .d_tokens = {s->d_tokens, tokens, row},
                                                  .d_slot_weights = dispatch.slot_weights,
                                                  .d_weights =
                                                      is_weighted() ? s->d_weights : NULL,
                                                  .type = EPIC_F32};
    epic_result result = epic_plan_dispatch(ctx, &planning, &dispatch);
    if (result == EPIC_OK) result = epic_combine(ctx, &combine);
    return result == EPIC_OK ? epic_dispatch_backward(ctx, &backward) : result;
}

static epic_result launch_plain(const rank_state *s, epic_context *ctx, const epic_layer *layer,
                                void *plan)
{
    epic_plan_args args = plan_args(s, layer, plan);
    args.rank_of_expert = NULL;
    return epic_plan(ctx, &args);
}

typedef epic_result launcher(const rank_state *s, epic_context *ctx, const epic_layer *layer,
                             void *plan);

static cudaGraphExec_t capture(rank_state *s, launcher *launch)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    must_run(cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal), "capture", s);
    must(launch(s, s->ctx, &s->layer, s->plan) == EPIC_OK, "captured calls", s, s->ctx);
    must_run(cudaStreamEndCapture(s->stream, &graph), "capture", s);
    must_run(cudaGraphInstantiate(&exec, graph, 0), "a graph", s);
    must_run(cudaGraphDestroy(graph), "a graph", s);
    return exec;
}

/* Copies on the stream of the rank, which must be idle. */
static void copy(void *to, const void *from, int64_t bytes, const rank_state *s)
{
    must_run(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, s->stream), "a copy",
             s);
    must_run(cudaStreamSynchronize(s->stream), "a copy", s);
}

static void replay(const rank_state *s, cudaGraphExec_t graph)
{
    must_run(cudaGraphLaunch(graph, s->stream), "a replay", s);
    must_run(cudaStreamSynchronize(s->stream), "a replay", s);
}

/* --------------------------------------------------------------------------- the checks ---- */

static void check_rows(const rank_state *s, const void *device, int leaves, bool weighted,
                       const char *what)
{
    const int tokens = tokens_of(s->rank), hidden = the_case->hidden;
    float *rows = malloc((size_t)(tokens * hidden + 1) * 4);
    copy(rows, device, (int64_t)tokens * hidden * 4, s);
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < hidden; i++) {
            const node n = sum_tree(s->rank, t, i, 0, num_experts(), leaves, weighted);
            const float expected = n.has ? n.x : 0.0f, x = rows[t * hidden + i];
            char text[TEXT];
            snprintf(text, sizeof text, "token %d, element %d is %a instead of %a", t, i, x,
                     expected);
            if (memcmp(&x, &expected, 4) != 0) fail(s, what, text);
        }
    free(rows);
}

/* Checks the results of a step. `leaves`: number of leaves of the layer. */
static void check_step(const rank_state *s, int leaves, const char *what)
{
    const int tokens = tokens_of(s->rank);
    must(epic_check(s->ctx) == EPIC_OK, what, s, s->ctx);
    if (the_case->layout == EPIC_FLAT) leaves = s->num_members;
    check_rows(s, s->out, leaves, is_weighted(), what);
    check_rows(s, s->d_tokens, leaves, false, what);
    float *weights = malloc((size_t)(tokens * TOP_K + 1) * 4);
    copy(weights, s->d_weights, is_weighted() ? tokens * TOP_K * 4 : 0, s);
    for (int c = 0; c < tokens * TOP_K && is_weighted(); c++) {
        const int t = c / TOP_K, k = c % TOP_K;
        const bool none = expert_of(s->rank, t, k) < 0;
        if (weights[c] != (none ? 0.0f : weight_of(s->rank, t, k))) fail(s, what, "d_weights");
    }
    free(weights);
}

/* Overwrites the results of the step before. */
static void spoil(const rank_state *s)
{
    const size_t bytes = (size_t)(tokens_of(s->rank) * the_case->hidden + 1) * 4;
    must_run(cudaMemsetAsync(s->out, 0x77, bytes, s->stream), "a fill", s);
    must_run(cudaMemsetAsync(s->d_tokens, 0x77, bytes, s->stream), "a fill", s);
    must_run(cudaStreamSynchronize(s->stream), "a fill", s);
}

/* Writes to `text` the error of a plan of the host group. */
static void ask_host(const rank_state *s, const epic_layer *layer, bool with_table, char *text)
{
    static _Thread_local int32_t ids[2048 * TOP_K];
    for (int c = 0; c < tokens_of(s->rank) * TOP_K; c++)
        ids[c] = expert_of(s->rank, c / TOP_K, c % TOP_K);
    const epic_plan_args args = {.layer = layer,
                                 .plan = s->host_plan,
                                 .plan_bytes = s->host_bytes,
                                 .topk_idx = ids,
                                 .rank_of_expert = with_table ? s->owner : NULL,
                                 .num_tokens = tokens_of(s->rank),
                                 .capacity = s->slots};
    must(epic_plan(s->host, &args) == EPIC_EINVAL, "an invalid plan on the host", s, s->host);
    snprintf(text, TEXT, "%s", epic_error(s->host));
}

/* The last step must have failed with the error `text`. The group must stay usable. */
static void check_error(const rank_state *s, const char *what, const char *text)
{
    must(epic_check(s->ctx) == EPIC_EINVAL, what, s, s->ctx);
    if (!strstr(epic_error(s->ctx), text)) {
        fprintf(stderr, "expected: %s\n", text);
        fail(s, what, epic_error(s->ctx));
    }
    must(epic_check(s->ctx) == EPIC_OK, what, s, s->ctx);
}

/* --------------------------------------------------------------------------- the stages ---- */

/* Gives each member one block of experts. The order of the members depends on `stage`. */
static void place_experts(rank_state *s, int stage)
{
    const int block = num_experts() / s->num_members;
    for (int e = 0; e < num_experts(); e++) {
        const int b = e / block < s->num_members ? e / block : s->num_members - 1;
        const int m = stage % 2 ? s->num_members - 1 - b : (b + 1) % s->num_members;
        s->owner[e] = s->members[m];
    }
    copy(s->d_owner, s->owner, num_experts() * 4, s);
}

static bool has_tree(const rank_state *s)
{
    return !(s->num_members & (s->num_members - 1));
}

/* Replays and calls a step whose expert `e` is on `seat`, which is an error. */
static void check_misplaced(rank_state *s, int e, int seat)
{
    char text[TEXT];
    const int32_t before = s->owner[e];
    s->owner[e] = seat;
    copy(s->d_owner, s->owner, num_experts() * 4, s);
    ask_host(s, &s->layer, true, text);
    replay(s, s->step);
    check_error(s, "a replay with a misplaced expert", text);
    must(launch_step(s, s->ctx, &s->layer, s->plan) == EPIC_OK, "a step", s, s->ctx);
    must_run(cudaStreamSynchronize(s->stream), "a step", s);
    check_error(s, "a step with a misplaced expert", text);
    s->owner[e] = before;
    copy(s->d_owner, s->owner, num_experts() * 4, s);
}

/* Without a table, a vacant seat has experts. */
static void check_plain(const rank_state *s)
{
    char text[TEXT];
    ask_host(s, &s->layer, false, text);
    replay(s, s->plain);
    check_error(s, "a replay without a table", text);
    must(launch_plain(s, s->ctx, &s->layer, s->plan) == EPIC_OK, "a plan", s, s->ctx);
    must_run(cudaStreamSynchronize(s->stream), "a plan", s);
    check_error(s, "a plan without a table", text);
}

/* Runs a step in a new group that has only the members. */
static void check_fresh(rank_state *s, int stage, const epic_config *config)
{
    epic_config c = *config;
    epic_context *ctx;
    int32_t owner[2 * MAX_SEATS * 16];
    int number_of[MAX_SEATS];
    c.num_ranks = (uint32_t)s->num_members;
    c.flags = 0; /* so the new group uses the kernels without vacant seats */
    for (int m = 0; m < s->num_members; m++) number_of[s->members[m]] = m;
    for (int e = 0; e < num_experts(); e++) owner[e] = number_of[s->owner[e]];
    copy(s->d_owner, owner, num_experts() * 4, s);
    epic_bootstrap *mine = &fresh_of[stage][number_of[s->rank]];
    must(epic_open(&ctx, mine, &c) == EPIC_OK, "open", s, NULL);
    must(launch_step(s, ctx, &s->layer, s->fresh_plan) == EPIC_OK, "a step", s, ctx);
    must_run(cudaStreamSynchronize(s->stream), "a step", s);
    check_step(s, (int)s->layer.leaves, "a step of a new group");
    epic_close(ctx);
    epic_bootstrap_close(mine);
    copy(s->d_owner, s->owner, num_experts() * 4, s);
}

static int vacant_seat(const rank_state *s)
{
    int seat = 0;
    for (int m = 0; m < s->num_members && s->members[m] == seat; m++) seat++;
    return seat;
}

/* The number of members has no tree. */
static void check_no_tree(rank_state *s)
{
    char text[TEXT];
    const epic_layer own = layer_with(the_case->leaves);
    place_experts(s, 0);
    snprintf(text, sizeof text,
             "layer.leaves is %u: must be a multiple of the group's number of members, %d",
             s->layer.leaves, s->num_members);
    replay(s, s->step);
    check_error(s, "a replay without a tree", text);
    replay(s, s->plain);
    check_error(s, "a replay without a tree", text);
    must(launch_step(s, s->ctx, &own, s->plan) == EPIC_EINVAL, "a step without a tree", s,
         s->ctx);
    if (!strstr(epic_error(s->ctx), "layer.leaves is")) fail(s, "error", epic_error(s->ctx));
}

static void check_stage(rank_state *s, int stage, const epic_config *config)
{
    const epic_layer own = layer_with(the_case->leaves);
    place_experts(s, stage);
    check_plain(s);
    check_misplaced(s, num_experts() - 1, vacant_seat(s));
    if (s->num_members > 1) check_misplaced(s, num_experts() / s->num_members, s->owner[0]);
    for (int i = 0; i < 2; i++) {
        spoil(s);
        replay(s, s->step);
        check_step(s, (int)s->layer.leaves, "a replay");
        spoil(s);
        must(launch_step(s, s->ctx, &own, s->plan) == EPIC_OK, "a step", s, s->ctx);
        must_run(cudaStreamSynchronize(s->stream), "a step", s);
        check_step(s, the_case->leaves ? (int)the_case->leaves : s->num_members, "a step");
    }
    check_fresh(s, stage, config);
}

/* ---------------------------------------------------------------------------- the ranks ---- */

static void *allocate(int64_t bytes, const rank_state *s)
{
    void *memory;
    must_run(cudaMalloc(&memory, (size_t)bytes + 64), "memory", s);
    return memory;
}

static void set_up(rank_state *s, const epic_config *config)
{
    const int tokens = tokens_of(s->rank), hidden = the_case->hidden;
    const int64_t rows = tokens + 1, row = hidden * 4;
    epic_layer_info sizes;
    for (int r = 0; r < the_case->seats; r++) s->slots += tokens_of(r) * TOP_K;
    must(!epic_plan_bytes(config, &s->layer, &s->plan_bytes), "plan_bytes", s, NULL);
    must(!epic_layer_sizes(s->host, &s->layer, &sizes), "sizes", s, s->host);
    s->host_bytes = sizes.plan_bytes;
    s->host_plan = malloc((size_t)s->host_bytes);
    s->owner = malloc((size_t)num_experts() * 4);
    must_run(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking), "a stream", s);
    s->plan = allocate(s->plan_bytes, s);
    s->fresh_plan = allocate(s->plan_bytes, s);
    s->ids = allocate(rows * TOP_K * 4, s);
    s->weights = allocate(rows * TOP_K * 4, s);
    s->d_weights = allocate(rows * TOP_K * 4, s);
    s->d_owner = allocate(num_experts() * 4, s);
    s->tokens = allocate(rows * row, s);
    s->out = allocate(rows * row, s);
    s->d_tokens = allocate(rows * row, s);
    s->recv = allocate(s->slots * row, s);
    s->slot_weights = allocate(s->slots * 4, s);
    int32_t *ids = malloc((size_t)rows * TOP_K * 4);
    float *numbers = malloc((size_t)(rows * (hidden + TOP_K)) * 4);
    for (int c = 0; c < tokens * TOP_K; c++) {
        ids[c] = expert_of(s->rank, c / TOP_K, c % TOP_K);
        numbers[c] = weight_of(s->rank, c / TOP_K, c % TOP_K);
    }
    copy(s->ids, ids, tokens * TOP_K * 4, s);
    copy(s->weights, numbers, tokens * TOP_K * 4, s);
    for (int i = 0; i < tokens * hidden; i++)
        numbers[i] = value_of(s->rank, i / hidden, i % hidden);
    copy(s->tokens, numbers, tokens * row, s);
    free(ids);
    free(numbers);
}

/* Sets the members of this stage. Returns false if this rank has left. */
static bool change_members(rank_state *s, uint32_t members)
{
    const bool stays = members >> s->rank & 1;
    const epic_regroup_args args = {.leaving = !stays};
    must(epic_regroup(s->ctx, &args, NULL) == EPIC_OK, "regroup", s, s->ctx);
    must(epic_regroup(s->host, &args, NULL) == EPIC_OK, "regroup", s, s->host);
    s->num_members = 0;
    for (int r = 0; r < the_case->seats; r++)
        if (members >> r & 1) s->members[s->num_members++] = r;
    return stays;
}

static void *run_rank(void *argument)
{
    rank_state s = {.rank = (int)(intptr_t)argument, .num_members = the_case->seats};
    int sms;
    const int sharers = (the_case->seats + num_gpus - 1) / num_gpus;
    must_run(cudaSetDevice(s.rank % num_gpus), "cudaSetDevice", &s);
    must_run(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, s.rank % num_gpus),
             "the GPU", &s);
    const int share = sms * 3 / 4 / sharers / 2; /* a rank has up to two contexts */
    epic_config config = {.max_tokens = the_case->tokens,
                          .max_row_bytes = the_case->hidden * 4,
                          .num_ranks = (uint32_t)the_case->seats,
                          .timeout_ms = TIMEOUT_MS,
                          .backend = "threads"};
    must(!epic_open(&s.host, &host_of[s.rank], &config), "open a host group", &s, NULL);
    config.backend = "p2p";
    config.flags = EPIC_CAN_REGROUP;
    config.max_sms = share > 1 ? (uint32_t)share : 1;
    must(!epic_open(&s.ctx, &group_of[s.rank], &config), "open", &s, NULL);
    for (int r = 0; r < the_case->seats; r++) s.members[r] = r;
    s.layer = layer_with(the_case->leaves ? the_case->leaves : (uint32_t)the_case->seats);
    set_up(&s, &config);
    place_experts(&s, 0);
    s.step = capture(&s, launch_step);
    s.plain = capture(&s, launch_plain);
    /* a rank that still instantiates a graph could wait for the kernels of other ranks */
    pthread_barrier_wait(&all_here);
    replay(&s, s.step);
    check_step(&s, (int)s.layer.leaves, "a replay with all seats");
    for (int stage = 0; stage < MAX_STAGES && the_case->members[stage]; stage++) {
        if (!change_members(&s, the_case->members[stage])) break;
        if (has_tree(&s))
            check_stage(&s, stage, &config);
        else
            check_no_tree(&s);
    }
    /* A close frees memory, which waits for all kernels of the GPU. So no kernel may still wait
     * for another rank. */
    pthread_barrier_wait(&all_here);
    epic_close(s.ctx);
    epic_close(s.host);
    return NULL;
}

static void run_case(const test_case *c)
{
    pthread_t threads[MAX_SEATS];
    the_case = c;
    int good = !epic_bootstrap_threads(group_of, c->seats, TIMEOUT_MS) &&
               !epic_bootstrap_threads(host_of, c->seats, TIMEOUT_MS);
    for (int i = 0; i < MAX_STAGES && c->members[i]; i++)
        good &=
            !epic_bootstrap_threads(fresh_of[i], __builtin_popcount(c->members[i]), TIMEOUT_MS);
    if (!good) {
        fprintf(stderr, "regroup_tree: bootstrap: %s\n", epic_error(NULL));
        _exit(1);
    }
    pthread_barrier_init(&all_here, NULL, (unsigned)c->seats);
    for (int r = 0; r < c->seats; r++)
        pthread_create(&threads[r], NULL, run_rank, (void *)(intptr_t)r);
    for (int r = 0; r < c->seats; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < c->seats; r++) {
        epic_bootstrap_close(&group_of[r]);
        epic_bootstrap_close(&host_of[r]);
    }
    pthread_barrier_destroy(&all_here);
    printf("  %s: %d seats, %u leaves: passed\n", c->name, c->seats, c->leaves);
    fflush(NULL);
}

int main(int argc, char **argv)
{
    int num_run = 0;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* kernels of ranks must run together */
    if (cudaGetDeviceCount(&num_gpus) != cudaSuccess || !num_gpus) {
        puts("no GPU can be used here");
        return 77;
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bool is_named = argc == 1;
        for (int a = 1; a < argc; a++) is_named |= !strcmp(argv[a], cases[i].name);
        if (!is_named) continue;
        run_case(&cases[i]);
        num_run++;
    }
    printf("regroup_tree: %d cases passed\n", num_run);
    return num_run ? 0 : 2;
}
