/* SPDX-License-Identifier: Apache-2.0 */
/* Tests groups of processes that lose ranks and go on (epic_regroup). A rank is killed, ends,
 * is stopped, or leaves as planned, while all ranks replay a CUDA graph of a layer and a sum.
 * The others make the next generation and replay the same graph, whose results must be those of
 * the members. Then a second rank leaves, or ends. In another case, it is killed soon after the
 * first one, often during epic_regroup. Prints the time from the end of a rank to the first
 * correct replay without it, and the time of epic_regroup.
 *
 *   api_regroup RANKS GPUS FAULTS [FIRST] */
#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "copies.h"
#include "epic/epic.h"
#include "victim.h"

enum { LOCAL = 3, TOP_K = 2, TOKENS = 20, HIDDEN = 64 };
enum { ROW = 4 * HIDDEN, COUNT = 5, MOST_REPLAYS = 1000000, NUM_FAULTS = TWO_KILLED + 1 };
#define TIMEOUT_MS 30000u
#define MOST_SECONDS 240u     /* of a rank; a hung one must not stay behind */
#define STOP_TIMEOUT_MS 1500u /* of a group with a rank that stops */

static int second; /* the rank that leaves or ends after the victim, or -1 */
static unsigned second_delay_us;

static struct shared {
    double fault_ms;
    int began, left, recovered, passed[MAX_RANKS];
    double recovery_ms[MAX_RANKS], leave_ms[MAX_RANKS];
} * shared;

/* The memory of a rank, which the graph reads and writes. */
typedef struct rank_state {
    int rank;
    epic_context *ctx;
    cudaStream_t stream;
    cudaGraphExec_t graph;
    epic_layer layer;
    int64_t slots, plan_bytes;
    uint64_t members;
    int32_t ids[TOKENS * TOP_K];
    void *plan, *d_ids, *d_logical, *tokens, *recv, *out, *sum;
} rank_state;

static void must(int good, const char *what, const rank_state *s)
{
    must_succeed(good, what, s->ctx);
}

static void must_run(cudaError_t error, const char *what, const rank_state *s)
{
    if (error != cudaSuccess) fprintf(stderr, "%s\n", cudaGetErrorString(error));
    must(error == cudaSuccess, what, s);
}

/* ---------------------------------------------------------------------------- the step ---- */

static int num_logical(void)
{
    return num_ranks * LOCAL / 2;
}

/* Expert e is a replica of logical expert e % num_logical(). */
static int is_present(uint64_t members, int logical)
{
    for (int e = logical; e < num_ranks * LOCAL; e += num_logical())
        if (members >> e / LOCAL & 1) return 1;
    return 0;
}

static float value_of(int rank, int token, int i)
{
    return (float)(1 + rank * 64 + token * 3 + i % 5);
}

/* Copies on the stream of the rank, which must be idle. */
static void copy(void *to, const void *from, size_t bytes, const rank_state *s)
{
    must_run(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, s->stream), "a copy", s);
    must_run(cudaStreamSynchronize(s->stream), "a copy", s);
}

static void *upload(const void *from, size_t bytes, const rank_state *s)
{
    void *to = NULL;
    must_run(cudaMalloc(&to, bytes), "memory", s);
    must_run(from ? copy_in(to, from, bytes) : fill_in(to, 0, bytes), "a copy", s);
    return to;
}

static void set_up(rank_state *s, const epic_config *config)
{
    int32_t logical[MAX_RANKS * LOCAL];
    float tokens[TOKENS * HIDDEN];
    s->layer = (epic_layer){.num_experts = (uint32_t)(num_ranks * LOCAL),
                            .num_logical = (uint32_t)num_logical(),
                            .top_k = TOP_K,
                            .flags = EPIC_DROP_ABSENT};
    must(!epic_capacity_bound(config, &s->layer, &s->slots) &&
             !epic_plan_bytes(config, &s->layer, &s->plan_bytes),
         "sizes", s);
    for (int e = 0; e < num_ranks * LOCAL; e++) logical[e] = e % num_logical();
    for (int i = 0; i < TOKENS * TOP_K; i++) s->ids[i] = (i * 5 + s->rank) % num_logical();
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        tokens[i] = value_of(s->rank, i / HIDDEN, i % HIDDEN);
    must_run(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking), "a stream", s);
    s->plan = upload(NULL, (size_t)s->plan_bytes, s);
    s->d_ids = upload(s->ids, sizeof s->ids, s);
    s->d_logical = upload(logical, (size_t)(num_ranks * LOCAL) * 4, s);
    s->tokens = upload(tokens, sizeof tokens, s);
    s->recv = upload(NULL, (size_t)s->slots * ROW, s);
    s->out = upload(NULL, sizeof tokens, s);
    s->sum = upload(NULL, COUNT * 4, s);
}

