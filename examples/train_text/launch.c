/* SPDX-License-Identifier: Apache-2.0 */
/* Starts ranks as processes, as threads, or as the processes of a launcher. */
#include "launch.h"

#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "product.h"
#include "train.h"

enum { GRACE_MS = 10000, LOOK_MS = 20 };

/* ------------------------------------------------------------------------------ Ctrl-C ---- */

static atomic_int interrupts;

static void note_interrupt(int signal)
{
    (void)signal;
    atomic_fetch_add(&interrupts, 1);
}

int num_interrupts(void)
{
    return atomic_load(&interrupts);
}

static void watch_interrupts(void)
{
    struct sigaction action = {.sa_handler = note_interrupt, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

/* ---------------------------------------------------------------------------- one rank ---- */

static int run_rank(const options *o, const text *t, const epic_bootstrap *bootstrap)
{
    return o->check ? check(o, t, bootstrap) : train(o, t, bootstrap, NULL);
}

static bool can_be(int num_ranks)
{
    if (num_ranks <= LEAVES && !(num_ranks & (num_ranks - 1))) return true;
    return complain("%d ranks were started: 1, 2, 4 or 8 are possible", num_ranks);
}

/* --------------------------------------------------------------------------- processes ---- */

typedef struct child {
    pid_t pid; /* 0: the process has ended */
    int status;
} child;

/* Returns a port on which no process listens, or 0. */
static uint32_t free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool good = fd >= 0 && !bind(fd, (struct sockaddr *)&address, length) &&
                      !getsockname(fd, (struct sockaddr *)&address, &length);
    if (fd >= 0) close(fd);
    return good ? ntohs(address.sin_port) : 0;
}

static int run_child(const options *o, const text *t, int rank, uint32_t port)
{
    const epic_tcp tcp = {
        .rank = rank, .num_ranks = (int32_t)o->ranks, .port = port, .timeout_ms = 60000};
    const group s = {.rank = rank, .num_ranks = (int)o->ranks};
    epic_bootstrap bootstrap = {0};
    product_start();
    if (o->ranks == 1) return run_rank(o, t, NULL);
    if (!works(&s, epic_bootstrap_tcp(&bootstrap, &tcp), "bootstrap")) return EXIT_FAILED;
    const int status = run_rank(o, t, &bootstrap);
    epic_bootstrap_close(&bootstrap);
    return status;
}

static pid_t start_child(const options *o, const text *t, int rank, uint32_t port)
{
    const pid_t parent = getpid(), pid = fork();
    if (pid) return pid;
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) raise(SIGTERM);
    const int status = run_child(o, t, rank, port);
    fflush(stdout);
    _exit(status);
}

static void signal_all(const child *children, int64_t num, int signal)
{
    for (int64_t r = 0; r < num; r++)
        if (children[r].pid > 0) kill(children[r].pid, signal);
}

/* Returns the exit status of rank r, which has just ended. */
static int judge(const child *c, int64_t r, pid_t pid)
{
    if (WIFEXITED(c->status)) return WEXITSTATUS(c->status);
    complain("rank %lld (process %d) was killed by signal %d (%s)", (long long)r, (int)pid,
             WTERMSIG(c->status), strsignal(WTERMSIG(c->status)));
    return EXIT_FAILED;
}

/* Records children that have ended. Returns how many are left. */
static int64_t reap(child *children, int64_t num, int *status)
{
    int64_t left = 0;
    for (int64_t r = 0; r < num; r++) {
        child *c = &children[r];
        const pid_t pid = c->pid;
        if (pid > 0 && waitpid(pid, &c->status, WNOHANG) == pid) {
            const int its = judge(c, r, pid);
            if (its == EXIT_FAILED || *status == EXIT_GOOD) *status = its;
            c->pid = 0;
        }
        left += c->pid > 0;
    }
    return left;
}

/* Waits for all ranks. Ranks end by themselves after one fails or is interrupted; those that
 * do not are killed. */
static int watch(child *children, int64_t num, int status)
{
    const struct timespec pause = {.tv_nsec = LOOK_MS * 1000000};
    int64_t failed_ms = 0;
    int passed_on = 0;
    bool killed = false;
    while (reap(children, num, &status)) {
        if (status == EXIT_FAILED) failed_ms += LOOK_MS;
        if (!killed && failed_ms > GRACE_MS)
            killed = !complain("not all ranks have ended %d s after one failed: killing them",
                               GRACE_MS / 1000);
        if (killed || num_interrupts() > 1) {
            signal_all(children, num, SIGKILL);
        } else if (num_interrupts() > passed_on) {
            signal_all(children, num, SIGTERM);
            passed_on++;
        }
        nanosleep(&pause, NULL);
    }
    return status;
}

