/* SPDX-License-Identifier: Apache-2.0 */
/* Compares two builds of libepic.so by turns: the same two ranks run plan_dispatch and combine
 * with one library, then with the other, again and again.
 *
 *     build/bench/compare OLD/libepic.so NEW/libepic.so [--backend threads] [--tokens 16]
 *                         [--hidden 1024] [--top-k 4] [--experts 32] [--rounds 400]
 *
 * Backend "threads" runs the ranks as threads, every other backend as processes. Prints the
 * median time of a step of rank 0 with each library, and the median over the rounds of the
 * ratio of both times. A round takes about 10 ms, so a load of the machine affects both times
 * of a round. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "epic/epic.h"

#define RANKS 2
#define MAX_ROUNDS 4001
#define ROUND_SECONDS 0.005 /* time of one measurement */

typedef struct options {
    const char *libraries[2], *backend;
    int tokens, hidden, top_k, experts, rounds;
} options;

/* The functions of one library, and this rank's context and arrays for it. */
typedef struct side {
    __typeof__(epic_bootstrap_threads) *bootstrap_threads;
    __typeof__(epic_bootstrap_tcp_v1) *bootstrap_tcp;
    __typeof__(epic_bootstrap_close) *bootstrap_close;
    __typeof__(epic_open_v1) *open;
    __typeof__(epic_close) *close;
    __typeof__(epic_plan_bytes_v1) *plan_bytes;
    __typeof__(epic_plan_dispatch_v1) *plan_dispatch;
    __typeof__(epic_combine_v1) *combine;
    __typeof__(epic_allreduce_sum_v1) *sum;
    __typeof__(epic_error) *error;
    epic_bootstrap bootstraps[RANKS]; /* of the backend threads */
} side;

typedef struct seat {
    const options *o;
    side *sides;
    int rank;
    epic_context *ctx[2];
    epic_layer layer;
    int64_t bytes_of_plan, slots, row_bytes;
    char *plan, *tokens, *recv, *out;
    int32_t *ids;
    float *weights, *slot_weights;
    double ratios[MAX_ROUNDS], times[2][MAX_ROUNDS];
} seat;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *need(int64_t bytes)
{
    void *memory = calloc(1, (size_t)bytes + 64);
    if (!memory) exit(1);
    return memory;
}

static void must(const side *s, epic_result result, const char *what)
{
    if (result == EPIC_OK) return;
    fprintf(stderr, "compare: %s: %s\n", what, s->error(NULL));
    exit(1);
}

static void load(side *s, const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "compare: %s\n", dlerror());
        exit(2);
    }
    *(void **)&s->bootstrap_threads = dlsym(library, "epic_bootstrap_threads");
    *(void **)&s->bootstrap_tcp = dlsym(library, "epic_bootstrap_tcp_v1");
    *(void **)&s->bootstrap_close = dlsym(library, "epic_bootstrap_close");
    *(void **)&s->open = dlsym(library, "epic_open_v1");
    *(void **)&s->close = dlsym(library, "epic_close");
    *(void **)&s->plan_bytes = dlsym(library, "epic_plan_bytes_v1");
    *(void **)&s->plan_dispatch = dlsym(library, "epic_plan_dispatch_v1");
    *(void **)&s->combine = dlsym(library, "epic_combine_v1");
    *(void **)&s->sum = dlsym(library, "epic_allreduce_sum_v1");
    *(void **)&s->error = dlsym(library, "epic_error");
}

