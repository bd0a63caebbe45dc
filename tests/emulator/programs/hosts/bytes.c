/* SPDX-License-Identifier: Apache-2.0 */
/* Tests how many bytes and ring entries a rank passes to the net, exactly. Two hosts of two
 * ranks; every token goes to all four ranks.
 *
 * With relays a row crosses the net once per host, together with a word about which ranks want
 * it. The partials of a host cross as one if the sum order is a tree, else one per rank. A
 * whole partial takes one ring entry. A plan takes one entry for counts and one for the records
 * of a CTA's tokens; a low-latency plan takes one for the ids of several tokens and nothing
 * else. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/hosts/proxy.h"
#include "copies.h"
#include "team.h"

enum { RANKS = 4, TOKENS = 40, ROW = 4096, SCALE = ROW / 2 / 128 * 4, SLOTS = RANKS * TOKENS };
#define ROWS ((uint64_t)TOKENS * ROW)
#define ANNOUNCED 64u /* bytes of an announcement to each rank of the other host */
#define ALWAYS 2u     /* ring entries of these two announcements */

static bool relays;
static uint32_t order;
static int bad;

/* Expects what the last operation has passed to the net, after all ranks have ended it. 0: not
 * checked. */
static void expect_puts(team_rank *me, uint64_t *before, const char *what, uint64_t bytes,
                        uint64_t entries)
{
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    epic_failure_info f;
    if (p2p_ops.poll_failure(me->group, &f) != EPIC_OK) {
        fprintf(stderr, "%s: %s\n", what, f.sentence);
        team_stop();
    }
    team_barrier(me);
    uint64_t all[3];
    epic_backend_hosts_counts(me->group, all);
    const uint64_t given = all[0] - before[0], taken = all[2] - before[2];
    memcpy(before, all, sizeof all);
    if ((given == bytes || !bytes) && (taken == entries || !entries)) return;
    fprintf(
        stderr,
        "%s, relays %d, order %u: rank %d gave %llu bytes by %llu entries, not %llu by %llu\n",
        what, relays, order, me->rank, (unsigned long long)given, (unsigned long long)taken,
        (unsigned long long)bytes, (unsigned long long)entries);
    __atomic_store_n(&bad, 1, __ATOMIC_RELAXED);
}

static void *allocate_zeroed(size_t bytes)
{
    void *p = NULL;
    CHECK_CUDA(cudaMalloc(&p, bytes));
    CHECK_CUDA(fill_in(p, 0, bytes));
    return p;
}

enum { PLAN, IDS, TOKEN_ROWS, SLOT_ROWS, SCALES, SLOT_SCALES, OUT, NUM_ARRAYS };

/* Dispatches rows, rows with a second row, and rows that EPIC quantizes. */
static void test_dispatch(team_rank *me, void *const *all, epic_dispatch_args dispatch,
                          uint64_t *before)
{
    const uint64_t words = relays ? TOKENS * 8 : 0, copies = relays ? 1 : 2;
    if (p2p_ops.dispatch(me->group, &dispatch) != EPIC_OK) team_stop();
    expect_puts(me, before, "dispatch", ANNOUNCED + copies * ROWS + words,
                relays ? 0 : ALWAYS + 2 * TOKENS);
    dispatch.scales = (epic_const_rows){all[SCALES], TOKENS, SCALE};
    dispatch.recv_scales = (epic_rows){all[SLOT_SCALES], SLOTS, SCALE};
    if (p2p_ops.dispatch(me->group, &dispatch) != EPIC_OK) team_stop();
    expect_puts(me, before, "second rows", ANNOUNCED + copies * TOKENS * (ROW + SCALE) + words,
                0);
    dispatch.scales = (epic_const_rows){0};
    dispatch.recv.row_bytes = ROW / 2;
    dispatch.type = EPIC_BF16;
    dispatch.quantize = EPIC_QUANTIZE_1X128;
    if (p2p_ops.dispatch(me->group, &dispatch) != EPIC_OK) team_stop();
    expect_puts(me, before, "quantized",
                ANNOUNCED + copies * TOKENS * (ROW / 2 + SCALE) + words, 0);
}

