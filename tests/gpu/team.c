/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of a test: how they start, find each other, and join a group. */
#include "team.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "copies.h"

#define SEAT_BYTES 8192

#if HOSTS
#define BACKEND epic_backend_hosts
#else
#define BACKEND epic_backend_p2p
#endif

typedef struct bootstrap { /* memory shared by all ranks */
    pthread_barrier_t barrier;
    uint64_t group_id;
    char seats[DEVICE_MAX_RANKS][SEAT_BYTES];
} bootstrap;

static epic_sm_budget sm_budget = {.mutex = PTHREAD_MUTEX_INITIALIZER};
static bootstrap *place;
static char *shared;

static epic_result gather_seats(void *self, const void *mine, void *all, int64_t bytes)
{
    const team_rank *me = self;
    if (bytes > SEAT_BYTES) return epic_fail(EPIC_EINVAL, "the test's bootstrap is too small");
    memcpy(place->seats[me->rank], mine, bytes);
    pthread_barrier_wait(&place->barrier);
    for (int q = 0; q < me->num_ranks; q++)
        memcpy((char *)all + (size_t)q * bytes, place->seats[q], bytes);
    pthread_barrier_wait(&place->barrier);
    return EPIC_OK;
}

void team_barrier(team_rank *me)
{
    (void)me;
    pthread_barrier_wait(&place->barrier);
}

void team_stop(void)
{
    fflush(NULL);
    _exit(1);
}

void *team_shared(void)
{
    return shared;
}

typedef struct seat {
    const team *team;
    int rank;
    int result;
} seat;

/* Returns the SMs of a rank. Ranks that share a GPU get equal parts of three quarters of its
 * SMs. */
static uint32_t sms_of(const team *t)
{
    int sms = 0;
    const int sharers = (t->num_ranks + t->num_gpus - 1) / t->num_gpus;
    CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    const uint32_t share = (uint32_t)(sms * 3 / 4 / sharers);
    if (t->max_sms && t->max_sms < share) return t->max_sms;
    return sharers > 1 ? share : t->max_sms;
}

/* If EPIC_TEST_EPOCH is set, makes the group begin with this epoch. */
static void set_epoch(const team_rank *me)
{
    const char *text = getenv("EPIC_TEST_EPOCH");
    const uint32_t epoch = text ? (uint32_t)strtoul(text, NULL, 10) : 0;
    const epic_group *g = me->group;
    CHECK_CUDA(
        copy_in(g->self.heap[me->rank] + g->self.at.control + offsetof(p2p_control, epoch),
                &epoch, sizeof epoch));
}

/* Returns the host of a rank. EPIC_TEST_RANKS_PER_HOST ranks are one host. If the variable is
 * not set, every rank is a host of its own with backend hosts, and all ranks are on one host
 * with backend p2p. */
static uint64_t host_of(int rank)
{
    const char *text = getenv("EPIC_TEST_RANKS_PER_HOST");
    if (!text) return HOSTS ? (uint64_t)rank + 1 : 1;
    return (uint64_t)(rank / atoi(text)) + 1;
}

uint32_t team_max_top_k(void)
{
    const char *text = getenv("EPIC_TEST_MAX_TOP_K");
    return text ? (uint32_t)atoi(text) : 0;
}