/* Makes the arrays of a rank. Both libraries use the same ones. */
static void make_arrays(seat *s)
{
    const options *o = s->o;
    const int64_t choices = (int64_t)o->tokens * o->top_k;
    unsigned seed = (unsigned)s->rank + 1;
    s->row_bytes = 2 * (int64_t)o->hidden;
    s->layer = (epic_layer){.num_experts = (uint32_t)o->experts, .top_k = (uint32_t)o->top_k};
    s->slots = RANKS * choices;
    s->tokens = need(o->tokens * s->row_bytes);
    s->out = need(o->tokens * s->row_bytes);
    s->recv = need(s->slots * s->row_bytes);
    s->ids = need(choices * 4);
    s->weights = need(choices * 4);
    s->slot_weights = need(s->slots * 4);
    for (int64_t i = 0; i < choices; i++)
        s->ids[i] = (int32_t)(rand_r(&seed) % (unsigned)o->experts);
}

static void open_side(seat *s, int which)
{
    const options *o = s->o;
    side *side = &s->sides[which];
    epic_config config = {.max_tokens = o->tokens,
                          .max_row_bytes = s->row_bytes,
                          .num_ranks = RANKS,
                          .timeout_ms = 60000,
                          .backend = o->backend};
    epic_bootstrap tcp, *bootstrap = &side->bootstraps[s->rank];
    if (strcmp(o->backend, "threads") != 0) {
        const epic_tcp address = {.rank = s->rank,
                                  .num_ranks = RANKS,
                                  .port = 20000 + (uint32_t)getppid() % 20000,
                                  .timeout_ms = 30000};
        bootstrap = &tcp;
        must(side, side->bootstrap_tcp(&tcp, &address, sizeof address), "bootstrap");
    }
    must(side, side->open(&s->ctx[which], bootstrap, &config, sizeof config), "open");
    must(
        side,
        side->plan_bytes(&config, sizeof config, &s->layer, sizeof s->layer, &s->bytes_of_plan),
        "plan_bytes");
    if (!s->plan) s->plan = need(s->bytes_of_plan);
    if (bootstrap == &tcp) side->bootstrap_close(&tcp);
}

static void step(seat *s, int which)
{
    const side *side = &s->sides[which];
    const epic_plan_args plan = {.layer = &s->layer,
                                 .plan = s->plan,
                                 .plan_bytes = s->bytes_of_plan,
                                 .topk_idx = s->ids,
                                 .num_tokens = s->o->tokens,
                                 .capacity = s->slots};
    const epic_dispatch_args dispatch = {
        .tokens = {s->tokens, s->o->tokens, s->row_bytes},
        .recv = {s->recv, s->slots, s->row_bytes},
        .weights = s->weights,
        .slot_weights = s->slot_weights,
    };
    const epic_combine_args combine = {.layer = &s->layer,
                                       .plan = s->plan,
                                       .plan_bytes = s->bytes_of_plan,
                                       .rows = {s->recv, s->slots, s->row_bytes},
                                       .out = {s->out, s->o->tokens, s->row_bytes},
                                       .slot_weights = s->slot_weights,
                                       .type = EPIC_BF16};
    must(side,
         side->plan_dispatch(s->ctx[which], &plan, sizeof plan, &dispatch, sizeof dispatch),
         "plan_dispatch");
    must(side, side->combine(s->ctx[which], &combine, sizeof combine), "combine");
}

/* Returns the time of `steps` steps with one library, after the ranks have met. */
static double run_turn(seat *s, int which, int steps)
{
    float one = 1;
    const epic_allreduce_sum_args sum = {.data = &one, .count = 1};
    must(&s->sides[which], s->sides[which].sum(s->ctx[which], &sum, sizeof sum), "sum");
    const double begin = now();
    for (int i = 0; i < steps; i++) step(s, which);
    return (now() - begin) / steps;
}

static int compare_numbers(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, compare_numbers);
    return values[count / 2];
}

/* Returns the number of steps of a turn. Rank 0 measures it and sends it by a sum. */
static int count_steps(seat *s)
{
    run_turn(s, 0, 20);
    float steps = 0;
    const double seconds = run_turn(s, 0, 50);
    if (s->rank == 0) steps = (float)(int)(ROUND_SECONDS / seconds + 1);
    const epic_allreduce_sum_args sum = {.data = &steps, .count = 1};
    must(&s->sides[0], s->sides[0].sum(s->ctx[0], &sum, sizeof sum), "sum");
    return (int)steps;
}

