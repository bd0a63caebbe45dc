/* SPDX-License-Identifier: Apache-2.0 */
/* Tests ranks with too few file descriptors or too little memory. Open fails on that rank, and
 * the other ranks get its sentence, which names what is missing. No rank names a healthy rank
 * or another host, and no rank waits past the deadline. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "run.h"

#define RANKS 3
#define PATIENCE_MS 1500
#define MOST_LIMIT 40 /* more descriptors than a rank needs here */

typedef struct report {
    epic_result result;
    char sentence[512];
} report;

typedef struct trial {
    int poor;  /* the rank with the limit */
    int limit; /* its limit on descriptors */
    bool memory;
    const char *secret;
    uint32_t port;
    report *reports; /* [RANKS] */
} trial;

/* Closes all descriptors below the limit that the test does not need, so that the limit has its
 * full effect. */
static void limit_descriptors(int limit)
{
    const struct rlimit few = {(rlim_t)limit, (rlim_t)limit};
    for (int fd = 3; fd < 256; fd++) close(fd);
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
}

static void limit_memory(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%lu", &pages) == 1);
    if (file) fclose(file);
    const rlim_t bytes = (pages + 256) * (rlim_t)sysconf(_SC_PAGESIZE);
    const struct rlimit little = {bytes, bytes};
    CHECK(setrlimit(RLIMIT_AS, &little) == 0);
}

static epic_result open_and_close(const trial *t, int rank)
{
    const epic_tcp tcp = {.secret = t->secret,
                          .rank = rank,
                          .num_ranks = RANKS,
                          .port = t->port,
                          .timeout_ms = PATIENCE_MS};
    const epic_config config = {.max_tokens = 64,
                                .max_row_bytes = 4096,
                                .max_in_flight = 16,
                                .timeout_ms = PATIENCE_MS,
                                .backend = "shm"};
    epic_bootstrap bootstrap;
    epic_context *ctx = NULL;
    epic_result result = epic_bootstrap_tcp(&bootstrap, &tcp);
    if (result == EPIC_OK) result = epic_open(&ctx, &bootstrap, &config);
    report *out = &t->reports[rank];
    out->result = result;
    snprintf(out->sentence, sizeof out->sentence, "%s", result ? epic_error(NULL) : "");
    epic_bootstrap_close(&bootstrap);
    epic_close(ctx);
    return result;
}

static void run_rank(const epic_bootstrap *bootstrap, void *self)
{
    const trial *t = self;
    const uint64_t start = run_now_ns();
    if (bootstrap->rank == t->poor && t->limit > 0) limit_descriptors(t->limit);
    if (bootstrap->rank == t->poor && t->memory) limit_memory();
    open_and_close(t, bootstrap->rank);
    const int64_t ms = (int64_t)(run_now_ns() - start) / 1000000;
    /* time to connect, to get the error and to join, on a busy machine */
    CHECK_SAY(ms < 3 * PATIENCE_MS + 3000, "rank %d took %lld ms", bootstrap->rank,
              (long long)ms);
}

/* Returns a port that no other program can use while *holder is open. */
static uint32_t hold_port(int *holder)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    const int one = 1;
    *holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(*holder, (struct sockaddr *)&at, sizeof at) == 0);
    getsockname(*holder, (struct sockaddr *)&at, &bytes);
    setsockopt(*holder, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    return ntohs(at.sin_port);
}

static void run_trial(trial *t)
{
    int holder;
    t->port = hold_port(&holder);
    memset(t->reports, 0, RANKS * sizeof *t->reports);
    check_seed = (uint64_t)(1000 * t->poor + t->limit);
    run_processes(RANKS, run_rank, t, 40);
    close(holder);
}

static bool says_why(const char *sentence)
{
    return strstr(sentence, "Too many open files") != NULL;
}

/* Checks the error of another rank: the sentence of the rank with the limit, that this rank did
 * not accept, or that it left. */
static void check_other(const trial *t, int rank)
{
    char name[32];
    const report *r = &t->reports[rank];
    snprintf(name, sizeof name, "rank %d", t->poor);
    const bool not_accepted =
        t->poor == 0 && strstr(r->sentence, "rank 0 did not accept") != NULL;
    CHECK_SAY(says_why(r->sentence) || not_accepted || strstr(r->sentence, name) != NULL,
              "poor rank %d, rank %d: %s", t->poor, rank, r->sentence);
    CHECK_SAY(strstr(r->sentence, "another host") == NULL, "rank %d: %s", rank, r->sentence);
}

/* Returns whether the group opened. */
static bool check_trial(const trial *t)
{
    const report *poor = &t->reports[t->poor];
    if (poor->result == EPIC_OK) {
        for (int r = 0; r < RANKS; r++)
            CHECK_SAY(t->reports[r].result == EPIC_OK, "%s", t->reports[r].sentence);
        return true;
    }
    CHECK_SAY(says_why(poor->sentence) && strstr(poor->sentence, "ulimit -n") != NULL,
              "poor rank %d, limit %d: %s", t->poor, t->limit, poor->sentence);
    for (int r = 0; r < RANKS; r++)
        if (r != t->poor) check_other(t, r);
    return false;
}

static void test_descriptors(report *reports, const char *secret)
{
    for (int poor = 0; poor < RANKS; poor++) {
        int limit = 3, opened = 0;
        for (; limit < MOST_LIMIT && opened < 2; limit++) {
            trial t = {.poor = poor, .limit = limit, .secret = secret, .reports = reports};
            run_trial(&t);
            opened += check_trial(&t);
        }
        CHECK_SAY(opened == 2, "poor rank %d: not even %d descriptors are enough", poor, limit);
        printf("rank %d%s: %d descriptors are enough\n", poor, secret ? ", a secret" : "",
               limit - 2);
    }
}

/* If a rank fails after the bootstrap, all ranks get its sentence word for word. */
static void test_memory(report *reports)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void)reports; /* a sanitizer uses the address space itself */
    printf("memory: left out with sanitizers\n");
#else
    for (int poor = 0; poor < RANKS; poor++) {
        trial t = {.poor = poor, .memory = true, .reports = reports};
        run_trial(&t);
        for (int r = 0; r < RANKS; r++) {
            CHECK_SAY(reports[r].result == EPIC_ENOMEM, "%s: %s",
                      epic_result_name(reports[r].result), reports[r].sentence);
            CHECK_SAY(!strcmp(reports[r].sentence, reports[poor].sentence), "rank %d: %s", r,
                      reports[r].sentence);
        }
        printf("%s\n", reports[poor].sentence);
    }
#endif
}

int main(void)
{
    check_begin();
    run_alarm(300);
    report *reports = run_share(RANKS * sizeof *reports);
    test_memory(reports);
    test_descriptors(reports, NULL);
    return check_end();
}
