/* SPDX-License-Identifier: Apache-2.0 */
/* Opens, uses, sometimes breaks, and closes groups many times in one process. Its descriptors,
 * memory and threads must not grow. EPIC_TEST_SCALE makes the test longer, and the soak test
 * repeats it. */
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"

#define RANKS 3
#define TOKENS 40
#define TOP_K 2
#define EXPERTS 9
#define HIDDEN 24

typedef struct seat {
    epic_bootstrap bootstrap;
    uint64_t life;
    int breaks; /* the rank that aborts; -1: none */
} seat;

static epic_result work(epic_context *ctx, void *plan, int64_t bytes, run_random *random)
{
    const epic_layer layer = {.num_experts = EXPERTS, .top_k = TOP_K};
    int32_t ids[TOKENS * TOP_K];
    static const int64_t row = HIDDEN * sizeof(float), most = TOKENS * TOP_K * RANKS;
    float x[TOKENS * HIDDEN], weights[TOKENS * TOP_K];
    float *recv = malloc((size_t)(most * row)), *slot_weights = malloc(most * sizeof(float));
    for (int i = 0; i < TOKENS * TOP_K; i++) {
        ids[i] = (int32_t)run_below(random, EXPERTS);
        weights[i] = 0.5f;
    }
    for (int i = 0; i < TOKENS * HIDDEN; i++) x[i] = (float)(i % 17);
    const epic_plan_args args = {.layer = &layer,
                                 .plan = plan,
                                 .plan_bytes = bytes,
                                 .topk_idx = ids,
                                 .num_tokens = TOKENS,
                                 .capacity = most};
    const epic_dispatch_args dispatch = {.tokens = {x, TOKENS, row},
                                         .recv = {recv, most, row},
                                         .weights = weights,
                                         .slot_weights = slot_weights};
    const epic_combine_args combine = {.layer = &layer,
                                       .plan = plan,
                                       .plan_bytes = bytes,
                                       .rows = {recv, most, row},
                                       .out = {x, TOKENS, row},
                                       .slot_weights = slot_weights,
                                       .type = EPIC_F32};
    epic_result result = epic_plan_dispatch(ctx, &args, &dispatch);
    if (result == EPIC_OK) result = epic_combine(ctx, &combine);
    for (int i = 0; result == EPIC_OK && i < TOKENS * HIDDEN; i++)
        if (!CHECK(x[i] == (float)(i % 17))) break; /* the experts returned their input */
    free(recv);
    free(slot_weights);
    return result;
}

static void *live(void *argument)
{
    seat *s = argument;
    run_random random = {run_mix(s->life, (uint64_t)s->bootstrap.rank)};
    epic_context *ctx;
    const epic_config config = {.max_tokens = TOKENS,
                                .max_row_bytes = HIDDEN * sizeof(float),
                                .num_ranks = RANKS,
                                .timeout_ms = 60000};
    const epic_layer layer = {.num_experts = EXPERTS, .top_k = TOP_K};
    int64_t bytes;
    CHECK(epic_plan_bytes(&config, &layer, &bytes) == EPIC_OK);
    void *plan = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    CHECK(epic_open(&ctx, &s->bootstrap, &config) == EPIC_OK);
    epic_result result = EPIC_OK;
    for (int step = 0; step < 4 && result == EPIC_OK; step++) {
        if (step == 2 && s->breaks == s->bootstrap.rank) {
            epic_abort(ctx, 0, "on purpose");
            break;
        }
        result = work(ctx, plan, bytes, &random);
    }
    if (s->breaks < 0) CHECK_EQ(result, EPIC_OK);
    if (s->breaks >= 0 && s->breaks != s->bootstrap.rank) CHECK_EQ(result, EPIC_EPEER);
    epic_close(ctx);
    free(plan);
    return NULL;
}

static void one_life(uint64_t life)
{
    epic_bootstrap bootstraps[RANKS];
    pthread_t threads[RANKS];
    seat seats[RANKS];
    run_random random = {life};
    const int breaks = run_chance(&random, 40) ? (int)run_below(&random, RANKS) : -1;
    CHECK(epic_bootstrap_threads(bootstraps, RANKS, 60000) == EPIC_OK);
    for (int r = 0; r < RANKS; r++) {
        seats[r] = (seat){bootstraps[r], life, breaks};
        CHECK(pthread_create(&threads[r], NULL, live, &seats[r]) == 0);
    }
    for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < RANKS; r++) epic_bootstrap_close(&bootstraps[r]);
}

static int entries_of(const char *path)
{
    int num = 0;
    DIR *folder = opendir(path);
    while (folder && readdir(folder)) num++;
    if (folder) closedir(folder);
    return num;
}

static long resident_kb(void)
{
    char line[256];
    long kb = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status)) sscanf(line, "VmRSS: %ld", &kb);
    if (status) fclose(status);
    return kb;
}

int main(void)
{
    enum { WARM = 60 };
    check_begin();
    run_alarm(600);
    const int lives = (int)run_scaled(120) + WARM;
    int files = 0, tasks = 0;
    long kb = 0;
    for (int life = 0; life < lives; life++) {
        if (life == WARM) {
            files = entries_of("/proc/self/fd");
            tasks = entries_of("/proc/self/task");
            kb = resident_kb();
        }
        one_life(run_mix(run_seed(), (uint64_t)life));
    }
    CHECK_EQ(entries_of("/proc/self/fd"), files);
    /* A joined thread may still be visible for a moment. */
    for (int i = 0; i < 5000 && entries_of("/proc/self/task") > tasks; i++) run_nap_us(1000);
    CHECK_EQ(entries_of("/proc/self/task"), tasks);
/* sanitizers keep freed memory */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    /* This is less than 20 KB for each group, even for the smallest number of groups. */
    CHECK_SAY(resident_kb() < kb + 2048, "%ld KB, once warm %ld", resident_kb(), kb);
#endif
    printf("%d lives: %ld KB, once warm %ld\n", lives, resident_kb(), kb);
    return check_end();
}
