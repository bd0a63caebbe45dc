/* SPDX-License-Identifier: Apache-2.0 */
/* Times the p2p backend: whole operations, slowest rank, median over repetitions.
 *   gpu_bench [ranks=4] [gpus=4] [hidden=7168] [tokens=4096,8192] [sms=48] [reps=50]
 *             [routing=uniform|zipf|hot] [ops=PDCUGBp] [json=FILE]
 * ops: P plan+dispatch, D cached dispatch, C combine weighted, U combine unweighted, T combine in
 * tree order, G combine_backward, g the same without dot products, B dispatch_backward, L plan
 * alone, p plain push.
 *
 * One repetition: an epic_sum of four floats as a barrier of all GPUs, an event, the operation, an
 * event; few tokens: the L2 is overwritten before.  All of them wait in the stream behind a gate
 * before the first begins, so that no launch is late.  One process for each GPU, or threads that
 * share one GPU. */
#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

extern "C" {
#include "base/error.h"
#include "team.h"
}
#include "cuda/ptx.cuh"

#define MAX_REPS 100
#define EXPERTS 256
#define TOP_K 8
#define ALIGNMENT 128
#define FLUSH_BYTES ((size_t)256 << 20)

struct Options {
    int ranks = 4, gpus = 4, hidden = 7168, reps = 50;
    std::vector<int> tokens = {4096, 8192}, sms = {48};
    const char *routing = "uniform", *ops = "PDCUGBp", *json = NULL;
    bool processes = true;
} options;

struct Shared { /* by all ranks */
    float us[DEVICE_MAX_RANKS][MAX_REPS];
    double out_rows[DEVICE_MAX_RANKS], in_rows[DEVICE_MAX_RANKS][DEVICE_MAX_RANKS];
};

struct Rank {
    team_rank *me;
    Shared *all;
    int tokens;
    int64_t row_bytes, slots;
    size_t plan_bytes;
    int32_t *ids;
    uint8_t *plan, *x, *recv, *y, *dx, *out, *flush;
    float *weights, *recv_weights, *slot_weights, *d_slot_weights, *d_weights, *tick;
    int32_t *expert_rows;
    epic_layer layer;
    int *gate, *gate_device;
    int opened;
    cudaEvent_t begin[MAX_REPS], end[MAX_REPS];
    std::vector<uint8_t> touched; /* [tokens] a bit for each rank */
    uint8_t *touched_device;
    FILE *json;
};

static uint64_t next_random(uint64_t *s)
{
    *s += 0x9e3779b97f4a7c15ull;
    uint64_t x = *s;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

/* One token's experts, all different. */
static void choose(uint64_t *s, int32_t *to)
{
    static double zipf[EXPERTS];
    if (zipf[0] == 0)
        for (int e = 0; e < EXPERTS; e++) zipf[e] = (e ? zipf[e - 1] : 0) + 1.0 / (e + 1);
    for (int k = 0; k < TOP_K; k++) {
        bool again = true;
        for (int tries = 0; again; tries++) {
            to[k] = (int32_t)(next_random(s) % EXPERTS);
            if (!strcmp(options.routing, "zipf")) {
                const double u = (double)(next_random(s) >> 11) / 9007199254740992.0;
                to[k] =
                    (int32_t)(std::lower_bound(zipf, zipf + EXPERTS, u * zipf[EXPERTS - 1]) -
                              zipf);
                to[k] = to[k] * 37 % EXPERTS;
            }
            if (!strcmp(options.routing, "hot") && next_random(s) % 10 < 8 && tries < 8)
                to[k] %= 4;
            again = false;
            for (int j = 0; j < k; j++) again |= to[j] == to[k];
        }
    }
}

__global__ void fill_kernel(uint32_t *p, int64_t words, uint32_t seed)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < words;
         i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 0x9e3779b1u ^ seed;
        h ^= h >> 15;
        h *= 0x2c1b3c6du;
        h ^= h >> 12;
        const uint32_t a = (h & 0x807f) | (120 + (h >> 8 & 7)) << 7;
        p[i] = a | (a ^ 0x8055) << 16;
    }
}

__global__ void gate_kernel(volatile int *gate, int value)
{
    while (*gate < value) __nanosleep(200);
}

