/* SPDX-License-Identifier: Apache-2.0 */
/* Times the layer on CUDA contexts, forward and backward, and its parts alone, in one run.
 * There is one thread for each GPU, rows are bf16, and routing is uniform. Prints ms of the
 * slowest rank, the median of ROUNDS x 3, in bursts as in layer.cu.
 * Each part has two more times. "after layers" is its time after two whole layers. These
 * heat the GPU up to its power limit, which slows it down, as the first half of a layer slows
 * down the second. "in turn" is the time of the part within a layer, which includes waiting for
 * late ranks.
 * With `overlap` it also times exchanges at the same time as experts. The experts use the SMs
 * that the exchange does not use. As many exchanges run on another stream as are needed so that
 * both end together.
 *   gpu_moe [ranks=GPUS] [tokens=4096] [rounds=4] [models=6] [first=0] [experts=N] [json=FILE]
 *           [MODE ...]
 * experts: number of experts of all ranks together. It replaces the model's number per rank.
 * json: file to which the times of whole layers are appended, one JSON object per line, with
 * the fields that gpu_bench writes. The floor is the time of the experts alone: their matrix
 * products, without gate, router and exchange. us is the median of the rank with the largest
 * median. For p90 and worst, the time of a repetition is that of its slowest rank.
 * Modes: whole (without the parts), overlap, profile (only whole layers, with bf16 gradients of
 * weights, for a profiler), invariant (layers with sums by rank, in a tree, and with
 * EPIC_INVARIANT, and their parts, alone), decode (times of the forward pass and of each of its
 * parts, in CUDA graphs), tiny (a small layer, as a quick test) */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "copies.h"
#include "moe/args.h"
#include "moe/device.h"
#include "moe_arrays.h"

enum { MOST_RANKS = 8, MOST_TIMES = 300 };

typedef struct model {
    const char *name;
    uint32_t experts, top_k, hidden, inner; /* experts: number per rank */
    uint32_t shared;                        /* inner dimension of the shared expert; 0: none */
    /* true: gate and experts have biases, and the activation is clamped */
    bool biased;
} model;

static const model models[] = {
    {"7168, inner 2048, 8 a rank, top-8", 8, 8, 7168, 2048, 0, false},
    {"7168, inner 2048, 128 a rank, top-8", 128, 8, 7168, 2048, 0, false},
    {"gpt-oss, 2880, inner 2880, 32 a rank, top-4", 32, 4, 2880, 2880, 0, false},
    {"Qwen3-30B, 2048, inner 768, 64 a rank, top-8", 64, 8, 2048, 768, 0, false},
    {"7168, inner 2048, 32 a rank, top-8, shared 2048", 32, 8, 7168, 2048, 2048, false},
    {"gpt-oss with its biases, clamped, 32 a rank", 32, 4, 2880, 2880, 0, true}};
static const model small = {"64, inner 32, 4 a rank, top-2", 4, 2, 64, 32, 32, true};

static int num_ranks, rounds = 4, tiny, first_model, num_models = 6, whole, overlap, profile,
                      invariant, decode;
static int64_t tokens = 4096;
static uint32_t num_experts; /* number of experts of all ranks; 0: that of the model */
static FILE *json;
static epic_bootstrap bootstraps[MOST_RANKS];
static pthread_barrier_t all;
static float slowest[MOST_RANKS];
/* The results of the last time_after(): the ms of each repetition on each rank, and the number
 * of repetitions. */
static float times_of_ranks[MOST_RANKS][MOST_TIMES];
static __thread int num_times;

typedef struct bench {
    epic_context *ctx;
    int rank, sms; /* rank, and number of SMs of the GPU */
    cudaStream_t stream, side;
    cudaEvent_t forked, joined;
    moe_job forward_job, backward_job;
    epic_moe_args forward;
    epic_moe_backward_args backward;
    epic_moe_gradients gradients;
} bench;

/* ------------------------------------------------------------------------------- parts ---- */

typedef epic_result part(bench *b);

static epic_result forward(bench *b)
{
    return epic_moe_forward(b->ctx, &b->forward);
}

static epic_result backward(bench *b)
{
    return epic_moe_backward(b->ctx, &b->backward);
}

