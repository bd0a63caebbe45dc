/* SPDX-License-Identifier: Apache-2.0 */
/* Tests backend mpi on a network that delays and loses packets (relay.h). Each rank has a
 * network namespace and a host name of its own. All results must be correct bit by bit, and no
 * rank may be reported as dead because of the network.
 *     mpi_net [ranks [steps [delay in us [losses of a million packets]]]] */
#include <fcntl.h>
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "epic/epic.h"
#include "mpiexec.h"
#include "relay.h"
#include "run.h"

enum { TOKENS = 6, TOP_K = 3, HIDDEN = 300, MOST_SLOTS = 4096, MOST_PLAN = 1 << 20 };
#define DEADLINE_MS 120000
#define SECONDS 270 /* time limit of the whole test */
#define GOOD "rank has received all its rows"

/* ------------------------------------------------------------------------------ a rank ---- */

/* Returns whole numbers, whose sums are exact in any order. */
static float element(int rank, int step, int token, int i)
{
    return (float)((rank * 31 + step * 7 + token * 3 + i) % 64);
}

/* Returns an expert by a hash, so that the experts of a token are on any ranks. */
static int32_t expert(int rank, int step, int token, int k, int experts)
{
    return (int32_t)((run_mix((uint64_t)(rank * 1000 + step), (uint64_t)token) + 7919u * k) %
                     (uint64_t)experts);
}

static bool said(epic_context *ctx, epic_result result, const char *what)
{
    if (result == EPIC_OK) return true;
    fprintf(stderr, "rank %d: %s: %s\n", epic_rank(ctx), what, epic_error(ctx));
    return false;
}

/* Runs a step. Experts return their rows, so a token's result is the token times the sum of its
 * weights. */
static bool step(epic_context *ctx, int number)
{
    static _Alignas(64) unsigned char plan[MOST_PLAN];
    static float x[TOKENS][HIDDEN], out[TOKENS][HIDDEN], rows[MOST_SLOTS][HIDDEN];
    static float weights[TOKENS][TOP_K], slot_weights[MOST_SLOTS];
    const int rank = epic_rank(ctx), ranks = epic_num_ranks(ctx);
    const int num_tokens = (rank + number) % (TOKENS + 1); /* some ranks have none */
    const epic_layer layer = {
        .num_experts = (uint32_t)ranks, .top_k = TOP_K, .sum_order = EPIC_BY_HOSTS};
    int32_t ids[TOKENS][TOP_K];
    epic_layer_info sizes;
    if (!said(ctx, epic_layer_sizes(ctx, &layer, &sizes), "sizes")) return false;
    if (sizes.capacity > MOST_SLOTS || sizes.plan_bytes > MOST_PLAN) return false;
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < HIDDEN; i++) x[t][i] = element(rank, number, t, i);
        for (int k = 0; k < TOP_K; k++) ids[t][k] = expert(rank, number, t, k, ranks);
        for (int k = 0; k < TOP_K; k++) weights[t][k] = (float)(k + 1);
    }
    const epic_rows received = {rows, sizes.capacity, sizeof *rows};
    const epic_plan_args to_plan = {.layer = &layer,
                                    .plan = plan,
                                    .plan_bytes = sizes.plan_bytes,
                                    .topk_idx = ids,
                                    .num_tokens = num_tokens,
                                    .capacity = sizes.capacity};
    const epic_dispatch_args there = {.layer = &layer,
                                      .plan = plan,
                                      .plan_bytes = sizes.plan_bytes,
                                      .tokens = {x, num_tokens, sizeof *x},
                                      .recv = received,
                                      .weights = weights[0],
                                      .slot_weights = slot_weights};
    const epic_combine_args home = {.layer = &layer,
                                    .plan = plan,
                                    .plan_bytes = sizes.plan_bytes,
                                    .rows = epic_rows_as_const(received),
                                    .out = {out, num_tokens, sizeof *out},
                                    .slot_weights = slot_weights,
                                    .type = EPIC_F32};
    float sum[2] = {(float)rank, (float)num_tokens}, tokens = 0;
    const epic_allreduce_sum_args add = {.data = sum, .count = 2};
    epic_plan_info info;
    if (!said(ctx, epic_plan_dispatch(ctx, &to_plan, &there), "plan and dispatch") ||
        !said(ctx, epic_combine(ctx, &home), "combine") ||
        !said(ctx, epic_allreduce_sum(ctx, &add), "sum") ||
        !said(ctx, epic_plan_read(plan, sizes.plan_bytes, &info), "the plan"))
        return false;
    bool right = info.num_leaves == 0; /* host contexts add by rank */
    for (int t = 0; t < num_tokens; t++)
        for (int i = 0; i < HIDDEN; i++) right &= out[t][i] == 6 * x[t][i];
    for (int r = 0; r < ranks; r++) tokens += (float)((r + number) % (TOKENS + 1));
    return right && sum[0] == (float)(ranks * (ranks - 1) / 2) && sum[1] == tokens;
}