/* Every row once to each peer that needs it, and nothing else. */
__global__ void push_kernel(p2p_seat seat, const uint8_t *x, const uint8_t *touched, int tokens,
                            int vectors)
{
    const int lane = threadIdx.x % 32, warps = gridDim.x * blockDim.x / 32;
    const int pieces = (vectors + 223) / 224, peers = seat.num_ranks - 1;
    for (int u = (blockIdx.x * blockDim.x + threadIdx.x) / 32; u < tokens * pieces * peers;
         u += warps) {
        const int token = u / (pieces * peers), distance = u / pieces % peers + 1;
        const int rank = (seat.rank + distance) % seat.num_ranks;
        if (!(touched[token] >> rank & 1)) continue;
        uint8_t *to = seat.heap[rank] + seat.at.staging +
                      (int64_t)(peers - distance) * seat.at.source_bytes + 65536;
        const int first = u % pieces * 224 + lane;
        const int64_t row = min((int64_t)token, seat.at.source_bytes / (vectors * 16) - 8);
        uint4 q[7];
#pragma unroll
        for (int v = 0; v < 7; v++)
            if (first + v * 32 < vectors)
                q[v] = load_again((const uint4 *)x + (int64_t)token * vectors + first + v * 32);
#pragma unroll
        for (int v = 0; v < 7; v++)
            if (first + v * 32 < vectors)
                store_relaxed((uint4 *)to + row * vectors + first + v * 32, q[v]);
    }
}

static void must(epic_result result)
{
    if (result == EPIC_OK) return;
    fprintf(stderr, "%s: %s\n", epic_result_name(result), epic_error(NULL));
    exit(1);
}

template <class T> static T *room(size_t bytes, uint32_t seed)
{
    void *p = NULL;
    CHECK_CUDA(cudaMalloc(&p, bytes + 256));
    fill_kernel<<<512, 256>>>((uint32_t *)p, (int64_t)bytes / 4, seed);
    CHECK_CUDA(cudaDeviceSynchronize());
    return (T *)p;
}

