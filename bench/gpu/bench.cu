/* SPDX-License-Identifier: Apache-2.0 */
/* Times single operations of the p2p backend. gpu_bench_many is the same program with the
 * library for many ranks, in which up to 32 ranks can share one GPU. The time of a repetition is that of the slowest
 * rank. Prints the median over the repetitions (p50), the time that nine in ten repetitions
 * stay below (p90) and the longest time (worst), together with the floor of the operation, a
 * lower bound that is measured in the same run (floors.cuh), and the ratio of the median to it.
 *   gpu_bench [model=deepseek-v3] [hidden=] [top_k=] [experts=] [alignment=128] [type=bf16]
 *             [scales=0|32|128] [quantize=0|1] [padding=0|1] [layout=expert|flat]
 *             [routing=uniform|zipf|hot] [tokens=4096,8192] [max_tokens=] [sms=48] [ops=PDCUGB]
 *             [ranks=4] [gpus=4] [reps=50] [windows=0|1] [json=FILE]
 *
 *   model       a name of models.h; hidden, top_k and experts replace values of this model
 *   type        bf16, f16, f32; bytes (one per element, which only P, D and L move); or e4m3
 *               for P and D, where the other operations use bf16
 *   scales      how many e4m3 elements share a scale: 128 (float32 scales) or 32 (e8m0 scales)
 *   quantize=1  P and D quantize bf16 tokens to e4m3, and G quantizes its gradients
 *   padding=0   padding is not written
 *   layout=flat one row for each token and rank; then combine has no weights, and
 *               combine_backward computes no dot products
 *   windows=1   measures everything first without windows, and then once more with the outputs
 *               of dispatch, combine and their gradients in windows
 *   max_tokens  that of the context; default: the largest number of `tokens`
 *   ops         P plan + dispatch, D dispatch with an existing plan, C combine with weights,
 *               U combine without weights, T combine in tree order, G combine_backward,
 *               g combine_backward without dot products, B dispatch_backward, L plan alone
 *
 * Routing: the experts of a token are distinct. With "uniform" all experts are equally likely.
 * With "zipf" the i-th expert of a fixed order is drawn with a probability proportional to 1 /
 * i. With "hot" eight in ten draws, in up to eight tries, are among the first four experts. An
 * expert that the token already has is drawn again. Because choices are distinct, they cannot
 * all fall on few experts, so the program prints the resulting distribution.
 *
 * A repetition consists of an epic_allreduce_sum of four floats, which is a barrier of all
 * GPUs, then an event, the operation, and an event. With few tokens the L2 cache is overwritten
 * before the operation. All repetitions wait in the stream until all of them are enqueued, so
 * that no launch is late. There is one process for each GPU, or threads that share one GPU. */
#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

extern "C" {
#include "base/error.h"
#include "copies.h"
#include "team.h"
}
#include "floors.cuh"
#include "models.h"

#define MAX_REPS 100
#define MOST_RANKS 32 /* because a word has one bit for each rank */
#define FLUSH_BYTES ((size_t)256 << 20)
/* with fewer tokens rows could be in the L2 cache, so it is overwritten */
#define FEW_TOKENS 1024

struct Options {
    int ranks = 4, gpus = 4, reps = 50, max_tokens = 0, alignment = 128;
    Model model = models[0];
    uint32_t type = EPIC_BF16; /* with EPIC_BYTES and EPIC_E4M3 an element has one byte */
    int scales = 0;            /* number of elements that share a scale */
    bool quantize = false, padding = true, windows = false;
    std::vector<int> tokens = {4096, 8192}, sms = {48};
    const char *routing = "uniform", *ops = "PDCUGB", *json = NULL;
    bool processes = true, flat = false;
} options;

struct Shared { /* Memory that all ranks share. */
    float us[DEVICE_MAX_RANKS][MAX_REPS];
    double out_rows[DEVICE_MAX_RANKS], in_rows[DEVICE_MAX_RANKS][DEVICE_MAX_RANKS];
    double choices[DEVICE_MAX_RANKS][DEVICE_MAX_EXPERTS];
};

