/* SPDX-License-Identifier: Apache-2.0 */
/* Bootstraps over MPI: gathers, ranks that are missing, and epic_open() with a communicator and
 * no bootstrap. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"
#include "step.h"

#define TIMEOUT_MS 400

static int world_rank, world_size;

static unsigned char byte_of(int rank, size_t at)
{
    return (unsigned char)(rank * 37 + (int)(at * 11));
}

static void gather(const epic_bootstrap *bootstrap, size_t bytes)
{
    unsigned char *mine = malloc(bytes + 1), *all = malloc(bytes * (size_t)world_size + 1);
    for (size_t i = 0; i < bytes; i++) mine[i] = byte_of(world_rank, i);
    CHECK_SAY(bootstrap->gather(bootstrap->self, mine, all, bytes) == EPIC_OK,
              "gather of %zu: %s", bytes, epic_error(NULL));
    bool right = true;
    for (int r = 0; r < world_size; r++)
        for (size_t i = 0; i < bytes; i++) right &= all[(size_t)r * bytes + i] == byte_of(r, i);
    CHECK_SAY(right, "gather of %zu brought something else", bytes);
    free(mine);
    free(all);
}

static bool bootstraps(epic_bootstrap *bootstrap, const MPI_Comm *comm, uint32_t timeout_ms)
{
    return CHECK_SAY(epic_bootstrap_mpi(bootstrap, comm, timeout_ms) == EPIC_OK, "%s",
                     epic_error(NULL));
}

static void check_gathers(const MPI_Comm *comm)
{
    epic_bootstrap bootstrap;
    if (!bootstraps(&bootstrap, comm, 20000)) return;
    CHECK_EQ(bootstrap.rank, world_rank);
    CHECK_EQ(bootstrap.num_ranks, world_size);
    for (int turn = 0; turn < 3; turn++) {
        gather(&bootstrap, 8);
        gather(&bootstrap, 0);
        gather(&bootstrap, 300000);
    }
    epic_bootstrap_close(&bootstrap);
}

/* Opens a context with only a communicator. */
static void check_open(const char *backend, MPI_Comm *comm)
{
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .timeout_ms = 20000,
                                .max_in_flight = 4,
                                .backend = backend,
                                .native = comm};
    epic_context *ctx;
    const epic_result result = epic_open(&ctx, NULL, &config);
    if (CHECK_SAY(result == EPIC_OK, "open: %s", epic_error(ctx))) {
        CHECK_EQ(epic_num_ranks(ctx), world_size);
        CHECK_EQ(epic_rank(ctx), world_rank);
        CHECK(step_works(ctx, 3));
    }
    epic_close(ctx);
}

/* The last rank does not take part. The communicator cannot be used afterwards. */
static void check_missing(bool opens)
{
    MPI_Comm comm;
    char name[32];
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    const uint64_t begin = run_now_ns();
    if (world_rank < world_size - 1) {
        const epic_config config = {
            .max_tokens = 1, .max_row_bytes = 1, .timeout_ms = TIMEOUT_MS, .native = &comm};
        epic_bootstrap bootstrap;
        epic_context *ctx = NULL;
        const epic_result result = opens ? epic_open(&ctx, NULL, &config)
                                         : epic_bootstrap_mpi(&bootstrap, &comm, TIMEOUT_MS);
        const long ms = (long)((run_now_ns() - begin) / 1000000);
        snprintf(name, sizeof name, " rank %d,", world_size - 1);
        CHECK_SAY(result == EPIC_ETIMEOUT && strstr(epic_error(ctx), name),
                  "rank %d of %d: %s: %s", world_rank, world_size, epic_result_name(result),
                  epic_error(ctx));
        CHECK_SAY(ms >= TIMEOUT_MS - 10 && ms < TIMEOUT_MS + 3000, "after %ld ms", ms);
        epic_close(ctx);
        if (!opens) epic_bootstrap_close(&bootstrap);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

/* A rank leaves between two gathers. */
static void check_left(void)
{
    epic_bootstrap bootstrap;
    char mine[4] = "", name[32];
    char *all = malloc(4 * (size_t)world_size);
    if (!bootstraps(&bootstrap, NULL, TIMEOUT_MS)) return;
    if (world_rank < world_size - 1) {
        snprintf(name, sizeof name, " rank %d,", world_size - 1);
        epic_result result = bootstrap.gather(bootstrap.self, mine, all, sizeof mine);
        CHECK_EQ(result, EPIC_ETIMEOUT);
        CHECK_SAY(strstr(epic_error(NULL), name) != NULL, "%s", epic_error(NULL));
        result = bootstrap.gather(bootstrap.self, mine, all, sizeof mine);
        CHECK_SAY(result == EPIC_ETIMEOUT && strstr(epic_error(NULL), name), "%s",
                  epic_error(NULL));
    }
    MPI_Barrier(MPI_COMM_WORLD);
    epic_bootstrap_close(&bootstrap);
    free(all);
}

/* Ranks that pass different numbers of bytes get an error. */
static void check_sizes(void)
{
    epic_bootstrap bootstrap;
    char mine[64] = "";
    char *all = calloc((size_t)world_size, sizeof mine);
    if (!bootstraps(&bootstrap, NULL, 20000)) return;
    const epic_result result =
        bootstrap.gather(bootstrap.self, mine, all, world_rank == 0 ? 64 : 32);
    if (world_rank == 0) CHECK_EQ(result, EPIC_EMISMATCH);
    if (world_rank == 0)
        CHECK_SAY(strstr(epic_error(NULL), "64 bytes"), "%s", epic_error(NULL));
    if (world_size == 2) CHECK_EQ(result, EPIC_EMISMATCH);
    MPI_Barrier(MPI_COMM_WORLD);
    epic_bootstrap_close(&bootstrap);
    free(all);
}

static void check_refusals(void)
{
    MPI_Comm none = MPI_COMM_NULL;
    epic_bootstrap bootstrap;
    CHECK(epic_bootstrap_mpi(NULL, NULL, 0) == EPIC_EINVAL);
    CHECK(epic_bootstrap_mpi(&bootstrap, &none, 0) == EPIC_EINVAL);
    CHECK_SAY(strstr(epic_error(NULL), "MPI_COMM_NULL"), "%s", epic_error(NULL));
    epic_bootstrap_close(&bootstrap);
}

int main(int argc, char **argv)
{
    int level;
    MPI_Comm comm = MPI_COMM_WORLD;
    epic_bootstrap bootstrap;
    check_begin();
    CHECK(epic_bootstrap_mpi(&bootstrap, &comm, 0) == EPIC_EINVAL); /* before MPI_Init */
    CHECK_SAY(strstr(epic_error(NULL), "MPI_Init_thread"), "%s", epic_error(NULL));
    const bool theirs = argc > 1 && strcmp(argv[1], "theirs") == 0;
    if (!theirs) MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    if (theirs && bootstraps(&bootstrap, NULL, 20000)) epic_bootstrap_close(&bootstrap);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    run_alarm(100);
    check_refusals();
    check_gathers(NULL);
    check_gathers(&comm);
    check_open("mpi", &comm);
    check_open(NULL, &comm);
    if (world_size > 1) check_missing(false);
    if (world_size > 1) check_missing(true);
    if (world_size > 1) check_left();
    if (world_size > 1) check_sizes();
    check_gathers(&comm);
    long mine = check_num_failed(), all = 0;
    MPI_Allreduce(&mine, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    MPI_Finalize();
    return all ? 1 : 0;
}