/* Enters the namespace, before any use of MPI. */
static bool go_to_host(const char *spaces)
{
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    for (int i = rank ? atoi(rank) : -1; i > 0 && spaces; i--) {
        spaces = strchr(spaces, ':');
        spaces += spaces != NULL;
    }
    char name[64] = "";
    if (rank && spaces) snprintf(name, sizeof name, "%.*s", (int)strcspn(spaces, ":"), spaces);
    const int space = open(name, O_RDONLY | O_CLOEXEC);
    return space >= 0 && setns(space, CLONE_NEWNET) == 0;
}

static int be_rank(int num_steps)
{
    int level;
    epic_bootstrap bootstrap;
    epic_context *ctx = NULL;
    bool good = go_to_host(getenv("EPIC_TEST_SPACES"));
    run_alarm(SECONDS);
    if (!good) return fprintf(stderr, "a rank does not get to its host\n"), 1;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    const epic_config config = {.max_tokens = TOKENS,
                                .max_row_bytes = HIDDEN * sizeof(float),
                                .timeout_ms = DEADLINE_MS,
                                .backend = "mpi"};
    good = said(NULL, epic_bootstrap_mpi(&bootstrap, NULL, DEADLINE_MS), "bootstrap") &&
           said(ctx, epic_open(&ctx, &bootstrap, &config), "open") &&
           epic_num_hosts(ctx) == epic_num_ranks(ctx);
    for (int i = 0; good && i < num_steps; i++) good = step(ctx, i);
    if (good) printf(GOOD "\n");
    fflush(stdout);
    epic_close(ctx);
    epic_bootstrap_close(&bootstrap);
    MPI_Finalize();
    /* without cleanup: AddressSanitizer would report memory that MPI keeps */
    _exit(good ? 0 : 1);
}

/* ---------------------------------------------------------------------------- the test ---- */

static void name_spaces(int num_ranks)
{
    char spaces[RELAY_MOST_HOSTS * 32] = "", name[32];
    for (int r = 0; r < num_ranks; r++) {
        relay_name(r, name, sizeof name);
        snprintf(spaces + strlen(spaces), sizeof spaces - strlen(spaces), "%s%s", r ? ":" : "",
                 name);
    }
    setenv("EPIC_TEST_SPACES", spaces, 1);
    setenv("EPIC_HOST", "%r", 1);
}

/* Starts the ranks. Ranks that wait yield their cores, and all messages use the network. */
static FILE *start(int num_ranks, const char *steps)
{
    char self[512], command[2048];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    self[length > 0 ? length : 0] = 0;
    mpiexec_permit();
    setenv("PMIX_MCA_ptl_base_if_include", RELAY_INTERFACE, 1);
    snprintf(command, sizeof command,
             "'%s' -n %d --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include %s "
             "--mca oob_tcp_if_include %s --mca mpi_yield_when_idle 1 "
             "--mca plm_rsh_agent false '%s' rank %s",
             mpiexec_name(), num_ranks, RELAY_INTERFACE, RELAY_INTERFACE, self, steps);
    return popen(command, "r");
}

int main(int argc, char **argv)
{
    char line[512];
    int good = 0;
    if (argc == 3 && !strcmp(argv[1], "rank")) return be_rank(atoi(argv[2]));
    const int num_ranks = argc > 1 ? atoi(argv[1]) : 6;
    const char *steps = argc > 2 ? argv[2] : "4";
    const int delay_us = argc > 3 ? atoi(argv[3]) : 1000;
    const uint32_t losses = argc > 4 ? (uint32_t)atoi(argv[4]) : 10000;
    check_begin();
    if (num_ranks < 1 || num_ranks >= RELAY_MOST_HOSTS) return 2;
    if (!mpiexec_recovers()) return check_skip("mpiexec is not Open MPI's");
    if (!relay_open(num_ranks + 1, delay_us, losses)) return check_skip("there is no network");
    name_spaces(num_ranks);
    const uint64_t begin = run_now_ns();
    FILE *job = start(num_ranks, steps);
    while (CHECK(job != NULL) && fgets(line, sizeof line, job))
        good += !strcmp(line, GOOD "\n");
    CHECK_EQ(pclose(job), 0);
    CHECK_EQ(good, num_ranks);
    const relay_count counted = relay_counted();
    relay_close();
    CHECK(counted.passed > (uint64_t)num_ranks && relay_did_lose(counted, losses));
    printf(
        "%d ranks, %s steps, %d us and %u of a million lost: %llu packets, %llu lost, %.1f s\n",
        num_ranks, steps, delay_us, losses, (unsigned long long)counted.passed,
        (unsigned long long)counted.lost, 1e-9 * (double)(run_now_ns() - begin));
    return check_end();
}