static epic_result both(bench *b)
{
    TRY(forward(b));
    return backward(b);
}

static epic_result route(bench *b)
{
    return moe_device_route(&b->forward_job, &b->forward);
}

static epic_result send(bench *b)
{
    return moe_device_plan_dispatch(&b->forward_job, &b->forward);
}

static epic_result transform(bench *b)
{
    return moe_run_experts(&b->forward_job);
}

static epic_result bring_home(bench *b)
{
    return moe_combine(&b->forward_job, &b->forward.out);
}

/* Runs the shared expert, if there is one. */
static epic_result finish(bench *b)
{
    return moe_device_add_local_experts(&b->forward_job, &b->forward.out);
}

static epic_result combine_backward(bench *b)
{
    return moe_combine_backward(&b->backward_job, &b->backward.d_out, NULL);
}

static epic_result transform_backward(bench *b)
{
    return moe_experts_backward(&b->backward_job, &b->gradients, 0);
}

static epic_result dispatch_backward(bench *b)
{
    return moe_dispatch_backward(&b->backward_job, &b->backward.d_x);
}

static epic_result dense_backward(bench *b)
{
    return moe_device_dense_backward(&b->backward_job, &b->backward, &b->gradients);
}

static const struct {
    const char *name;
    part *run;
} parts[] = {{"gate and router", route},
             {"plan + dispatch", send},
             {"experts", transform},
             {"combine", bring_home},
             {"shared expert", finish},
             {"combine_backward", combine_backward},
             {"experts' backward", transform_backward},
             {"dispatch_backward", dispatch_backward},
             {"the rest of backward", dense_backward}};
enum { NUM_PARTS = sizeof parts / sizeof *parts, NUM_FORWARD_PARTS = 5 };

/* ------------------------------------------------------------------------------ timing ---- */

