/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls on CUDA contexts, through libepic.so and the libepic_cuda.so that it loads:
 * virtual ranks on one GPU do a step, and host contexts do the same step; all bits are equal.
 * usage: step [RANKS] */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "epic/epic.h"

enum { MAX_RANKS = 8, TOKENS = 96, HIDDEN = 1096, TOP_K = 4, EXPERTS = 24 };
#define ROW (HIDDEN * 2)

static int num_ranks = 4;
static int64_t slots;
static size_t plan_bytes;
static epic_meet meets[MAX_RANKS];
static pthread_barrier_t all;
static int failed;

static const epic_layer layer = {.num_experts = EXPERTS, .top_k = TOP_K, .alignment = 16};

typedef struct inputs {
    int32_t chosen[TOKENS][TOP_K];
    float weights[TOKENS][TOP_K];
    uint16_t tokens[TOKENS][HIDDEN], d_out[TOKENS][HIDDEN];
} inputs;

typedef struct results {
    uint16_t out[TOKENS][HIDDEN], d_tokens[TOKENS][HIDDEN];
    float d_weights[TOKENS][TOP_K];
} results;

static inputs in[MAX_RANKS];
static results host[MAX_RANKS], device[MAX_RANKS];

static void need(int good, const char *what, const epic_context *ctx)
{
    if (good) return;
    fprintf(stderr, "step: %s: %s\n", what, epic_error(ctx));
    _exit(1); /* peers would wait for us, and threads must not meet in exit handlers */
}

static void *memory(int on_device, const void *from, size_t bytes)
{
    void *p = NULL;
    if (!on_device) {
        p = aligned_alloc(64, (bytes + 63) / 64 * 64);
        if (from) memcpy(p, from, bytes);
        return p;
    }
    need(cudaMalloc(&p, bytes) == cudaSuccess, "cudaMalloc", NULL);
    need(cudaMemset(p, 0xab, bytes) == cudaSuccess, "cudaMemset", NULL);
    if (from)
        need(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess, "copy", NULL);
    return p;
}

static void drop(int on_device, void *p)
{
    if (on_device)
        cudaFree(p);
    else
        free(p);
}

/* One that has carried work: docs/cuda.md says why ranks that share a GPU need such. */
static cudaStream_t used_stream(void)
{
    cudaStream_t stream;
    void *word = memory(1, NULL, 64);
    need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
             cudaMemsetAsync(word, 0, 64, stream) == cudaSuccess &&
             cudaStreamSynchronize(stream) == cudaSuccess,
         "a stream", NULL);
    drop(1, word);
    return stream;
}

static void step(epic_context *ctx, int rank, int on_device, results *out)
{
    const inputs *mine = &in[rank];
    cudaStream_t stream = NULL;
    if (on_device) stream = used_stream();
    const epic_call call = {.stream = stream};
    void *plan = memory(on_device, NULL, plan_bytes);
    void *recv = memory(on_device, NULL, (size_t)slots * ROW);
    void *d_rows = memory(on_device, NULL, (size_t)slots * ROW);
    void *slot_weights = memory(on_device, NULL, (size_t)slots * 4);
    void *d_slot = memory(on_device, NULL, (size_t)slots * 4);
    void *chosen = memory(on_device, mine->chosen, sizeof mine->chosen);
    void *weights = memory(on_device, mine->weights, sizeof mine->weights);
    void *tokens = memory(on_device, mine->tokens, sizeof mine->tokens);
    void *d_out = memory(on_device, mine->d_out, sizeof mine->d_out);
    results *got = memory(on_device, NULL, sizeof *got);
    const epic_rows slot_rows = {recv, slots, ROW}, d_slot_rows = {d_rows, slots, ROW};
    if (on_device) cudaDeviceSynchronize();
    pthread_barrier_wait(&all);

    const epic_plan_args where = {.call = call,
                                  .layer = &layer,
                                  .plan = plan,
                                  .plan_bytes = plan_bytes,
                                  .topk_idx = chosen,
                                  .num_tokens = TOKENS,
                                  .capacity = slots};
    const epic_dispatch_args there = {.tokens = {tokens, TOKENS, ROW},
                                      .recv = slot_rows,
                                      .weights = weights,
                                      .slot_weights = slot_weights};
    const epic_combine_args home = {.call = call,
                                    .plan = plan,
                                    .plan_bytes = plan_bytes,
                                    .rows = slot_rows,
                                    .out = {got->out, TOKENS, ROW},
                                    .slot_weights = slot_weights,
                                    .type = EPIC_BF16};
    const epic_combine_backward_args back = {.call = call,
                                             .plan = plan,
                                             .plan_bytes = plan_bytes,
                                             .d_out = {d_out, TOKENS, ROW},
                                             .rows = slot_rows,
                                             .d_rows = d_slot_rows,
                                             .slot_weights = slot_weights,
                                             .d_slot_weights = d_slot,
                                             .type = EPIC_BF16};
    const epic_dispatch_backward_args d_home = {.call = call,
                                                .plan = plan,
                                                .plan_bytes = plan_bytes,
                                                .d_recv = d_slot_rows,
                                                .d_tokens = {got->d_tokens, TOKENS, ROW},
                                                .d_slot_weights = d_slot,
                                                .d_weights = (float *)got->d_weights,
                                                .type = EPIC_BF16};
    need(!epic_plan_dispatch(ctx, &where, &there), "dispatch", ctx);
    need(!epic_combine(ctx, &home), "combine", ctx);
    need(!epic_combine_backward(ctx, &back), "combine_backward", ctx);
    need(!epic_dispatch_backward(ctx, &d_home), "dispatch_backward", ctx);
    if (on_device) need(cudaStreamSynchronize(stream) == cudaSuccess, "synchronize", NULL);
    pthread_barrier_wait(&all);
    need(epic_check(ctx) == EPIC_OK, "check", ctx);
    if (on_device)
        need(cudaMemcpy(out, got, sizeof *out, cudaMemcpyDeviceToHost) == cudaSuccess, "copy",
             NULL);
    else
        memcpy(out, got, sizeof *out);
    pthread_barrier_wait(&all);
    void *const parts[] = {plan,   recv,    d_rows, slot_weights, d_slot,
                           chosen, weights, tokens, d_out,        got};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) drop(on_device, parts[i]);
    if (stream) cudaStreamDestroy(stream);
}

