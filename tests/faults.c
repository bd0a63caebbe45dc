/* SPDX-License-Identifier: Apache-2.0 */
/* Runs each fault in its own process, which starts the ranks, sends them signals and waits
 * for them, so that nothing remains for the next fault. The processes share memory that
 * other programs open by a path. */
#include "faults_rank.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "run.h"

#define HANG_S (way->num_ranks ? 150 : 30)
#define TRIES 6 /* how often a fault is tried if errors are late */

static int tally_fd;
static char lateness[256]; /* description of the late error in the last run of the fault */

/* ------------------------------------------------------------------------- processes ---- */

static char state_of(pid_t pid)
{
    char path[64], text[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "r");
    if (!file) return 'X';
    const bool read = fgets(text, sizeof text, file) != NULL;
    fclose(file);
    const char *name =
        strrchr(text, ')'); /* the process's name in parentheses; its state follows */
    return read && name && name[1] ? name[2] : 'X';
}

static bool await_stop(pid_t pid)
{
    char state;
    while ((state = state_of(pid)) != 'T' && state != 'Z' && state != 'X') run_nap_us(500);
    return state == 'T';
}

/* Sends the victim its signals. */
static void lead_victim(const fault *f, stage *stage)
{
    wait_for(&stage->opened, f->num_ranks);
    const pid_t pid = atomic_load(&stage->victim);
    if (f->middle) {
        run_nap_us(f->delay_us);
        atomic_store(&stage->begin_ns, run_now_ns());
        kill(pid, f->kind == KILLED ? SIGKILL : SIGSTOP);
    }
    if (f->kind != STOPPED && f->kind != PAUSED) return;
    if (!CHECK_SAY(await_stop(pid), "%s: the victim did not stop", f->name)) return;
    if (f->kind == PAUSED) run_nap_us(f->late_us);
    if (f->kind == STOPPED) wait_for(&stage->done, f->num_ranks - 1);
    kill(pid, SIGCONT);
}

static void check_end_of(const fault *f, int rank, int status)
{
    const bool died = rank == f->victim && f->kind == KILLED;
    const bool hung = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;
    if (hung) atomic_fetch_add(&totals->hangs, 1);
    const bool right = died ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                            : WIFEXITED(status) && WEXITSTATUS(status) == 0;
    CHECK_SAY(right, "%s: rank %d %s (status 0x%x)", f->name, rank, hung ? "hung" : "ended",
              status);
}

static void run_as_processes(const fault *f, stage *stage)
{
    const int left = kinds[f->kind].dies ? f->num_ranks - 1 : f->num_ranks;
    run_rendezvous *first = run_rendezvous_new(f->num_ranks), *again = run_rendezvous_new(left);
    pid_t pids[MAX_RANKS];
    for (int i = 0; i < f->num_ranks; i++) {
        pids[i] = run_fork();
        if (pids[i] > 0) continue;
        run_alarm(HANG_S);
        rank_of_fault r = {.f = f, .stage = stage, .bootstrap = run_rendezvous_seat(first, i)};
        const int place = left < f->num_ranks && i > f->victim ? i - 1 : i;
        if (place < left) r.again = run_rendezvous_seat(again, place);
        be_rank(&r);
        fflush(NULL);
        _exit(0);
    }
    lead_victim(f, stage);
    for (int i = 0; i < f->num_ranks; i++) {
        int status = 0;
        while (waitpid(pids[i], &status, 0) < 0 && errno == EINTR) continue;
        check_end_of(f, i, status);
    }
}

/* ---------------------------------------------------------------------------- threads ---- */

static void *be_thread(void *self)
{
    be_rank(self);
    return NULL;
}

