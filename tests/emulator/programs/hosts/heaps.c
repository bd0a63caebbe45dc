/* SPDX-License-Identifier: Apache-2.0 */
/* Tests how heaps are allocated and exported (EPIC_HEAP). A closed group leaves no descriptors,
 * addresses or memory behind. If one rank cannot join, all ranks return before the deadline. */
#include <cuda_runtime_api.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "check.h"
#include "emulator.h"
#include "run.h"

enum {
    RANKS = 3,
    PATIENCE_MS = 600000, /* the deadline, which no rank may reach */
    JOIN_GATHER = 3,      /* number of the gather in which ranks exchange handles */
    SECONDS = 120
};

static epic_config config_of(void)
{
    return (epic_config){.max_tokens = 96,
                         .max_row_bytes = 5000,
                         .num_ranks = RANKS,
                         .timeout_ms = PATIENCE_MS,
                         .backend = "p2p"};
}

/* ------------------------------------------------------------------------ what is left ---- */

static int count_descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;
    while (folder && readdir(folder)) count++;
    if (folder) closedir(folder);
    return count;
}

static void check_empty(void)
{
    int allocations, reservations;
    emulator_virtual(&allocations, &reservations);
    CHECK_EQ(allocations, 0);
    CHECK_EQ(reservations, 0);
    CHECK_EQ(emulator_bytes(false), 0);
}

static void open_and_close(const epic_bootstrap *bootstrap, bool is_virtual)
{
    epic_context *ctx;
    int allocations, reservations;
    const epic_config config = config_of();
    CHECK_SAY(epic_open(&ctx, bootstrap, &config) == EPIC_OK, "rank %d: %s", bootstrap->rank,
              epic_error(ctx));
    emulator_virtual(&allocations, &reservations);
    CHECK(is_virtual ? reservations > 0 : reservations == 0);
    epic_close(ctx);
}

static void repeat_open(const epic_bootstrap *bootstrap, void *self)
{
    const bool *is_virtual = self;
    open_and_close(bootstrap, *is_virtual); /* loads libraries, which may keep descriptors */
    const int before = count_descriptors();
    for (int i = 0; i < 3; i++) open_and_close(bootstrap, *is_virtual);
    CHECK_EQ(count_descriptors(), before);
    check_empty();
}

static void open_in_thread(const epic_bootstrap *bootstrap, void *self)
{
    const bool *is_virtual = self;
    for (int i = 0; i < 2; i++) open_and_close(bootstrap, *is_virtual);
}

/* Checks that groups leave nothing, in threads of this process or in processes. Must run with
 * processes first, because this process must have no threads of the emulator when it forks. */
static void test_leaks(bool threads)
{
    static const char *const kinds[] = {"ipc", "descriptor", "fabric", "" /* several hosts */};
    for (int i = 0; i < 4; i++) {
        bool is_virtual = i > 0;
        setenv("EPIC_HEAP", kinds[i], 1);
        setenv("EPIC_HOST", *kinds[i] ? "" : "%r", 1);
        if (!threads) run_processes(RANKS, repeat_open, &is_virtual, SECONDS);
        if (threads) run_threads(RANKS, open_in_thread, &is_virtual);
    }
    unsetenv("EPIC_HOST");
    check_empty();
}

/* ---------------------------------------------------------------------------- refusals ---- */

typedef struct refusal {
    const char *kinds[RANKS]; /* EPIC_HEAP of each rank; NULL: not set */
    epic_result result;
    const char *said;
} refusal;

static void open_refused(const epic_bootstrap *bootstrap, void *self)
{
    const refusal *r = self;
    const char *kind = r->kinds[bootstrap->rank];
    epic_context *ctx;
    const epic_config config = config_of();
    unsetenv("EPIC_HEAP");
    if (kind) setenv("EPIC_HEAP", kind, 1);
    const epic_result result = epic_open(&ctx, bootstrap, &config);
    CHECK_SAY(result == r->result && strstr(epic_error(ctx), r->said), "rank %d: %s: %s",
              bootstrap->rank, epic_result_name(result), epic_error(ctx));
    epic_close(ctx);
    check_empty();
}

