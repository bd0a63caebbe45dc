/* SPDX-License-Identifier: Apache-2.0 */
/* Runs each group in its own process, which starts the ranks and sends them signals. They
 * share memory that a launched rank opens by a path. */
#include "stops.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "run.h"

#define MAX_RANKS 8
#define STOPS 2 /* stops per group */
#define STOP_MS 1500
#define DEADLINE_MS 500
#define LATE_MS 300 /* less than the deadline, more than half of it */
#define HANG_S 40
#define COUNT 700 /* number of floats in a sum */

/* Memory that the ranks of one group and the process that stops them share. */
typedef struct stage {
    uint64_t seed;
    int num_ranks;
    int absent; /* rank that stops calling before the stop; -1: none */
    _Atomic pid_t pids[MAX_RANKS];
    _Atomic int opened, closed;
    _Atomic int over;          /* 1: all stops have been made */
    _Atomic int left;          /* 1: the absent rank makes no more calls */
    _Atomic uint64_t awake_ns; /* when the ranks last continued */
    _Atomic long passed, failed;
} stage;

static const stops_way *way;

static void wait_for_count(const _Atomic int *count, int many)
{
    while (atomic_load(count) < many) run_nap_us(500);
}

/* ------------------------------------------------------------------------------ a rank ---- */

/* Sums over the ranks. Checks the sums, and whether any rank has seen that the stops are
 * over. */
static epic_result add_once(epic_context *ctx, uint64_t tag, bool over, bool *all_over)
{
    float data[COUNT];
    const int n = epic_num_ranks(ctx);
    for (int i = 0; i < COUNT; i++) data[i] = (float)(epic_rank(ctx) + i);
    data[0] = over;
    const epic_allreduce_sum_args args = {.call = {.tag = tag}, .data = data, .count = COUNT};
    const epic_result result = way->sum ? way->sum(ctx, &args) : epic_allreduce_sum(ctx, &args);
    if (result != EPIC_OK) return result;
    for (int i = 1; i < COUNT; i++)
        if (data[i] != (float)(n * (n - 1) / 2 + n * i)) return EPIC_EINVAL;
    *all_over = data[0] > 0;
    return EPIC_OK;
}

static void check_absent_is_named(const stage *s, const epic_context *ctx, epic_result result)
{
    epic_failure_info info;
    const long ms = (long)((run_now_ns() - atomic_load(&s->awake_ns)) / 1000000);
    CHECK(epic_failure(ctx, &info) == EPIC_OK);
    CHECK_SAY(result == EPIC_ETIMEOUT, "rank %d: %s: %s", epic_rank(ctx),
              epic_result_name(result), epic_error(ctx));
    CHECK_SAY(info.num_culprits == 1 && info.culprits[0] == s->absent, "rank %d is absent: %s",
              s->absent, epic_error(ctx));
    CHECK_SAY(ms < 10 * DEADLINE_MS, "rank %d was named after %ld ms", s->absent, ms);
}

/* Waits between calls, so that ranks are stopped at different places. The last rank is often
 * late by a part of the deadline and enters the first call after a stop late. The other
 * ranks must have restarted their deadline. */
static void lag(const stage *s, run_random *random, int rank, uint64_t *woken_ns)
{
    const bool late = rank == s->num_ranks - 1 && s->absent < 0;
    if (run_chance(random, 20)) run_nap_us((long)run_below(random, 3000));
    const uint64_t now_ns = atomic_load(&s->awake_ns);
    /* Sleep at most once: a stop may fall into the sleep, and two sleeps would exceed the
     * deadline. */
    if (late && (now_ns != *woken_ns || run_chance(random, 5))) run_nap_us(LATE_MS * 1000);
    *woken_ns = now_ns;
}

static void be_rank(const epic_bootstrap *bootstrap, void *self)
{
    stage *s = self;
    check_seed = s->seed;
    run_random random = {run_mix(s->seed, (uint64_t)bootstrap->rank + 77)};
    const epic_config config = {.timeout_ms = DEADLINE_MS,
                                .max_tokens = 8,
                                .max_row_bytes = 4096,
                                .backend = way->backend};
    if (way->prepare) way->prepare(bootstrap->rank);
    epic_context *ctx;
    const epic_result opened = epic_open(&ctx, bootstrap, &config);
    if (!CHECK_SAY(opened == EPIC_OK, "open: %s", epic_error(ctx))) exit(1);
    atomic_store(&s->pids[bootstrap->rank], getpid());
    atomic_fetch_add(&s->opened, 1);
    epic_result result = EPIC_OK;
    bool all_over = false;
    uint64_t woken_ns = 0;
    for (long i = 0; result == EPIC_OK && !all_over; i++) {
        if (i > 20 && bootstrap->rank == s->absent) break;
        result = add_once(ctx, 1 + (uint64_t)i % 3, atomic_load(&s->over), &all_over);
        lag(s, &random, bootstrap->rank, &woken_ns);
    }
    if (bootstrap->rank == s->absent) {
        atomic_store(&s->left, 1);
        wait_for_count(&s->closed, s->num_ranks - 1);
    } else if (s->absent >= 0) {
        check_absent_is_named(s, ctx, result);
    } else {
        CHECK_SAY(result == EPIC_OK, "rank %d of %d: %s: %s", bootstrap->rank, s->num_ranks,
                  epic_result_name(result), epic_error(ctx));
    }
    atomic_fetch_add(&s->closed, 1);
    epic_close(ctx);
}