/* What CUDA contexts cannot do is said, and leaves the group whole. */
static void check_refused(epic_context *ctx)
{
    epic_layer by_k = layer;
    by_k.overflow = EPIC_OVERFLOW_DROP;
    by_k.priority = EPIC_BY_K;
    const epic_plan_args args = {
        .layer = &by_k, .plan = in, .plan_bytes = sizeof in, .topk_idx = in};
    need(epic_plan(ctx, &args) == EPIC_ENOTSUP && strstr(epic_error(ctx), "EPIC_BY_K"),
         "EPIC_BY_K was not refused", ctx);
}

static void seat(int rank, const char *backend, results *out)
{
    epic_context *ctx;
    const epic_config config = {
        .max_tokens = TOKENS, .max_row_bytes = ROW, .timeout_ms = 20000, .backend = backend};
    need(!epic_open(&ctx, &meets[rank], &config), "open", ctx);
    if (strcmp(backend, "p2p") == 0) check_refused(ctx);
    step(ctx, rank, strcmp(backend, "p2p") == 0, out);
    epic_close(ctx);
}

static void *run(void *self)
{
    const int rank = (int)((inputs *)self - in);
    seat(rank, num_ranks > 1 ? "threads" : "self", &host[rank]);
    seat(rank, "p2p", &device[rank]);
    return NULL;
}

static void fill(unsigned seed)
{
    for (int r = 0; r < num_ranks; r++)
        for (int t = 0; t < TOKENS; t++) {
            for (int k = 0; k < TOP_K; k++) {
                in[r].chosen[t][k] = (int)(rand_r(&seed) % (EXPERTS + 2)) - 2;
                in[r].weights[t][k] = (float)(rand_r(&seed) % 1000) / 700.0f;
            }
            for (int h = 0; h < HIDDEN; h++) { /* bf16 around 1, either sign */
                in[r].tokens[t][h] = (uint16_t)(0x3f00 | (rand_r(&seed) & 0x80ff));
                in[r].d_out[t][h] = (uint16_t)(0x3f00 | (rand_r(&seed) & 0x80ff));
            }
        }
}

int main(int argc, char **argv)
{
    pthread_t threads[MAX_RANKS];
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* no kernel waits behind another rank's */
    if (argc > 1) num_ranks = atoi(argv[1]);
    if (num_ranks < 1 || num_ranks > MAX_RANKS || EXPERTS % num_ranks) return 2;
    const epic_config config = {
        .max_tokens = TOKENS, .max_row_bytes = ROW, .num_ranks = (uint32_t)num_ranks};
    slots = epic_capacity_bound(&config, &layer);
    plan_bytes = epic_plan_bytes(&config, &layer);
    fill(7);
    need(!epic_meet_threads(meets, num_ranks, 20000), "meet", NULL);
    pthread_barrier_init(&all, NULL, (unsigned)num_ranks);
    for (int r = 0; r < num_ranks; r++) pthread_create(&threads[r], NULL, run, &in[r]);
    for (int r = 0; r < num_ranks; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < num_ranks; r++) {
        failed |= memcmp(host[r].out, device[r].out, sizeof host[r].out) != 0;
        failed |= memcmp(host[r].d_tokens, device[r].d_tokens, sizeof host[r].d_tokens) != 0;
        failed |= memcmp(host[r].d_weights, device[r].d_weights, sizeof host[r].d_weights) != 0;
        epic_meet_close(&meets[r]);
    }
    printf("public calls, %d ranks on one GPU: host and CUDA %s\n", num_ranks,
           failed ? "DIFFER" : "have the same bits");
    return failed;
}
