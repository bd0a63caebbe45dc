/* SPDX-License-Identifier: Apache-2.0 */
/* Measures plan, dispatch and combine of processes on this machine, compared with
 * the rate at which the same processes copy memory.
 *
 *     build/bench/host [--ranks 4] [--tokens 4096] [--hidden 7168] [--top-k 8] [--experts 64]
 *                      [--rounds 5] [--backend shm]
 *
 * Prints the median over the rounds of the slowest rank.  GB/s count the bytes of the rows that
 * an operation writes: slots for dispatch, tokens and partials for combine. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "epic/epic.h"

#define MAX_RANKS 64
#define MAX_ROUNDS 101

typedef struct options {
    int ranks, tokens, hidden, top_k, experts, rounds;
    const char *backend;
} options;

enum { COPY, PLAN, DISPATCH, COMBINE, NUM_TIMED };

typedef struct board { /* state in memory that the processes share */
    double seconds[NUM_TIMED][MAX_ROUNDS][MAX_RANKS];
    double bytes[NUM_TIMED][MAX_RANKS];
} board;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *need(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory) {
        fprintf(stderr, "host: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    memset(memory, 1, bytes);
    return memory;
}

static void must(const epic_context *ctx, epic_result result, const char *what)
{
    if (result == EPIC_OK) return;
    fprintf(stderr, "host: %s: %s\n", what, epic_error(ctx));
    exit(1);
}

/* Waits until all ranks have finished the previous operation. */
static void bootstrap(epic_context *ctx)
{
    float one = 1;
    must(ctx, epic_allreduce_sum(ctx, &(epic_allreduce_sum_args){.data = &one, .count = 1}),
         "sum");
}

typedef struct seat {
    const options *o;
    board *board;
    epic_context *ctx;
    int rank;
    epic_layer layer;
    void *plan;
    int64_t plan_bytes;
    int32_t *topk_idx;
    float *weights, *slot_weights;
    int64_t slots;
    epic_rows tokens, recv, out;
} seat;

static void fill_routing(seat *s)
{
    unsigned seed = (unsigned)s->rank + 1;
    const options *o = s->o;
    for (int t = 0; t < o->tokens; t++)
        for (int k = 0; k < o->top_k; k++) {
            int32_t *row = s->topk_idx + (size_t)t * (size_t)o->top_k;
            int again;
            do { /* draw distinct experts uniformly */
                row[k] = (int32_t)(rand_r(&seed) % (unsigned)o->experts);
                again = 0;
                for (int j = 0; j < k; j++) again |= row[j] == row[k];
            } while (again);
        }
}

static epic_plan_args plan_args(const seat *s, int64_t capacity, int32_t *demand)
{
    return (epic_plan_args){.layer = &s->layer,
                            .plan = s->plan,
                            .plan_bytes = s->plan_bytes,
                            .topk_idx = s->topk_idx,
                            .num_tokens = s->o->tokens,
                            .capacity = capacity,
                            .demand = demand};
}

static void open_seat(seat *s)
{
    const options *o = s->o;
    const size_t choices = (size_t)o->tokens * (size_t)o->top_k;
    const int64_t row_bytes = 2 * (int64_t)o->hidden;
    epic_config config = {.max_tokens = o->tokens,
                          .max_row_bytes = row_bytes,
                          .num_ranks = (uint32_t)o->ranks,
                          .backend = o->backend};
    must(s->ctx, epic_plan_bytes(&config, &s->layer, &s->plan_bytes), "plan_bytes");
    s->plan = need(s->plan_bytes);
    s->topk_idx = need(choices * sizeof(int32_t));
    s->weights = need(choices * sizeof(float));
    fill_routing(s);
    int32_t demand;
    epic_plan_args args = plan_args(s, EPIC_CAPACITY_EXACT, &demand);
    must(s->ctx, epic_plan(s->ctx, &args), "plan");
    s->slots = demand;
    s->recv = (epic_rows){need((size_t)(demand * row_bytes)), demand, row_bytes};
    s->slot_weights = need((size_t)demand * sizeof(float));
    s->tokens = (epic_rows){need((size_t)(o->tokens * row_bytes)), o->tokens, row_bytes};
    s->out = (epic_rows){need((size_t)(o->tokens * row_bytes)), o->tokens, row_bytes};
}

/* Measures the rate to compare with: copies as many bytes as dispatch writes, row by row, from
 * the tokens. */
static void copy_rows(const seat *s)
{
    for (int64_t i = 0; i < s->slots; i++)
        memcpy((char *)s->recv.data + i * s->recv.row_bytes,
               (char *)s->tokens.data + i % s->tokens.num_rows * s->tokens.row_bytes,
               (size_t)s->recv.row_bytes);
}

static void run_once(seat *s, int what)
{
    if (what == COPY) {
        copy_rows(s);
    } else if (what == PLAN) {
        int32_t demand;
        epic_plan_args args = plan_args(s, s->slots, &demand);
        must(s->ctx, epic_plan(s->ctx, &args), "plan");
    } else if (what == DISPATCH) {
        const epic_dispatch_args args = {.layer = &s->layer,
                                         .plan = s->plan,
                                         .plan_bytes = s->plan_bytes,
                                         .tokens = epic_rows_as_const(s->tokens),
                                         .recv = s->recv,
                                         .weights = s->weights,
                                         .slot_weights = s->slot_weights};
        must(s->ctx, epic_dispatch(s->ctx, &args), "dispatch");
    } else {
        const epic_combine_args args = {.layer = &s->layer,
                                        .plan = s->plan,
                                        .plan_bytes = s->plan_bytes,
                                        .rows = epic_rows_as_const(s->recv),
                                        .out = s->out,
                                        .slot_weights = s->slot_weights,
                                        .type = EPIC_BF16};
        must(s->ctx, epic_combine(s->ctx, &args), "combine");
    }
}

static void measure(seat *s)
{
    const double row = (double)s->recv.row_bytes, slots = (double)s->slots;
    const double bytes[NUM_TIMED] = {slots * row, (double)s->o->tokens * s->o->top_k * 4,
                                     slots * row, slots * row};
    for (int what = 0; what < NUM_TIMED; what++) s->board->bytes[what][s->rank] = bytes[what];
    for (int round = -1; round < s->o->rounds; round++)
        for (int what = 0; what < NUM_TIMED; what++) {
            bootstrap(s->ctx);
            const double begin = now();
            run_once(s, what);
            if (round >= 0) s->board->seconds[what][round][s->rank] = now() - begin;
        }
}

static int run_rank(const options *o, board *b, int rank, uint32_t port)
{
    seat s = {.o = o, .board = b, .rank = rank};
    s.layer = (epic_layer){.num_experts = (uint32_t)o->experts, .top_k = (uint32_t)o->top_k};
    epic_bootstrap bootstrap;
    const epic_tcp tcp = {
        .rank = rank, .num_ranks = o->ranks, .port = port, .timeout_ms = 30000};
    must(NULL, epic_bootstrap_tcp(&bootstrap, &tcp), "bootstrap");
    const epic_config config = {.max_tokens = o->tokens,
                                .max_row_bytes = 2 * (int64_t)o->hidden,
                                .timeout_ms = 60000,
                                .backend = o->backend};
    must(NULL, epic_open(&s.ctx, &bootstrap, &config), "open");
    open_seat(&s);
    measure(&s);
    epic_close(s.ctx);
    epic_bootstrap_close(&bootstrap);
    return 0;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of_slowest(const options *o, const board *b, int what)
{
    double slowest[MAX_ROUNDS];
    for (int round = 0; round < o->rounds; round++) {
        slowest[round] = 0;
        for (int r = 0; r < o->ranks; r++)
            if (b->seconds[what][round][r] > slowest[round])
                slowest[round] = b->seconds[what][round][r];
    }
    qsort(slowest, (size_t)o->rounds, sizeof *slowest, ascending);
    return slowest[o->rounds / 2];
}

static void report(const options *o, const board *b)
{
    static const char *const names[NUM_TIMED] = {"copy", "plan", "dispatch", "combine"};
    double copy = 0;
    printf("%d ranks on %ld cores, backend %s: %d tokens of hidden %d bf16, top-%d of %d "
           "experts, median of %d\n",
           o->ranks, sysconf(_SC_NPROCESSORS_ONLN), o->backend, o->tokens, o->hidden, o->top_k,
           o->experts, o->rounds);
    printf("%-10s %12s %10s %14s\n", "", "ms", "GB/s", "of copy's rate");
    for (int what = 0; what < NUM_TIMED; what++) {
        const double seconds = median_of_slowest(o, b, what);
        double bytes = 0;
        for (int r = 0; r < o->ranks; r++) bytes += b->bytes[what][r];
        const double rate = bytes / seconds * 1e-9;
        if (what == COPY) copy = rate;
        printf("%-10s %12.3f %10.2f", names[what], seconds * 1e3, rate);
        if (what == PLAN)
            printf("\n");
        else
            printf(" %13.0f%%\n", 100 * rate / copy);
    }
}

static int usage(const char *why, const char *what)
{
    fprintf(stderr,
            "host: %s %s\nusage: host [--ranks N] [--tokens N] [--hidden N] [--top-k N] "
            "[--experts N] [--rounds N] [--backend NAME]\n",
            why, what);
    return 2;
}

static int read_options(options *o, int argc, char **argv)
{
    for (int i = 1; i < argc; i += 2) {
        const struct {
            const char *name;
            int *value;
            int most;
        } numbers[] = {
            {"--ranks", &o->ranks, MAX_RANKS},   {"--tokens", &o->tokens, 1 << 20},
            {"--hidden", &o->hidden, 1 << 20},   {"--top-k", &o->top_k, 64},
            {"--experts", &o->experts, 1 << 16}, {"--rounds", &o->rounds, MAX_ROUNDS}};
        const size_t n = sizeof numbers / sizeof *numbers;
        size_t at = 0;
        while (at < n && strcmp(argv[i], numbers[at].name)) at++;
        if (i + 1 == argc) return usage("a value is missing after", argv[i]);
        if (!strcmp(argv[i], "--backend")) {
            o->backend = argv[i + 1];
        } else if (at == n) {
            return usage("unknown option", argv[i]);
        } else {
            const int value = atoi(argv[i + 1]);
            if (value < 1 || value > numbers[at].most)
                return usage("no such number:", argv[i + 1]);
            *numbers[at].value = value;
        }
    }
    if (o->top_k > o->experts) return usage("--top-k is more than --experts", "");
    return 0;
}

int main(int argc, char **argv)
{
    options o = {.ranks = 4,
                 .tokens = 4096,
                 .hidden = 7168,
                 .top_k = 8,
                 .experts = 64,
                 .rounds = 5,
                 .backend = "shm"};
    const int bad = read_options(&o, argc, argv);
    if (bad) return bad;
    board *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b == MAP_FAILED) return 1;
    const uint32_t port = 20000 + (uint32_t)getpid() % 20000;
    for (int r = 0; r < o.ranks; r++)
        if (fork() == 0) return run_rank(&o, b, r, port);
    int failed = 0, status;
    while (wait(&status) > 0) failed |= status;
    if (failed) return 1;
    report(&o, b);
    return 0;
}
