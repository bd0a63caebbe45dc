/* SPDX-License-Identifier: Apache-2.0 */
/* Compares epic_allreduce_sum with MPI_Allreduce of the same number of floats, in the same
 * processes.
 *
 *     mpiexec -n 4 build/bench/sum [--backend shm]  ranks are the processes of the job
 *     build/bench/sum [--ranks 4]                   ranks are threads; epic_allreduce_sum only
 *
 * Each round times a series of consecutive calls, and the kinds of calls take turns.  Prints
 * rank 0's microseconds per call in its fastest round, because other programs may slow rounds
 * down. */
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifdef EPIC_BENCH_MPI
#include <mpi.h>
#endif

#include "clock.h"
#include "epic/epic.h"

#define MAX_RANKS 64
#define MAX_COUNT 65536
#define FLOATS_A_ROUND \
    (1 << 19) /* a round has this many floats, in at most CALLS_A_ROUND calls */
#define CALLS_A_ROUND 200

enum kind { BY_RANK, TREE, ALLREDUCE, NUM_KINDS };

typedef struct options {
    int ranks, rounds;
    const char *backend;
    bool mpi;
} options;

typedef struct seat {
    const options *o;
    epic_bootstrap bootstrap;
    epic_context *ctx;
    int rank;
    float *data;
} seat;

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "sum: %s: %s\n", what, why);
    exit(1);
}

static void allreduce(float *data, int count)
{
#ifdef EPIC_BENCH_MPI
    MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
#else
    (void)data, (void)count;
#endif
}

static void call(seat *s, enum kind kind, int count)
{
    if (kind == ALLREDUCE) {
        allreduce(s->data, count);
        return;
    }
    const epic_allreduce_sum_args args = {
        .data = s->data, .count = count, .order = kind == TREE ? EPIC_TREE : EPIC_BY_RANK};
    if (epic_allreduce_sum(s->ctx, &args) != EPIC_OK)
        fail("epic_allreduce_sum", epic_error(s->ctx));
}

/* Checks a sum.  The inputs are integers, so every order of addition gives the exact result. */
static void check(seat *s, enum kind kind, int count)
{
    const int n = s->o->ranks;
    for (int i = 0; i < count; i++) s->data[i] = (float)(s->rank + i % 5);
    call(s, kind, count);
    for (int i = 0; i < count; i++)
        if (s->data[i] != (float)(n * (n - 1) / 2 + n * (i % 5))) fail("check", "a wrong sum");
}

static double time_calls(seat *s, enum kind kind, int count)
{
    const int fitting = FLOATS_A_ROUND / count;
    const int calls = fitting < CALLS_A_ROUND ? fitting : CALLS_A_ROUND;
    memset(s->data, 0, (size_t)count * sizeof *s->data);
    call(s, kind, count); /* this call also waits for all ranks */
    const double begin = now_us();
    for (int i = 0; i < calls; i++) call(s, kind, count);
    return (now_us() - begin) / calls;
}

static bool is_possible(const options *o, enum kind kind)
{
    return kind == ALLREDUCE ? o->mpi : kind == BY_RANK || (o->ranks & (o->ranks - 1)) == 0;
}

static void measure(seat *s, int count)
{
    double best[NUM_KINDS];
    for (int k = 0; k < NUM_KINDS; k++) {
        best[k] = INFINITY;
        if (is_possible(s->o, (enum kind)k)) check(s, (enum kind)k, count);
    }
    for (int round = 0; round < s->o->rounds; round++)
        for (int k = 0; k < NUM_KINDS; k++)
            if (is_possible(s->o, (enum kind)k))
                best[k] = fmin(best[k], time_calls(s, (enum kind)k, count));
    if (s->rank != 0) return;
    printf("%8d", count);
    for (int k = 0; k < NUM_KINDS; k++)
        if (is_possible(s->o, (enum kind)k)) printf(" %12.2f", best[k]);
    if (s->o->mpi) printf(" %9.1f x", best[BY_RANK] / best[ALLREDUCE]);
    printf("\n");
    fflush(stdout);
}