static int by_size(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Returns the ms of a part after this many whole layers, the same on all ranks. */
static float time_after(bench *b, part *run, int layers)
{
    cudaEvent_t at[4];
    float times[MOST_TIMES];
    int num = 0;
    for (int i = 0; i < 4; i++) cudaEventCreate(&at[i]);
    for (int r = 0; r < rounds && num + 3 <= MOST_TIMES; r++) {
        cudaStreamSynchronize(b->stream);
        usleep(15000);
        pthread_barrier_wait(&all);
        for (int i = 0; i < layers; i++) must(both(b) == EPIC_OK, "a layer", b->ctx);
        must(run(b) == EPIC_OK, "a call", b->ctx);
        cudaEventRecord(at[0], b->stream);
        for (int i = 1; i < 4; i++) {
            must(run(b) == EPIC_OK, "a call", b->ctx);
            cudaEventRecord(at[i], b->stream);
        }
        must(cudaStreamSynchronize(b->stream) == cudaSuccess, "a burst", b->ctx);
        for (int i = 1; i < 4; i++) cudaEventElapsedTime(&times[num++], at[i - 1], at[i]);
    }
    for (int i = 0; i < 4; i++) cudaEventDestroy(at[i]);
    memcpy(times_of_ranks[b->rank], times, sizeof times[0] * (size_t)num);
    num_times = num;
    qsort(times, (size_t)num, sizeof *times, by_size);
    slowest[b->rank] = times[num / 2];
    pthread_barrier_wait(&all);
    float most = 0;
    for (int r = 0; r < num_ranks; r++) most = slowest[r] > most ? slowest[r] : most;
    pthread_barrier_wait(&all);
    return most;
}

static float time_of(bench *b, part *run)
{
    return time_after(b, run, 0);
}

/* Stores the ms of each part within a whole layer, on this rank. */
static void time_in_turn(bench *b, float *times)
{
    cudaEvent_t at[NUM_PARTS + 1];
    float all_times[NUM_PARTS][MOST_TIMES];
    int num = 0;
    for (int i = 0; i <= NUM_PARTS; i++) cudaEventCreate(&at[i]);
    for (int r = 0; r < 3 * rounds && r < MOST_TIMES; r++) {
        cudaStreamSynchronize(b->stream);
        usleep(15000);
        pthread_barrier_wait(&all);
        must(both(b) == EPIC_OK, "a call", b->ctx);
        for (int i = 0; i < NUM_PARTS; i++) {
            cudaEventRecord(at[i], b->stream);
            must(parts[i].run(b) == EPIC_OK, "a call", b->ctx);
        }
        cudaEventRecord(at[NUM_PARTS], b->stream);
        must(cudaStreamSynchronize(b->stream) == cudaSuccess, "a turn", b->ctx);
        for (int i = 0; i < NUM_PARTS; i++)
            cudaEventElapsedTime(&all_times[i][num], at[i], at[i + 1]);
        num++;
    }
    for (int i = 0; i <= NUM_PARTS; i++) cudaEventDestroy(at[i]);
    for (int i = 0; i < NUM_PARTS; i++) {
        qsort(all_times[i], (size_t)num, sizeof *all_times[i], by_size);
        times[i] = all_times[i][num / 2];
    }
    pthread_barrier_wait(&all);
}

/* Returns the ms of the whole layer with bf16 gradients of weights. */
static float time_narrow(bench *b)
{
    b->backward.grad_type = EPIC_BF16;
    const float narrow = time_of(b, both);
    b->backward.grad_type = 0;
    return narrow;
}

/* The times of a part in ms. */
typedef struct spread {
    float p50, p90, worst;
} spread;

/* Returns the times of a part. p50 is the largest median of any rank, as time_of() returns it.
 * For p90 and worst, the time of a repetition is that of its slowest rank. */
static spread time_spread(bench *b, part *run)
{
    float times[MOST_TIMES];
    spread found = {.p50 = time_of(b, run)};
    const int num = num_times;
    for (int i = 0; i < num; i++) {
        times[i] = 0;
        for (int r = 0; r < num_ranks; r++)
            if (times_of_ranks[r][i] > times[i]) times[i] = times_of_ranks[r][i];
    }
    qsort(times, (size_t)num, sizeof *times, by_size);
    found.p90 = times[num * 9 / 10];
    found.worst = times[num - 1];
    pthread_barrier_wait(&all); /* no rank overwrites the times before all have read them */
    return found;
}

/* Appends the times of an operation to the JSON file. `scale` converts `times` and `floor` to
 * us. */
static void write_result(const bench *b, const model *m, const char *op, spread times,
                         float floor, float scale)
{
    if (!json || b->rank != 0) return;
    fprintf(json,
            "{\"op\":\"%s\",\"model\":\"%s\",\"hidden\":%u,\"top_k\":%u,\"experts\":%u,"
            "\"note\":\"inner %u%s%s\",\"alignment\":128,\"padding\":1,\"layout\":\"expert\","
            "\"type\":\"bf16\",\"scales\":0,\"quantize\":0,\"routing\":\"uniform\","
            "\"tokens\":%lld,\"sms\":%d,\"ranks\":%d,\"windows\":0,\"us\":%.2f,"
            "\"p90_us\":%.2f,\"worst_us\":%.2f,\"floor_us\":%.2f,\"of_floor\":%.3f}\n",
            op, m->name, m->hidden, m->top_k, m->experts * (uint32_t)num_ranks, m->inner,
            m->shared ? ", shared expert" : "", m->biased ? ", biases" : "", (long long)tokens,
            b->sms, num_ranks, (double)(times.p50 * scale), (double)(times.p90 * scale),
            (double)(times.worst * scale), (double)(floor * scale),
            floor > 0 ? (double)(times.p50 / floor) : 0.0);
    fflush(json);
}

/* Times the whole layer: forward alone (*ahead, in ms), and forward with backward
 * (*there_and_back). Writes the results as JSON. */
static void time_whole(bench *b, const model *m, float *ahead, float *there_and_back)
{
    const spread once = time_spread(b, forward), twice = time_spread(b, both);
    *ahead = once.p50;
    *there_and_back = twice.p50;
    if (!json) return;
    const float experts = time_of(b, transform), back = time_of(b, transform_backward);
    write_result(b, m, "layer", once, experts, 1000);
    write_result(b, m, "layer + backward", twice, experts + back, 1000);
}

static void time_layer(bench *b, const model *m)
{
    static float in_turn[MOST_RANKS][NUM_PARTS];
    float sum = 0, warm_sum = 0, times[NUM_PARTS], warm[NUM_PARTS], ahead, there_and_back;
    time_whole(b, m, &ahead, &there_and_back);
    const float narrow = time_narrow(b);
    if (!whole) time_in_turn(b, in_turn[b->rank]);
    for (size_t i = 0; i < NUM_PARTS && !whole; i++) {
        times[i] = time_of(b, parts[i].run);
        warm[i] = time_after(b, parts[i].run, 2);
        sum += times[i];
        warm_sum += warm[i];
    }
    must(epic_check(b->ctx) == EPIC_OK, "the layer", b->ctx);
    if (b->rank != 0) return;
    printf("layer, %s, %d ranks of %lld tokens: forward %.3f ms, with backward %.3f, with bf16 "
           "gradients of weights %.3f",
           m->name, num_ranks, (long long)tokens, ahead, there_and_back, narrow);
    if (!whole)
        printf("; sum of the parts %.3f (%.3f x), after layers %.3f (%.3f x)", sum,
               there_and_back / sum, warm_sum, there_and_back / warm_sum);
    printf("\n");
    for (size_t i = 0; i < NUM_PARTS && !whole; i++) {
        printf("    %-30s %8.3f   after layers %8.3f   in turn", parts[i].name, times[i],
               warm[i]);
        for (int r = 0; r < num_ranks; r++) printf(" %8.3f", in_turn[r][i]);
        printf("\n");
    }
}

/* ------------------------------------------------------------------------------ decode ---- */

enum { GRAPH_CALLS = 8 }; /* calls in a graph, like the layers of a model */
static __thread cudaGraphExec_t replayed;

static epic_result replay(bench *b)
{
    return cudaGraphLaunch(replayed, b->stream) == cudaSuccess ? EPIC_OK : EPIC_EDEVICE;
}

/* Returns the times of a CUDA graph of GRAPH_CALLS calls, in ms for the whole graph. */
static spread time_in_graph(bench *b, part *run)
{
    cudaGraph_t graph;
    cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal);
    for (int i = 0; i < GRAPH_CALLS; i++) must(run(b) == EPIC_OK, "a captured call", b->ctx);
    must(!cudaStreamEndCapture(b->stream, &graph) && !cudaGraphInstantiate(&replayed, graph, 0),
         "a graph", NULL);
    const spread ms = time_spread(b, replay);
    cudaGraphExecDestroy(replayed);
    cudaGraphDestroy(graph);
    return ms;
}

