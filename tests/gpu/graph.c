/* SPDX-License-Identifier: Apache-2.0 */
/* Tests a captured graph of plan+dispatch and combine, which is replayed with new routing and
 * data, and with another capacity_limit. Then runs these operations many times without pauses,
 * with random delays of the host.
 *
 *   gpu_graph RANKS GPUS threads|processes REPLAYS [usual|flat|rare [windows]]
 *   rare: layers with replicas and EPIC_BY_K; the sum of replicas is captured, too
 *   windows: outputs lie in windows. Rank 0 captures its graph before it has a window, so that
 *   kernels with and without windows run together */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "copies.h"
#include "scaled_cases.h"
#include "team.h"

/* Few enough for the low-latency kernels; another program uses more. */
#ifndef TOKENS
#define TOKENS 96
#endif
#define HIDDEN 256
#define TOP_K 3
#define EACH 6 /* experts per rank */
#define SLOTS (TOKENS * TOP_K * 8)
#define NUMBERS 7
#define LEAST_REPLAYS 4 /* replays and calls alternate, so two of each */

static int replays;
static bool flat, rare, windows;

typedef struct memory {
    int32_t *ids;
    uint8_t *plan;
    float *tokens, *recv, *out;
    int32_t *logical;
    int32_t *limit; /* number of slots, which each replay changes */
    float *numbers; /* [EACH][NUMBERS], numbers of experts */
    size_t plan_bytes;
    epic_layer layer;
} memory;

static memory allocate_memory(const team_rank *me)
{
    memory m = {.layer = {.num_experts = EACH * (uint32_t)me->num_ranks,
                          .top_k = TOP_K,
                          .layout = flat ? EPIC_FLAT : EPIC_EXPERT_MAJOR}};
    if (rare) {
        m.layer.num_logical = m.layer.num_experts / 2; /* two replicas, on different ranks */
        m.layer.overflow = EPIC_OVERFLOW_DROP;
        m.layer.priority = EPIC_BY_K;
        m.layer.expert_capacity = SLOTS;
    }
    int32_t *logical = malloc(m.layer.num_experts * sizeof *logical);
    for (uint32_t e = 0; e < m.layer.num_experts; e++)
        logical[e] = (int32_t)(e % (m.layer.num_experts / 2));
    CHECK_CUDA(cudaMalloc((void **)&m.logical, m.layer.num_experts * sizeof *logical));
    CHECK_CUDA(copy_in(m.logical, logical, m.layer.num_experts * sizeof *logical));
    free(logical);
    CHECK_CUDA(cudaMalloc((void **)&m.numbers, EACH * NUMBERS * sizeof *m.numbers));
    m.plan_bytes = (size_t)device_layer_bytes(me->num_ranks, TOKENS, &m.layer);
    CHECK_CUDA(cudaMalloc((void **)&m.limit, sizeof *m.limit));
    CHECK_CUDA(cudaMalloc((void **)&m.ids, TOKENS * TOP_K * 4));
    CHECK_CUDA(cudaMalloc((void **)&m.plan, m.plan_bytes));
    CHECK_CUDA(cudaMalloc((void **)&m.tokens, TOKENS * HIDDEN * 4));
    CHECK_CUDA(cudaMalloc((void **)&m.recv, (size_t)SLOTS * HIDDEN * 4));
    CHECK_CUDA(cudaMalloc((void **)&m.out, TOKENS * HIDDEN * 4));
    return m;
}

static epic_result run_operations(team_rank *me, memory *m)
{
    const epic_plan_args plan = {.call.stream = me->stream,
                                 .layer = &m->layer,
                                 .plan = m->plan,
                                 .plan_bytes = m->plan_bytes,
                                 .topk_idx = m->ids,
                                 .logical_of_expert = rare ? m->logical : NULL,
                                 .num_tokens = TOKENS,
                                 .capacity = SLOTS,
                                 .capacity_limit = m->limit};
    float unused;
    const epic_sum_replicas_args sum = {.call.stream = me->stream,
                                        .plan = m->plan,
                                        .plan_bytes = (int64_t)m->plan_bytes,
                                        .data = {m->numbers, EACH, NUMBERS * sizeof(float)},
                                        .workspace = &unused};
    const epic_dispatch_args dispatch = {.tokens = {m->tokens, TOKENS, HIDDEN * 4},
                                         .recv = {m->recv, SLOTS, HIDDEN * 4}};
    const epic_combine_args combine = {.call.stream = me->stream,
                                       .layer = &m->layer,
                                       .plan = m->plan,
                                       .plan_bytes = m->plan_bytes,
                                       .rows = {m->recv, SLOTS, HIDDEN * 4},
                                       .out = {m->out, TOKENS, HIDDEN * 4},
                                       .type = EPIC_F32};
    TRY(p2p_ops.plan_dispatch(me->group, &plan, &dispatch));
    if (rare) TRY(p2p_ops.sum_replicas(me->group, &sum));
    return p2p_ops.combine(me->group, &combine);
}

