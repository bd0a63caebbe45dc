/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the errors of epic_bootstrap_nccl with a small NCCL (fake.h): no NCCL, several, an old
 * one, one without a function, communicators that cannot be used, errors while the ranks wait,
 * and late ranks.
 *
 *   usage: faults LIBRARY OLD SHORT     (three builds of fake.c) */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "emulator.h"
#include "epic/epic.h"
#include "gpu/times.h"
#include "nccl/fake.h"
#include "run.h"

enum { NUM_RANKS = 3, LATE_MS = 400 };

/* Functions of fake.h in the library. */
static __typeof__(ncclCommInitAll) *init_all;
static __typeof__(fake_nccl_behave) *behave;
static __typeof__(ncclCommAbort) *abort_comm;

static struct ncclComm *comms[NUM_RANKS];

static void *load(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK_SAY(library != NULL, "%s", dlerror());
    return library;
}

/* Stores the address of a function of the library. */
static void find_function(void *library, const char *name, void *function)
{
    void *address = dlsym(library, name);
    CHECK_SAY(address != NULL, "no function %s", name);
    memcpy(function, &address, sizeof address);
}

static void new_comms(void)
{
    static const int devices[NUM_RANKS]; /* all on GPU 0 */
    CHECK(init_all(comms, NUM_RANKS, devices) == 0);
}

/* Checks that the bootstrap of rank 0 fails with this result and these words. */
static void check_open(epic_result result, const char *words)
{
    epic_bootstrap b;
    const epic_result got = epic_bootstrap_nccl(&b, comms[0], LATE_MS);
    CHECK_SAY(got == result && strstr(epic_error(NULL), words), "%s: %s, not: %s",
              epic_result_name(got), epic_error(NULL), words);
    epic_bootstrap_close(&b);
    epic_bootstrap_close(&b);
}

/* ------------------------------------------------------------------------ libraries ---- */

/* Checks which library is used. In the end EPIC_NCCL is the first one's path. */
static void check_libraries(char **paths)
{
    struct ncclComm *const none = NULL;
    epic_bootstrap b;
    CHECK(epic_bootstrap_nccl(NULL, none, 0) == EPIC_EINVAL);
    CHECK(strstr(epic_error(NULL), "out is NULL"));
    CHECK(epic_bootstrap_nccl(&b, none, 0) == EPIC_EINVAL);
    CHECK(strstr(epic_error(NULL), "comm is NULL: must be"));

    comms[0] = (struct ncclComm *)(void *)&b; /* no library is there that could read it */
    check_open(EPIC_ENOTSUP, "this process has not loaded libnccl.so");
    setenv("EPIC_NCCL", paths[0], 1);
    check_open(EPIC_ENOTSUP, "which this process has not loaded");
    setenv("EPIC_NCCL", "", 1);

    load(paths[1]);
    check_open(EPIC_ENOTSUP, "is NCCL 2.8.4: must be 2.14 or newer");
    load(paths[2]);
    check_open(EPIC_ENOTSUP, "has loaded 2 copies of NCCL");
    setenv("EPIC_NCCL", paths[2], 1);
    check_open(EPIC_ENOTSUP, "has no function ncclAllGather");

    void *library = load(paths[0]);
    setenv("EPIC_NCCL", paths[0], 1);
    find_function(library, "ncclCommInitAll", &init_all);
    find_function(library, "fake_nccl_behave", &behave);
    find_function(library, "ncclCommAbort", &abort_comm);
    new_comms();
    check_open(EPIC_OK, "");
}

/* -------------------------------------------------------------------- communicators ---- */