/* Prints the us of the forward pass in a CUDA graph, and of its parts alone. */
static void time_decode(bench *b, const model *m)
{
    const float scale = 1000.0f / GRAPH_CALLS; /* from ms of a graph to us of a call */
    float sum = 0, us[NUM_PARTS];
    const spread times = time_in_graph(b, forward);
    const float layer = times.p50 * scale;
    for (int i = 0; i < NUM_FORWARD_PARTS; i++)
        if (parts[i].run != finish || m->shared)
            sum += us[i] = time_in_graph(b, parts[i].run).p50 * scale;
    must(epic_check(b->ctx) == EPIC_OK, "the layer", b->ctx);
    write_result(b, m, "layer in a graph", times, us[2] / scale, scale);
    if (b->rank != 0) return;
    printf("decode, %s, %d ranks of %lld tokens: layer %.1f us, sum of its parts %.1f (",
           m->name, num_ranks, (long long)tokens, layer, sum);
    for (int i = 0; i < NUM_FORWARD_PARTS; i++)
        if (parts[i].run != finish || m->shared)
            printf("%s%s %.1f", i ? ", " : "", parts[i].name, us[i]);
    printf(")\n");
}

/* ----------------------------------------------------------------------------- overlap ---- */

static const struct {
    const char *name;
    part *run;
} exchanges[] = {{"plan + dispatch", send},
                 {"combine", bring_home},
                 {"combine_backward", combine_backward},
                 {"dispatch_backward", dispatch_backward}};
/* the exchange of which `times_of_it` calls run on the other stream */
static __thread part *exchange;
static __thread int times_of_it, sms_of_it;

