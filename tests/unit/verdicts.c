/* SPDX-License-Identifier: Apache-2.0 */
/* Tests special cases in which all ranks must report the same: an error of one rank together
 * with a mismatch of two others, outputs of a failed plan, an empty buffer, a rank that closes
 * early, one that closes because another died, and one that never leaves an operation. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "context/context.h"
#include "epic/epic.h"
#include "exchange/op_header.h"
#include "run.h"

#define TOKENS 4

static void check_result(epic_result result, epic_result right)
{
    CHECK_SAY(result == right, "%s, not %s: %s", epic_result_name(result),
              epic_result_name(right), epic_error(NULL));
}

typedef struct seat {
    epic_context *ctx;
    epic_config config;
    epic_layer layer;
    void *plan;
    int64_t plan_bytes;
} seat;

static seat open_seat(const epic_bootstrap *bootstrap, uint32_t num_experts, int64_t max_tokens)
{
    seat s = {.config = {.max_tokens = max_tokens,
                         .max_row_bytes = 8192,
                         .num_ranks = (uint32_t)bootstrap->num_ranks,
                         .timeout_ms = 20000,
                         .max_in_flight = 1,
                         .staging_bytes = 100000},
              .layer = {.num_experts = num_experts, .top_k = 1}};
    CHECK_SAY(epic_open(&s.ctx, bootstrap, &s.config) == EPIC_OK, "open: %s", epic_error(NULL));
    CHECK(epic_plan_bytes(&s.config, &s.layer, &s.plan_bytes) == EPIC_OK);
    s.plan = aligned_alloc(64, (s.plan_bytes + 63) / 64 * 64);
    return s;
}

static void close_seat(seat *s)
{
    epic_close(s->ctx);
    free(s->plan);
}

static epic_plan_args plan_args(const seat *s, const int32_t *ids, int64_t num_tokens)
{
    return (epic_plan_args){.layer = &s->layer,
                            .plan = s->plan,
                            .plan_bytes = s->plan_bytes,
                            .topk_idx = ids,
                            .num_tokens = num_tokens};
}

/* Rank 0 passes an id that is too large, ranks 1 and 2 different layers. EPIC_EMISMATCH has
 * priority, on rank 0 too. */
static void error_with_mismatch(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    seat s = open_seat(bootstrap, 12, TOKENS);
    const int32_t ids[TOKENS] = {0, bootstrap->rank == 0 ? 99 : 1, 2, 3};
    s.layer.alignment = bootstrap->rank == 2 ? 4 : 1;
    const epic_plan_args args = plan_args(&s, ids, TOKENS);
    check_result(epic_plan(s.ctx, &args), EPIC_EMISMATCH);
    check_result(epic_check(s.ctx), EPIC_EMISMATCH);
    close_seat(&s);
}

/* The counts of a failed plan are zeros, as many as rank_of_expert gives this rank experts. */
static void counts_after_error(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    seat s = open_seat(bootstrap, 6, TOKENS);
    const int32_t table[6] = {1, 1, 1, 1, 1, 0};
    const int32_t ids[TOKENS] = {0, bootstrap->rank == 0 ? 6 : 1, 2, 3};
    int32_t rows[5], tokens[5];
    int64_t rows_i64[5], tokens_i64[5];
    memset(rows, 1, sizeof rows);
    memset(tokens, 1, sizeof tokens);
    memset(rows_i64, 1, sizeof rows_i64);
    memset(tokens_i64, 1, sizeof tokens_i64);
    epic_plan_args args = plan_args(&s, ids, TOKENS);
    args.rank_of_expert = table;
    args.expert_rows = rows;
    args.expert_tokens = tokens;
    args.expert_rows_i64 = rows_i64;
    args.expert_tokens_i64 = tokens_i64;
    check_result(epic_plan(s.ctx, &args), EPIC_EINVAL);
    for (int e = 0; e < 5; e++) CHECK(rows[e] == 0 && tokens[e] == 0);
    for (int e = 0; e < 5; e++) CHECK(rows_i64[e] == 0 && tokens_i64[e] == 0);
    check_result(epic_check(s.ctx), EPIC_OK);
    close_seat(&s);
}

