/* SPDX-License-Identifier: Apache-2.0 */
/* Tests counters that pass 2^32: the sequence numbers of a tag, and the versions of an op slot.
 */
#include <string.h>

#include "backend/shared/shared.h"
#include "check.h"
#include "context/context.h"
#include "run.h"
#include "step.h"

#define TAG 11
#define EDGE (1ull << 32)

static const char *backend;

static epic_context *open_context(const epic_bootstrap *bootstrap)
{
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .timeout_ms = 20000,
                                .max_in_flight = 2,
                                .backend = backend};
    epic_context *ctx;
    const epic_result result = epic_open(&ctx, bootstrap, &config);
    CHECK_SAY(result == EPIC_OK, "open: %s", epic_error(ctx));
    return ctx;
}

/* Sets the sequence number of the tag's next operation. */
static void start_at(epic_context *ctx, uint64_t tag, uint64_t sequence)
{
    uint64_t first;
    CHECK(tags_begin(&ctx->tags, tag, &first) == EPIC_OK);
    tags_end(&ctx->tags, tag);
    for (size_t i = 0; i < ctx->tags.size; i++)
        if (ctx->tags.entries[i].next && ctx->tags.entries[i].tag == tag)
            ctx->tags.entries[i].next = sequence + 1;
}

/* Sets the versions of this rank's op slots as if they had been used often. Must be called
 * before the first operation, when no peer reads them yet. */
static void start_op_slots_at(epic_context *ctx, uint64_t version)
{
    epic_group *g = ctx->group;
    for (int i = 0; i < g->layout.num_slots; i++) {
        atomic_store(&g->exchanges[i].slot->version, version);
        for (int r = 0; r < g->num_ranks; r++)
            atomic_store(&g->exchanges[i].slot->peers[r].done, version);
    }
}

static epic_result sum(epic_context *ctx, uint32_t timeout_ms)
{
    float one = 1;
    const epic_allreduce_sum_args args = {
        .call = {.tag = TAG, .timeout_ms = timeout_ms}, .data = &one, .count = 1};
    const epic_result result = epic_allreduce_sum(ctx, &args);
    CHECK(result != EPIC_OK || (int)one == epic_num_ranks(ctx));
    return result;
}

/* Runs every operation before, at and after 2^32. Then rank 0 waits in an operation that no
 * peer calls. */
static void over_the_edge(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    epic_context *ctx = open_context(bootstrap);
    step s;
    start_at(ctx, TAG, EDGE - 3);
    start_op_slots_at(ctx, EDGE - 4);
    step_open(&s, ctx, 9, 64);
    CHECK(step_all(&s, TAG)); /* runs all operations, from plan to sum, past 2^32 */
    for (int i = 0; i < 20; i++) CHECK_SAY(sum(ctx, 0) == EPIC_OK, "%s", epic_error(ctx));
    epic_failure_info info = {0};
    if (bootstrap->rank == 0) CHECK_EQ(sum(ctx, 300), EPIC_ETIMEOUT);
    while (bootstrap->rank != 0 && info.result == EPIC_OK) {
        CHECK(epic_failure(ctx, &info) == EPIC_OK);
        run_nap_us(1000);
    }
    CHECK(epic_failure(ctx, &info) == EPIC_OK);
    CHECK_SAY(info.sequence > EDGE && info.sequence < EDGE + 100, "step %llu",
              (unsigned long long)info.sequence);
    CHECK_SAY(strstr(info.sentence, "after sum (tag 11, sequence 42949673") != NULL, "%s",
              info.sentence);
    step_close(&s);
    epic_close(ctx);
}

/* Sequence numbers that differ by 2^32 are not equal. */
static void edge_apart(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    epic_context *ctx = open_context(bootstrap);
    start_at(ctx, TAG, bootstrap->rank == 0 ? 5 : EDGE + 5);
    CHECK_EQ(sum(ctx, 300), EPIC_ETIMEOUT);
    epic_close(ctx);
}

int main(void)
{
    check_begin();
    run_alarm(100);
    backend = "threads";
    run_threads(3, over_the_edge, NULL);
    run_threads(2, edge_apart, NULL);
    backend = "shm";
    run_processes(3, over_the_edge, NULL, 60);
    run_processes(2, edge_apart, NULL, 60);
    return check_end();
}