static epic_result combine(rank_state *s)
{
    const epic_combine_args args = {.call.stream = s->stream,
                                    .layer = &s->layer,
                                    .plan = s->plan,
                                    .plan_bytes = s->plan_bytes,
                                    .rows = {s->recv, s->slots, ROW},
                                    .out = {s->out, TOKENS, ROW},
                                    .type = EPIC_F32};
    return epic_combine(s->ctx, &args);
}

static epic_result launch_step(rank_state *s)
{
    const epic_plan_args plan = {.call.stream = s->stream,
                                 .layer = &s->layer,
                                 .plan = s->plan,
                                 .plan_bytes = s->plan_bytes,
                                 .topk_idx = s->d_ids,
                                 .logical_of_expert = s->d_logical,
                                 .num_tokens = TOKENS,
                                 .capacity = s->slots};
    const epic_dispatch_args dispatch = {.tokens = {s->tokens, TOKENS, ROW},
                                         .recv = {s->recv, s->slots, ROW}};
    const epic_allreduce_sum_args sum = {
        .call.stream = s->stream, .data = s->sum, .count = COUNT};
    epic_result result = epic_plan_dispatch(s->ctx, &plan, &dispatch);
    if (result == EPIC_OK) result = combine(s);
    return result == EPIC_OK ? epic_allreduce_sum(s->ctx, &sum) : result;
}

static void capture_step(rank_state *s)
{
    cudaGraph_t graph;
    must_run(cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal), "capture", s);
    must(launch_step(s) == EPIC_OK, "captured calls", s);
    must_run(cudaStreamEndCapture(s->stream, &graph), "capture", s);
    must_run(cudaGraphInstantiate(&s->graph, graph, 0), "a graph", s);
    must_run(cudaGraphDestroy(graph), "a graph", s);
}

/* Runs a step: by the graph, or by calls. */
static epic_result run_step(rank_state *s, int by_graph)
{
    float numbers[COUNT];
    epic_result result = EPIC_OK;
    for (int i = 0; i < COUNT; i++) numbers[i] = i ? (float)(1 << s->rank) : -0.0f;
    copy(s->sum, numbers, sizeof numbers, s);
    if (by_graph)
        must_run(cudaGraphLaunch(s->graph, s->stream), "a replay", s);
    else
        result = launch_step(s);
    must_run(cudaStreamSynchronize(s->stream), "a step", s);
    return result == EPIC_OK ? epic_check(s->ctx) : result;
}

/* Checks the results of a step. A token gets its row once for each choice that is present. */
static void check_step(const rank_state *s)
{
    static float out[TOKENS * HIDDEN];
    float numbers[COUNT];
    copy(out, s->out, sizeof out, s);
    copy(numbers, s->sum, sizeof numbers, s);
    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        const int token = i / HIDDEN;
        float times = 0;
        for (int k = 0; k < TOP_K; k++)
            times += (float)is_present(s->members, s->ids[token * TOP_K + k]);
        must(out[i] == times * value_of(s->rank, token, i % HIDDEN), "a wrong row", s);
    }
    /* a vacant seat must not add +0 */
    must(numbers[0] == 0 && signbit(numbers[0]), "a wrong sum of -0", s);
    for (int i = 1; i < COUNT; i++) must(numbers[i] == (float)s->members, "a wrong sum", s);
}

static void must_step(rank_state *s, int by_graph)
{
    must(run_step(s, by_graph) == EPIC_OK, "a step", s);
    check_step(s);
}

/* --------------------------------------------------------------------------- the ranks ---- */

static void open_rank(rank_state *s)
{
    const epic_tcp tcp = {
        .rank = s->rank, .num_ranks = num_ranks, .port = port, .timeout_ms = TIMEOUT_MS};
    const epic_config config = {.max_tokens = TOKENS,
                                .max_row_bytes = ROW,
                                .num_ranks = (uint32_t)num_ranks,
                                .timeout_ms = fault == STOPPED ? STOP_TIMEOUT_MS : TIMEOUT_MS,
                                .backend = "p2p",
                                .flags = EPIC_CAN_REGROUP};
    epic_bootstrap bootstrap;
    must(!epic_bootstrap_tcp(&bootstrap, &tcp), "bootstrap", s);
    must(!epic_open(&s->ctx, &bootstrap, &config), "open", s);
    epic_bootstrap_close(&bootstrap);
    s->members = (1u << num_ranks) - 1;
    set_up(s, &config);
}