/* Rank 0 receives nothing and has no buffers, but sends rows with scales. */
static void scales_from_an_empty_buffer(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    seat s = open_seat(bootstrap, 2, TOKENS);
    const int rank = bootstrap->rank;
    const int32_t ids[TOKENS] = {1, 1, 1, 1};
    float rows[TOKENS][3], scales[TOKENS][2], recv[2 * TOKENS][3], recv_scales[2 * TOKENS][2];
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < 3; i++) rows[t][i] = (float)(100 * rank + 10 * t + i);
        for (int i = 0; i < 2; i++) scales[t][i] = -(float)(100 * rank + 10 * t + i);
    }
    const epic_plan_args args = plan_args(&s, ids, TOKENS);
    check_result(epic_plan(s.ctx, &args), EPIC_OK);
    epic_dispatch_args how = {.layer = &s.layer,
                              .plan = s.plan,
                              .plan_bytes = s.plan_bytes,
                              .tokens = {rows, TOKENS, sizeof rows[0]},
                              .scales = {scales, TOKENS, sizeof scales[0]},
                              .recv = {NULL, 0, sizeof rows[0]},
                              .recv_scales = {NULL, 0, sizeof scales[0]}};
    if (rank == 1) {
        how.recv = (epic_rows){recv, 2 * TOKENS, sizeof recv[0]};
        how.recv_scales = (epic_rows){recv_scales, 2 * TOKENS, sizeof recv_scales[0]};
    }
    CHECK_SAY(epic_dispatch(s.ctx, &how) == EPIC_OK, "%s", epic_error(s.ctx));
    for (int t = 0; rank == 1 && t < 2 * TOKENS; t++) {
        const int first = 100 * (t / TOKENS) + 10 * (t % TOKENS);
        CHECK_EQ(recv[t][2], first + 2);
        CHECK_EQ(recv_scales[t][0], -first);
        CHECK_EQ(recv_scales[t][1], -first - 1);
    }
    close_seat(&s);
}

/* epic_failure returns what another rank reported, before any call of this rank has failed. */
static void abort_is_reported(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    seat s = open_seat(bootstrap, 2, TOKENS);
    epic_failure_info info = {0};
    if (bootstrap->rank == 0) epic_abort(s.ctx, 7, "no more rows");
    const uint64_t end = run_now_ns() + 5000000000ull;
    while (info.result == EPIC_OK && run_now_ns() < end) {
        check_result(epic_failure(s.ctx, &info), EPIC_OK);
        run_nap_us(1000);
    }
    CHECK_EQ(info.result, EPIC_EPEER);
    CHECK_EQ(info.tag, 7);
    CHECK(info.num_culprits == 1 && info.culprits[0] == 0);
    CHECK(strstr(info.sentence, "no more rows") != NULL);
    close_seat(&s);
}

/* A rank that waits returns soon after another rank has aborted, long before its deadline. Rank
 * 0 closes only after that, because rank 1 would notice the close, too. */
static void abort_ends_a_wait(const epic_bootstrap *bootstrap, void *self)
{
    static _Atomic int over;
    (void)self;
    float one = 1;
    const epic_allreduce_sum_args args = {.data = &one, .count = 1};
    seat s = open_seat(bootstrap, 2, TOKENS);
    const uint64_t begin = run_now_ns();
    if (bootstrap->rank == 0) {
        run_nap_us(200000);
        epic_abort(s.ctx, 7, "no more rows");
        while (!atomic_load(&over)) run_nap_us(1000);
    } else {
        check_result(epic_allreduce_sum(s.ctx, &args), EPIC_EPEER);
        CHECK(strstr(epic_error(s.ctx), "no more rows") != NULL);
        const long ms = (long)((run_now_ns() - begin) / 1000000);
        CHECK_SAY(ms < (long)s.config.timeout_ms / 2, "the wait ended after %ld ms", ms);
        atomic_store(&over, 1);
    }
    close_seat(&s);
}

/* ---------------------------------------------------------------------------- leaving ---- */

#define MANY 4000
#define WIDE 8192

static pthread_t slow_thread;
static _Atomic int slow_is_known;

static void stand_still(int signal)
{
    (void)signal;
    run_nap_us(700000);
}

/* Rank 0 sends much to rank 2, which pauses for a while. Rank 1 has no part, finishes and
 * closes. This is no failure. (run_threads joins rank 1 before rank 2, so the thread that gets
 * the signal still exists.) */