static void *run_rank(void *argument)
{
    seat *s = argument;
    make_arrays(s);
    for (int which = 0; which < 2; which++) open_side(s, which);
    const int steps = count_steps(s);
    for (int round = 0; round < s->o->rounds; round++) {
        /* every second round begins with the other library */
        for (int turn = 0; turn < 2; turn++) {
            const int which = turn ^ (round & 1);
            s->times[which][round] = run_turn(s, which, steps);
        }
        s->ratios[round] = s->times[1][round] / s->times[0][round];
    }
    for (int which = 0; which < 2; which++) s->sides[which].close(s->ctx[which]);
    if (s->rank > 0) return NULL;
    printf("%s, %d tokens of hidden %d bf16, top-%d of %d experts, %d rounds of %d steps\n",
           s->o->backend, s->o->tokens, s->o->hidden, s->o->top_k, s->o->experts, s->o->rounds,
           steps);
    for (int which = 0; which < 2; which++)
        printf("%-40s %9.2f us\n", s->o->libraries[which],
               1e6 * median(s->times[which], s->o->rounds));
    printf("%-40s %9.4f\n", "second / first", median(s->ratios, s->o->rounds));
    return NULL;
}

static void run_threads(seat *seats)
{
    pthread_t threads[RANKS];
    for (int which = 0; which < 2; which++) {
        side *side = &seats->sides[which];
        must(side, side->bootstrap_threads(side->bootstraps, RANKS, 30000), "bootstrap");
    }
    for (int r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, run_rank, &seats[r]);
    for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
}

static int run_processes(seat *seats)
{
    int failed = 0, status;
    for (int r = 0; r < RANKS; r++)
        if (fork() == 0) {
            run_rank(&seats[r]);
            exit(0);
        }
    for (int r = 0; r < RANKS; r++) failed |= wait(&status) < 0 || status != 0;
    return failed;
}

static int read_options(options *o, int argc, char **argv)
{
    if (argc < 3 || argc % 2 == 0) return 2;
    o->libraries[0] = argv[1];
    o->libraries[1] = argv[2];
    const struct {
        const char *name;
        int *value;
    } numbers[] = {{"--tokens", &o->tokens},
                   {"--hidden", &o->hidden},
                   {"--top-k", &o->top_k},
                   {"--experts", &o->experts},
                   {"--rounds", &o->rounds}};
    for (int i = 3; i < argc; i += 2) {
        size_t n = 0;
        if (!strcmp(argv[i], "--backend")) {
            o->backend = argv[i + 1];
            continue;
        }
        while (n < 5 && strcmp(argv[i], numbers[n].name) != 0) n++;
        if (n == 5) return 2;
        *numbers[n].value = atoi(argv[i + 1]);
        if (*numbers[n].value < 1) return 2;
    }
    return o->rounds <= MAX_ROUNDS ? 0 : 2;
}

int main(int argc, char **argv)
{
    options o = {.backend = "threads",
                 .tokens = 16,
                 .hidden = 1024,
                 .top_k = 4,
                 .experts = 32,
                 .rounds = 400};
    static seat seats[RANKS];
    static side sides[2];
    if (read_options(&o, argc, argv)) {
        fprintf(stderr, "usage: compare OLD/libepic.so NEW/libepic.so [--backend NAME] "
                        "[--tokens N] [--hidden N] [--top-k N] [--experts N] [--rounds N]\n");
        return 2;
    }
    for (int which = 0; which < 2; which++) load(&sides[which], o.libraries[which]);
    for (int r = 0; r < RANKS; r++) seats[r] = (seat){.o = &o, .sides = sides, .rank = r};
    if (strcmp(o.backend, "threads") != 0) return run_processes(seats);
    run_threads(seats);
    return 0;
}