struct Rank {
    team_rank *me;
    Shared *all;
    int tokens;
    /* for P and D: bytes of received rows, of sent rows and of second rows */
    int64_t row_bytes, token_bytes, scale_bytes;
    /* bytes of a row on the net: for P and D, and for the other operations */
    int64_t string_bytes, sum_bytes;
    int64_t slots;
    size_t plan_bytes;
    int32_t *ids;
    uint8_t *plan, *x, *recv, *y, *out, *flush, *scales, *recv_scales;
    float *weights, *recv_weights, *slot_weights, *d_slot_weights, *d_weights, *tick;
    int32_t *expert_rows, *recv_expert;
    epic_layer layer;
    int *gate, *gate_device;
    int opened;
    bool in_windows; /* recv and out lie in windows */
    uint32_t hops;
    cudaEvent_t begin[MAX_REPS], end[MAX_REPS];
    std::vector<uint32_t> touched; /* [tokens], one bit for each rank */
    uint32_t *touched_device;
    FILE *json;
};

/* ----------------------------------------------------------------------------- routing ---- */

static uint64_t next_random(uint64_t *s)
{
    *s += 0x9e3779b97f4a7c15ull;
    uint64_t x = *s;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static int draw_zipf(uint64_t *s)
{
    static std::vector<double> upto;
    const int experts = options.model.experts;
    if (upto.empty())
        for (int e = 0; e < experts; e++) upto.push_back((e ? upto[e - 1] : 0) + 1.0 / (e + 1));
    const double u = (double)(next_random(s) >> 11) / 9007199254740992.0;
    const auto at = std::lower_bound(upto.begin(), upto.end(), u * upto.back());
    return (int)((at - upto.begin()) * 37 % experts);
}

/* Draws the experts of one token, all different. */
static void choose(uint64_t *s, int32_t *to)
{
    const int experts = options.model.experts;
    for (int k = 0; k < options.model.top_k; k++) {
        bool again = true;
        for (int tries = 0; again; tries++) {
            to[k] = (int32_t)(next_random(s) % (uint64_t)experts);
            if (!strcmp(options.routing, "zipf")) to[k] = draw_zipf(s);
            if (!strcmp(options.routing, "hot") && next_random(s) % 10 < 8 && tries < 8)
                to[k] %= 4;
            again = false;
            for (int j = 0; j < k; j++) again |= to[j] == to[k];
        }
    }
}

static void make_routing(Rank *r)
{
    const int ranks = r->me->num_ranks, rank = r->me->rank, k = options.model.top_k;
    const int block = options.model.experts / ranks;
    uint64_t s = 17 + (uint64_t)rank;
    std::vector<int32_t> ids((size_t)(r->tokens * k));
    r->touched.assign((size_t)r->tokens, 0);
    r->all->out_rows[rank] = 0;
    memset(r->all->in_rows[rank], 0, sizeof r->all->in_rows[0]);
    memset(r->all->choices[rank], 0, sizeof r->all->choices[0]);
    for (size_t t = 0; t < (size_t)r->tokens; t++) {
        int32_t *token = &ids[t * (size_t)k];
        choose(&s, token);
        for (int i = 0; i < k; i++) {
            r->touched[t] |= 1u << token[i] / block;
            r->all->choices[rank][token[i]]++;
        }
        for (int q = 0; q < ranks; q++)
            if (q != rank && (r->touched[t] >> q & 1)) {
                r->all->out_rows[rank]++;
                r->all->in_rows[rank][q]++;
            }
    }
    CHECK_CUDA(copy_in(r->ids, ids.data(), ids.size() * 4));
    CHECK_CUDA(copy_in(r->touched_device, r->touched.data(), r->touched.size() * 4));
}

/* Prints the routing: the share of the choices of the busiest experts and of the busiest rank.
 */
static void print_routing(const Rank *r)
{
    const int ranks = r->me->num_ranks, experts = options.model.experts;
    std::vector<double> of((size_t)experts, 0), on((size_t)ranks, 0);
    double all = 0, rows = 0, top = 0;
    for (int q = 0; q < ranks; q++) {
        rows += r->all->out_rows[q];
        for (int e = 0; e < experts; e++) {
            of[(size_t)e] += r->all->choices[q][e];
            on[(size_t)(e / (experts / ranks))] += r->all->choices[q][e];
            all += r->all->choices[q][e];
        }
    }
    std::sort(of.rbegin(), of.rend());
    for (int e = 0; e < 4 && e < experts; e++) top += of[(size_t)e];
    printf("%s routing of %d tokens: %.1f %% of the choices on the busiest four experts, "
           "%.1f %% on the busiest rank, %.3f peers a token\n",
           options.routing, r->tokens, 100 * top / all,
           100 * *std::max_element(on.begin(), on.end()) / all, rows / ranks / r->tokens);
}

/* -------------------------------------------------------------------------- operations ---- */

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

static uint32_t how_quantized()
{
    if (!options.quantize) return EPIC_QUANTIZE_NONE;
    return options.scales == 128 ? EPIC_QUANTIZE_1X128 : EPIC_QUANTIZE_1X32;
}

static uint32_t sum_type()
{
    return options.type == EPIC_E4M3 ? (uint32_t)EPIC_BF16 : options.type;
}

static uint32_t slot_flags()
{
    return options.padding ? 0 : EPIC_LEAVE_PADDING;
}

static epic_dispatch_args dispatch_args(Rank *r, int sms)
{
    epic_dispatch_args a = {};
    a.call.stream = r->me->stream;
    a.call.max_sms = (uint32_t)sms;
    a.layer = &r->layer;
    a.plan = r->plan;
    a.plan_bytes = r->plan_bytes;
    a.tokens = {r->x, r->tokens, r->token_bytes};
    a.recv = {r->recv, r->slots, r->row_bytes};
    if (r->scale_bytes) a.recv_scales = {r->recv_scales, r->slots, r->scale_bytes};
    if (r->scale_bytes && !options.quantize) a.scales = {r->scales, r->tokens, r->scale_bytes};
    if (options.quantize) a.type = EPIC_BF16;
    a.quantize = how_quantized();
    a.flags = slot_flags();
    a.weights = r->weights;
    a.slot_weights = r->recv_weights;
    a.recv_expert = options.flat ? r->recv_expert : NULL;
    return a;
}

static void run_combine(Rank *r, int sms, bool weighted)
{
    epic_combine_args a = {};
    a.call.stream = r->me->stream;
    a.call.max_sms = (uint32_t)sms;
    a.layer = &r->layer;
    a.plan = r->plan;
    a.plan_bytes = r->plan_bytes;
    a.rows = {r->y, r->slots, r->sum_bytes};
    a.out = {r->out, r->tokens, r->sum_bytes};
    a.slot_weights = weighted && !options.flat ? r->slot_weights : NULL;
    a.type = sum_type();
    must(p2p_ops.combine(r->me->group, &a));
}

static void run_dispatch_backward(Rank *r, int sms)
{
    epic_dispatch_backward_args a = {};
    a.call.stream = r->me->stream;
    a.call.max_sms = (uint32_t)sms;
    a.layer = &r->layer;
    a.plan = r->plan;
    a.plan_bytes = r->plan_bytes;
    a.d_recv = {r->y, r->slots, r->sum_bytes};
    a.d_tokens = {r->out, r->tokens, r->sum_bytes};
    a.d_slot_weights = r->slot_weights;
    a.d_weights = r->d_weights;
    a.type = sum_type();
    must(p2p_ops.dispatch_backward(r->me->group, &a));
}

static void run_combine_backward(Rank *r, int sms, bool dots)
{
    epic_combine_backward_args a = {};
    a.call.stream = r->me->stream;
    a.call.max_sms = (uint32_t)sms;
    a.layer = &r->layer;
    a.plan = r->plan;
    a.plan_bytes = r->plan_bytes;
    dots = dots && !options.flat;
    a.d_out = {r->x, r->tokens, r->sum_bytes};
    if (dots) a.rows = {r->y, r->slots, r->sum_bytes};
    a.d_rows = {r->recv, r->slots, options.quantize ? r->row_bytes : r->sum_bytes};
    if (options.quantize) a.d_rows_scales = {r->recv_scales, r->slots, r->scale_bytes};
    a.quantize = how_quantized();
    a.flags = slot_flags();
    a.slot_weights = options.flat ? NULL : r->slot_weights;
    a.d_slot_weights = dots ? r->d_slot_weights : NULL;
    a.type = sum_type();
    must(p2p_ops.combine_backward(r->me->group, &a));
}

/* Runs the floor for an operation: 'p' push of rows of P and D, 'q' push of rows of the other
 * operations, 'x' expand, 'X' expand with dot products, 'r' reduce, 'h' hop. */
static void run_floor(Rank *r, char op, int sms)
{
    const p2p_self &self = r->me->group->self;
    const Model &model = options.model;
    const int64_t row_bytes = op == 'p' || op == 'x' ? r->string_bytes : r->sum_bytes;
    const Floor f = {
        self,
        r->plan,
        device_plan_layout_of(self.num_ranks, self.max_tokens, model.experts, model.top_k),
        r->x,
        r->y,
        op == 'r' ? r->y : r->recv,
        r->y,
        r->out,
        row_bytes,
        r->slots,
        r->tokens,
        model.top_k,
        options.padding ? model.experts / self.num_ranks : 0};
    cudaStream_t stream = r->me->stream;
    if (op == 'p' || op == 'q')
        push_kernel<<<sms, 512, 0, stream>>>(self, r->x, r->touched_device, r->tokens,
                                             (int)(row_bytes / 16));
    else if (op == 'x')
        expand_kernel<false><<<sms, FLOOR_BLOCK, 0, stream>>>(f);
    else if (op == 'X')
        expand_kernel<true><<<sms, FLOOR_BLOCK, 0, stream>>>(f);
    else if (op == 'r')
        reduce_kernel<<<sms, FLOOR_BLOCK, 0, stream>>>(f);
    else
        hop_kernel<<<1, WARP, 0, stream>>>(self, ++r->hops);
    CHECK_CUDA(cudaGetLastError());
}

static void run_op(Rank *r, char op, int sms)
{
    epic_plan_args plan = plan_args(r, sms);
    epic_dispatch_args dispatch = dispatch_args(r, sms);
    switch (op) {
    case 'L':
        return must(p2p_ops.plan(r->me->group, &plan));
    case 'P':
        return must(p2p_ops.plan_dispatch(r->me->group, &plan, &dispatch));
    case 'D':
        return must(p2p_ops.dispatch(r->me->group, &dispatch));
    case 'C':
    case 'T':
        return run_combine(r, sms, true);
    case 'U':
        return run_combine(r, sms, false);
    case 'G':
    case 'g':
        return run_combine_backward(r, sms, op == 'G');
    case 'B':
        return run_dispatch_backward(r, sms);
    default:
        return run_floor(r, op, sms);
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
    default:
        return "dispatch_backward";
    }
}

/* ------------------------------------------------------------------------------ timing ---- */

/* Runs all repetitions and fills r->all->us. The host only enqueues. */
static void repeat(Rank *r, char op, int sms)
{
    gate_kernel<<<1, 1, 0, r->me->stream>>>(r->gate_device, ++r->opened);
    for (int i = 0; i < options.reps + 3; i++) {
        const int slot = i < 3 ? 0 : i - 3;
        epic_allreduce_sum_args barrier = {};
        barrier.call.stream = r->me->stream;
        barrier.call.max_sms = 1;
        barrier.data = r->tick;
        barrier.count = 4;
        if (r->tokens < FEW_TOKENS)
            CHECK_CUDA(cudaMemsetAsync(r->flush, i, FLUSH_BYTES, r->me->stream));
        must(p2p_ops.allreduce_sum(r->me->group, &barrier));
        CHECK_CUDA(cudaEventRecord(r->begin[slot], r->me->stream));
        run_op(r, op, sms);
        CHECK_CUDA(cudaEventRecord(r->end[slot], r->me->stream));
    }
    team_barrier(r->me);
    *(volatile int *)r->gate = r->opened;
    CHECK_CUDA(cudaStreamSynchronize(r->me->stream));
    epic_failure_info failure;
    if (p2p_ops.poll_failure(r->me->group, &failure) != EPIC_OK) {
        fprintf(stderr, "%s\n", failure.sentence);
        exit(1);
    }
    for (int i = 0; i < options.reps; i++) {
        float ms = 0;
        CHECK_CUDA(cudaEventElapsedTime(&ms, r->begin[i], r->end[i]));
        r->all->us[r->me->rank][i] = ms * 1000;
    }
    team_barrier(r->me);
}

/* Returns the time of the slowest rank for each repetition, in ascending order. */
static std::vector<float> measure(Rank *r, char op, int sms)
{
    std::vector<float> slowest;
    repeat(r, op, sms);
    for (int i = 0; i < options.reps; i++) {
        float us = 0;
        for (int q = 0; q < r->me->num_ranks; q++) us = std::max(us, r->all->us[q][i]);
        slowest.push_back(us);
    }
    team_barrier(r->me);
    std::sort(slowest.begin(), slowest.end());
    return slowest;
}

static double median_us(Rank *r, char op, int sms)
{
    const std::vector<float> us = measure(r, op, sms);
    return us[us.size() / 2];
}

struct Floors {  /* Times in us; 0: not measured. */
    double push; /* of rows of P and D */
    double
        push_sums; /* of rows of the other operations, which are longer if P and D move e4m3 */
    double expand, expand_dots, reduce, hop;
};

/* Returns the best time of a push, 'p' or 'q'. Afterwards the staging contains poison again. */
static double best_push(Rank *r, char op)
{
    const p2p_self &self = r->me->group->self;
    double best = 0;
    for (int sms : {8, 16, 24, 64}) {
        const double us = median_us(r, op, sms);
        if (best == 0 || us < best) best = us;
    }
    CHECK_CUDA(fill_in(self.heap[self.rank] + self.at.staging, 0xff,
                       (size_t)(self.at.bytes - self.at.staging)));
    CHECK_CUDA(cudaDeviceSynchronize());
    team_barrier(r->me);
    return best;
}

static bool any_op(const char *of)
{
    return strpbrk(options.ops, of) != NULL;
}

/* Measures the floors with `sms` SMs. Push and hop do not depend on this number. */
static void measure_floors(Rank *r, int sms, Floors *f)
{
    if (any_op(options.flat ? "PDgG" : "PDg")) f->expand = median_us(r, 'x', sms);
    if (any_op("G") && !options.flat) f->expand_dots = median_us(r, 'X', sms);
    if (any_op("CUTB")) f->reduce = median_us(r, 'r', sms);
}

static double local_floor(const Floors &f, char op)
{
    if (strchr("PDg", op)) return f.expand;
    /* a quantizing G writes rows of another type than d_out's, so it has no floor */
    if (op == 'G' && options.quantize) return 0;
    if (op == 'G') return options.flat ? f.expand : f.expand_dots;
    return op == 'L' ? 0 : f.reduce;
}

static double busiest_bytes(const Rank *r, char op)
{
    double most = 0;
    for (int q = 0; q < r->me->num_ranks; q++) {
        double in = 0;
        for (int p = 0; p < r->me->num_ranks; p++) in += r->all->in_rows[p][q];
        most = std::max(most, std::max(in, r->all->out_rows[q]));
    }
    return most * (double)(strchr("PD", op) ? r->string_bytes : r->sum_bytes);
}

static const char *type_name()
{
    return options.type == EPIC_BF16   ? "bf16"
           : options.type == EPIC_F16  ? "f16"
           : options.type == EPIC_F32  ? "f32"
           : options.type == EPIC_E4M3 ? "e4m3"
                                       : "bytes";
}

static void print_result(Rank *r, char op, int sms, const std::vector<float> &us,
                         const Floors &f)
{
    const Model &model = options.model;
    const double median = us[us.size() / 2], p90 = us[us.size() * 9 / 10], worst = us.back();
    const double push = op == 'L' ? 0 : strchr("PD", op) ? f.push : f.push_sums;
    const double local = local_floor(f, op), floor = std::max(std::max(push, local), f.hop);
    const double bytes = op == 'L' ? 0 : busiest_bytes(r, op);
    printf("%-18s %6d tokens %4d SMs%s  p50 %8.1f us  p90 %8.1f  worst %8.1f", op_name(op),
           r->tokens, sms, r->in_windows ? " windows" : "", median, p90, worst);
    if (floor > 0)
        printf("  floor %6.1f (push %.1f, local %.1f, hop %.1f)  %.2fx", floor, push, local,
               f.hop, median / floor);
    printf("\n");
    fflush(stdout);
    if (r->json)
        fprintf(r->json,
                "{\"op\":\"%s\",\"model\":\"%s\",\"hidden\":%d,\"top_k\":%d,\"experts\":%d,"
                "\"alignment\":%d,\"padding\":%d,\"layout\":\"%s\",\"type\":\"%s\","
                "\"scales\":%d,\"quantize\":%d,\"routing\":\"%s\",\"tokens\":%d,\"sms\":%d,"
                "\"ranks\":%d,\"windows\":%d,\"us\":%.2f,\"p90_us\":%.2f,"
                "\"worst_us\":%.2f,\"push_us\":%.2f,\"local_us\":%.2f,"
                "\"hop_us\":%.2f,\"floor_us\":%.2f,\"of_floor\":%.3f,\"busiest_bytes\":%.0f,"
                "\"gb_per_s\":%.1f}\n",
                op_name(op), model.name, model.hidden, model.top_k, model.experts,
                options.alignment, options.padding, options.flat ? "flat" : "expert",
                type_name(), options.scales, options.quantize, options.routing, r->tokens, sms,
                r->me->num_ranks, r->in_windows, median, p90, worst, push, local, f.hop, floor,
                floor > 0 ? median / floor : 0, bytes, bytes / median / 1e3);
}

/* ------------------------------------------------------------------------------- ranks ---- */

static void find_bytes(Rank *r)
{
    const int64_t n = options.model.hidden;
    r->sum_bytes = n * (options.type == EPIC_BYTES ? 1 : options.type == EPIC_F32 ? 4 : 2);
    r->row_bytes = options.type == EPIC_E4M3 ? n : r->sum_bytes;
    r->token_bytes = options.quantize ? r->sum_bytes : r->row_bytes;
    r->scale_bytes = options.scales == 128  ? (n + 127) / 128 * 4
                     : options.scales == 32 ? (n + 31) / 32
                                            : 0;
    r->string_bytes = p2p_packed_bytes(r->row_bytes, r->scale_bytes);
}

static void allocate(Rank *r, int most)
{
    const uint32_t seed = 1000 * (uint32_t)r->me->rank;
    const Model &model = options.model;
    const size_t choices = (size_t)most * (size_t)model.top_k * 4;
    find_bytes(r);
    r->slots =
        (int64_t)most * model.top_k * (strcmp(options.routing, "uniform") ? options.ranks : 1);
    r->slots = r->slots * 3 / 2 + (int64_t)model.experts * options.alignment + 64;
    if (options.flat) r->slots = (int64_t)most * options.ranks + 64;
    const int64_t widest = std::max(r->string_bytes, std::max(r->token_bytes, r->sum_bytes));
    const size_t rows = (size_t)most * (size_t)widest, slots = (size_t)(r->slots * widest);
    const size_t floats = (size_t)(r->slots * (options.flat ? model.top_k : 1)) * 4;
    r->ids = room<int32_t>(choices, 0);
    r->layer = {};
    r->layer.num_experts = (uint32_t)model.experts;
    r->layer.top_k = (uint32_t)model.top_k;
    r->layer.alignment = (uint32_t)options.alignment;
    r->layer.layout = options.flat ? EPIC_FLAT : EPIC_EXPERT_MAJOR;
    r->plan_bytes = (size_t)device_layer_bytes(r->me->num_ranks,
                                               r->me->group->config.max_tokens, &r->layer);
    r->plan = room<uint8_t>(r->plan_bytes, 0);
    r->x = room<uint8_t>(rows, seed + 1);
    r->out = room<uint8_t>(rows, 0);
    r->recv = room<uint8_t>(slots, 0);
    r->y = room<uint8_t>(slots, seed + 2);
    r->scales = room<uint8_t>((size_t)(most * r->scale_bytes), seed + 5);
    r->recv_scales = room<uint8_t>((size_t)(r->slots * r->scale_bytes), 0);
    r->weights = room<float>(choices, seed + 3);
    r->d_weights = room<float>(choices, 0);
    r->recv_weights = room<float>(floats, 0);
    r->recv_expert = room<int32_t>(floats, 0);
    r->slot_weights = room<float>(floats, seed + 4);
    r->d_slot_weights = room<float>(floats, 0);
    r->expert_rows = room<int32_t>((size_t)model.experts * 4, 0);
    r->tick = room<float>(64, 0);
    r->flush = room<uint8_t>(FLUSH_BYTES, 0);
    r->touched_device = room<uint32_t>((size_t)most * 4, 0);
    CHECK_CUDA(cudaHostAlloc((void **)&r->gate, 64, cudaHostAllocMapped));
    *r->gate = 0;
    CHECK_CUDA(cudaHostGetDevicePointer((void **)&r->gate_device, r->gate, 0));
    for (int i = 0; i < options.reps; i++) {
        CHECK_CUDA(cudaEventCreate(&r->begin[i]));
        CHECK_CUDA(cudaEventCreate(&r->end[i]));
    }
}

/* Moves recv and out into a window. A window cannot be removed, so the operations without
 * windows must be measured before. */
static void use_windows(Rank *r, int most)
{
    const int64_t widest = std::max(r->string_bytes, std::max(r->token_bytes, r->sum_bytes));
    const int64_t slots = device_round_up(r->slots * widest + 256, 256);
    epic_window_args args = {};
    epic_window_info window = {};
    args.bytes = slots + (int64_t)most * widest + 256;
    must(p2p_ops.add_window(r->me->group, &args, &window));
    CHECK_CUDA(cudaFree(r->recv));
    CHECK_CUDA(cudaFree(r->out));
    r->recv = (uint8_t *)window.data;
    r->out = r->recv + slots;
    r->in_windows = true;
    team_barrier(r->me);
}

/* Makes the plan that floors and operations read. */
static void make_plan(Rank *r, char op, int sms)
{
    r->layer.sum_order = op == 'T' ? EPIC_TREE : EPIC_BY_RANK;
    run_op(r, 'L', sms);
}

static void run_tokens(Rank *r, int tokens)
{
    Floors f = {};
    r->tokens = tokens;
    make_routing(r);
    team_barrier(r->me);
    if (r->me->rank == 0) print_routing(r);
    const bool floors = r->row_bytes % 16 == 0 && r->sum_bytes % 16 == 0;
    if (floors && any_op("PD")) f.push = best_push(r, 'p');
    if (floors && any_op("CTUGgB"))
        f.push_sums = f.push && r->string_bytes == r->sum_bytes ? f.push : best_push(r, 'q');
    if (tokens < FEW_TOKENS && r->row_bytes >= 128) f.hop = median_us(r, 'h', 1);
    for (int sms : options.sms) {
        make_plan(r, 'P', sms);
        if (floors) measure_floors(r, sms, &f);
        for (const char *op = options.ops; *op; op++) {
            make_plan(r, *op, sms);
            const std::vector<float> us = measure(r, *op, sms);
            if (r->me->rank == 0) print_result(r, *op, sms, us, f);
        }
    }
}

static int work(team_rank *me)
{
    Rank *r = new Rank();
    r->me = me;
    r->all = (Shared *)me->shared;
    const int most = *std::max_element(options.tokens.begin(), options.tokens.end());
    allocate(r, most);
    r->json = me->rank == 0 && options.json ? fopen(options.json, "a") : NULL;
    for (int tokens : options.tokens) run_tokens(r, tokens);
    if (options.windows) use_windows(r, most);
    for (size_t i = 0; options.windows && i < options.tokens.size(); i++)
        run_tokens(r, options.tokens[i]);
    if (r->json) fclose(r->json);
    return 0;
}

/* ----------------------------------------------------------------------------- options ---- */

static std::vector<int> numbers(const char *text)
{
    std::vector<int> list;
    for (char *end; *text; text = *end ? end + 1 : end)
        list.push_back((int)strtol(text, &end, 10));
    return list;
}

static bool read_model(const char *name)
{
    for (const Model &m : models)
        if (!strcmp(m.name, name)) {
            options.model = m;
            return true;
        }
    fprintf(stderr, "model=%s: the models are", name);
    for (const Model &m : models) fprintf(stderr, " %s", m.name);
    fprintf(stderr, "\n");
    return false;
}

static bool read_type(const char *name)
{
    options.type = !strcmp(name, "bf16")   ? EPIC_BF16
                   : !strcmp(name, "f16")  ? EPIC_F16
                   : !strcmp(name, "f32")  ? EPIC_F32
                   : !strcmp(name, "e4m3") ? EPIC_E4M3
                                           : EPIC_BYTES;
    if (options.type != EPIC_BYTES || !strcmp(name, "bytes")) return true;
    fprintf(stderr, "type=%s: the types are bf16, f16, f32, bytes and e4m3\n", name);
    return false;
}

static bool read_scales(int elements)
{
    options.scales = elements;
    return elements == 0 || elements == 32 || elements == 128;
}

static bool read_option(const char *name, const char *value)
{
    const auto is = [&](const char *other) { return !strcmp(name, other); };
    if (is("model")) return read_model(value);
    if (is("type")) return read_type(value);
    if (is("layout"))
        return (options.flat = !strcmp(value, "flat")) || !strcmp(value, "expert");
    if (is("ranks")) return (options.ranks = atoi(value)) > 0;
    if (is("gpus")) return (options.gpus = atoi(value)) > 0;
    if (is("hidden")) return (options.model.hidden = atoi(value)) > 0;
    if (is("top_k")) return (options.model.top_k = atoi(value)) > 0;
    if (is("experts")) return (options.model.experts = atoi(value)) > 0;
    if (is("alignment")) return (options.alignment = atoi(value)) > 0;
    if (is("max_tokens")) return (options.max_tokens = atoi(value)) > 0;
    if (is("scales")) return read_scales(atoi(value));
    if (is("quantize")) return (options.quantize = atoi(value) != 0) || !strcmp(value, "0");
    if (is("padding")) return (options.padding = atoi(value) != 0) || !strcmp(value, "0");
    if (is("windows")) return (options.windows = atoi(value) != 0) || !strcmp(value, "0");
    if (is("reps")) return (options.reps = std::min(atoi(value), MAX_REPS)) > 0;
    if (is("tokens")) return !(options.tokens = numbers(value)).empty();
    if (is("sms")) return !(options.sms = numbers(value)).empty();
    if (is("routing")) return (options.routing = value) != NULL;
    if (is("ops")) return (options.ops = value) != NULL;
    return is("json") && (options.json = value) != NULL;
}

static bool read_options(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) { /* read the model first, wherever it is in the list */
        char *value = strchr(argv[i], '=');
        if (value && !strncmp(argv[i], "model=", 6) && !read_model(value + 1)) return false;
    }
    for (int i = 1; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        if (value && !strncmp(argv[i], "model=", 6)) continue;
        if (value) *value = 0;
        if (value && read_option(argv[i], value + 1)) continue;
        fprintf(stderr, "%s: there is no such option, or not with this value\n", argv[i]);
        return false;
    }
    options.processes = options.ranks <= options.gpus;
    if ((options.scales || options.quantize) &&
        (options.type != EPIC_E4M3 || !options.scales)) {
        fprintf(stderr, "scales and quantize need type=e4m3, quantize needs scales\n");
        return false;
    }
    const Model &m = options.model;
    if (m.experts % options.ranks == 0 && m.top_k <= m.experts && m.top_k <= WARP &&
        m.experts <= DEVICE_MAX_EXPERTS && options.ranks <= MOST_RANKS)
        return true;
    fprintf(stderr,
            "ranks=%d top_k=%d experts=%d: the ranks, at most %d, share the experts, at "
            "most %d, equally, and a token chooses at most %d of them\n",
            options.ranks, m.top_k, m.experts, MOST_RANKS, DEVICE_MAX_EXPERTS, WARP);
    return false;
}

