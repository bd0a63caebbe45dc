/* SPDX-License-Identifier: Apache-2.0 */
/* Starts the ranks of a test and counts its checks. */
#include "run.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define MAX_PRINTED 40
#define BOOTSTRAP_BYTES 16384 /* largest number of bytes that a rank gathers */
#define BOOTSTRAP_S 30
#define BOOTSTRAP_MANY_S 600 /* with more than 64 ranks, which may share few cores */

/* ----------------------------------------------------------------------------- checks ---- */

typedef struct counts {
    _Atomic long passed, failed;
} counts;

_Thread_local uint64_t check_seed;
static counts *total;

void check_begin(void)
{
    total = run_share(sizeof *total);
    setvbuf(stdout, NULL, _IOLBF, 0);
}

bool check_that(bool right, const char *file, int line, const char *format, ...)
{
    if (right) {
        atomic_fetch_add(&total->passed, 1);
        return true;
    }
    if (atomic_fetch_add(&total->failed, 1) >= MAX_PRINTED) return false;
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    const char *slash = strrchr(file, '/');
    fprintf(stderr, "%s:%d: seed %llx: %s\n", slash ? slash + 1 : file, line,
            (unsigned long long)check_seed, text);
    return false;
}

bool check_equal(long long a, long long b, const char *file, int line, const char *a_text,
                 const char *b_text)
{
    return check_that(a == b, file, line, "%s is %lld, %s is %lld", a_text, a, b_text, b);
}

long check_num_passed(void)
{
    return atomic_load(&total->passed);
}

long check_num_failed(void)
{
    return atomic_load(&total->failed);
}

int check_end(void)
{
    printf("%ld passed, %ld failed\n", check_num_passed(), check_num_failed());
    fflush(stdout);
    return check_num_failed() ? 1 : 0;
}

int check_skip(const char *why)
{
    printf("skipped: %s\n", why);
    return 77;
}

/* ------------------------------------------------------------------------------ tools ---- */

void *run_share(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return memory;
}

void run_unshare(void *memory, size_t bytes)
{
    munmap(memory, bytes);
}

pid_t run_fork(void)
{
    const pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1); /* the parent ended before prctl */
    }
    return pid;
}

#define BUSY 3 /* factor for time limits on a busy machine */

void run_alarm(unsigned seconds)
{
    signal(SIGALRM, SIG_DFL);
    alarm(BUSY * seconds);
}

/* Sanitizers make everything several times slower. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#endif

bool run_is_sanitized(void)
{
#ifdef SANITIZED
    return true;
#else
    return false;
#endif
}

double run_scale(void)
{
    const double usual = run_is_sanitized() ? 0.25 : 1;
    const char *text = getenv("EPIC_TEST_SCALE");
    const double scale = text ? atof(text) : usual;
    return scale > 0 ? scale : usual;
}

int64_t run_scaled(int64_t count)
{
    const int64_t scaled = (int64_t)((double)count * run_scale() + 0.5);
    return scaled > 1 ? scaled : 1;
}

uint64_t run_seed(void)
{
    const char *text = getenv("EPIC_TEST_SEED");
    const uint64_t seed = text ? strtoull(text, NULL, 0) : 1;
    return seed ? seed : run_mix(run_now_ns(), (uint64_t)getpid());
}

uint64_t run_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void run_nap_us(long us)
{
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

uint64_t run_mix(uint64_t a, uint64_t b)
{
    run_random random = {a ^ (b + 0x632be59bd9b4e019ull) * 0x9e3779b97f4a7c15ull};
    return run_next(&random);
}

uint64_t run_next(run_random *random)
{
    uint64_t x = random->state += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

int64_t run_below(run_random *random, int64_t limit)
{
    return limit > 0 ? (int64_t)(run_next(random) % (uint64_t)limit) : 0;
}

int64_t run_between(run_random *random, int64_t first, int64_t last)
{
    return first + run_below(random, last - first + 1);
}

bool run_chance(run_random *random, int percent)
{
    return run_below(random, 100) < percent;
}

/* ---------------------------------------------------------------------------- threads ---- */

typedef struct rank_thread {
    epic_bootstrap bootstrap;
    run_body *body;
    void *self;
    uint64_t seed;
} rank_thread;

static void *run_thread(void *argument)
{
    rank_thread *t = argument;
    check_seed = t->seed;
    t->body(&t->bootstrap, t->self);
    return NULL;
}

