/* SPDX-License-Identifier: Apache-2.0 */
/* Tests faults on a CUDA backend. Each must become an error that names the right rank, in time,
 * and leave CUDA usable. The next round opens a new group.
 *
 *   gpu_faults RANKS GPUS threads|processes ROUNDS [DEADLINE in ms [SMS of a rank [FIRST]]]
 *
 * FIRST is the number of the first round, 0 by default. It determines the faults and their
 * ranks, so several processes can run different rounds at the same time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "copies.h"
#include "product.h"
#include "team.h"
#include "times.h"

/* Few enough for the low-latency kernels; another program uses more. */
#ifndef TOKENS
#define TOKENS 64
#endif
#define HIDDEN 512
#define TRIES 5 /* how often a fault is tried if errors are late */

enum fault { SKIPPED, DIFFERENT, SHAPED, TAGGED, LATE, SLOW, ABORTED, NUM_FAULTS };
static const char *const fault_names[] = {"a skipped call", "another call", "another shape",
                                          "another tag",    "too late",     "slow",
                                          "abort"};
static const uint32_t expected[] = {EPIC_ETIMEOUT,  EPIC_EMISMATCH, EPIC_EMISMATCH,
                                    EPIC_EMISMATCH, EPIC_ETIMEOUT,  EPIC_OK,
                                    EPIC_EPEER};
static enum fault fault;
static int culprit, deadline_ms = 200;
static bool apart; /* rounds of few tokens in which no row goes to or comes from the culprit */

/* Returns the number of tokens of a rank. In rounds with `apart`, every third rank of the
 * libraries for many ranks has none. */
static int64_t tokens_of(const team_rank *me)
{
    return MANY_RANKS && apart && me->rank % 3 == 1 ? 0 : TOKENS;
}

typedef struct memory {
    int32_t *ids;
    uint8_t *plan, *tokens, *recv;
    float *data;
    size_t plan_bytes;
    epic_layer layer;
} memory;

static memory allocate_memory(team_rank *me)
{
    memory m = {.layer = {.num_experts = 8 * (uint32_t)me->num_ranks, .top_k = 4}};
    int32_t ids[TOKENS * 4];
    for (int i = 0; i < TOKENS * 4; i++) {
        ids[i] = (i * 7 + me->rank) % (int)m.layer.num_experts;
        if (apart && (me->rank == culprit || ids[i] / 8 == culprit)) ids[i] = -1;
    }
    m.plan_bytes = device_plan_bytes(me->num_ranks, TOKENS, m.layer.num_experts, 4);
    CHECK_CUDA(cudaMalloc((void **)&m.ids, sizeof ids));
    CHECK_CUDA(cudaMalloc((void **)&m.plan, m.plan_bytes));
    CHECK_CUDA(cudaMalloc((void **)&m.tokens, TOKENS * HIDDEN * 2));
    CHECK_CUDA(cudaMalloc((void **)&m.recv, TOKENS * 4 * 8 * HIDDEN * 2));
    CHECK_CUDA(cudaMalloc((void **)&m.data, 4096));
    CHECK_CUDA(copy_in(m.ids, ids, sizeof ids));
    CHECK_CUDA(fill_in(m.tokens, 1, TOKENS * HIDDEN * 2));
    CHECK_CUDA(fill_in(m.data, 0, 4096));
    return m;
}

/* Returns the deadline of a call in which a fault happens. Only a test of deadlines waits until
 * it passes. */
static uint32_t fault_timeout(void)
{
    return expected[fault] == EPIC_ETIMEOUT ? (uint32_t)deadline_ms : TEAM_LONG_MS;
}

static epic_result call_plan(team_rank *me, memory *m)
{
    const epic_plan_args args = {.call = {.stream = me->stream, .timeout_ms = TEAM_LONG_MS},
                                 .layer = &m->layer,
                                 .plan = m->plan,
                                 .plan_bytes = m->plan_bytes,
                                 .topk_idx = m->ids,
                                 .num_tokens = tokens_of(me)};
    return p2p_ops.plan(me->group, &args);
}

static epic_result call_dispatch(team_rank *me, memory *m, int64_t row_bytes)
{
    const uint64_t tag = fault == TAGGED && me->rank == culprit;
    const epic_call call = {.stream = me->stream, .tag = tag, .timeout_ms = fault_timeout()};
    const epic_dispatch_args args = {.call = call,
                                     .layer = &m->layer,
                                     .plan = m->plan,
                                     .plan_bytes = m->plan_bytes,
                                     .tokens = {m->tokens, tokens_of(me), row_bytes},
                                     .recv = {m->recv, TOKENS * 4 * 8, row_bytes}};
    return p2p_ops.dispatch(me->group, &args);
}