static void test_refusals(void)
{
    refusal refusals[] = {
        {{"cuda", "cuda", "cuda"},
         EPIC_EINVAL,
         "rank 0: EPIC_HEAP=cuda: must be ipc, descriptor or fabric"},
        {{NULL, "fabrics", NULL}, EPIC_EINVAL, "rank 1: EPIC_HEAP=fabrics: must be"},
        {{NULL, NULL, "descriptor"},
         EPIC_EMISMATCH,
         "rank 2: EPIC_HEAP=descriptor, and =ipc on rank 0: set the same on every rank"},
        {{"fabric", "ipc", "fabric"},
         EPIC_EMISMATCH,
         "rank 1: EPIC_HEAP=ipc, and =fabric on rank 0: set the same on every rank"},
    };
    refusal no_imex = {{"fabric", "fabric", "fabric"},
                       EPIC_ENOTSUP,
                       "rank 0: device 0: CUDA cannot allocate memory with a fabric handle "
                       "(operation not permitted): "};
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
        run_processes(RANKS, open_refused, &refusals[i], SECONDS);
    setenv("EMULATED_IMEX", "0", 1);
    run_processes(RANKS, open_refused, &no_imex, SECONDS);
    setenv("EMULATED_IMEX", "-", 1);
    no_imex.said = "(operation not supported)";
    run_processes(RANKS, open_refused, &no_imex, SECONDS);
    unsetenv("EMULATED_IMEX");
}

/* --------------------------------------------------------- faults while ranks connect ---- */

/* The fault of rank 1, which happens when rank 1 has received the handles of all ranks. */
typedef enum fault { DIES, CANNOT_OPEN_FILES } fault;

typedef struct seat {
    const epic_bootstrap *inner;
    fault fault;
    int num_gathers;
    struct rlimit limit;
} seat;

static struct rlimit forbid_files(void)
{
    struct rlimit before, limit;
    const int next = open("/dev/null", O_RDONLY | O_CLOEXEC); /* lowest free number */
    CHECK(next >= 0 && getrlimit(RLIMIT_NOFILE, &before) == 0);
    close(next);
    limit = before;
    limit.rlim_cur = (rlim_t)next;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    return before;
}

static epic_result gather_with_fault(void *self, const void *mine, void *all, int64_t bytes)
{
    seat *s = self;
    const int number = ++s->num_gathers;
    const bool is_faulty = s->inner->rank == 1;
    /* This gather exchanges the results of joining. Rank 1 has exited and cannot take part. */
    if (s->fault == DIES && number > JOIN_GATHER) {
        static const char said[] = "rank 1 has ended before its heap was mapped";
        CHECK_SAY(memmem(mine, (size_t)bytes, said, sizeof said - 1) != NULL,
                  "rank %d did not notice that rank 1 has ended", s->inner->rank);
        return EPIC_EPEER;
    }
    if (s->fault == CANNOT_OPEN_FILES && is_faulty && number > JOIN_GATHER)
        setrlimit(RLIMIT_NOFILE, &s->limit);
    const epic_result result = s->inner->gather(s->inner->self, mine, all, bytes);
    if (number != JOIN_GATHER || !is_faulty) return result;
    if (s->fault == DIES) _exit(0);
    s->limit = forbid_files();
    return result;
}

static void open_with_fault(const epic_bootstrap *bootstrap, void *self)
{
    seat s = {.inner = bootstrap, .fault = *(const fault *)self};
    const epic_bootstrap wrapped = {bootstrap->rank, RANKS, gather_with_fault, NULL, &s};
    const epic_config config = config_of();
    epic_context *ctx;
    const uint64_t begin = run_now_ns();
    const epic_result result = epic_open(&ctx, &wrapped, &config);
    CHECK_SAY(s.fault == DIES ? result == EPIC_EPEER
                              : result == EPIC_ENOTSUP &&
                                    strstr(epic_error(ctx), "rank 1: this process has too many "
                                                            "open files"),
              "rank %d: %s: %s", bootstrap->rank, epic_result_name(result), epic_error(ctx));
    CHECK(run_now_ns() - begin < (uint64_t)PATIENCE_MS * 1000000);
    epic_close(ctx);
    check_empty();
}

int main(void)
{
    fault faults[] = {DIES, CANNOT_OPEN_FILES};
    check_begin();
    setenv("EMULATED_FABRIC", "7", 1);
    test_leaks(false);
    test_refusals();
    setenv("EPIC_HEAP", "descriptor", 1);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        run_processes(RANKS, open_with_fault, &faults[i], SECONDS);
    test_leaks(true);
    return check_end();
}