static void set_sms(bench *b, cudaStream_t stream, int sms)
{
    b->forward_job.call.stream = b->backward_job.call.stream = stream;
    b->forward_job.call.max_sms = b->backward_job.call.max_sms = (uint32_t)sms;
}

static epic_result exchange_alone(bench *b)
{
    set_sms(b, b->stream, sms_of_it);
    return exchange(b);
}

static epic_result experts_alone(bench *b)
{
    set_sms(b, b->stream, sms_of_it ? b->sms - sms_of_it : 0);
    return transform(b);
}

static epic_result experts_overlapped(bench *b)
{
    cudaEventRecord(b->forked, b->stream);
    cudaStreamWaitEvent(b->side, b->forked, 0);
    TRY(experts_alone(b));
    set_sms(b, b->side, sms_of_it);
    for (int i = 0; i < times_of_it; i++) TRY(exchange(b));
    cudaEventRecord(b->joined, b->side);
    cudaStreamWaitEvent(b->stream, b->joined, 0);
    return EPIC_OK;
}

/* Prints for each exchange on `sms` SMs: its time alone, and the time that it adds to experts
 * that run at the same time. */
static void time_overlap(bench *b, int sms)
{
    sms_of_it = 0;
    const float whole = time_of(b, experts_alone);
    sms_of_it = sms;
    const float rest = time_of(b, experts_alone);
    if (b->rank == 0)
        printf("  overlap: experts take %.3f ms on all SMs, %.3f on all but %d\n", whole, rest,
               sms);
    for (size_t i = 0; i < sizeof exchanges / sizeof *exchanges; i++) {
        exchange = exchanges[i].run;
        sms_of_it = 0;
        const float usual = time_of(b, exchange_alone);
        sms_of_it = sms;
        const float few = time_of(b, exchange_alone);
        times_of_it = (int)(rest / few + 0.5f) > 0 ? (int)(rest / few + 0.5f) : 1;
        const float together = time_of(b, experts_overlapped);
        if (b->rank == 0)
            printf(
                "    %-20s %.3f ms, on %d SMs %.3f; %d together with experts %.3f: each adds "
                "%.3f\n",
                exchanges[i].name, usual, sms, few, times_of_it, together,
                (together - whole) / (float)times_of_it);
    }
    set_sms(b, b->stream, 0);
}

/* Times e4m3 experts with quantized rows: forward, and with backward, whose weights are bf16 or
 * e4m3. */
static void time_scaled(bench *b, arrays *a, const epic_moe *wide)
{
    epic_experts experts = *wide->experts;
    epic_moe moe = *wide;
    epic_moe_memory_info memory;
    epic_moe_weights w = *b->forward.weights;
    const int64_t local = experts.num_local_experts, hidden = experts.hidden;
    const int64_t first = local * hidden * 2 * experts.inner;
    const bench before = *b;
    experts.weight_type = EPIC_E4M3;
    moe.experts = &experts;
    moe.flags = EPIC_DISPATCH_AGAIN;
    must(!epic_moe_memory(b->ctx, NULL, &moe, &memory), "memory", NULL);
    w.w_gate_up = numbers_on(a, first, EPIC_E4M3, 1);
    w.w_down = numbers_on(a, first / 2, EPIC_E4M3, 1);
    /* more elements than needed */
    w.w_gate_up_scales = numbers_on(a, first / 8192, EPIC_F32, 0.02f);
    w.w_down_scales = numbers_on(a, first / 8192, EPIC_F32, 0.02f);
    const int64_t work = memory.backward_bytes > memory.forward_bytes ? memory.backward_bytes
                                                                      : memory.forward_bytes;
    b->forward.moe = b->backward.moe = &moe;
    b->forward.weights = &w;
    b->forward.workspace = b->backward.workspace = bytes_on(a, work);
    b->forward.workspace_bytes = b->backward.workspace_bytes = work;
    b->backward.grad_type = EPIC_BF16;
    const float ahead = time_of(b, forward), mixed = time_of(b, both);
    b->backward.weights = &w;
    const float narrow = time_of(b, both);
    must(epic_check(b->ctx) == EPIC_OK, "the layer of e4m3", b->ctx);
    if (b->rank == 0)
        printf(
            "    experts of e4m3: forward %.3f ms, with backward and bf16 gradients %.3f, with "
            "weights of e4m3 there too %.3f\n",
            ahead, mixed, narrow);
    b->forward = before.forward;
    b->backward = before.backward;
}