static void check_comms(void)
{
    static const struct {
        fake_behavior behavior;
        epic_result result;
        const char *words;
    } cases[] = {
        {{.num_ranks = 1025}, EPIC_EINVAL, "comm has 1025 ranks: must be at most 1024"},
        {{.num_ranks = 1024}, EPIC_OK, ""},
        {{.state = FAKE_INVALID}, EPIC_EINVAL, "comm is in the state \"invalid argument\""},
        {{.state = FAKE_REMOTE_ERROR}, EPIC_EDEVICE, "comm is in the state \"remote error\""},
        {{.polls_to_finish = 1 << 30}, EPIC_ETIMEOUT, "after 400 ms NCCL has not finished"},
        {{.polls_to_finish = 5}, EPIC_OK, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        behave(comms[0], &cases[i].behavior);
        check_open(cases[i].result, cases[i].words);
    }
    behave(comms[0], &(fake_behavior){0});
    CHECK(cudaSetDevice(1) == cudaSuccess);
    check_open(EPIC_EINVAL, "the current device is 1: must be 0, the device of comm");
    CHECK(cudaSetDevice(0) == cudaSuccess);
}

/* ------------------------------------------------------------------------- gathers ---- */

typedef struct trial {
    const char *name;
    fake_behavior behavior[NUM_RANKS];
    int late;             /* this rank gathers after all others have returned; -1: none does */
    bool is_missing;      /* the late rank never gathers, and the communicator is aborted */
    epic_result result;   /* result of the others */
    const char *words[2]; /* in their errors */
    bool is_early;        /* the error is returned before the deadline */
} trial;

typedef struct seat {
    const trial *trial;
    int rank;
    pthread_t thread;
} seat;

static pthread_barrier_t barrier;

/* Gathers 6000 bytes, which are two chunks, and checks those of all ranks. */
static epic_result gather(const epic_bootstrap *b)
{
    static const size_t bytes = 6000;
    unsigned char mine[6000], all[NUM_RANKS * 6000];
    for (size_t i = 0; i < bytes; i++) mine[i] = (unsigned char)(b->rank * 37 + (int)i * 11);
    const epic_result result = b->gather(b->self, mine, all, (int64_t)bytes);
    bool right = true;
    for (int r = 0; r < NUM_RANKS && result == EPIC_OK; r++)
        for (size_t i = 0; i < bytes; i++)
            right &= all[(size_t)r * bytes + i] == (unsigned char)(r * 37 + (int)i * 11);
    CHECK(right);
    return result;
}

static void check_gather(const trial *t, const epic_bootstrap *b)
{
    char text[512];
    const uint64_t begin = run_now_ns();
    const epic_result result = gather(b);
    const double ms = (double)(run_now_ns() - begin) / 1e6;
    bool good = result == t->result;
    for (int i = 0; i < 2 && good; i++)
        good = !t->words[i] || strstr(epic_error(NULL), t->words[i]);
    CHECK_SAY(good, "%s: rank %d: %s: %s", t->name, b->rank, epic_result_name(result),
              epic_error(NULL));
    if (result == EPIC_ETIMEOUT) CHECK(ms >= LATE_MS - 1 && ms < LATE_MS + 1000 + slack_ms());
    if (t->is_early) CHECK_SAY(ms < 5000 + slack_ms(), "%s: %g ms", t->name, ms);
    if (result == EPIC_OK) return;
    snprintf(text, sizeof text, "%s", epic_error(NULL));
    CHECK(b->gather(b->self, NULL, NULL, 0) == result); /* the same error again */
    CHECK(strcmp(text, epic_error(NULL)) == 0);
}

static void *be_rank(void *argument)
{
    const seat *s = argument;
    const trial *t = s->trial;
    epic_bootstrap b;
    CHECK(cudaSetDevice(0) == cudaSuccess);
    behave(comms[s->rank], &t->behavior[s->rank]);
    const uint32_t timeout_ms = t->result == EPIC_ETIMEOUT ? LATE_MS : 60000;
    CHECK(epic_bootstrap_nccl(&b, comms[s->rank], timeout_ms) == EPIC_OK);
    pthread_barrier_wait(&barrier);
    if (s->rank != t->late) check_gather(t, &b);
    if (s->rank != t->late) epic_bootstrap_close(&b); /* while a thread may be in NCCL */
    pthread_barrier_wait(&barrier);
    if (s->rank != t->late) return NULL;
    if (t->is_missing) {
        CHECK(abort_comm(comms[s->rank]) == 0);
    } else {
        /* The first chunk arrives, because the threads of the other ranks still wait in NCCL.
         * No rank sends a second one. */
        unsigned char mine[8] = "", all[NUM_RANKS * 8];
        const epic_result result = b.gather(b.self, mine, all, sizeof mine);
        CHECK_SAY(result == EPIC_EMISMATCH && strstr(epic_error(NULL), "bytes is 8 and 6000"),
                  "%s: %s: %s", t->name, epic_result_name(result), epic_error(NULL));
    }
    epic_bootstrap_close(&b);
    return NULL;
}

/* Runs a trial with new communicators. Then waits until the threads of all bootstraps have
 * freed their memory. */
static void run_trial(const trial *t)
{
    seat seats[NUM_RANKS];
    const uint64_t before = emulator_bytes(false), pinned = emulator_bytes(true);
    new_comms();
    pthread_barrier_init(&barrier, NULL, NUM_RANKS);
    for (int r = 0; r < NUM_RANKS; r++) {
        seats[r] = (seat){.trial = t, .rank = r};
        pthread_create(&seats[r].thread, NULL, be_rank, &seats[r]);
    }
    for (int r = 0; r < NUM_RANKS; r++) pthread_join(seats[r].thread, NULL);
    pthread_barrier_destroy(&barrier);
    if (t->late < 0) CHECK(abort_comm(comms[0]) == 0); /* ends the threads that still wait */
    const uint64_t begin = run_now_ns();
    while ((emulator_bytes(false) != before || emulator_bytes(true) != pinned) &&
           run_now_ns() - begin < 60000000000)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    CHECK_SAY(emulator_bytes(false) == before && emulator_bytes(true) == pinned,
              "%s: memory is not freed", t->name);
}

#define ALL_RANKS(...)                \
    {                                 \
        {__VA_ARGS__}, {__VA_ARGS__}, \
        {                             \
            __VA_ARGS__               \
        }                             \
    }

static const trial trials[] = {
    {.name = "works", .late = -1},
    {.name = "waits in the call", .behavior = ALL_RANKS(.waits_in_call = true), .late = -1},
    {.name = "does not block", .behavior = ALL_RANKS(.is_unblocking = true), .late = -1},
    {.name = "late, in the kernel",
     .late = 1,
     .result = EPIC_ETIMEOUT,
     .words = {"of 3 waited 400 ms in the kernel of ncclAllGather", "gather 1:"}},
    {.name = "late, in the call",
     .behavior = ALL_RANKS(.waits_in_call = true),
     .late = 1,
     .result = EPIC_ETIMEOUT,
     .words = {"of 3 waited 400 ms in ncclAllGather;", "does not report which rank"}},
    {.name = "missing, in the kernel",
     .late = 2,
     .is_missing = true,
     .result = EPIC_ETIMEOUT,
     .words = {"in the kernel of ncclAllGather"}},
    {.name = "missing, in the call",
     .behavior = ALL_RANKS(.waits_in_call = true),
     .late = 0,
     .is_missing = true,
     .result = EPIC_ETIMEOUT,
     .words = {"in ncclAllGather;"}},
    {.name = "an error of the call",
     .behavior = ALL_RANKS(.gather_result = FAKE_SYSTEM_ERROR),
     .late = -1,
     .result = EPIC_EDEVICE,
     .words = {"ncclAllGather failed on rank", "reports \"system error\"; NCCL_DEBUG"},
     .is_early = true},
    {.name = "a dead peer",
     .behavior = ALL_RANKS(.gather_result = FAKE_REMOTE_ERROR),
     .late = -1,
     .result = EPIC_EPEER,
     .words = {"of 3: NCCL reports \"remote error\""},
     .is_early = true},
    {.name = "another collective",
     .behavior = ALL_RANKS(.has_other_data = true),
     .late = -1,
     .result = EPIC_EMISMATCH,
     .words = {"rank 1 was in another collective"},
     .is_early = true},
};

/* The communicator reports an error while the ranks wait for rank 0, which does not gather. */
static void *report_error(void *argument)
{
    (void)argument;
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    for (int r = 1; r < NUM_RANKS; r++)
        behave(comms[r], &(fake_behavior){.state = FAKE_REMOTE_ERROR});
    return NULL;
}

static void check_error_while_waiting(void)
{
    pthread_t thread;
    const trial t = {.name = "an error while waiting",
                     .late = 0,
                     .is_missing = true,
                     .result = EPIC_EPEER,
                     .words = {"the communicator failed on rank", "\"remote error\""},
                     .is_early = true};
    pthread_create(&thread, NULL, report_error, NULL);
    run_trial(&t);
    pthread_join(thread, NULL);
}

int main(int argc, char **argv)
{
    check_begin();
    if (argc != 4) {
        fprintf(stderr, "usage: %s LIBRARY OLD SHORT\n", argv[0]);
        return 2;
    }
    check_libraries(argv + 1);
    check_comms();
    for (size_t i = 0; i < sizeof trials / sizeof *trials; i++) run_trial(&trials[i]);
    check_error_while_waiting();
    return check_end();
}