static int run_rank(const team *t, int rank)
{
    team_rank me = {.rank = rank, .num_ranks = t->num_ranks, .shared = shared};
    epic_peer peers[DEVICE_MAX_RANKS], mine;
    memset(&mine, 0, sizeof mine);
    mine.host[0] = host_of(rank);
    mine.process[0] = (uint64_t)getpid();
    if (!HOSTS)
        mine.process[1] = mine.host[0]; /* threads on several hosts are not one process */
    mine.pid = getpid();
    const epic_bootstrap bootstrap = {rank, t->num_ranks, gather_seats, NULL, &me};
    const epic_config config = {.max_tokens = t->max_tokens,
                                .max_row_bytes = t->max_row_bytes,
                                .staging_bytes = t->staging_bytes,
                                .num_ranks = (uint32_t)t->num_ranks,
                                .timeout_ms = t->timeout_ms,
                                .max_sms = sms_of(t),
                                .max_top_k = team_max_top_k()};
    CHECK_CUDA(cudaSetDevice(rank % t->num_gpus));
    gather_seats(&me, &mine, peers, sizeof mine);
    const epic_join join = {&bootstrap, &config, peers, place->group_id, &sm_budget};
    epic_result result = BACKEND.join(&me.group, &join);
    uint32_t results[DEVICE_MAX_RANKS], own = (uint32_t)result;
    gather_seats(&me, &own, results, sizeof own);
    if (result != EPIC_OK) fprintf(stderr, "rank %d: join: %s\n", rank, epic_error(NULL));
    for (int q = 0; q < t->num_ranks; q++)
        if (results[q] != EPIC_OK) return 1;
    if (t->lowlat_tokens) me.group->lowlat_tokens = t->lowlat_tokens;
    CHECK_CUDA(cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking));
    set_epoch(&me);
    const int failed = t->work(&me);
    (void)cudaStreamSynchronize(me.stream);
    (void)cudaStreamDestroy(me.stream);
    BACKEND.leave(me.group);
    return failed;
}

static void *run_thread(void *self)
{
    seat *s = self;
    s->result = run_rank(s->team, s->rank);
    return NULL;
}

/* Runs ranks first to end - 1 as threads of this process. */
static int run_threads(const team *t, int first, int end)
{
    pthread_t threads[DEVICE_MAX_RANKS];
    seat seats[DEVICE_MAX_RANKS];
    int failed = 0;
    for (int q = first; q < end; q++) {
        seats[q] = (seat){t, q, 0};
        pthread_create(&threads[q], NULL, run_thread, &seats[q]);
    }
    for (int q = first; q < end; q++) {
        pthread_join(threads[q], NULL);
        failed += seats[q].result != 0;
    }
    return failed;
}

/* The parent process makes no CUDA call. */
static int run_processes(const team *t)
{
    const int each = t->ranks_per_process;
    pid_t children[DEVICE_MAX_RANKS], ended;
    int count = 0, failed = 0, status;
    fflush(NULL);
    for (int q = 0; q < t->num_ranks; q += each) {
        children[count] = fork();
        if (children[count++] == 0) {
            const int end = q + each < t->num_ranks ? q + each : t->num_ranks;
            const int result = each == 1 ? run_rank(t, q) : run_threads(t, q, end);
            fflush(NULL);
            _exit(result != 0);
        }
    }
    while ((ended = wait(&status)) > 0) {
        failed += status != 0;
        for (int i = 0; i < count; i++) {
            if (children[i] == ended) children[i] = 0;
            /* its ranks would wait forever */
            if (status && children[i]) kill(children[i], SIGKILL);
        }
    }
    return failed;
}

int team_ranks_per_process(const char *argument)
{
    if (!strcmp(argument, "threads")) return 0;
    return !strcmp(argument, "processes") ? 1 : atoi(argument);
}

/* Allows as many open files as the system does: ranks of several hosts have a connection each. */
static void allow_files(void)
{
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
    files.rlim_cur = files.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &files);
}

int team_run(const team *t)
{
    if (t->num_ranks < 1 || t->num_gpus < 1) {
        fprintf(stderr, "%d ranks, %d GPUs: there must be at least one\n", t->num_ranks,
                t->num_gpus);
        return 1;
    }
    static uint64_t groups = 0;
    allow_files();
    pthread_barrierattr_t attributes;
    const size_t bytes = sizeof *place + t->shared_bytes;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* no kernel waits behind another rank's */
    place = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED) return t->num_ranks;
    shared = (char *)(place + 1);
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&place->barrier, &attributes, (unsigned)t->num_ranks);
    place->group_id = 0x1234567 + ++groups * 977 + (uint64_t)getpid() * 65537;
    const int failed =
        t->ranks_per_process > 0 ? run_processes(t) : run_threads(t, 0, t->num_ranks);
    return failed;
}
