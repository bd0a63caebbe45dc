/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic_open if one rank has few descriptors, small files or little memory. All ranks
 * return the same result at once: EPIC_OK, or an error that names the rank and its limit.
 * Nothing leaks, and no signal is raised. Without the limit the next group opens. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"

#define RANKS 3

typedef struct trial {
    int victim;
    int resource;
    /* how many descriptors, bytes of a file or bytes of memory the victim may still use */
    uint64_t spare;
    bool large; /* true: a group that needs much memory */
    uint32_t result[RANKS];
    char said[RANKS][512];
} trial;

static int num_open(void)
{
    int num = 0;
    for (int fd = 0; fd < 1024; fd++) num += fcntl(fd, F_GETFD) >= 0;
    return num;
}

/* Returns the limit under which this many more descriptors can be opened. */
static rlim_t descriptors(uint64_t spare)
{
    int fd = 0;
    for (uint64_t free = 0;; fd++) {
        if (fcntl(fd, F_GETFD) >= 0) continue;
        if (free++ == spare) return (rlim_t)fd;
    }
}

static rlim_t address_space(uint64_t spare)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%lu", &pages) != 1) pages = 0;
    if (file) fclose(file);
    return pages * 4096 + spare;
}

static rlim_t limit_of(const trial *t)
{
    return t->resource == RLIMIT_NOFILE ? descriptors(t->spare)
           : t->resource == RLIMIT_AS   ? address_space(t->spare)
                                        : (rlim_t)t->spare;
}

static void open_limited(const epic_bootstrap *bootstrap, void *self)
{
    trial *t = self;
    const int rank = bootstrap->rank, before = num_open();
    const epic_config config = {.max_tokens = t->large ? 1 << 20 : 4,
                                .max_row_bytes = t->large ? 1 << 20 : 64,
                                .backend = "shm",
                                .timeout_ms = 20000};
    struct rlimit was, now;
    struct sigaction action;
    getrlimit(t->resource, &was);
    now = was;
    if (rank == t->victim) now.rlim_cur = limit_of(t);
    setrlimit(t->resource, &now);
    epic_context *ctx = NULL;
    const uint64_t start = run_now_ns();
    t->result[rank] = epic_open(&ctx, bootstrap, &config);
    CHECK(run_now_ns() - start < 10000000000ull);
    snprintf(t->said[rank], sizeof t->said[rank], "%s",
             t->result[rank] == EPIC_OK ? "" : epic_error(ctx));
    float one = 1;
    const epic_allreduce_sum_args sum = {.data = &one, .count = 1};
    if (t->result[rank] == EPIC_OK)
        CHECK_SAY(epic_allreduce_sum(ctx, &sum) == EPIC_OK, "%s", epic_error(ctx));
    epic_close(ctx);
    setrlimit(t->resource, &was);
    CHECK_EQ(num_open(), before);
    CHECK(sigaction(SIGXFSZ, NULL, &action) == 0 && action.sa_handler == SIG_DFL);
    CHECK_SAY(epic_open(&ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(ctx));
    epic_close(ctx);
}

/* Returns whether the group opened. If not, every rank must have the same error about the
 * victim, with all words. */
static bool try_limit(int victim, int resource, uint64_t spare, bool large, const char *word,
                      const char *help)
{
    trial *t = run_share(sizeof *t);
    *t = (trial){.victim = victim, .resource = resource, .spare = spare, .large = large};
    char name[32];
    snprintf(name, sizeof name, "open: rank %d: ", victim);
    run_processes(RANKS, open_limited, t, 60);
    for (int r = 0; r < RANKS; r++) {
        const char *said = t->said[r];
        CHECK_SAY(t->result[r] == t->result[0] && strcmp(said, t->said[0]) == 0,
                  "spare %llu on rank %d: rank %d got %s, \"%s\", rank 0 %s, \"%s\"",
                  (unsigned long long)spare, victim, r,
                  epic_result_name((epic_result)t->result[r]), said,
                  epic_result_name((epic_result)t->result[0]), t->said[0]);
        if (t->result[r] == EPIC_OK) continue;
        CHECK_SAY(strncmp(said, name, strlen(name)) == 0 && strstr(said, word) &&
                      strstr(said, help),
                  "spare %llu on rank %d: %s", (unsigned long long)spare, victim, said);
    }
    const bool opened = t->result[0] == EPIC_OK;
    run_unshare(t, sizeof *t);
    return opened;
}

/* Tries all numbers of descriptors from none to enough. */
static void try_descriptors(int victim)
{
    int refused = 0;
    for (uint64_t spare = 0; spare < 40; spare++) {
        if (try_limit(victim, RLIMIT_NOFILE, spare, false, "Too many open files", "ulimit -n"))
            break;
        refused++;
    }
    CHECK_SAY(refused > 2 && refused < 40, "rank %d: %d limits were too small", victim,
              refused);
}

/* Rank 0 creates the memory that all ranks share. The other ranks need no file. */
static void try_files(void)
{
    static const uint64_t sizes[] = {0, 1, 4096, 50000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int victim = 0; victim < RANKS; victim++)
            CHECK_EQ(
                try_limit(victim, RLIMIT_FSIZE, sizes[i], false, "File too large", "ulimit -f"),
                victim > 0);
    CHECK(try_limit(0, RLIMIT_FSIZE, 1ull << 40, false, "", ""));
}

static void try_memory(void)
{
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    for (int victim = 0; victim < RANKS; victim++)
        CHECK(!try_limit(victim, RLIMIT_AS, 1 << 20, true, "emory", "lower config."));
#endif
}

/* A group of one rank needs no file. */
static void alone(const epic_bootstrap *bootstrap, void *self)
{
    (void)bootstrap, (void)self;
    const epic_config config = {.max_tokens = 4, .max_row_bytes = 64};
    epic_context *ctx;
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){0, 0});
    CHECK_SAY(epic_open(&ctx, NULL, &config) == EPIC_OK, "%s", epic_error(NULL));
    epic_close(ctx);
}

int main(void)
{
    check_begin();
    run_alarm(200);
    for (int victim = 0; victim < RANKS; victim++) try_descriptors(victim);
    try_files();
    try_memory();
    run_processes(1, alone, NULL, 20);
    return check_end();
}
