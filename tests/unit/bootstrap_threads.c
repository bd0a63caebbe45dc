/* SPDX-License-Identifier: Apache-2.0 */
/* Tests bootstraps between threads of one process: gathers, and every way in which one rank
 * makes the others fail. */
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "epic/epic.h"
#include "run.h"

#define MOST 8
#define STOPPED_LIMIT_MS 1000
#define STOPPED_LATE_MS 300 /* time from the end of the stop until the late rank comes */

typedef struct trial {
    const char *name;
    int num_ranks;
    int odd;             /* the rank that behaves differently, or -1 */
    uint32_t timeout_ms; /* time limit; 0 means 20 s */
    int num_gathers;
    size_t bytes;
    bool odd_stays_away; /* the odd rank closes only after all other ranks are done */
    bool odd_closes;     /* the odd rank closes after its first gather */
    bool odd_is_longer;  /* the odd rank passes more bytes from its second gather on */
    epic_result result;  /* result of the other ranks */
    const char *words[2];
} trial;

typedef struct seat {
    const trial *trial;
    epic_bootstrap bootstrap;
    pthread_t thread;
    epic_result result;
    bool wrong_bytes;
    char sentence[512];
} seat;

static int failures;

static unsigned char byte_of(int rank, int number, size_t i)
{
    return (unsigned char)(rank * 131 + number * 31 + (int)(i % 251));
}

static epic_result gather(seat *s, int number, size_t bytes)
{
    const size_t ranks = (size_t)s->bootstrap.num_ranks;
    unsigned char *mine = malloc(bytes + 1);
    unsigned char *all = malloc(ranks * bytes + 1);
    for (size_t i = 0; i < bytes; i++) mine[i] = byte_of(s->bootstrap.rank, number, i);
    const epic_result result = s->bootstrap.gather(s->bootstrap.self, mine, all, bytes);
    for (size_t r = 0; r < ranks && result == EPIC_OK; r++)
        for (size_t i = 0; i < bytes; i++)
            if (all[r * bytes + i] != byte_of((int)r, number, i)) s->wrong_bytes = true;
    free(mine);
    free(all);
    return result;
}

static void *be_rank(void *argument)
{
    seat *s = argument;
    const trial *t = s->trial;
    const bool odd = s->bootstrap.rank == t->odd;
    if (odd && t->odd_stays_away) return NULL;
    for (int i = 0; i < t->num_gathers && s->result == EPIC_OK; i++) {
        if (odd && t->odd_closes && i == 1) break;
        s->result = gather(s, i, t->bytes + (odd && t->odd_is_longer && i > 0 ? 8 : 0));
    }
    if (s->result != EPIC_OK) {
        snprintf(s->sentence, sizeof s->sentence, "%s", epic_error(NULL));
        /* after a failure every gather must fail */
        if (gather(s, 0, 8) != s->result) s->wrong_bytes = true;
    }
    if (odd && t->odd_closes) poll(NULL, 0, 30); /* usually the other ranks wait by now */
    epic_bootstrap_close(&s->bootstrap);
    if (s->result != EPIC_OK && strcmp(s->sentence, epic_error(NULL)) != 0)
        s->wrong_bytes = true; /* closing must not change the error text */
    epic_bootstrap_close(&s->bootstrap);
    return NULL;
}

static void check(const trial *t, const seat *s, int rank)
{
    bool good = s->result == t->result && !s->wrong_bytes;
    for (int i = 0; i < 2 && good; i++)
        good = t->words[i] == NULL || strstr(s->sentence, t->words[i]) != NULL;
    if (good) return;
    printf("%s: rank %d of %d: %s%s: %s\n", t->name, rank, t->num_ranks,
           epic_result_name(s->result), s->wrong_bytes ? ", and wrong" : "", s->sentence);
    failures++;
}

static void run(const trial *t)
{
    static seat seats[MOST];
    epic_bootstrap bootstraps[MOST];
    const uint32_t timeout_ms = t->timeout_ms > 0 ? t->timeout_ms : 20000;
    if (epic_bootstrap_threads(bootstraps, t->num_ranks, timeout_ms) != EPIC_OK) {
        printf("%s: %s\n", t->name, epic_error(NULL));
        failures++;
        return;
    }
    for (int r = 0; r < t->num_ranks; r++) {
        seats[r] = (seat){.trial = t, .bootstrap = bootstraps[r]};
        pthread_create(&seats[r].thread, NULL, be_rank, &seats[r]);
    }
    for (int r = 0; r < t->num_ranks; r++) pthread_join(seats[r].thread, NULL);
    if (t->odd_stays_away) epic_bootstrap_close(&seats[t->odd].bootstrap);
    for (int r = 0; r < t->num_ranks; r++)
        if (r != t->odd || t->odd_is_longer) check(t, &seats[r], r);
}

static void *gather_once(void *argument)
{
    seat *s = argument;
    if (s->bootstrap.rank > 0)
        poll(NULL, 0, 300); /* both threads that are rank 0 have connected by then */
    s->result = gather(s, 0, 8);
    snprintf(s->sentence, sizeof s->sentence, "%s", epic_error(NULL));
    return NULL;
}

