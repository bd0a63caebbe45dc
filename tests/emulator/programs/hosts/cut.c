/* SPDX-License-Identifier: Apache-2.0 */
/* The link of a rank is cut amid steps, over UCX between network namespaces: the others name it and
 * nobody else, it names some of them, all within a deadline that is longer, and closing ends.
 *   cut RANKS CUTS */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "copies.h"
#include "epic/epic.h"
#include "slack.h"
#include "wire/suite_net.h"

enum {
    MAX_RANKS = 8,
    TOKENS = 64,
    TOP_K = 4,
    EXPERTS = 24,
    ROW = 1024,
    STEPS = 3, /* before the cut */
    MOST_MS = 1500,
    PATIENCE_MS = 60000 /* the deadline: the cut must be seen long before */
};

typedef struct trial { /* shared by all */
    int victim;
    uint64_t cut_ns;
    uint64_t seen_ns[MAX_RANKS];
} trial;

typedef struct seat {
    epic_context *ctx;
    epic_layer layer;
    int64_t slots;
    size_t plan_bytes;
    void *plan, *ids, *tokens, *recv, *out;
} seat;

static void *memory(size_t bytes)
{
    void *p = NULL;
    CHECK(cudaMalloc(&p, bytes) == cudaSuccess && fill_in(p, 0, bytes) == cudaSuccess);
    return p;
}

static bool take_seat(seat *s, const epic_meet *meet)
{
    const epic_config config = {.max_tokens = TOKENS,
                                .max_row_bytes = ROW,
                                .num_ranks = (uint32_t)meet->num_ranks,
                                .timeout_ms = PATIENCE_MS,
                                .backend = "hosts"};
    int32_t ids[TOKENS * TOP_K];
    if (!CHECK_SAY(epic_open(&s->ctx, meet, &config) == EPIC_OK, "%s", epic_error(s->ctx)))
        return false;
    s->layer =
        (epic_layer){.num_experts = (uint32_t)(EXPERTS / meet->num_ranks * meet->num_ranks),
                     .top_k = TOP_K,
                     .sum_order = EPIC_BY_HOSTS};
    s->slots = epic_capacity_bound(&config, &s->layer);
    s->plan_bytes = epic_plan_bytes(&config, &s->layer);
    for (int i = 0; i < TOKENS * TOP_K; i++)
        ids[i] = (i * 7 + meet->rank) % (int)s->layer.num_experts;
    s->plan = memory(s->plan_bytes);
    s->ids = memory(sizeof ids);
    s->tokens = memory(TOKENS * ROW);
    s->recv = memory((size_t)s->slots * ROW);
    s->out = memory(TOKENS * ROW);
    return CHECK(copy_in(s->ids, ids, sizeof ids) == cudaSuccess);
}

static epic_result step(seat *s)
{
    const epic_plan_args plan = {.layer = &s->layer,
                                 .plan = s->plan,
                                 .plan_bytes = s->plan_bytes,
                                 .topk_idx = s->ids,
                                 .num_tokens = TOKENS,
                                 .capacity = s->slots};
    const epic_dispatch_args dispatch = {.tokens = {s->tokens, TOKENS, ROW},
                                         .recv = {s->recv, s->slots, ROW}};
    const epic_combine_args combine = {.plan = s->plan,
                                       .plan_bytes = s->plan_bytes,
                                       .rows = {s->recv, s->slots, ROW},
                                       .out = {s->out, TOKENS, ROW},
                                       .type = EPIC_BF16};
    epic_result result = epic_plan_dispatch(s->ctx, &plan, &dispatch);
    if (result == EPIC_OK) result = epic_combine(s->ctx, &combine);
    CHECK(cudaStreamSynchronize(NULL) == cudaSuccess);
    return result == EPIC_OK ? epic_check(s->ctx) : result;
}

static void check_failure(const seat *s, int rank, int victim)
{
    epic_failure_info f = {0};
    CHECK(epic_failure(s->ctx, &f) == EPIC_OK);
    CHECK_SAY(f.result == EPIC_EPEER, "%s", f.sentence);
    bool right = f.num_culprits > 0;
    for (uint32_t i = 0; i < f.num_culprits; i++)
        right = right && (f.culprits[i] == victim) == (rank != victim) && f.culprits[i] != rank;
    CHECK_SAY(right, "rank %d, and rank %d was cut off: %s", rank, victim, f.sentence);
}

static void be(const epic_meet *meet, void *self)
{
    trial *t = self;
    seat s = {0};
    if (!take_seat(&s, meet)) return;
    for (int i = 0; i < STEPS; i++)
        if (!CHECK_SAY(step(&s) == EPIC_OK, "%s", epic_error(s.ctx))) return;
    if (meet->rank == t->victim) {
        net_cut(t->victim);
        __atomic_store_n(&t->cut_ns, run_now_ns(), __ATOMIC_RELEASE);
    }
    while (step(&s) == EPIC_OK) continue;
    t->seen_ns[meet->rank] = run_now_ns();
    check_failure(&s, meet->rank, t->victim);
    epic_close(s.ctx);
}

static bool cut(int num_ranks, int victim, trial *t)
{
    uint64_t last = 0;
    *t = (trial){.victim = victim};
    if (!net_open(num_ranks)) return false;
    net_run(num_ranks, be, t, 0, 120);
    net_close();
    for (int r = 0; r < num_ranks; r++)
        if (t->seen_ns[r] > last) last = t->seen_ns[r];
    const double ms = ((double)last - (double)t->cut_ns) / 1e6;
    CHECK_SAY(ms < MOST_MS + slack_ms(), "seen by all after %.0f ms", ms);
    printf("rank %d of %d is cut off: seen by all after %.0f ms\n", victim, num_ranks, ms);
    fflush(stdout);
    return true;
}

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    check_begin();
    const int num_ranks = atoi(argv[1]), cuts = atoi(argv[2]);
    setenv("UCX_NET_DEVICES", "wire", 1);
    trial *t = run_share(sizeof *t);
    for (int i = 0; i < cuts; i++)
        if (!cut(num_ranks, i * 3 % num_ranks, t))
            return check_skip("a link can be cut in a network namespace alone");
    return check_end();
}
