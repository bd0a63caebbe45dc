/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic_bootstrap_nccl with the real NCCL: a thread for each GPU, one GPU at least.
 * Gathers bytes, opens a context, and lets a rank be late, once before NCCL has opened its
 * connections and once after. Without libnccl.so.2 nothing is tested.
 *
 *   usage: nccl [MOST_GPUS] */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "epic/epic.h"
#include "times.h"

enum { MOST_RANKS = 8, LATE_MS = 1500 };

/* Functions of NCCL. This program is also compiled where there is no nccl.h. */
static int (*init_all)(struct ncclComm **comms, int num_ranks, const int *devices);
static int (*destroy)(struct ncclComm *comm);
static int (*abort_comm)(struct ncclComm *comm);

static struct ncclComm *comms[MOST_RANKS];
static int num_ranks;
static pthread_barrier_t barrier;
static _Atomic int failed;

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: rank %d: not so: %s (%s)\n", __FILE__, __LINE__, rank, \
                    #condition, epic_error(NULL));                                         \
            failed = 1;                                                                    \
        }                                                                                  \
    } while (0)

/* Gathers `bytes` bytes and checks those of all ranks. */
static void gather_bytes(const epic_bootstrap *b, size_t bytes)
{
    const int rank = b->rank;
    unsigned char *mine = malloc(bytes + 1), *all = malloc(bytes * (size_t)num_ranks + 1);
    for (size_t i = 0; i < bytes; i++) mine[i] = (unsigned char)(rank * 37 + (int)i * 11);
    CHECK(b->gather(b->self, mine, all, (int64_t)bytes) == EPIC_OK);
    bool right = true;
    for (int r = 0; r < num_ranks; r++)
        for (size_t i = 0; i < bytes; i++)
            right &= all[(size_t)r * bytes + i] == (unsigned char)(r * 37 + (int)i * 11);
    CHECK(right);
    free(mine);
    free(all);
}

static void test_gathers(int rank)
{
    epic_bootstrap b;
    CHECK(epic_bootstrap_nccl(&b, comms[rank], 0) == EPIC_OK);
    CHECK(b.rank == rank && b.num_ranks == num_ranks);
    for (int i = 0; i < 3; i++) {
        gather_bytes(&b, 8);
        gather_bytes(&b, 0);
        gather_bytes(&b, 30000);
    }
    epic_bootstrap_close(&b);
}

static void test_wrong_device(int rank)
{
    epic_bootstrap b;
    char words[64];
    CHECK(cudaSetDevice((rank + 1) % num_ranks) == cudaSuccess);
    CHECK(epic_bootstrap_nccl(&b, comms[rank], 0) == EPIC_EINVAL);
    snprintf(words, sizeof words, "must be %d, the device of comm", rank);
    CHECK(strstr(epic_error(NULL), words) != NULL);
    epic_bootstrap_close(&b);
    CHECK(cudaSetDevice(rank) == cudaSuccess);
}

/* Rank 0 passes another number of bytes. The communicator can be used afterwards. */
static void test_mismatch(int rank)
{
    epic_bootstrap b;
    char mine[24] = "", all[24 * MOST_RANKS];
    CHECK(epic_bootstrap_nccl(&b, comms[rank], 0) == EPIC_OK);
    const epic_result result = b.gather(b.self, mine, all, rank == 0 ? 16 : 24);
    CHECK(result == EPIC_EMISMATCH);
    CHECK(b.gather(b.self, mine, all, 8) == EPIC_EMISMATCH); /* the same error again */
    epic_bootstrap_close(&b);
}

/* Opens a context on the GPUs and adds a number of each rank. */
static void test_context(int rank)
{
    const epic_config config = {.max_tokens = 64,
                                .max_row_bytes = 64,
                                .max_sms = 4,
                                .timeout_ms = 20000,
                                .backend = "gpu"};
    const float mine = (float)(rank + 1);
    float *data, sum = 0;
    epic_bootstrap b;
    epic_context *ctx = NULL;
    CHECK(epic_bootstrap_nccl(&b, comms[rank], 0) == EPIC_OK);
    CHECK(epic_open(&ctx, &b, &config) == EPIC_OK);
    epic_bootstrap_close(&b);
    CHECK(cudaMalloc((void **)&data, sizeof *data) == cudaSuccess);
    CHECK(cudaMemcpy(data, &mine, sizeof mine, cudaMemcpyDefault) == cudaSuccess);
    const epic_allreduce_sum_args args = {.data = data, .count = 1};
    CHECK(epic_allreduce_sum(ctx, &args) == EPIC_OK);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(epic_check(ctx) == EPIC_OK);
    CHECK(cudaMemcpy(&sum, data, sizeof sum, cudaMemcpyDefault) == cudaSuccess);
    CHECK(sum == (float)(num_ranks * (num_ranks + 1) / 2));
    cudaFree(data);
    epic_close(ctx);
}