/* Two threads connect as rank 0. Of three ranks, all connect or rank 2 does not. */
static void check_twice(bool all_come)
{
    seat seats[4] = {0};
    epic_bootstrap bootstraps[3];
    const int num_threads = all_come ? 4 : 3;
    failures += epic_bootstrap_threads(bootstraps, 3, 3000) != EPIC_OK;
    for (int i = 0; i < num_threads; i++) {
        seats[i].bootstrap = bootstraps[i > 0 ? i - 1 : 0];
        pthread_create(&seats[i].thread, NULL, gather_once, &seats[i]);
    }
    for (int i = 0; i < num_threads; i++) pthread_join(seats[i].thread, NULL);
    const bool first_failed = seats[0].result == EPIC_EINVAL;
    const seat *refused = &seats[first_failed ? 0 : 1], *other = &seats[first_failed ? 1 : 0];
    const epic_result wanted = all_come ? EPIC_OK : EPIC_ETIMEOUT;
    const char *words = all_come ? "" : "rank 2 did not join";
    bool good = refused->result == EPIC_EINVAL &&
                strstr(refused->sentence, "another thread is rank 0") != NULL;
    for (int i = 2; i < num_threads; i++) good = good && seats[i].result == wanted;
    good = good && other->result == wanted && strstr(other->sentence, words) != NULL &&
           (all_come || strstr(other->sentence, "another rank joined twice") != NULL);
    for (int i = 0; i < num_threads; i++) good = good && !seats[i].wrong_bytes;
    if (!good) printf("twice: %s; %s\n", refused->sentence, other->sentence);
    failures += !good;
    for (int r = 0; r < 3; r++) epic_bootstrap_close(&bootstraps[r]);
}

/* Rank 0 of a stopped process comes to the gather after the stop, which it detects by the
 * clock. */
static void *gather_after_stop(void *argument)
{
    seat *s = argument;
    if (s->bootstrap.rank == 0) {
        for (int64_t before = run_now_ns(), now = before; now - before < 500000000;) {
            before = now;
            poll(NULL, 0, 5);
            now = run_now_ns();
        }
        poll(NULL, 0, STOPPED_LATE_MS);
    }
    s->result = gather(s, 0, 8);
    return NULL;
}

/* Stops the process of all threads for longer than the time limit. */
static void check_stopped(void)
{
    int status = 0;
    fflush(stdout);
    const pid_t child = run_fork();
    if (child == 0) {
        seat seats[3] = {0};
        epic_bootstrap bootstraps[3];
        int failed = epic_bootstrap_threads(bootstraps, 3, STOPPED_LIMIT_MS) != EPIC_OK;
        for (int i = 0; i < 3; i++) {
            seats[i].bootstrap = bootstraps[i];
            pthread_create(&seats[i].thread, NULL, gather_after_stop, &seats[i]);
        }
        for (int i = 0; i < 3; i++) {
            pthread_join(seats[i].thread, NULL);
            failed |= seats[i].result != EPIC_OK || seats[i].wrong_bytes;
        }
        for (int i = 0; i < 3; i++) epic_bootstrap_close(&bootstraps[i]);
        _exit(failed);
    }
    poll(NULL, 0, 200);
    kill(child, SIGSTOP);
    poll(NULL, 0, STOPPED_LIMIT_MS + 300);
    kill(child, SIGCONT);
    waitpid(child, &status, 0);
    if (status != 0) printf("stopped: the gather failed, status %x\n", (unsigned)status);
    failures += status != 0;
}

static void check_arguments(void)
{
    epic_bootstrap bootstraps[2];
    failures += epic_bootstrap_threads(NULL, 2, 0) != EPIC_EINVAL;
    failures += epic_bootstrap_threads(bootstraps, 0, 0) != EPIC_EINVAL;
    failures += strstr(epic_error(NULL), "num_ranks is 0") == NULL;
    failures += epic_bootstrap_threads(bootstraps, -3, 0) != EPIC_EINVAL;
    failures += epic_bootstrap_threads(bootstraps, 1 << 20, 0) != EPIC_EINVAL;

    /* no rank ever gathers */
    failures += epic_bootstrap_threads(bootstraps, 2, 0) != EPIC_OK;
    failures += bootstraps[0].gather(bootstraps[0].self, NULL, NULL, 4) != EPIC_EINVAL;
    epic_bootstrap_close(&bootstraps[1]);
    epic_bootstrap_close(&bootstraps[0]);
    epic_bootstrap_close(&bootstraps[0]);
    epic_bootstrap_close(NULL);
}

int main(void)
{
    const trial trials[] = {
        {.name = "alone", .num_ranks = 1, .odd = -1, .num_gathers = 20, .bytes = 33},
        {.name = "two", .num_ranks = 2, .odd = -1, .num_gathers = 200, .bytes = 33},
        {.name = "three", .num_ranks = 3, .odd = -1, .num_gathers = 200, .bytes = 33},
        {.name = "eight", .num_ranks = 8, .odd = -1, .num_gathers = 100, .bytes = 33},
        {.name = "no bytes", .num_ranks = 3, .odd = -1, .num_gathers = 100, .bytes = 0},
        {.name = "4 MiB", .num_ranks = 3, .odd = -1, .num_gathers = 2, .bytes = 4 << 20},
        {.name = "away",
         .num_ranks = 4,
         .odd = 2,
         .timeout_ms = 3000,
         .num_gathers = 1,
         .bytes = 8,
         .odd_stays_away = true,
         .result = EPIC_ETIMEOUT,
         .words = {"gather 1: rank 2 did not join", "3000 ms"}},
        {.name = "closes",
         .num_ranks = 4,
         .odd = 1,
         .num_gathers = 3,
         .bytes = 8,
         .odd_closes = true,
         .result = EPIC_EPEER,
         .words = {"gather 2: rank 1 closed"}},
        {.name = "longer",
         .num_ranks = 4,
         .odd = 3,
         .num_gathers = 3,
         .bytes = 16,
         .odd_is_longer = true,
         .result = EPIC_EMISMATCH,
         .words = {"24 on rank 3", "16 on rank"}},
    };
    for (size_t i = 0; i < sizeof trials / sizeof *trials; i++) run(&trials[i]);
    check_twice(true);
    check_twice(false);
    check_stopped();
    check_arguments();
    return failures == 0 ? 0 : 1;
}