/* ------------------------------------------------------------------- a group of ranks ---- */

static void *open_stage(const char *path)
{
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    void *memory = fd < 0
                       ? MAP_FAILED
                       : mmap(NULL, sizeof(stage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory != MAP_FAILED) return memory;
    perror(path);
    exit(1);
}

void stops_be_launched_rank(const stops_way *how, char **arguments,
                            const epic_bootstrap *bootstrap)
{
    way = how;
    check_begin();
    run_alarm(HANG_S);
    stage *s = open_stage(arguments[1]);
    be_rank(bootstrap, s);
    fflush(NULL);
    atomic_fetch_add(&s->passed, check_num_passed());
    atomic_fetch_add(&s->failed, check_num_failed());
}

/* Runs in its own process: starts the ranks and ends with them. */
static void run_ranks(stage *s, int fd)
{
    if (way->launcher) {
        char count[16], program[256] = "", path[64];
        snprintf(count, sizeof count, "%d", s->num_ranks);
        snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getppid(), fd);
        if (readlink("/proc/self/exe", program, sizeof program - 1) > 0)
            execlp(way->launcher, way->launcher, "-n", count, program, path, (char *)NULL);
        perror(way->launcher);
        _exit(127);
    }
    run_alarm(HANG_S);
    if (way->processes)
        run_processes(s->num_ranks, be_rank, s, HANG_S);
    else
        run_threads(s->num_ranks, be_rank, s);
    fflush(NULL);
    _exit(0);
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *at)
{
    (void)status, (void)type, (void)at;
    return remove(path);
}

static void signal_all(const stage *s, int number)
{
    for (int r = 0; r < s->num_ranks; r++) {
        const pid_t pid = atomic_load(&s->pids[r]);
        if (r == 0 || pid != atomic_load(&s->pids[0])) kill(pid, number);
    }
}

static void stop_and_go_on(stage *s)
{
    run_random random = {s->seed};
    const int stops = s->absent < 0 ? STOPS : 1;
    if (s->absent >= 0) wait_for_count(&s->left, 1);
    for (int i = 0; i < stops; i++) {
        const long longest = s->absent < 0 ? 700 : DEADLINE_MS - 200;
        run_nap_us((long)run_below(&random, longest * 1000));
        signal_all(s, SIGSTOP);
        run_nap_us(STOP_MS * 1000);
        atomic_store(&s->awake_ns, run_now_ns());
        signal_all(s, SIGCONT);
    }
    atomic_store(&s->over, 1);
}

/* Runs one group in its own process. */
static void run_group(uint64_t seed, int index)
{
    const int fd = memfd_create("stops", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, sizeof(stage)) != 0) exit(1);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    stage *s = open_stage(path);
    run_random random = {seed};
    s->seed = check_seed = seed;
    s->num_ranks = 2 + index % ((way->most_ranks ? way->most_ranks : MAX_RANKS) - 1);
    s->absent = index % 4 == 3 ? (int)run_below(&random, s->num_ranks) : -1;
    run_alarm(HANG_S + 10);
    /* Gives the launcher its own TMPDIR, because Open MPI launchers that start together race
     * for one folder. */
    char folder[] = "/tmp/epic-stops-XXXXXX";
    const bool has_folder = way->launcher && mkdtemp(folder);
    if (has_folder) setenv("TMPDIR", folder, 1);
    const pid_t pid = run_fork();
    if (pid == 0) run_ranks(s, fd);
    int status = 0;
    bool ended = false;
    while (!ended && atomic_load(&s->opened) < s->num_ranks) {
        ended = waitpid(pid, &status, WNOHANG) == pid;
        run_nap_us(1000);
    }
    if (!ended) stop_and_go_on(s);
    while (!ended && waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
    if (has_folder) nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    CHECK_SAY(status == 0, "the ranks ended with status 0x%x", status);
    CHECK_EQ(s->failed, 0);
    CHECK_EQ(s->closed, s->num_ranks);
    fflush(NULL);
    _exit(0);
}

int stops_main(const stops_way *how)
{
    way = how;
    check_begin();
    const int groups = (int)run_scaled(how->groups);
    printf("seed %llu\n", (unsigned long long)run_seed());
    for (int i = 0, running = 0; i < groups || running > 0;) {
        if (i < groups && running < how->width) {
            fflush(NULL);
            if (run_fork() == 0) run_group(run_mix(run_seed(), (uint64_t)i), i);
            i++;
            running++;
            continue;
        }
        int status = 0;
        if (wait(&status) > 0) running--;
        CHECK_SAY(status == 0, "a group's process ended with status 0x%x", status);
    }
    return check_end();
}
