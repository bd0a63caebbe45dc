/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic_waits. A rank that sleeps before each operation has the longest waiting time in
 * the table of every other rank, for each kind of operation. The times never decrease, also
 * while operations run. Wrong arguments are refused with their names. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"
#include "step.h"

#define RANKS 3
#define SLOW 1
#define NAP_US 50000
#define ROUNDS 3

static const uint32_t operations[] = {EPIC_OP_PLAN, EPIC_OP_DISPATCH, EPIC_OP_COMBINE,
                                      EPIC_OP_SUM};
#define NUM_OPERATIONS (int)(sizeof operations / sizeof *operations)

/* Reads the table, checks that no number is smaller than in *last, and then replaces *last. */
static bool check_growth(const epic_context *ctx, epic_wait_info last[RANKS])
{
    epic_wait_info now[RANKS];
    bool good = CHECK(epic_waits(ctx, EPIC_OP_NONE, now, RANKS) == EPIC_OK);
    for (int r = 0; r < RANKS && good; r++) {
        good &= CHECK(now[r].num_operations >= last[r].num_operations);
        good &= CHECK(now[r].wait_ns >= last[r].wait_ns);
        good &= CHECK(now[r].alone_ns >= last[r].alone_ns);
        good &= CHECK(now[r].alone_ns <= now[r].wait_ns);
        last[r] = now[r];
    }
    return good;
}

typedef struct reader {
    const epic_context *ctx;
    _Atomic bool stops;
} reader;

/* Reads the table again and again while the rank runs operations. */
static void *read_always(void *argument)
{
    reader *self = argument;
    epic_wait_info last[RANKS] = {{0}};
    while (!atomic_load(&self->stops) && check_growth(self->ctx, last)) run_nap_us(200);
    return NULL;
}

static void run_operations(step *s)
{
    const epic_call call = {.tag = 1};
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < NUM_OPERATIONS; i++) {
            if (s->rank == SLOW) run_nap_us(NAP_US);
            CHECK_SAY(step_call(s, operations[i], &call, STEP_SAME) == EPIC_OK, "%s",
                      epic_error(s->ctx));
        }
}

/* Checks that this rank waited for the slow rank alone, at least half of its naps. */
static void check_blame(const step *s)
{
    const uint64_t least = (uint64_t)ROUNDS * NAP_US * 1000 / 2;
    epic_wait_info sum[RANKS] = {{0}}, all[RANKS], one[RANKS];
    for (int i = 0; i < NUM_OPERATIONS; i++) {
        CHECK(epic_waits(s->ctx, operations[i], one, RANKS) == EPIC_OK);
        for (int r = 0; r < RANKS; r++) {
            CHECK_EQ(one[r].num_operations, ROUNDS);
            if (r == s->rank) CHECK_EQ(one[r].wait_ns, 0);
            if (r != SLOW && s->rank != SLOW)
                CHECK_SAY(one[SLOW].alone_ns > least && one[SLOW].alone_ns > one[r].alone_ns,
                          "%s on rank %d: %llu ns for rank %d, %llu ns for rank %d",
                          epic_operation_name(operations[i]), s->rank,
                          (unsigned long long)one[SLOW].alone_ns, SLOW,
                          (unsigned long long)one[r].alone_ns, r);
            sum[r].num_operations += one[r].num_operations;
            sum[r].wait_ns += one[r].wait_ns;
            sum[r].alone_ns += one[r].alone_ns;
        }
    }
    CHECK(epic_waits(s->ctx, EPIC_OP_NONE, all, RANKS) == EPIC_OK);
    CHECK(memcmp(all, sum, sizeof all) == 0);
}

static void refused(epic_result result, const char *words)
{
    CHECK_SAY(result == EPIC_EINVAL && strstr(epic_error(NULL), words), "%s: %s: %s", words,
              epic_result_name(result), epic_error(NULL));
}

static void check_refusals(const epic_context *ctx)
{
    epic_wait_info out[RANKS + 1];
    memset(out, 0xee, sizeof out);
    refused(epic_waits(NULL, EPIC_OP_NONE, out, RANKS), "ctx is NULL");
    refused(epic_waits(ctx, EPIC_OP_NONE, NULL, RANKS), "out is NULL");
    refused(epic_waits(ctx, EPIC_OP_NONE, out, RANKS + 1), "num_ranks is 4: must be 3");
    refused(epic_waits(ctx, EPIC_OP_NONE, out, 0), "num_ranks is 0: must be 3");
    refused(epic_waits(ctx, EPIC_OP_NONE, out, -1), "num_ranks is -1: must be 3");
    refused(epic_waits(ctx, EPIC_OP_WINDOW + 1, out, RANKS), "operation is 9: must be");
    refused(epic_waits(ctx, UINT32_MAX, out, RANKS), "operation is 4294967295: must be");
    for (size_t i = 0; i < sizeof out; i++) CHECK_EQ(((unsigned char *)out)[i], 0xee);
}

/* A newer program passes a larger struct. The library fills the rest of each element with
 * zeros. */
static void check_larger_struct(const epic_context *ctx)
{
    struct {
        epic_wait_info info;
        uint64_t more;
    } out[RANKS];
    epic_wait_info plain[RANKS];
    memset(out, 0xee, sizeof out);
    CHECK(epic_waits(ctx, EPIC_OP_NONE, plain, RANKS) == EPIC_OK);
    CHECK(epic_waits_v1(ctx, EPIC_OP_NONE, (void *)out, RANKS, sizeof *out) == EPIC_OK);
    for (int r = 0; r < RANKS; r++)
        CHECK(memcmp(&out[r].info, &plain[r], sizeof plain[r]) == 0 && out[r].more == 0);
}

static void run_rank(const epic_bootstrap *bootstrap, void *self)
{
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .timeout_ms = 60000,
                                .backend = self};
    epic_context *ctx;
    if (!CHECK_SAY(epic_open(&ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(ctx)))
        return;
    step s;
    step_open(&s, ctx, 8, 32);
    reader other = {.ctx = ctx};
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, read_always, &other), 0);
    run_operations(&s);
    atomic_store(&other.stops, true);
    pthread_join(thread, NULL);
    check_blame(&s);
    check_refusals(ctx);
    check_larger_struct(ctx);
    step_close(&s);
    epic_close(ctx);
}

/* A forked child cannot read the table of its parent. The table stays readable after the group
 * has failed. */
static void check_fork_and_failure(void)
{
    const epic_config config = {.max_tokens = 1, .max_row_bytes = 64};
    epic_context *ctx;
    epic_wait_info out;
    int status;
    CHECK(epic_open(&ctx, NULL, &config) == EPIC_OK);
    CHECK(epic_waits(ctx, EPIC_OP_NONE, &out, 1) == EPIC_OK && out.wait_ns == 0);
    const pid_t child = run_fork();
    if (child == 0) _exit(epic_waits(ctx, EPIC_OP_NONE, &out, 1) != EPIC_ECLOSED);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    epic_abort(ctx, 1, "the test ends");
    CHECK(epic_check(ctx) == EPIC_EPEER);
    CHECK(epic_waits(ctx, EPIC_OP_NONE, &out, 1) == EPIC_OK);
    epic_close(ctx);
}

int main(void)
{
    check_begin();
    check_fork_and_failure();
    run_threads(RANKS, run_rank, (void *)"threads");
    run_processes(RANKS, run_rank, (void *)"shm", 60);
    return check_end();
}