static void early_close(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    seat s = open_seat(bootstrap, 3, MANY);
    const int64_t sends = bootstrap->rank == 0 ? MANY : 0,
                  slots = bootstrap->rank == 2 ? MANY : 0;
    int32_t *ids = malloc(MANY * sizeof *ids);
    for (int t = 0; t < MANY; t++) ids[t] = 2;
    epic_rows tokens = {calloc((size_t)sends + 1, WIDE), sends, WIDE};
    epic_rows recv = {calloc((size_t)slots + 1, WIDE), slots, WIDE};
    if (bootstrap->rank == 2) {
        slow_thread = pthread_self();
        atomic_store(&slow_is_known, 1);
    }
    const epic_plan_args args = plan_args(&s, ids, sends);
    check_result(epic_plan(s.ctx, &args), EPIC_OK);
    const epic_dispatch_args how = {.layer = &s.layer,
                                    .plan = s.plan,
                                    .plan_bytes = s.plan_bytes,
                                    .tokens = epic_rows_as_const(tokens),
                                    .recv = recv};
    CHECK_SAY(epic_dispatch(s.ctx, &how) == EPIC_OK, "rank %d: %s", bootstrap->rank,
              epic_error(s.ctx));
    if (bootstrap->rank == 1 && atomic_load(&slow_is_known)) pthread_kill(slow_thread, SIGUSR1);
    close_seat(&s);
    free(ids);
    free(tokens.data);
    free(recv.data);
}

/* Rank 0 dies and rank 2 closes. The error of rank 1 must name rank 0. */
static void close_after_a_death(const epic_bootstrap *bootstrap, void *closed)
{
    seat s = open_seat(bootstrap, 3, TOKENS);
    if (bootstrap->rank == 0) _exit(0);
    if (bootstrap->rank == 1) {
        float one = 1;
        const epic_allreduce_sum_args args = {.data = &one, .count = 1};
        epic_failure_info info;
        while (!atomic_load((_Atomic int *)closed)) run_nap_us(1000);
        run_nap_us(2000000); /* it takes a moment until the death is noticed */
        check_result(epic_allreduce_sum(s.ctx, &args), EPIC_EPEER);
        check_result(epic_failure(s.ctx, &info), EPIC_OK);
        CHECK_SAY(info.num_culprits == 1 && info.culprits[0] == 0 &&
                      strstr(info.sentence, "whose process ended"),
                  "%s", info.sentence);
    }
    close_seat(&s);
    if (bootstrap->rank == 2) atomic_store((_Atomic int *)closed, 1);
}

/* Rank 1 sends its part of a sum and stays in the call. Rank 0 gets its result, but its only op
 * slot stays in use. So at the next sum it waits for a slot, and the error names rank 1. */
static void never_leaves(const epic_bootstrap *bootstrap, void *self)
{
    static _Atomic int over;
    (void)self;
    float one = 1;
    epic_failure_info info;
    const epic_allreduce_sum_args args = {.data = &one, .count = 1, .call.timeout_ms = 1000};
    seat s = open_seat(bootstrap, 2, TOKENS);
    if (bootstrap->rank == 1) {
        const epic_transport *transport = s.ctx->backend->transport;
        epic_op_header header = {
            .common = {[COMMON_OPERATION] = EPIC_OP_SUM, [COMMON_COUNT] = 1}};
        memcpy(header.bytes, &one, sizeof one);
        transport->announce(s.ctx->group, transport->claim(s.ctx->group), 0, 0, &header);
        while (!atomic_load(&over)) run_nap_us(1000);
    } else {
        check_result(epic_allreduce_sum(s.ctx, &args), EPIC_OK);
        CHECK(one == 2);
        check_result(epic_allreduce_sum(s.ctx, &args), EPIC_ETIMEOUT);
        check_result(epic_failure(s.ctx, &info), EPIC_OK);
        CHECK_SAY(info.num_culprits == 1 && info.culprits[0] == 1, "%s", info.sentence);
        atomic_store(&over, 1);
    }
    close_seat(&s);
}

int main(void)
{
    _Atomic int *closed = run_share(sizeof *closed);
    check_begin();
    run_alarm(60);
    signal(SIGUSR1, stand_still);
    for (int i = 0; i < 20; i++) run_threads(3, error_with_mismatch, NULL);
    run_threads(2, counts_after_error, NULL);
    run_threads(2, abort_is_reported, NULL);
    run_threads(2, abort_ends_a_wait, NULL);
    run_threads(2, scales_from_an_empty_buffer, NULL);
    for (int i = 0; i < 3; i++) run_threads(3, early_close, NULL);
    run_threads(2, never_leaves, NULL);
    run_processes(3, close_after_a_death, closed, 30);
    run_unshare(closed, sizeof *closed);
    return check_end();
}