static void make_routing(Rank *r)
{
    const int ranks = r->me->num_ranks, block = EXPERTS / ranks;
    uint64_t s = 17 + (uint64_t)r->me->rank;
    std::vector<int32_t> ids((size_t)r->tokens * TOP_K);
    r->touched.assign((size_t)r->tokens, 0);
    double out = 0;
    memset(r->all->in_rows[r->me->rank], 0, sizeof r->all->in_rows[0]);
    for (int t = 0; t < r->tokens; t++) {
        choose(&s, &ids[(size_t)t * TOP_K]);
        for (int k = 0; k < TOP_K; k++)
            r->touched[(size_t)t] |= (uint8_t)(1 << ids[(size_t)t * TOP_K + k] / block);
        for (int q = 0; q < ranks; q++)
            if (q != r->me->rank && (r->touched[(size_t)t] >> q & 1)) {
                out++;
                r->all->in_rows[r->me->rank][q]++;
            }
    }
    r->all->out_rows[r->me->rank] = out;
    CHECK_CUDA(cudaMemcpy(r->ids, ids.data(), ids.size() * 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(r->touched_device, r->touched.data(), r->touched.size(),
                          cudaMemcpyHostToDevice));
}

static epic_plan_args plan_args(Rank *r, int sms)
{
    epic_plan_args a = {};
    a.call.stream = r->me->stream;
    a.call.max_sms = (uint32_t)sms;
    a.layer = &r->layer;
    a.plan = r->plan;
    a.plan_bytes = r->plan_bytes;
    a.topk_idx = r->ids;
    a.num_tokens = r->tokens;
    a.capacity = r->slots;
    a.expert_rows = r->expert_rows;
    return a;
}

static epic_dispatch_args dispatch_args(Rank *r, int sms)
{
    epic_dispatch_args a = {};
    a.call.stream = r->me->stream;
    a.call.max_sms = (uint32_t)sms;
    a.plan = r->plan;
    a.plan_bytes = r->plan_bytes;
    a.tokens = {r->x, r->tokens, r->row_bytes};
    a.recv = {r->recv, r->slots, r->row_bytes};
    a.weights = r->weights;
    a.slot_weights = r->recv_weights;
    return a;
}

static void run_combine(Rank *r, int sms, bool weighted)
{
    epic_combine_args a = {};
    a.call.stream = r->me->stream;
    a.call.max_sms = (uint32_t)sms;
    a.plan = r->plan;
    a.plan_bytes = r->plan_bytes;
    a.rows = {r->y, r->slots, r->row_bytes};
    a.out = {r->out, r->tokens, r->row_bytes};
    a.slot_weights = weighted ? r->slot_weights : NULL;
    a.type = EPIC_BF16;
    must(p2p_steps.combine(r->me->group, &a));
}

static void run_dispatch_backward(Rank *r, int sms)
{
    epic_dispatch_backward_args a = {};
    a.call.stream = r->me->stream;
    a.call.max_sms = (uint32_t)sms;
    a.plan = r->plan;
    a.plan_bytes = r->plan_bytes;
    a.d_recv = {r->y, r->slots, r->row_bytes};
    a.d_tokens = {r->out, r->tokens, r->row_bytes};
    a.d_slot_weights = r->slot_weights;
    a.d_weights = r->d_weights;
    a.type = EPIC_BF16;
    must(p2p_steps.dispatch_backward(r->me->group, &a));
}

static void run_combine_backward(Rank *r, int sms, bool dots)
{
    epic_combine_backward_args a = {};
    a.call.stream = r->me->stream;
    a.call.max_sms = (uint32_t)sms;
    a.plan = r->plan;
    a.plan_bytes = r->plan_bytes;
    a.d_out = {r->x, r->tokens, r->row_bytes};
    a.rows = {r->y, r->slots, r->row_bytes};
    a.d_rows = {r->recv, r->slots, r->row_bytes};
    a.slot_weights = r->slot_weights;
    a.d_slot_weights = dots ? r->d_slot_weights : NULL;
    a.type = EPIC_BF16;
    must(p2p_steps.combine_backward(r->me->group, &a));
}

static void run_op(Rank *r, char op, int sms)
{
    epic_plan_args plan = plan_args(r, sms);
    epic_dispatch_args dispatch = dispatch_args(r, sms);
    switch (op) {
    case 'L':
        must(p2p_steps.plan(r->me->group, &plan));
        break;
    case 'P':
        must(p2p_steps.plan_dispatch(r->me->group, &plan, &dispatch));
        break;
    case 'D':
        must(p2p_steps.dispatch(r->me->group, &dispatch));
        break;
    case 'C':
    case 'T':
        run_combine(r, sms, true);
        break;
    case 'U':
        run_combine(r, sms, false);
        break;
    case 'G':
    case 'g':
        run_combine_backward(r, sms, op == 'G');
        break;
    case 'B':
        run_dispatch_backward(r, sms);
        break;
    default:
        push_kernel<<<sms, 512, 0, r->me->stream>>>(r->me->group->seat, r->x, r->touched_device,
                                                    r->tokens, (int)(r->row_bytes / 16));
        CHECK_CUDA(cudaGetLastError());
    }
}

static const char *op_name(char op)
{
    switch (op) {
    case 'L':
        return "plan";
    case 'P':
        return "plan_dispatch";
    case 'D':
        return "dispatch";
    case 'C':
        return "combine_weighted";
    case 'T':
        return "combine_tree";
    case 'U':
        return "combine";
    case 'G':
        return "combine_backward";
    case 'g':
        return "scaled rows alone";
    case 'B':
        return "dispatch_backward";
    default:
        return "push";
    }
}

/* Fills r->all->us; the host only enqueues. */
static void repeat(Rank *r, char op, int sms)
{
    gate_kernel<<<1, 1, 0, r->me->stream>>>(r->gate_device, ++r->opened);
    for (int i = 0; i < options.reps + 3; i++) {
        const int slot = i < 3 ? 0 : i - 3;
        epic_sum_args barrier = {};
        barrier.call.stream = r->me->stream;
        barrier.call.max_sms = 1;
        barrier.data = r->tick;
        barrier.count = 4;
        if (r->tokens < 1024)
            CHECK_CUDA(cudaMemsetAsync(r->flush, i, FLUSH_BYTES, r->me->stream));
        must(p2p_steps.sum(r->me->group, &barrier));
        CHECK_CUDA(cudaEventRecord(r->begin[slot], r->me->stream));
        run_op(r, op, sms);
        CHECK_CUDA(cudaEventRecord(r->end[slot], r->me->stream));
    }
    team_meet(r->me);
    *(volatile int *)r->gate = r->opened;
    CHECK_CUDA(cudaStreamSynchronize(r->me->stream));
    epic_failure_info failure;
    if (p2p_steps.check(r->me->group, &failure) != EPIC_OK) {
        fprintf(stderr, "%s\n", failure.sentence);
        exit(1);
    }
    for (int i = 0; i < options.reps; i++) {
        float ms = 0;
        CHECK_CUDA(cudaEventElapsedTime(&ms, r->begin[i], r->end[i]));
        r->all->us[r->me->rank][i] = ms * 1000;
    }
    team_meet(r->me);
}

static double busiest_bytes(const Rank *r)
{
    double most = 0;
    for (int q = 0; q < r->me->num_ranks; q++) {
        double in = 0;
        for (int p = 0; p < r->me->num_ranks; p++) in += r->all->in_rows[p][q];
        most = std::max(most, std::max(in, r->all->out_rows[q]));
    }
    return most * (double)r->row_bytes;
}

static void print_result(Rank *r, char op, int sms, double push)
{
    std::vector<float> slowest;
    for (int i = 0; i < options.reps; i++) {
        float us = 0;
        for (int q = 0; q < r->me->num_ranks; q++) us = std::max(us, r->all->us[q][i]);
        slowest.push_back(us);
    }
    std::sort(slowest.begin(), slowest.end());
    const double median = slowest[slowest.size() / 2], bytes = busiest_bytes(r);
    printf("%-18s %6d tokens %4d SMs %8.1f us (min %.1f, 90%% %.1f) %6.1f GB/s", op_name(op),
           r->tokens, sms, median, slowest[0], slowest[slowest.size() * 9 / 10],
           bytes / median / 1e3);
    if (push > 0) printf("  push %.0f%%", 100 * push / median);
    printf("\n");
    fflush(stdout);
    if (r->json)
        fprintf(r->json,
                "{\"op\":\"%s\",\"tokens\":%d,\"hidden\":%d,\"sms\":%d,\"ranks\":%d,"
                "\"routing\":\"%s\",\"us\":%.1f,\"min_us\":%.1f,\"busiest_bytes\":%.0f,"
                "\"push_us\":%.1f,\"gb_per_s\":%.1f,\"of_push\":%.3f}\n",
                op_name(op), r->tokens, options.hidden, sms, r->me->num_ranks, options.routing,
                median, slowest[0], bytes, push, bytes / median / 1e3, push / median);
}

static double median_of(Rank *r)
{
    std::vector<float> slowest;
    for (int i = 0; i < options.reps; i++) {
        float us = 0;
        for (int q = 0; q < r->me->num_ranks; q++) us = std::max(us, r->all->us[q][i]);
        slowest.push_back(us);
    }
    std::sort(slowest.begin(), slowest.end());
    return slowest[slowest.size() / 2];
}

static void allocate(Rank *r, int most)
{
    const uint32_t seed = 1000 * (uint32_t)r->me->rank;
    r->row_bytes = options.hidden * 2;
    r->slots = (int64_t)most * TOP_K * (strcmp(options.routing, "uniform") ? options.ranks : 1);
    r->slots = r->slots * 3 / 2 + EXPERTS * ALIGNMENT;
    const size_t rows = (size_t)most * (size_t)r->row_bytes;
    const size_t slots = (size_t)(r->slots * r->row_bytes);
    r->ids = room<int32_t>((size_t)most * TOP_K * 4, 0);
    r->plan_bytes =
        device_plan_bytes(r->me->num_ranks, r->me->group->config.max_tokens, EXPERTS, TOP_K);
    r->plan = room<uint8_t>(r->plan_bytes, 0);
    r->x = room<uint8_t>(rows, seed + 1);
    r->out = room<uint8_t>(rows, 0);
    r->recv = room<uint8_t>(slots, 0);
    r->y = room<uint8_t>(slots, seed + 2);
    r->weights = room<float>((size_t)most * TOP_K * 4, seed + 3);
    r->d_weights = room<float>((size_t)most * TOP_K * 4, 0);
    r->recv_weights = room<float>((size_t)r->slots * 4, 0);
    r->slot_weights = room<float>((size_t)r->slots * 4, seed + 4);
    r->d_slot_weights = room<float>((size_t)r->slots * 4, 0);
    r->expert_rows = room<int32_t>(EXPERTS * 4, 0);
    r->tick = room<float>(64, 0);
    r->flush = room<uint8_t>(FLUSH_BYTES, 0);
    r->touched_device = room<uint8_t>((size_t)most, 0);
    CHECK_CUDA(cudaHostAlloc((void **)&r->gate, 64, cudaHostAllocMapped));
    *r->gate = 0;
    CHECK_CUDA(cudaHostGetDevicePointer((void **)&r->gate_device, r->gate, 0));
    for (int i = 0; i < options.reps; i++) {
        CHECK_CUDA(cudaEventCreate(&r->begin[i]));
        CHECK_CUDA(cudaEventCreate(&r->end[i]));
    }
    r->layer = {};
    r->layer.num_experts = EXPERTS;
    r->layer.top_k = TOP_K;
    r->layer.alignment = ALIGNMENT;
}

static int work(team_rank *me)
{
    Rank *r = new Rank();
    r->me = me;
    r->all = (Shared *)me->shared;
    int most = 0;
    for (int t : options.tokens) most = std::max(most, t);
    allocate(r, most);
    r->json = me->rank == 0 && options.json ? fopen(options.json, "a") : NULL;
    for (int tokens : options.tokens) {
        r->tokens = tokens;
        make_routing(r);
        team_meet(me);
        double push = 0;
        if (strchr(options.ops, 'p'))
            for (int sms : {24, 16, 8}) {
                repeat(r, 'p', sms);
                const double us = median_of(r);
                if (push == 0 || us < push) push = us;
                if (me->rank == 0) print_result(r, 'p', sms, us);
                team_meet(me);
            }
        CHECK_CUDA(cudaMemset(me->group->seat.heap[me->rank] + me->group->seat.at.staging, 0xff,
                              (size_t)(me->group->seat.at.bytes - me->group->seat.at.staging)));
        CHECK_CUDA(cudaDeviceSynchronize());
        team_meet(me);
        for (int sms : options.sms)
            for (const char *op = options.ops; *op; op++) {
                if (*op == 'p') continue;
                r->layer.sum_order = *op == 'T' ? EPIC_TREE : EPIC_BY_RANK;
                run_op(r, 'L', sms);
                repeat(r, *op, sms);
                if (me->rank == 0) print_result(r, *op, sms, push);
                team_meet(me);
            }
    }
    if (r->json) fclose(r->json);
    return 0;
}

static std::vector<int> numbers(const char *text)
{
    std::vector<int> list;
    for (char *end; *text; text = *end ? end + 1 : end)
        list.push_back((int)strtol(text, &end, 10));
    return list;
}

static void read_options(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *value = strchr(argv[i], '=');
        if (!value) continue;
        value++;
        if (!strncmp(argv[i], "ranks", 5)) options.ranks = atoi(value);
        if (!strncmp(argv[i], "gpus", 4)) options.gpus = atoi(value);
        if (!strncmp(argv[i], "hidden", 6)) options.hidden = atoi(value);
        if (!strncmp(argv[i], "reps", 4)) options.reps = std::min(atoi(value), MAX_REPS);
        if (!strncmp(argv[i], "tokens", 6)) options.tokens = numbers(value);
        if (!strncmp(argv[i], "sms", 3)) options.sms = numbers(value);
        if (!strncmp(argv[i], "routing", 7)) options.routing = value;
        if (!strncmp(argv[i], "ops", 3)) options.ops = value;
        if (!strncmp(argv[i], "json", 4)) options.json = value;
    }
    options.processes = options.ranks <= options.gpus;
}

int main(int argc, char **argv)
{
    /* no loading while ranks that share a GPU spin */
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    read_options(argc, argv);
    int most_tokens = 0, most_sms = 0;
    for (int t : options.tokens) most_tokens = std::max(most_tokens, t);
    for (int s : options.sms) most_sms = std::max(most_sms, s);
    team t = {};
    t.num_ranks = options.ranks;
    t.num_gpus = options.gpus;
    t.processes = options.processes;
    t.max_tokens = most_tokens;
    t.max_row_bytes = options.hidden * 2;
    t.timeout_ms = 5000;
    t.max_sms = (uint32_t)most_sms;
    t.work = work;
    t.shared_bytes = sizeof(Shared);
    printf(
        "%d ranks on %d GPUs, %s, hidden %d bf16, top-%d of %d, %s routing; %d repetitions\n",
        options.ranks, options.gpus, options.processes ? "processes" : "threads",
        options.hidden, TOP_K, EXPERTS, options.routing, options.reps);
    return team_run(&t) != 0;
}
