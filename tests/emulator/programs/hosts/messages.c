/* SPDX-License-Identifier: Apache-2.0 */
/* Tests and prints how many messages the ranks pass to the net in operations without tokens: a
 * plan, which sends announcements and counts, and a dispatch, which sends announcements only.
 * With relays, only one rank of each host sends words to another host, for all ranks of its
 * host.
 *
 *   many_hosts_messages HOSTS RANKS_PER_HOST [relays]   relays: only with relays */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/hosts/proxy.h"
#include "team.h"

enum { MOST_RANKS = DEVICE_MAX_RANKS, ANNOUNCEMENT = 32, EXPERTS_PER_RANK = 1 };

static int hosts, local;
static bool relays;
static struct {
    uint64_t bytes, puts, entries;
} sent[2][MOST_RANKS]; /* of the plan and of the dispatch, by rank */

static void *allocate(size_t bytes)
{
    void *p = NULL;
    CHECK_CUDA(cudaMalloc(&p, bytes));
    return p;
}

/* Returns what the last operation has passed to the net. */
static void count_messages(team_rank *me, int operation, uint64_t *before)
{
    uint64_t all[3];
    epic_failure_info f;
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    if (p2p_ops.poll_failure(me->group, &f) != EPIC_OK) {
        fprintf(stderr, "rank %d: %s\n", me->rank, f.sentence);
        team_stop();
    }
    team_barrier(me);
    epic_backend_hosts_counts(me->group, all);
    sent[operation][me->rank].bytes = all[0] - before[0];
    sent[operation][me->rank].puts = all[1] - before[1];
    sent[operation][me->rank].entries = all[2] - before[2];
    memcpy(before, all, sizeof all);
}

static int run_rank(team_rank *me)
{
    const epic_layer layer = {.num_experts = (uint32_t)(EXPERTS_PER_RANK * me->num_ranks),
                              .top_k = 1};
    const size_t plan_bytes = (size_t)device_layer_bytes(me->num_ranks, 1, &layer);
    const epic_call call = {.stream = me->stream, .timeout_ms = 300000};
    uint8_t *memory = allocate(plan_bytes);
    uint64_t before[3] = {0};
    const epic_plan_args plan = {
        .call = call, .layer = &layer, .plan = memory, .plan_bytes = plan_bytes};
    const epic_dispatch_args dispatch = {.call = call,
                                         .layer = &layer,
                                         .plan = memory,
                                         .plan_bytes = plan_bytes,
                                         .tokens = {NULL, 0, 256},
                                         .recv = {NULL, 0, 256}};
    if (p2p_ops.plan(me->group, &plan) != EPIC_OK) team_stop();
    count_messages(me, 0, before);
    if (p2p_ops.dispatch(me->group, &dispatch) != EPIC_OK) team_stop();
    count_messages(me, 1, before);
    CHECK_CUDA(cudaFree(memory));
    return 0;
}

/* Returns the number of words' rows that a rank must send: one per rank whose words it sends
 * and per rank to which it sends them. */
static uint64_t rows_of(int rank)
{
    const int host = rank / local;
    uint64_t rows = 0;
    for (int to = 0; to < hosts; to++) {
        if (to == host) continue;
        if (!relays)
            rows += (uint64_t)local;
        else if ((host + to) % local == rank % local)
            rows += (uint64_t)local;
    }
    return rows;
}

/* Checks the messages of all ranks, and prints the largest numbers. */
static int check_messages(void)
{
    const char *const names[] = {"plan", "dispatch"};
    const uint64_t row_bytes[] = {
        ANNOUNCEMENT + 8 * EXPERTS_PER_RANK * (uint64_t)(hosts * local), ANNOUNCEMENT};
    int bad = 0;
    for (int operation = 0; operation < 2; operation++) {
        uint64_t bytes = 0, puts = 0, entries = 0;
        for (int r = 0; r < hosts * local; r++) {
            const uint64_t rows = rows_of(r);
            /* An entry whose words are in two blocks of the proxy's batches takes two puts. */
            const bool right = sent[operation][r].bytes == rows * row_bytes[operation] &&
                               sent[operation][r].entries == rows * (operation ? 1 : 2) &&
                               sent[operation][r].puts <= 2 * sent[operation][r].entries;
            if (!right) {
                fprintf(stderr, "%s, relays %d: rank %d sent %llu bytes by %llu entries\n",
                        names[operation], relays, r,
                        (unsigned long long)sent[operation][r].bytes,
                        (unsigned long long)sent[operation][r].entries);
                bad = 1;
            }
            if (sent[operation][r].bytes > bytes) bytes = sent[operation][r].bytes;
            if (sent[operation][r].puts > puts) puts = sent[operation][r].puts;
            if (sent[operation][r].entries > entries) entries = sent[operation][r].entries;
        }
        printf(
            "%d x %d, relays %d, %s: a rank sends at most %llu puts, %llu entries of the ring, "
            "%llu bytes\n",
            hosts, local, relays, names[operation], (unsigned long long)puts,
            (unsigned long long)entries, (unsigned long long)bytes);
    }
    return bad;
}

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    hosts = atoi(argv[1]);
    local = atoi(argv[2]);
    const team t = {.num_ranks = hosts * local,
                    .num_gpus = 1,
                    .max_tokens = 1,
                    .max_row_bytes = 256,
                    .timeout_ms = 300000,
                    .work = run_rank};
    int bad = 0;
    setenv("EPIC_TEST_RANKS_PER_HOST", argv[2], 1);
    for (int i = argc > 3; i < 2; i++) {
        relays = i;
        setenv("EPIC_NET_RELAY", relays ? "1" : "0", 1);
        if (team_run(&t) != 0) return 1;
        bad |= check_messages();
    }
    return bad;
}