/* Prints the ms of each part of a layer alone, in one line. */
static void print_parts(bench *b)
{
    float times[NUM_PARTS];
    must(!moe_read_forward_args(&b->forward_job, b->ctx, &b->forward, false) &&
             !moe_read_backward_args(&b->backward_job, b->ctx, &b->backward, &b->gradients),
         "parts", b->ctx);
    for (size_t i = 0; i < NUM_PARTS; i++) times[i] = time_of(b, parts[i].run);
    if (b->rank != 0) return;
    for (size_t i = 0; i < NUM_PARTS; i++)
        printf("%s%s %.3f", i ? ", " : "    ", parts[i].name, times[i]);
    printf("\n");
}

/* Times the layer with sums by rank, in a tree of 8 leaves, and with EPIC_INVARIANT. */
static void time_invariant(bench *b, arrays *a, const model *m, epic_moe moe)
{
    static const char *const names[] = {"by rank", "tree", "invariant"};
    epic_layer layer = *moe.layer;
    epic_moe_memory_info memory;
    moe.layer = &layer;
    for (int i = 0; i < 3; i++) {
        if (i == 1) layer.sum_order = EPIC_TREE, layer.leaves = 8;
        if (i == 2) moe.flags = EPIC_INVARIANT;
        must(!epic_moe_memory(b->ctx, NULL, &moe, &memory), "memory", NULL);
        b->forward.moe = b->backward.moe = &moe;
        b->forward.saved_bytes = b->backward.saved_bytes = memory.saved_bytes;
        b->backward.saved = b->forward.saved = bytes_on(a, memory.saved_bytes);
        b->backward.workspace_bytes = b->forward.workspace_bytes = memory.backward_bytes;
        if (memory.forward_bytes > memory.backward_bytes)
            b->backward.workspace_bytes = b->forward.workspace_bytes = memory.forward_bytes;
        b->backward.workspace = b->forward.workspace = bytes_on(a, b->forward.workspace_bytes);
        const float ahead = time_of(b, forward), whole_ms = time_of(b, both);
        if (b->rank == 0)
            printf("layer, %s, %lld tokens, %s: forward %.3f ms, with backward %.3f ms\n",
                   m->name, (long long)tokens, names[i], ahead, whole_ms);
        print_parts(b);
    }
}

/* Makes random weights on the GPU, and allocates their gradients. */
static epic_moe_weights make_weights(bench *b, arrays *a, const model *m)
{
    const uint32_t experts = m->experts * (uint32_t)num_ranks;
    const int64_t first = (int64_t)m->hidden * 2 * m->inner;
    const int64_t of_shared = (int64_t)m->hidden * 2 * m->shared;
    epic_moe_weights weights = {
        .w_gate = numbers_on(a, (int64_t)m->hidden * experts, EPIC_F32, 0.02f),
        .w_gate_up = numbers_on(a, m->experts * first, EPIC_BF16, 0.02f),
        .w_down = numbers_on(a, m->experts * first / 2, EPIC_BF16, 0.02f)};
    b->gradients = (epic_moe_gradients){.w_gate = bytes_on(a, (int64_t)m->hidden * experts * 4),
                                        .w_gate_up = bytes_on(a, m->experts * first * 4),
                                        .w_down = bytes_on(a, m->experts * first * 2)};
    if (m->biased) {
        weights.b_gate = numbers_on(a, experts, EPIC_F32, 0.1f);
        weights.b_gate_up = numbers_on(a, (int64_t)m->experts * 2 * m->inner, EPIC_BF16, 0.1f);
        weights.b_down = numbers_on(a, (int64_t)m->experts * m->hidden, EPIC_BF16, 0.1f);
        b->gradients.b_gate = bytes_on(a, experts * 4);
        b->gradients.b_gate_up = bytes_on(a, (int64_t)m->experts * 8 * m->inner);
        b->gradients.b_down = bytes_on(a, (int64_t)m->experts * 4 * m->hidden);
    }
    if (m->shared) {
        weights.shared_gate_up = numbers_on(a, of_shared, EPIC_BF16, 0.02f);
        weights.shared_down = numbers_on(a, of_shared / 2, EPIC_BF16, 0.02f);
        b->gradients.shared_gate_up = bytes_on(a, of_shared * 4);
        b->gradients.shared_down = bytes_on(a, of_shared * 2);
    }
    return weights;
}