static void test_sums(team_rank *me, void *const *all, const epic_plan_args *plan,
                      uint64_t *before)
{
    const epic_combine_args combine = {.call = plan->call,
                                       .layer = plan->layer,
                                       .plan = plan->plan,
                                       .plan_bytes = plan->plan_bytes,
                                       .rows = {all[SLOT_ROWS], SLOTS, ROW},
                                       .out = {all[OUT], TOKENS, ROW},
                                       .type = EPIC_BF16};
    const epic_combine_backward_args back = {.call = plan->call,
                                             .layer = plan->layer,
                                             .plan = plan->plan,
                                             .plan_bytes = plan->plan_bytes,
                                             .d_out = {all[TOKEN_ROWS], TOKENS, ROW},
                                             .d_rows = {all[SLOT_ROWS], SLOTS, ROW},
                                             .type = EPIC_BF16};
    if (p2p_ops.combine(me->group, &combine) != EPIC_OK) team_stop();
    const uint64_t copies = relays && order == EPIC_TREE ? 1 : 2;
    expect_puts(me, before, "combine", ANNOUNCED + copies * ROWS, ALWAYS + copies * TOKENS);
    if (p2p_ops.combine_backward(me->group, &back) != EPIC_OK) team_stop();
    expect_puts(me, before, "combine_backward",
                ANNOUNCED + (relays ? ROWS + TOKENS * 8 : 2 * ROWS), 0);
}

static int run_rank(team_rank *me)
{
    const epic_layer layer = {.num_experts = RANKS, .top_k = RANKS, .sum_order = order};
    const int64_t plan_bytes = device_layer_bytes(RANKS, TOKENS, &layer);
    const epic_call call = {.stream = me->stream, .timeout_ms = 60000};
    int32_t ids[TOKENS * RANKS];
    for (int i = 0; i < TOKENS * RANKS; i++) ids[i] = i % RANKS;
    void *all[NUM_ARRAYS] = {allocate_zeroed((size_t)plan_bytes),
                             allocate_zeroed(sizeof ids),
                             allocate_zeroed(ROWS),
                             allocate_zeroed((size_t)SLOTS * ROW),
                             allocate_zeroed((size_t)TOKENS * SCALE),
                             allocate_zeroed((size_t)SLOTS * SCALE),
                             allocate_zeroed(ROWS)};
    CHECK_CUDA(copy_in(all[IDS], ids, sizeof ids));
    const epic_plan_args plan = {.call = call,
                                 .layer = &layer,
                                 .plan = all[PLAN],
                                 .plan_bytes = plan_bytes,
                                 .topk_idx = all[IDS],
                                 .num_tokens = TOKENS};
    const epic_dispatch_args dispatch = {.call = call,
                                         .layer = &layer,
                                         .plan = all[PLAN],
                                         .plan_bytes = plan_bytes,
                                         .tokens = {all[TOKEN_ROWS], TOKENS, ROW},
                                         .recv = {all[SLOT_ROWS], SLOTS, ROW}};
    /* a low-latency plan: the ids of 16 tokens, two words each, in one ring entry */
    const bool few = !relays;
    uint64_t before[3] = {0};
    if (p2p_ops.plan(me->group, &plan) != EPIC_OK) team_stop();
    const uint64_t announced =
        few ? TOKENS * 16 : (TOKENS + 1) * RANKS * 8; /* counts and records */
    expect_puts(me, before, "plan", ANNOUNCED + 2 * announced,
                ALWAYS + 2 * (few ? (TOKENS + 15) / 16 : 2));
    test_dispatch(me, all, dispatch, before);
    test_sums(me, all, &plan, before);
    for (int i = 0; i < NUM_ARRAYS; i++) CHECK_CUDA(cudaFree(all[i]));
    return 0;
}

int main(void)
{
    const team t = {.num_ranks = RANKS,
                    .num_gpus = 1,
                    .max_tokens = TOKENS,
                    .max_row_bytes = ROW + SCALE, /* so that one round is enough */
                    .timeout_ms = 60000,
                    .work = run_rank};
    setenv("EPIC_TEST_RANKS_PER_HOST", "2", 1);
    for (int i = 0; i < 4 && !bad; i++) {
        relays = i % 2;
        order = i < 2 ? EPIC_TREE : EPIC_BY_RANK;
        setenv("EPIC_NET_RELAY", relays ? "1" : "0", 1);
        if (team_run(&t) != 0) return 1;
    }
    if (!bad) printf("hosts_bytes: good\n");
    return bad;
}