static void run_as_threads(const fault *f, stage *stage)
{
    epic_bootstrap first[MAX_RANKS], again[MAX_RANKS];
    rank_of_fault ranks[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    CHECK(epic_bootstrap_threads(first, f->num_ranks, 20000) == EPIC_OK);
    CHECK(epic_bootstrap_threads(again, f->num_ranks, 20000) == EPIC_OK);
    for (int i = 0; i < f->num_ranks; i++) {
        ranks[i] =
            (rank_of_fault){.f = f, .stage = stage, .bootstrap = first[i], .again = again[i]};
        pthread_create(&threads[i], NULL, be_thread, &ranks[i]);
    }
    for (int i = 0; i < f->num_ranks; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < f->num_ranks; i++) {
        epic_bootstrap_close(&first[i]);
        epic_bootstrap_close(&again[i]);
    }
}

static void *share(size_t bytes, int *fd)
{
    *fd = memfd_create("faults", MFD_CLOEXEC);
    const bool good = *fd >= 0 && ftruncate(*fd, (off_t)bytes) == 0;
    void *memory = good ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0) : NULL;
    if (good && memory != MAP_FAILED) return memory;
    perror("memory that ranks share");
    exit(1);
}

/* Errors come within 50 ms if every rank has a core. */
static long choose_slack(int width)
{
    const char *text = getenv("EPIC_TEST_SLACK_MS");
    if (text) return atol(text);
    if (way->num_ranks) return 4000;
    return width * FEW_RANKS > sysconf(_SC_NPROCESSORS_ONLN) ? 1000 : 0;
}

/* --------------------------------------------------------------------------- launched ---- */

enum { ARGUMENT_TALLY = 1, ARGUMENT_STAGE, ARGUMENT_SEED, NUM_ARGUMENTS };

struct faults_rank {
    fault f;
    stage *stage;
};

static int num_left(const fault *f)
{
    return f->num_ranks - kinds[f->kind].dies;
}

static void exec_launcher(const fault *f, int stage_fd)
{
    char program[256] = "", count[16], tally_at[64], stage_at[64], seed[32];
    const char *arguments[32];
    int num = 0;
    while (way->launcher[num] && num < 16) {
        arguments[num] = way->launcher[num];
        num++;
    }
    if (readlink("/proc/self/exe", program, sizeof program - 1) < 0) _exit(127);
    snprintf(count, sizeof count, "%d", f->num_ranks);
    snprintf(tally_at, sizeof tally_at, "/proc/%d/fd/%d", (int)getppid(), tally_fd);
    snprintf(stage_at, sizeof stage_at, "/proc/%d/fd/%d", (int)getppid(), stage_fd);
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)f->seed);
    const char *const rest[] = {"-n", count, program, tally_at, stage_at, seed, NULL};
    for (size_t i = 0; i < sizeof rest / sizeof *rest; i++) arguments[num++] = rest[i];
    execvp(arguments[0], (char *const *)(uintptr_t)arguments);
    perror(arguments[0]);
    _exit(127);
}

/* Prints the launcher's output only if the ranks did not finish. */
static void run_as_launched(const fault *f, stage *stage, int stage_fd)
{
    int out;
    char *said = share(1 << 16, &out);
    const pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        dup2(out, STDOUT_FILENO);
        dup2(out, STDERR_FILENO);
        exec_launcher(f, stage_fd);
    }
    bool over = false;
    while (!over && atomic_load(&stage->opened) < f->num_ranks) {
        over = waitpid(pid, NULL, WNOHANG) == pid;
        run_nap_us(1000);
    }
    if (!over) lead_victim(f, stage);
    while (!over && waitpid(pid, NULL, 0) < 0 && errno == EINTR) continue;
    CHECK_SAY(atomic_load(&stage->closed) == num_left(f), "%s: %d of %d ranks have finished",
              f->name, atomic_load(&stage->closed), num_left(f));
    for (long i = 0; i < atomic_load(&stage->passed); i++) CHECK(true);
    if (!CHECK_EQ(stage->failed, 0) || atomic_load(&stage->closed) != num_left(f))
        fprintf(stderr, "%.4000s\n", said);
}

static void *open_shared(const char *path, size_t bytes)
{
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    void *memory =
        fd < 0 ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory != MAP_FAILED) return memory;
    perror(path);
    exit(1);
}