static epic_result call_sum(team_rank *me, memory *m)
{
    const epic_call call = {.stream = me->stream, .timeout_ms = fault_timeout()};
    const epic_allreduce_sum_args args = {.call = call, .data = m->data, .count = 1000};
    return p2p_ops.allreduce_sum(me->group, &args);
}

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static void inject_fault(team_rank *me, memory *m)
{
    if (fault == DIFFERENT) call_sum(me, m);
    if (fault == SHAPED) call_dispatch(me, m, HIDDEN);
    if (fault == LATE) sleep_ms(3 * deadline_ms);
    if (fault == SLOW) sleep_ms(deadline_ms / 2);
    if (fault == LATE || fault == SLOW || fault == TAGGED) call_dispatch(me, m, HIDDEN * 2);
    if (fault == ABORTED) p2p_ops.abort(me->group, 0, "the loss is not a number");
}

/* If an error is late, the machine may be too busy. Prints this and tries the fault again. */
static int judge_fault(team_rank *me, double took, const epic_failure_info *f)
{
    int *late = me->shared;
    /* each rank may name the other one */
    const bool differ = expected[fault] == EPIC_EMISMATCH;
    const bool named = fault == SLOW || (differ && f->num_culprits && f->rank == culprit) ||
                       (f->num_culprits == 1 && f->culprits[0] == culprit);
    const bool in_time =
        took < deadline_ms * 1.25 + slack_ms() || (fault == LATE && me->rank == culprit);
    /* the late rank came before any rank had given up */
    const bool came = fault == LATE && f->result == EPIC_OK;
    if (f->result == expected[fault] && named && in_time) return 0;
    if (came || (f->result == expected[fault] && named))
        __atomic_store_n(late, 1, __ATOMIC_RELAXED);
    fprintf(stderr, "rank %d, %s by rank %d: %s after %.0f ms: %s\n", me->rank,
            fault_names[fault], culprit, epic_result_name((epic_result)f->result), took,
            f->sentence);
    return !__atomic_load_n(late, __ATOMIC_RELAXED);
}

/* A later call must return the same error at once. If the group is not broken, it must succeed.
 */
static int judge_later_call(team_rank *me, memory *m)
{
    const epic_result later = call_sum(me, m);
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    epic_failure_info f;
    if (fault == SLOW)
        return later != EPIC_OK || p2p_ops.poll_failure(me->group, &f) != EPIC_OK;
    if (__atomic_load_n((int *)me->shared, __ATOMIC_RELAXED)) return 0;
    return me->rank != culprit && (uint32_t)later != expected[fault];
}

static int run_rank(team_rank *me)
{
    memory m = allocate_memory(me);
    team_barrier(me);
    if (call_plan(me, &m) != EPIC_OK) team_stop();
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    team_barrier(me);
    const double begin = now_ms();
    if (me->rank == culprit)
        inject_fault(me, &m);
    else
        call_dispatch(me, &m, HIDDEN * 2);
    const cudaError_t error = cudaStreamSynchronize(me->stream);
    const double took = now_ms() - begin;
    epic_failure_info f;
    int bad = error != cudaSuccess;
    p2p_ops.poll_failure(me->group, &f);
    if (me->rank != culprit || fault == LATE || fault == SLOW) bad |= judge_fault(me, took, &f);
    team_barrier(me);
    bad |= judge_later_call(me, &m);
    team_barrier(me);
    if (me->rank == (culprit + 1) % me->num_ranks) bad |= !product_is_right();
    team_barrier(me);
    void *const parts[] = {m.ids, m.plan, m.tokens, m.recv, m.data};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) CHECK_CUDA(cudaFree(parts[i]));
    return bad;
}

int main(int argc, char **argv)
{
    if (argc < 5) return 2;
    const int ranks = atoi(argv[1]), rounds = atoi(argv[4]);
    int failed = 0;
    if (argc > 5) deadline_ms = atoi(argv[5]);
    const uint32_t sms = argc > 6 ? (uint32_t)atoi(argv[6]) : 8;
    const int first = argc > 7 ? atoi(argv[7]) : 0;
    for (int i = first; i < first + rounds && !failed; i++) {
        fault = (enum fault)(i % NUM_FAULTS);
        culprit = i * 3 % ranks;
        apart = i / NUM_FAULTS % 2;
        team t = {.num_ranks = ranks,
                  .num_gpus = atoi(argv[2]),
                  .ranks_per_process = team_ranks_per_process(argv[3]),
                  .max_tokens = TOKENS,
                  .lowlat_tokens = TEAM_LOWLAT_TOKENS,
                  .max_row_bytes = HIDDEN * 2,
                  .staging_bytes = apart ? (size_t)(ranks - 1) * TOKENS / 4 * HIDDEN * 4 : 0,
                  .timeout_ms = (uint32_t)deadline_ms,
                  .max_sms = sms,
                  .work = run_rank,
                  .shared_bytes = sizeof(int)};
        for (int tries = 1;; tries++) {
            const bool wrong = team_run(&t) != 0, late = *(int *)team_shared() != 0;
            failed += wrong || (late && tries == TRIES);
            if (wrong || !late || tries == TRIES) break;
        }
    }
    printf("gpu_faults %s ranks, %s GPUs, %s: %d of %d faults handled correctly\n", argv[1],
           argv[2], argv[3], rounds - failed, rounds);
    return failed != 0;
}