static void *run_rank(void *self)
{
    seat *s = self;
    const epic_config config = {
        .max_tokens = 64, .max_row_bytes = 4096, .backend = s->o->backend};
    if (epic_open(&s->ctx, &s->bootstrap, &config) != EPIC_OK) fail("open", epic_error(s->ctx));
    s->data = calloc(MAX_COUNT, sizeof *s->data);
    if (!s->data) fail("open", "no memory");
    if (s->rank == 0)
        printf("%d ranks on %ld cores, backend %s, us a call, fastest of %d rounds\n%8s %12s"
               "%s%s\n",
               s->o->ranks, sysconf(_SC_NPROCESSORS_ONLN), epic_backend_name(s->ctx),
               s->o->rounds, "floats", "by rank",
               is_possible(s->o, TREE) ? "         tree" : "",
               s->o->mpi ? "    Allreduce" : "");
    static const int counts[] = {1, 8, 64, 1024, 8192, MAX_COUNT};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) measure(s, counts[i]);
    epic_close(s->ctx);
    free(s->data);
    return NULL;
}

static void run_threads(const options *o)
{
    epic_bootstrap bootstraps[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    seat seats[MAX_RANKS];
    if (epic_bootstrap_threads(bootstraps, o->ranks, 30000) != EPIC_OK)
        fail("bootstrap", epic_error(NULL));
    for (int r = 0; r < o->ranks; r++) {
        seats[r] = (seat){.o = o, .bootstrap = bootstraps[r], .rank = r};
        if (pthread_create(&threads[r], NULL, run_rank, &seats[r]) != 0) fail("thread", "none");
    }
    for (int r = 0; r < o->ranks; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < o->ranks; r++) epic_bootstrap_close(&bootstraps[r]);
}

#ifdef EPIC_BENCH_MPI
static epic_result gather(void *self, const void *mine, void *all, int64_t bytes)
{
    (void)self;
    MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD);
    return EPIC_OK;
}

/* Runs as a rank of an MPI job. Returns false if this process is not in a job. */
static bool run_job(options *o, int *argc, char ***argv)
{
    int level, rank;
    MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_size(MPI_COMM_WORLD, &o->ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    o->mpi = true;
    seat s = {.o = o, .rank = rank};
    s.bootstrap = (epic_bootstrap){.rank = rank, .num_ranks = o->ranks, .gather = gather};
    run_rank(&s);
    MPI_Finalize();
    return true;
}
#endif

static bool under_mpiexec(void)
{
    return getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_SIZE") || getenv("PMIX_RANK");
}

static bool read_options(options *o, int argc, char **argv)
{
    for (int i = 1; i < argc; i += 2) {
        int *number = !strcmp(argv[i], "--ranks")    ? &o->ranks
                      : !strcmp(argv[i], "--rounds") ? &o->rounds
                                                     : NULL;
        const int most = number == &o->ranks ? MAX_RANKS : 1000000;
        if (i + 1 == argc || (!number && strcmp(argv[i], "--backend"))) return false;
        if (!number)
            o->backend = argv[i + 1];
        else if ((*number = atoi(argv[i + 1])) < 1 || *number > most)
            return false;
    }
    return true;
}

int main(int argc, char **argv)
{
    options o = {.ranks = 4, .rounds = 51};
    if (!read_options(&o, argc, argv)) {
        fprintf(stderr,
                "usage: [mpiexec -n N] sum [--ranks N] [--rounds N] [--backend NAME]\n");
        return 2;
    }
#ifdef EPIC_BENCH_MPI
    if (under_mpiexec()) return run_job(&o, &argc, &argv) ? 0 : 1;
#else
    if (under_mpiexec()) fail("mpiexec", "this build has no MPI");
#endif
    run_threads(&o);
    return 0;
}