int main(int argc, char **argv)
{
    /* no module may be loaded while ranks that share a GPU poll */
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    if (!read_options(argc, argv)) return 2;
    const Model &m = options.model;
    const int most = *std::max_element(options.tokens.begin(), options.tokens.end());
    team t = {};
    t.num_ranks = options.ranks;
    t.num_gpus = options.gpus;
    t.ranks_per_process = options.processes ? 1 : 0;
    t.max_tokens = std::max(most, options.max_tokens);
    t.max_row_bytes = m.hidden * (options.type == EPIC_F32 ? 4 : 2);
    t.timeout_ms = 5000;
    t.max_sms = (uint32_t)*std::max_element(options.sms.begin(), options.sms.end());
    t.work = work;
    t.shared_bytes = sizeof(Shared);
    printf("%s: %d ranks on %d GPUs, %s, hidden %d %s%s%s, top-%d of %d, %s %d%s; "
           "%d repetitions\n",
           m.name, options.ranks, options.gpus, options.processes ? "processes" : "threads",
           m.hidden, type_name(),
           options.scales == 128  ? " 1x128"
           : options.scales == 32 ? " 1x32"
                                  : "",
           options.quantize ? " quantized on the way" : "", m.top_k, m.experts,
           options.flat ? "flat, alignment" : "alignment", options.flat ? 1 : options.alignment,
           options.padding ? "" : " without padding", options.reps);
    return team_run(&t) != 0;
}