void run_threads(int num_ranks, run_body *body, void *self)
{
    epic_bootstrap bootstraps[RUN_MAX_RANKS];
    rank_thread ranks[RUN_MAX_RANKS];
    pthread_t threads[RUN_MAX_RANKS];
    const uint32_t seconds = num_ranks > 64 ? BOOTSTRAP_MANY_S : BOOTSTRAP_S;
    if (!CHECK(epic_bootstrap_threads(bootstraps, num_ranks, seconds * 1000) == EPIC_OK))
        return;
    for (int r = 0; r < num_ranks; r++) {
        ranks[r] = (rank_thread){bootstraps[r], body, self, check_seed};
        pthread_create(&threads[r], NULL, run_thread, &ranks[r]);
    }
    for (int r = 0; r < num_ranks; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < num_ranks; r++) epic_bootstrap_close(&bootstraps[r]);
}

/* -------------------------------------------------------------------------- processes ---- */

struct run_rendezvous {
    int num_ranks;
    _Atomic int arrived, gathers;
    struct seat {
        run_rendezvous *rendezvous;
        int rank, gathers;
    } seats[RUN_MAX_RANKS];
    unsigned char given[2][RUN_MAX_RANKS][BOOTSTRAP_BYTES]; /* two buffers, used in turn */
};

/* The last rank that arrives completes the gather. The others poll up to the deadline. */
static epic_result gather(void *self, const void *mine, void *all, int64_t bytes)
{
    struct seat *seat = self;
    run_rendezvous *m = seat->rendezvous;
    const int turn = seat->gathers++;
    if (bytes > BOOTSTRAP_BYTES) return EPIC_ENOMEM;
    memcpy(m->given[turn % 2][seat->rank], mine, bytes);
    if (atomic_fetch_add(&m->arrived, 1) + 1 == m->num_ranks) {
        atomic_store(&m->arrived, 0);
        atomic_fetch_add(&m->gathers, 1);
    }
    const uint64_t end = run_now_ns() + BOOTSTRAP_S * 1000000000ull;
    while (atomic_load(&m->gathers) <= turn) {
        if (run_now_ns() > end) return EPIC_ETIMEOUT;
        run_nap_us(200);
    }
    for (int r = 0; r < m->num_ranks; r++)
        memcpy((unsigned char *)all + (size_t)r * bytes, m->given[turn % 2][r], bytes);
    return EPIC_OK;
}

run_rendezvous *run_rendezvous_new(int num_ranks)
{
    run_rendezvous *m = run_share(sizeof *m);
    m->num_ranks = num_ranks;
    for (int r = 0; r < num_ranks; r++) m->seats[r] = (struct seat){m, r, 0};
    return m;
}

epic_bootstrap run_rendezvous_seat(run_rendezvous *m, int rank)
{
    return (epic_bootstrap){
        .rank = rank, .num_ranks = m->num_ranks, .gather = gather, .self = &m->seats[rank]};
}

void run_rendezvous_free(run_rendezvous *m)
{
    run_unshare(m, sizeof *m);
}

static bool check_exit(int rank, int status)
{
    const bool exited = WIFEXITED(status);
    return CHECK_SAY(exited && WEXITSTATUS(status) == 0, "rank %d ended with %s %d%s", rank,
                     exited ? "exit status" : "signal",
                     exited ? WEXITSTATUS(status) : WTERMSIG(status),
                     !exited && WTERMSIG(status) == SIGALRM ? ": it hung" : "");
}

/* If a rank crashes, the other ranks may wait for it until their deadline, so they are
 * killed a little later. */
static void wait_for_all(pid_t *pids, int num_ranks)
{
    uint64_t crashed_ns = 0;
    for (int left = num_ranks; left > 0;) {
        for (int r = 0; r < num_ranks; r++) {
            int status;
            if (!pids[r] || waitpid(pids[r], &status, WNOHANG) != pids[r]) continue;
            if (!check_exit(r, status)) crashed_ns = run_now_ns();
            pids[r] = 0;
            left--;
        }
        const bool late = crashed_ns && run_now_ns() > crashed_ns + 5000000000ull;
        for (int r = 0; r < num_ranks && late; r++)
            if (pids[r]) kill(pids[r], SIGKILL);
        run_nap_us(2000);
    }
}

void run_processes(int num_ranks, run_body *body, void *self, unsigned seconds)
{
    pid_t pids[RUN_MAX_RANKS];
    run_rendezvous *rendezvous = run_rendezvous_new(num_ranks);
    fflush(NULL);
    for (int r = 0; r < num_ranks; r++) {
        pids[r] = run_fork();
        if (pids[r] > 0) continue;
        run_alarm(seconds);
        const epic_bootstrap bootstrap = run_rendezvous_seat(rendezvous, r);
        body(&bootstrap, self);
        fflush(NULL);
        _exit(0);
    }
    wait_for_all(pids, num_ranks);
    run_rendezvous_free(rendezvous);
}

uint32_t run_free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) ||
        getsockname(fd, (struct sockaddr *)&at, &length))
        abort();
    close(fd);
    return ntohs(at.sin_port);
}