faults_rank *faults_rank_of(const faults_way *how, char **arguments)
{
    static faults_rank seat;
    way = how;
    check_begin();
    slack_ms = choose_slack(1);
    run_alarm(HANG_S);
    totals = open_shared(arguments[ARGUMENT_TALLY], sizeof *totals);
    seat.stage = open_shared(arguments[ARGUMENT_STAGE], sizeof *seat.stage);
    choose(&seat.f, strtoull(arguments[ARGUMENT_SEED], NULL, 10));
    return &seat;
}

bool faults_rank_dies(const faults_rank *seat, int rank)
{
    return kinds[seat->f.kind].dies && rank == seat->f.victim;
}

void faults_be_rank(const faults_rank *seat, const epic_bootstrap *first,
                    const epic_bootstrap *again)
{
    rank_of_fault r = {
        .f = &seat->f, .stage = seat->stage, .bootstrap = *first, .again = *again};
    be_rank(&r);
    fflush(NULL);
    atomic_fetch_add(&seat->stage->passed, check_num_passed());
    atomic_fetch_add(&seat->stage->failed, check_num_failed());
    atomic_fetch_add(&seat->stage->closed, 1);
    wait_for(&seat->stage->closed, num_left(&seat->f));
}

/* ------------------------------------------------------------------------------ all ---- */

/* Runs the fault once and returns whether errors came late. */
static bool run_once(const fault *f)
{
    int fd;
    stage *stage = share(sizeof *stage, &fd);
    run_alarm(HANG_S + 10);
    if (way->launcher)
        run_as_launched(f, stage, fd);
    else if (way->processes)
        run_as_processes(f, stage);
    else
        run_as_threads(f, stage);
    const bool late = atomic_load(&stage->late) > 0;
    if (late) snprintf(lateness, sizeof lateness, "%s", stage->lateness);
    munmap(stage, sizeof *stage);
    close(fd);
    return late;
}

/* Repeats a fault whose errors came late. On a busy machine they come late in some runs; a
 * slow library is late in each run. */
static void run_fault(const fault *f)
{
    check_seed = f->seed;
    bool late = run_once(f);
    int tries = 1;
    for (; late && tries < TRIES; tries++) late = run_once(f);
    if (tries > 1) atomic_fetch_add(&totals->again, 1);
    if (!CHECK_SAY(!late, "%s: late %d times, at last %s", f->name, tries, lateness))
        atomic_fetch_add(&totals->late, 1);
    fflush(NULL);
    _exit(0);
}

static void finish_one(void)
{
    int status;
    if (wait(&status) < 0) return;
    const bool hung = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;
    if (hung) atomic_fetch_add(&totals->hangs, 1);
    CHECK_SAY(status == 0, "a fault's process %s (status 0x%x)", hung ? "hung" : "ended",
              status);
}

static void print_tally(void)
{
    for (int k = 0; k < NUM_KINDS; k++)
        if (totals->of_kind[k])
            printf("%3d x %-17s the slowest error came %4ld ms after the %s\n",
                   totals->of_kind[k], kinds[k].name, totals->slowest_ms[k],
                   kinds[k].result == EPIC_ETIMEOUT ? "deadline" : "fault");
    printf("%d faults: %d hangs, %d wrong results, %d wrong culprits, %d too late by more than "
           "%ld ms; %d were tried again\n",
           totals->faults, totals->hangs, totals->wrong_results, totals->wrong_culprits,
           totals->late, slack_ms, totals->again);
}

int faults_main(const faults_way *how, int faults, int width)
{
    way = how;
    check_begin();
    totals = share(sizeof *totals, &tally_fd);
    slack_ms = choose_slack(width);
    const int count = (int)run_scaled(faults);
    printf("seed %llu\n", (unsigned long long)run_seed());
    for (int i = 0, running = 0; i < count || running > 0;) {
        if (i < count && running < width) {
            fault f;
            choose(&f, run_mix(run_seed(), (uint64_t)i++));
            totals->faults++;
            totals->of_kind[f.kind]++;
            fflush(NULL);
            if (run_fork() == 0) run_fault(&f);
            running++;
        } else {
            finish_one();
            running--;
        }
    }
    print_tally();
    return check_end();
}