/* Returns the model, with the number of experts from the command line if there is one. `name`:
 * buffer of `bytes` bytes for the name of such a model. */
static model set_experts(const model *m, char *name, size_t bytes)
{
    model changed = *m;
    if (num_experts == 0) return changed;
    changed.experts = num_experts / (uint32_t)num_ranks;
    snprintf(name, bytes, "%u, inner %u, top-%u of %u", m->hidden, m->inner, m->top_k,
             num_experts);
    changed.name = name;
    return changed;
}

static void run_model(bench *b, const model *from)
{
    char name[96];
    const model chosen = set_experts(from, name, sizeof name), *m = &chosen;
    arrays a = {.num = 0};
    const uint32_t experts = m->experts * (uint32_t)num_ranks;
    const int64_t row = (int64_t)m->hidden * 2;
    const epic_layer layer = {.num_experts = experts, .top_k = m->top_k, .alignment = 128};
    const epic_router router = {.num_experts = experts, .top_k = m->top_k};
    const epic_experts ex = {.num_local_experts = m->experts,
                             .hidden = m->hidden,
                             .inner = m->inner,
                             .activation = m->biased ? EPIC_CLAMPED_SWIGLU : EPIC_SILU,
                             .row_type = EPIC_BF16};
    const epic_experts shared = {.num_local_experts = 1,
                                 .hidden = m->hidden,
                                 .inner = m->shared,
                                 .activation = EPIC_SILU,
                                 .row_type = EPIC_BF16};
    /* With uniform routing a rank receives as many choices as it has. Reserve slots for half as
     * many more. */
    const epic_moe moe = {.layer = &layer,
                          .router = &router,
                          .experts = &ex,
                          .shared = m->shared ? &shared : NULL,
                          .capacity = tokens * m->top_k * 3 / 2 + (int64_t)m->experts * 128};
    const epic_config config = {.max_tokens = tokens,
                                .max_row_bytes = row,
                                .num_ranks = (uint32_t)num_ranks,
                                .backend = "p2p"};
    must(!epic_open(&b->ctx, &bootstraps[b->rank], &config), "open", b->ctx);
    epic_moe_memory_info memory;
    must(!epic_moe_memory(b->ctx, NULL, &moe, &memory), "memory", NULL);
    const epic_moe_weights weights = make_weights(b, &a, m);
    const int64_t work = memory.backward_bytes > memory.forward_bytes ? memory.backward_bytes
                                                                      : memory.forward_bytes;
    b->forward =
        (epic_moe_args){.call.stream = b->stream,
                        .moe = &moe,
                        .weights = &weights,
                        .x = {numbers_on(&a, tokens * m->hidden, EPIC_BF16, 1), tokens, row},
                        .out = {bytes_on(&a, tokens * row), tokens, row},
                        .saved = bytes_on(&a, memory.saved_bytes),
                        .saved_bytes = memory.saved_bytes,
                        .workspace = bytes_on(&a, work),
                        .workspace_bytes = work};
    b->backward = (epic_moe_backward_args){
        .call = b->forward.call,
        .moe = &moe,
        .weights = &weights,
        .x = b->forward.x,
        .d_out = {numbers_on(&a, tokens * m->hidden, EPIC_BF16, 1), tokens, row},
        .d_x = {bytes_on(&a, tokens * row), tokens, row},
        .gradients = &b->gradients,
        .saved = b->forward.saved,
        .saved_bytes = b->forward.saved_bytes,
        .workspace = b->forward.workspace,
        .workspace_bytes = work};
    must(!moe_read_forward_args(&b->forward_job, b->ctx, &b->forward, false), "parts", NULL);
    must(!moe_read_backward_args(&b->backward_job, b->ctx, &b->backward, &b->gradients),
         "parts", NULL);
    if (decode) {
        time_decode(b, m);
    } else if (invariant) {
        time_invariant(b, &a, m, moe);
    } else if (profile) {
        const float narrow = time_narrow(b);
        if (b->rank == 0) printf("layer, %s: %.3f ms\n", m->name, narrow);
    } else {
        time_layer(b, m);
        time_scaled(b, &a, &moe);
    }
    for (int sms = 24; overlap && sms <= 48; sms += 8)
        if (sms != 40) time_overlap(b, sms);
    epic_close(b->ctx);
    for (int i = 0; i < a.num; i++) cudaFree(a.list[i]);
}