/* Returns the number of rows of a token: one per choice, or one per rank that it chooses. */
static int rows_of(const int32_t *ids)
{
    int rows = 0;
    for (int k = 0; k < TOP_K; k++) {
        bool again = false;
        for (int j = 0; j < k; j++) again |= ids[j] >= 0 && ids[j] / EACH == ids[k] / EACH;
        rows += ids[k] >= 0 && !(flat && again);
    }
    return rows;
}

/* Returns a number of an expert in a round. */
static int row_number(int expert, int i, int round)
{
    return expert * 100 + i * 7 + round;
}

/* Returns the limit of a round. In each fourth round one rank, another one each time, has too
 * few slots: at most 63. */
static int32_t limit_of(const team_rank *me, int round)
{
    const int enough = TOKENS * TOP_K * me->num_ranks;
    const bool is_limited = round % 4 == 3 && round / 4 % me->num_ranks == me->rank;
    return is_limited ? round % 64 - 3 : enough + round * 100;
}

/* Checks that the plan of a round has the limit of the round. `is_over`: a rank had too few
 * slots. Then the layer has dropped choices, or all ranks get an error. */
static bool check_limit(team_rank *me, const memory *m, int round, bool is_over)
{
    device_plan_header header;
    const int32_t limit = limit_of(me, round) < 1 ? 1 : limit_of(me, round);
    const int32_t capacity = limit < SLOTS ? limit : SLOTS;
    CHECK_CUDA(
        cudaMemcpyAsync(&header, m->plan, sizeof header, cudaMemcpyDeviceToHost, me->stream));
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    const epic_result result = p2p_next_data_error(me->group);
    const epic_result wanted = is_over && !rare ? EPIC_EOVERFLOW : EPIC_OK;
    while (p2p_next_data_error(me->group) != EPIC_OK) continue;
    if (header.capacity == capacity && result == wanted &&
        (result != EPIC_OK || header.slots_of[me->rank] <= capacity))
        return true;
    fprintf(stderr, "rank %d round %d: capacity %d, %d slots, limit %d, %s: %s\n", me->rank,
            round, header.capacity, header.slots_of[me->rank], limit, epic_result_name(result),
            epic_error(NULL));
    return false;
}

/* Replays the graph. Values are small integers, so out must be exactly the token times its
 * number of rows. */
static int replay_graph(team_rank *me, memory *m, cudaGraphExec_t graph, int round,
                        unsigned *seed)
{
    static _Thread_local int32_t ids[TOKENS * TOP_K];
    static _Thread_local float x[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
    for (int i = 0; i < TOKENS * TOP_K; i++)
        ids[i] = rand_r(seed) % ((int)m->layer.num_experts / (rare ? 2 : 1) + 2) - 2;
    for (int i = 0; i < TOKENS * HIDDEN; i++) x[i] = (float)(rand_r(seed) % 1000);
    CHECK_CUDA(cudaMemcpyAsync(m->ids, ids, sizeof ids, cudaMemcpyHostToDevice, me->stream));
    CHECK_CUDA(cudaMemcpyAsync(m->tokens, x, sizeof x, cudaMemcpyHostToDevice, me->stream));
    const int32_t limit = limit_of(me, round);
    CHECK_CUDA(
        cudaMemcpyAsync(m->limit, &limit, sizeof limit, cudaMemcpyHostToDevice, me->stream));
    float numbers[EACH * NUMBERS];
    for (int i = 0; i < EACH * NUMBERS; i++)
        numbers[i] = (float)row_number(me->rank * EACH + i / NUMBERS, i % NUMBERS, round);
    CHECK_CUDA(cudaMemcpyAsync(m->numbers, numbers, sizeof numbers, cudaMemcpyHostToDevice,
                               me->stream));
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    if (round % 3 == 0) usleep((unsigned)rand_r(seed) % 300);
    if (graph)
        CHECK_CUDA(cudaGraphLaunch(graph, me->stream));
    else if (run_operations(me, m) != EPIC_OK)
        return 1;
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    CHECK_CUDA(cudaMemcpyAsync(y, m->out, sizeof y, cudaMemcpyDeviceToHost, me->stream));
    CHECK_CUDA(cudaMemcpyAsync(numbers, m->numbers, sizeof numbers, cudaMemcpyDeviceToHost,
                               me->stream));
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    const bool is_over = round % 4 == 3;
    if (!check_limit(me, m, round, is_over)) return 1;
    for (int i = 0; i < TOKENS * HIDDEN && !is_over; i++) {
        const int live = rows_of(ids + i / HIDDEN * TOP_K);
        if (y[i] == x[i] * (float)live) continue;
        fprintf(stderr, "rank %d round %d: element %d is %g, not %g\n", me->rank, round, i,
                y[i], x[i] * (float)live);
        return 1;
    }
    for (int i = 0; i < EACH * NUMBERS && rare; i++) {
        const int half = (int)m->layer.num_logical, l = (me->rank * EACH + i / NUMBERS) % half;
        const int must =
            row_number(l, i % NUMBERS, round) + row_number(l + half, i % NUMBERS, round);
        if (numbers[i] == (float)must) continue;
        fprintf(stderr, "rank %d round %d: number %d is %g, not %d\n", me->rank, round, i,
                numbers[i], must);
        return 1;
    }
    return 0;
}

static cudaGraphExec_t capture_graph(team_rank *me, memory *m)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK_CUDA(cudaStreamBeginCapture(me->stream, cudaStreamCaptureModeThreadLocal));
    const epic_result result = run_operations(me, m);
    CHECK_CUDA(cudaStreamEndCapture(me->stream, &graph));
    if (result != EPIC_OK) team_stop();
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CHECK_CUDA(cudaGraphUpload(exec, me->stream));
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    return exec;
}