/* The last rank gathers only after the deadline of the others, whose threads still wait in NCCL
 * and take part in its gather. */
static void test_late(int rank)
{
    epic_bootstrap b;
    char mine[8] = "", all[8 * MOST_RANKS], words[64];
    CHECK(epic_bootstrap_nccl(&b, comms[rank], LATE_MS) == EPIC_OK);
    if (rank < num_ranks - 1) {
        const double begin = now_ms();
        CHECK(b.gather(b.self, mine, all, sizeof mine) == EPIC_ETIMEOUT);
        const double ms = now_ms() - begin;
        snprintf(words, sizeof words, "rank %d of %d waited %d ms", rank, num_ranks, LATE_MS);
        CHECK(strstr(epic_error(NULL), words) != NULL);
        if (rank == 0) printf("late rank: %s\n", epic_error(NULL));
        CHECK(ms >= LATE_MS - 10 && ms < LATE_MS + 2000 + slack_ms());
        CHECK(b.gather(b.self, mine, all, sizeof mine) == EPIC_ETIMEOUT);
    }
    pthread_barrier_wait(&barrier);
    if (rank == num_ranks - 1) CHECK(b.gather(b.self, mine, all, sizeof mine) == EPIC_OK);
    pthread_barrier_wait(&barrier);
    epic_bootstrap_close(&b);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL); /* the threads end meanwhile */
    pthread_barrier_wait(&barrier);
}

/* The last rank never gathers. The others abort the communicator after their deadline. */
static void test_missing(int rank)
{
    epic_bootstrap b;
    char mine[8] = "", all[8 * MOST_RANKS];
    CHECK(epic_bootstrap_nccl(&b, comms[rank], LATE_MS) == EPIC_OK);
    if (rank < num_ranks - 1) CHECK(b.gather(b.self, mine, all, sizeof mine) == EPIC_ETIMEOUT);
    epic_bootstrap_close(&b);
    pthread_barrier_wait(&barrier);
    CHECK(abort_comm(comms[rank]) == 0);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

typedef struct seat {
    pthread_t thread;
    int rank;
    bool is_first; /* NCCL has not opened the connections of the communicators yet */
} seat;

static void *run_rank(void *argument)
{
    const seat *s = argument;
    const int rank = s->rank;
    CHECK(cudaSetDevice(rank) == cudaSuccess);
    if (s->is_first && num_ranks > 1) test_late(rank);
    test_gathers(rank);
    if (num_ranks > 1) test_wrong_device(rank);
    if (num_ranks > 1) test_mismatch(rank);
    test_context(rank);
    if (num_ranks > 1) test_late(rank);
    if (s->is_first || num_ranks == 1)
        CHECK(destroy(comms[rank]) == 0);
    else
        test_missing(rank);
    return NULL;
}

/* Runs all tests with new communicators. */
static void run_ranks(bool is_first)
{
    const int rank = -1;
    seat seats[MOST_RANKS] = {0};
    CHECK(init_all(comms, num_ranks, NULL) == 0);
    pthread_barrier_init(&barrier, NULL, (unsigned)num_ranks);
    for (int r = 0; r < num_ranks && !failed; r++) {
        seats[r] = (seat){.rank = r, .is_first = is_first};
        pthread_create(&seats[r].thread, NULL, run_rank, &seats[r]);
    }
    for (int r = 0; r < num_ranks && seats[r].thread; r++) pthread_join(seats[r].thread, NULL);
    pthread_barrier_destroy(&barrier);
}

/* Uses memcpy() because ISO C has no cast from void * to a function pointer. */
static bool find_function(void *library, const char *name, void *function)
{
    void *address = dlsym(library, name);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

int main(int argc, char **argv)
{
    int most = argc > 1 ? atoi(argv[1]) : MOST_RANKS;
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        printf("left out: epic_bootstrap_nccl: %s\n", dlerror());
        return 0;
    }
    if (!find_function(library, "ncclCommInitAll", &init_all) ||
        !find_function(library, "ncclCommDestroy", &destroy) ||
        !find_function(library, "ncclCommAbort", &abort_comm) ||
        cudaGetDeviceCount(&num_ranks) != cudaSuccess) {
        fprintf(stderr, "nccl: libnccl.so.2 lacks a function, or there is no GPU\n");
        return 1;
    }
    if (most > MOST_RANKS) most = MOST_RANKS;
    if (num_ranks > most) num_ranks = most;
    run_ranks(true);
    if (!failed) run_ranks(false);
    printf("epic_bootstrap_nccl, %d GPUs: %s\n", num_ranks, failed ? "WRONG" : "good");
    return failed;
}