static int launch_processes(const options *o, const text *t)
{
    child children[LEAVES] = {{0}};
    const uint32_t port = free_port();
    int status = EXIT_GOOD;
    if (!port && o->ranks > 1) {
        complain("no port is free on 127.0.0.1, where the ranks are to meet");
        return EXIT_FAILED;
    }
    fflush(stdout);
    for (int rank = 0; rank < o->ranks; rank++) {
        children[rank].pid = start_child(o, t, rank, port);
        if (children[rank].pid > 0) continue;
        complain("rank %d cannot be started", rank);
        status = EXIT_FAILED;
        signal_all(children, o->ranks, SIGKILL);
        break;
    }
    return watch(children, o->ranks, status);
}

/* ----------------------------------------------------------------------------- threads ---- */

typedef struct thread {
    pthread_t id;
    const options *o;
    const text *t;
    epic_bootstrap bootstrap;
    int status;
} thread;

static void *run_thread(void *self)
{
    thread *mine = self;
    mine->status = run_rank(mine->o, mine->t, &mine->bootstrap);
    return NULL;
}

static int launch_threads(const options *o, const text *t)
{
    const group no_group = {0};
    thread threads[LEAVES];
    epic_bootstrap bootstraps[LEAVES];
    int status = EXIT_GOOD;
    product_start();
    if (!works(&no_group, epic_bootstrap_threads(bootstraps, (int32_t)o->ranks, 0),
               "bootstrap"))
        return EXIT_FAILED;
    for (int64_t r = 0; r < o->ranks; r++) {
        threads[r] = (thread){.o = o, .t = t, .bootstrap = bootstraps[r]};
        if (!pthread_create(&threads[r].id, NULL, run_thread, &threads[r])) continue;
        complain("rank %lld cannot be started", (long long)r);
        exit(EXIT_FAILED);
    }
    for (int64_t r = 0; r < o->ranks; r++) {
        pthread_join(threads[r].id, NULL);
        if (threads[r].status == EXIT_FAILED || status == EXIT_GOOD) status = threads[r].status;
        epic_bootstrap_close(&bootstraps[r]);
    }
    return status;
}

/* --------------------------------------------------------------------- other launchers ---- */

static bool is_mpi_rank(void)
{
    return getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_SIZE");
}

/* Returns whether this process is one of several tasks of srun. epic_bootstrap_env connects
 * such tasks. */
static bool is_task(void)
{
    const char *tasks = getenv("SLURM_STEP_NUM_TASKS");
    return tasks && strcmp(tasks, "1") != 0;
}

static bool is_launched(void)
{
    return getenv("WORLD_SIZE") || getenv("RANK") || is_mpi_rank() || is_task();
}

/* Sets a port that is computed from the job's name, because mpirun sets none. */
static void choose_port(void)
{
    const char *job = getenv("PMIX_NAMESPACE");
    char port[8];
    uint32_t hash = 2166136261u;
    if (getenv("MASTER_PORT") || getenv("MASTER_ADDR") || getenv("WORLD_SIZE")) return;
    if (!is_mpi_rank()) return;
    if (!job) job = getenv("PMI_JOBID");
    for (; job && *job; job++) hash = (hash ^ (unsigned char)*job) * 16777619u;
    if (!job) hash = (uint32_t)getppid();
    snprintf(port, sizeof port, "%u", 10000 + hash % 20000);
    setenv("MASTER_PORT", port, 1);
}

static int launch_one(const options *o, const text *t)
{
    epic_bootstrap bootstrap;
    const group no_group = {0};
    choose_port();
    product_start();
    if (!works(&no_group, epic_bootstrap_env(&bootstrap), "bootstrap")) return EXIT_FAILED;
    int status = EXIT_USAGE;
    if (o->ranks && o->ranks != bootstrap.num_ranks)
        complain("--ranks is %lld, and the launcher started %d: leave it away",
                 (long long)o->ranks, bootstrap.num_ranks);
    else if (can_be(bootstrap.num_ranks))
        status = run_rank(o, t, &bootstrap);
    epic_bootstrap_close(&bootstrap);
    return status;
}

int launch(const options *o, const text *t)
{
    options here = *o;
    watch_interrupts();
    if (is_launched()) return launch_one(o, t);
    if (!here.ranks) here.ranks = o->device && !strcmp(o->device, "cuda") ? 1 : 4;
    if (o->backend && !strcmp(o->backend, "threads")) return launch_threads(&here, t);
    return launch_processes(&here, t);
}