/* Moves the outputs of the operations into a window. */
static void use_window(team_rank *me, memory *m)
{
    const int64_t recv_bytes = (int64_t)SLOTS * HIDDEN * 4, out_bytes = TOKENS * HIDDEN * 4;
    const epic_window_args args = {.bytes = recv_bytes + out_bytes};
    epic_window_info window;
    if (p2p_ops.add_window(me->group, &args, &window) != EPIC_OK) {
        fprintf(stderr, "rank %d: %s\n", me->rank, epic_error(NULL));
        team_stop();
    }
    m->recv = window.data;
    m->out = (float *)((char *)window.data + recv_bytes);
}

static int run_rank(team_rank *me)
{
    memory m = allocate_memory(me);
    cudaGraphExec_t exec = NULL;
    unsigned seed = 5 + (unsigned)me->rank;
    float *const out = m.out;
    team_barrier(me);
    if (me->rank == 0 || !windows) exec = capture_graph(me, &m);
    if (windows) use_window(me, &m);
    float *const window_out = m.out;
    if (!exec) exec = capture_graph(me, &m);
    team_barrier(me);
    for (int i = 0; i < replays; i++) {
        m.out = windows && i % 2 && me->rank == 0 ? out : window_out;
        if (replay_graph(me, &m, i % 2 ? exec : NULL, i, &seed)) team_stop();
    }
    epic_failure_info f;
    if (p2p_ops.poll_failure(me->group, &f) != EPIC_OK) {
        fprintf(stderr, "rank %d: %s\n", me->rank, f.sentence);
        team_stop();
    }
    team_barrier(me);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 5) return 2;
    replays = scaled_cases(atoi(argv[4]));
    if (replays < LEAST_REPLAYS && atoi(argv[4]) >= LEAST_REPLAYS) replays = LEAST_REPLAYS;
    flat = argc > 5 && !strcmp(argv[5], "flat");
    rare = argc > 5 && !strcmp(argv[5], "rare");
    windows = argc > 6 && !strcmp(argv[6], "windows");
    const team t = {.num_ranks = atoi(argv[1]),
                    .num_gpus = atoi(argv[2]),
                    .ranks_per_process = team_ranks_per_process(argv[3]),
                    .max_tokens = TOKENS,
                    .lowlat_tokens = TEAM_LOWLAT_TOKENS,
                    .max_row_bytes = HIDDEN * 4,
                    .timeout_ms = TEAM_LONG_MS,
                    .max_sms = 12,
                    .work = run_rank};
    const int failed = team_run(&t);
    printf("gpu_graph %s ranks, %s GPUs, %s, %d replays and calls%s%s: %s\n", argv[1], argv[2],
           argv[3], replays,
           flat   ? ", flat"
           : rare ? ", rare"
                  : "",
           windows ? ", windows" : "", failed ? "WRONG" : "good");
    return failed != 0;
}
