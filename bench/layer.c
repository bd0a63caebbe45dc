/* SPDX-License-Identifier: Apache-2.0 */
/* Times a layer on one host rank, with and without EPIC_INVARIANT, forward and with backward.
 * The layers take turns. Prints medians of the CPU time of the calling thread, which does the
 * whole layer, so other programs on the machine disturb little. Both layers sum in tree order.
 *
 *     build/bench/layer [--type f32|bf16] [--tokens 512] [--hidden 1024] [--inner 512]
 *                       [--experts 8] [--top-k 2] [--rounds 15] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "epic/epic.h"

enum { MAX_ROUNDS = 101 };

static uint32_t type = EPIC_F32;
static int tokens = 512, hidden = 1024, inner = 512, experts = 8, top_k = 2, rounds = 15;

/* A layer, and the median times of its forward pass and of both passes. */
typedef struct timed {
    epic_moe moe;
    epic_moe_args forward;
    epic_moe_backward_args backward;
    double seconds[2][MAX_ROUNDS];
} timed;

static void must(const epic_context *ctx, epic_result result, const char *what)
{
    if (result == EPIC_OK) return;
    fprintf(stderr, "layer: %s: %s\n", what, epic_error(ctx));
    exit(1);
}

/* Returns `count` random numbers of `kind` between -scale and scale. */
static void *make_numbers(int64_t count, uint32_t kind, float scale)
{
    static unsigned seed = 1;
    const size_t bytes = (size_t)count * (kind == EPIC_BF16 ? 2 : 4);
    char *to = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!to) exit(1);
    for (int64_t i = 0; i < count; i++) {
        const float x = ((float)rand_r(&seed) / (float)RAND_MAX * 2 - 1) * scale;
        uint32_t bits;
        memcpy(&bits, &x, 4);
        if (kind == EPIC_BF16) {
            const uint16_t high = (uint16_t)(bits >> 16);
            memcpy(to + 2 * i, &high, 2);
        } else {
            memcpy(to + 4 * i, &x, 4);
        }
    }
    return to;
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void run(epic_context *ctx, timed *t, int round)
{
    const double begin = cpu_seconds();
    must(ctx, epic_moe_forward(ctx, &t->forward), "forward");
    const double middle = cpu_seconds();
    must(ctx, epic_moe_backward(ctx, &t->backward), "backward");
    if (round < 0) return;
    t->seconds[0][round] = middle - begin;
    t->seconds[1][round] = cpu_seconds() - begin;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(double *seconds)
{
    qsort(seconds, (size_t)rounds, sizeof *seconds, ascending);
    return seconds[rounds / 2];
}

/* Allocates the memory of a layer whose options are set. */
static void prepare(epic_context *ctx, timed *t)
{
    epic_moe_memory_info memory;
    must(ctx, epic_moe_memory(ctx, NULL, &t->moe, &memory), "memory");
    t->forward.saved_bytes = t->backward.saved_bytes = memory.saved_bytes;
    t->forward.saved = make_numbers(memory.saved_bytes / 4, EPIC_F32, 0);
    t->backward.saved = t->forward.saved;
    t->forward.workspace_bytes = memory.forward_bytes;
    t->forward.workspace = make_numbers(memory.forward_bytes / 4, EPIC_F32, 0);
    t->backward.workspace_bytes = memory.backward_bytes;
    t->backward.workspace = make_numbers(memory.backward_bytes / 4, EPIC_F32, 0);
}

static void measure(epic_context *ctx)
{
    const int64_t row = (int64_t)hidden * (type == EPIC_BF16 ? 2 : 4);
    const int64_t up = (int64_t)experts * hidden * 2 * inner, gate = (int64_t)hidden * experts;
    const epic_layer layer = {.num_experts = (uint32_t)experts,
                              .top_k = (uint32_t)top_k,
                              .sum_order = EPIC_TREE,
                              .leaves = 1};
    const epic_router router = {.num_experts = (uint32_t)experts, .top_k = (uint32_t)top_k};
    const epic_experts mlps = {.num_local_experts = (uint32_t)experts,
                               .hidden = (uint32_t)hidden,
                               .inner = (uint32_t)inner,
                               .row_type = type};
    const epic_moe_weights weights = {.w_gate = make_numbers(gate, EPIC_F32, 0.1f),
                                      .w_gate_up = make_numbers(up, type, 0.1f),
                                      .w_down = make_numbers(up / 2, type, 0.1f)};
    const epic_moe_gradients gradients = {.w_gate = make_numbers(gate, EPIC_F32, 0),
                                          .w_gate_up = make_numbers(up, EPIC_F32, 0),
                                          .w_down = make_numbers(up / 2, EPIC_F32, 0)};
    void *x = make_numbers((int64_t)tokens * hidden, type, 1);
    void *out = make_numbers((int64_t)tokens * hidden, type, 0);
    static timed all[2];
    for (int i = 0; i < 2; i++) {
        timed *t = &all[i];
        t->moe = (epic_moe){.layer = &layer,
                            .router = &router,
                            .experts = &mlps,
                            .capacity = (int64_t)tokens * top_k,
                            .flags = i ? EPIC_INVARIANT : 0};
        t->forward = (epic_moe_args){.moe = &t->moe,
                                     .weights = &weights,
                                     .x = {x, tokens, row},
                                     .out = {out, tokens, row}};
        t->backward = (epic_moe_backward_args){.moe = &t->moe,
                                               .weights = &weights,
                                               .x = {x, tokens, row},
                                               .d_out = {x, tokens, row},
                                               .d_x = {out, tokens, row},
                                               .gradients = &gradients};
        prepare(ctx, t);
    }
    for (int round = -1; round < rounds; round++)
        for (int i = 0; i < 2; i++) run(ctx, &all[(round + i) & 1], round);
    printf("%s, hidden %d, inner %d, top-%d of %d experts, %d tokens, median of %d, %s\n",
           type == EPIC_BF16 ? "bf16" : "float32", hidden, inner, top_k, experts, tokens,
           rounds, epic_blas_name());
    for (int pass = 0; pass < 2; pass++) {
        const double usual = median_of(all[0].seconds[pass]),
                     invariant = median_of(all[1].seconds[pass]);
        printf("%-14s %9.3f ms, invariant %9.3f ms: %.2f\n", pass ? "with backward" : "forward",
               usual * 1e3, invariant * 1e3, invariant / usual);
    }
}

static int read_options(int argc, char **argv)
{
    const struct {
        const char *name;
        int *value;
    } numbers[] = {{"--tokens", &tokens},   {"--hidden", &hidden}, {"--inner", &inner},
                   {"--experts", &experts}, {"--top-k", &top_k},   {"--rounds", &rounds}};
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        size_t at = 0;
        if (!strcmp(argv[i], "--type")) {
            type = !strcmp(value, "bf16") ? EPIC_BF16 : EPIC_F32;
            continue;
        }
        while (at < 6 && strcmp(argv[i], numbers[at].name)) at++;
        if (at == 6 || atoi(value) < 1) return 0;
        *numbers[at].value = atoi(value);
    }
    return rounds <= MAX_ROUNDS && top_k <= experts;
}

int main(int argc, char **argv)
{
    epic_context *ctx;
    if (!read_options(argc, argv)) {
        fprintf(stderr, "usage: layer [--type f32|bf16] [--tokens N] [--hidden N] [--inner N] "
                        "[--experts N] [--top-k N] [--rounds N]\n");
        return 2;
    }
    const epic_config config = {
        .max_tokens = tokens, .max_row_bytes = 4 * (int64_t)hidden, .num_ranks = 1};
    must(NULL, epic_open(&ctx, NULL, &config), "open");
    measure(ctx);
    epic_close(ctx);
    return 0;
}