/* Makes the next generation, which must not contain rank `gone`. */
static void go_on(rank_state *s, int gone)
{
    const epic_regroup_args args = {.patience_ms = 1000 + (uint32_t)slack_ms()};
    epic_members_info info;
    s->members &= ~(UINT64_C(1) << gone);
    must(epic_regroup(s->ctx, &args, &info) == EPIC_OK, "regroup", s);
    must(info.members[0] == s->members && info.gone[0] == UINT64_C(1) << gone, "members", s);
}

/* The plan of the generation before is refused on all ranks, and the group stays usable. */
static void check_old_plan(rank_state *s)
{
    must(combine(s) == EPIC_OK, "combine", s);
    must_run(cudaStreamSynchronize(s->stream), "combine", s);
    must(epic_check(s->ctx) == EPIC_EINVAL, "an old plan", s);
}

static void leave(rank_state *s)
{
    const epic_regroup_args args = {.leaving = 1};
    must(epic_regroup(s->ctx, &args, NULL) == EPIC_OK, "leave", s);
    must(epic_check(s->ctx) == EPIC_EEVICTED, "a call after leave", s);
    const double begin = now_ms();
    epic_close(s->ctx);
    must(now_ms() - begin < TIMEOUT_MS / 2, "a close that waits for the others", s);
    __atomic_add_fetch(&shared->left, 1, __ATOMIC_RELAXED);
}

/* Waits until all ranks that leave have closed their contexts. */
static void await_left(void)
{
    const int leaves = (fault == LEFT) + (second >= 0 && fault != EXITED);
    while (__atomic_load_n(&shared->left, __ATOMIC_RELAXED) < leaves) usleep(100);
}

/* The victim works until its end. If it was stopped, it continues when the others have gone on
 * without it, and finds that it was evicted. */
static void run_victim(rank_state *s)
{
    const epic_regroup_args args = {.patience_ms = 1000};
    pthread_t thread;
    epic_result result = EPIC_OK;
    while (__atomic_load_n(&shared->began, __ATOMIC_RELAXED) < num_ranks) usleep(100);
    pthread_create(&thread, NULL, end_process, &shared->fault_ms);
    for (int i = 0; i < MOST_REPLAYS && result == EPIC_OK; i++) result = run_step(s, 1);
    if (fault != STOPPED)
        for (;;) pause();
    must(result == EPIC_EPEER || result == EPIC_ETIMEOUT, "a call of an evicted rank", s);
    result = epic_regroup(s->ctx, &args, NULL);
    must(result == EPIC_EEVICTED, "regroup of an evicted rank", s);
    epic_close(s->ctx);
    shared->passed[s->rank] = 1;
}

static void *end_second(void *unused)
{
    (void)unused;
    while (shared->fault_ms == 0) usleep(100);
    usleep(second_delay_us);
    raise(SIGKILL);
    return NULL;
}

/* Makes generations until a step succeeds in one that has neither the victim nor the second
 * rank. */
static void lose_two(rank_state *s)
{
    const uint64_t left = s->members & ~(UINT64_C(1) << victim) & ~(UINT64_C(1) << second);
    const epic_regroup_args args = {.patience_ms = 1000 + (uint32_t)slack_ms()};
    epic_result result = EPIC_OK;
    pthread_t thread;
    if (s->rank == second) pthread_create(&thread, NULL, end_second, NULL);
    do {
        epic_members_info info;
        while (result == EPIC_OK) result = run_step(s, 1);
        must(result == EPIC_EPEER, "another error", s);
        must(epic_regroup(s->ctx, &args, &info) == EPIC_OK, "regroup", s);
        s->members = info.members[0];
        result = run_step(s, 1);
    } while (result != EPIC_OK || s->members != left);
}

/* The process ends while the others work. */
static void end_second_rank(rank_state *s)
{
    for (int i = 0; i < 3; i++) must(run_step(s, 1) == EPIC_OK, "a step", s);
    shared->passed[s->rank] = 1;
    raise(SIGKILL);
}