static void *run(void *self)
{
    bench b = {.rank = (int)(intptr_t)self};
    int gpus = 1;
    cudaGetDeviceCount(&gpus);
    cudaSetDevice(b.rank % gpus);
    must(!cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking) &&
             !cudaStreamCreateWithFlags(&b.side, cudaStreamNonBlocking) &&
             !cudaEventCreateWithFlags(&b.forked, cudaEventDisableTiming) &&
             !cudaEventCreateWithFlags(&b.joined, cudaEventDisableTiming) &&
             !cudaDeviceGetAttribute(&b.sms, cudaDevAttrMultiProcessorCount, b.rank % gpus),
         "streams", NULL);
    for (int i = tiny ? 0 : first_model; i < (tiny ? 1 : num_models); i++) {
        pthread_barrier_wait(&all);
        if (b.rank == 0)
            must(!epic_bootstrap_threads(bootstraps, num_ranks, 0), "bootstrap", NULL);
        pthread_barrier_wait(&all);
        run_model(&b, tiny ? &small : &models[i]);
        epic_bootstrap_close(&bootstraps[b.rank]);
    }
    cudaStreamDestroy(b.stream);
    cudaStreamDestroy(b.side);
    cudaEventDestroy(b.forked);
    cudaEventDestroy(b.joined);
    return NULL;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int *is_on;
    } modes[] = {{"overlap", &overlap}, {"whole", &whole},   {"profile", &profile},
                 {"tiny", &tiny},       {"decode", &decode}, {"invariant", &invariant}};
    pthread_t threads[MOST_RANKS];
    const char *json_path = NULL;
    cudaGetDeviceCount(&num_ranks);
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "ranks=", 6)) num_ranks = atoi(argv[i] + 6);
        if (!strncmp(argv[i], "tokens=", 7)) tokens = atoll(argv[i] + 7);
        if (!strncmp(argv[i], "rounds=", 7)) rounds = atoi(argv[i] + 7);
        if (!strncmp(argv[i], "models=", 7)) num_models = atoi(argv[i] + 7);
        if (!strncmp(argv[i], "first=", 6)) first_model = atoi(argv[i] + 6);
        if (!strncmp(argv[i], "experts=", 8)) num_experts = (uint32_t)atoi(argv[i] + 8);
        if (!strncmp(argv[i], "json=", 5)) json_path = argv[i] + 5;
        for (size_t k = 0; k < sizeof modes / sizeof *modes; k++)
            if (!strcmp(argv[i], modes[k].name)) *modes[k].is_on = 1;
    }
    if (num_models < 1 || num_models > (int)(sizeof models / sizeof *models))
        num_models = (int)(sizeof models / sizeof *models);
    if (num_ranks < 1 || num_ranks > MOST_RANKS) num_ranks = num_ranks < 1 ? 1 : MOST_RANKS;
    must(num_experts % (uint32_t)num_ranks == 0, "experts must be a multiple of ranks", NULL);
    if (json_path) must((json = fopen(json_path, "a")) != NULL, json_path, NULL);
    pthread_barrier_init(&all, NULL, (unsigned)num_ranks);
    for (int r = 0; r < num_ranks; r++)
        pthread_create(&threads[r], NULL, run, (void *)(intptr_t)r);
    for (int r = 0; r < num_ranks; r++) pthread_join(threads[r], NULL);
    return 0;
}