/* Works until an error, goes on without the victim, and then without the second rank. */
static void run_survivor(rank_state *s)
{
    epic_result result = EPIC_OK;
    if (fault == TWO_KILLED) {
        lose_two(s);
        shared->recovery_ms[s->rank] = now_ms() - shared->fault_ms;
        for (int i = 0; i < 5; i++) must_step(s, i % 2);
        epic_close(s->ctx);
        shared->passed[s->rank] = 1;
        return;
    }
    if (fault != LEFT) {
        for (int i = 0; i < MOST_REPLAYS && result == EPIC_OK; i++) result = run_step(s, 1);
        must(result == (fault == STOPPED ? EPIC_ETIMEOUT : EPIC_EPEER), "another error", s);
    }
    const double begin = now_ms();
    go_on(s, victim);
    shared->leave_ms[s->rank] = now_ms() - begin;
    must_step(s, 1);
    shared->recovery_ms[s->rank] = now_ms() - (fault == LEFT ? begin : shared->fault_ms);
    __atomic_add_fetch(&shared->recovered, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 5; i++) must_step(s, i % 2);
    if (s->rank == second && fault == EXITED) {
        end_second_rank(s);
    } else if (s->rank == second) {
        leave(s);
    } else if (second >= 0) {
        result = EPIC_OK;
        while (fault == EXITED && result == EPIC_OK) result = run_step(s, 1);
        go_on(s, second);
        check_old_plan(s);
        for (int i = 0; i < 5; i++) must_step(s, 1 - i % 2);
    }
    if (s->rank != second) {
        await_left();
        epic_close(s->ctx);
    }
    shared->passed[s->rank] = 1;
}

static void run_rank(int rank)
{
    rank_state s = {.rank = rank};
    own_rank = rank;
    alarm(MOST_SECONDS);
    must_run(cudaSetDevice(rank % num_gpus), "cudaSetDevice", &s);
    open_rank(&s);
    must_step(&s, 0);
    capture_step(&s);
    must_step(&s, 1);
    __atomic_add_fetch(&shared->began, 1, __ATOMIC_RELAXED);
    if (rank != victim) {
        run_survivor(&s);
    } else if (fault == LEFT) {
        leave(&s);
        shared->passed[rank] = 1;
    } else {
        run_victim(&s);
    }
    fflush(NULL);
    _exit(0);
}

/* ---------------------------------------------------------------------------- the test ---- */

static int inject_fault(int i)
{
    pid_t pids[MAX_RANKS];
    int passed = 1, status;
    double recovery = 0, leaving = 0;
    unsigned seed = 99 + (unsigned)i;
    fault = (enum fault)(i % NUM_FAULTS);
    if (fault == TWO_KILLED && num_ranks < 3) fault = KILLED;
    /* a single rank is no majority, so it cannot evict a peer that may live */
    if (fault == STOPPED && num_ranks < 3) fault = LEFT;
    draw_victim(i);
    second_delay_us = (unsigned)rand_r(&seed) % 8000;
    second = num_ranks > 2 ? (victim + 1 + rand_r(&seed) % (num_ranks - 1)) % num_ranks : -1;
    memset(shared, 0, sizeof *shared);
    fflush(NULL);
    for (int r = 0; r < num_ranks; r++)
        if (!(pids[r] = fork())) run_rank(r);
    while (fault == STOPPED &&
           __atomic_load_n(&shared->recovered, __ATOMIC_RELAXED) < num_ranks - 1) {
        int alive = 0;
        for (int r = 0; r < num_ranks; r++) alive += kill(pids[r], 0) == 0;
        for (int r = 0; r < num_ranks; r++)
            if (r != victim && waitpid(pids[r], &status, WNOHANG) > 0 && status) alive = 0;
        if (alive < num_ranks) break;
        usleep(1000);
    }
    if (fault == STOPPED) kill(pids[victim], SIGCONT);
    for (int r = 0; r < num_ranks; r++)
        if (r != victim) waitpid(pids[r], &status, 0);
    if (fault != STOPPED && fault != LEFT) shared->passed[victim] = 1;
    if (fault == TWO_KILLED) shared->passed[second] = 1;
    if (!passed) kill(pids[victim], SIGKILL);
    waitpid(pids[victim], &status, 0);
    for (int r = 0; r < num_ranks; r++) {
        passed &= shared->passed[r];
        if (r == victim) continue;
        if (shared->recovery_ms[r] > recovery) recovery = shared->recovery_ms[r];
        if (shared->leave_ms[r] > leaving) leaving = shared->leave_ms[r];
    }
    printf("  %s of rank %d: regroup %.2f ms; first correct step after %.2f ms%s\n",
           fault_names[fault], victim, leaving, recovery, passed ? "" : ": FAILED");
    return passed;
}

int main(int argc, char **argv)
{
    shared = map_shared(sizeof *shared);
    return shared ? run_trials("api_regroup", argc, argv, inject_fault) : 2;
}
