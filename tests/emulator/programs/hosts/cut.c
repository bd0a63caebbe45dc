/* SPDX-License-Identifier: Apache-2.0 */
/* Tests a link that is cut in the middle of operations, over UCX between network namespaces.
 * The other ranks must name the rank behind this link and no other rank. This rank must name
 * some of the others. All errors must come before the deadline, which is longer, and closing
 * must end.
 *
 *   cut RANKS CUTS */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "epic/epic.h"
#include "net/suite_net.h"
#include "rounds.h"
#include "times.h"

enum {
    MAX_RANKS = 8,
    STEPS = 3, /* number of steps before the cut */
    MOST_MS = 1500,
    PATIENCE_MS = 60000 /* the deadline; the cut must be noticed much earlier */
};

typedef struct trial { /* shared by all ranks */
    int victim;
    uint64_t cut_ns;
    uint64_t seen_ns[MAX_RANKS];
} trial;

static bool take_seat(rounds *s, const epic_bootstrap *bootstrap)
{
    const epic_config config = {.max_tokens = ROUND_TOKENS,
                                .max_row_bytes = ROUND_ROW,
                                .num_ranks = (uint32_t)bootstrap->num_ranks,
                                .timeout_ms = PATIENCE_MS,
                                .backend = "hosts"};
    if (!CHECK_SAY(epic_open(&s->ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(s->ctx)))
        return false;
    return CHECK(round_seat(s, &config));
}

static void check_failure(const rounds *s, int rank, int victim)
{
    epic_failure_info f = {0};
    CHECK(epic_failure(s->ctx, &f) == EPIC_OK);
    CHECK_SAY(f.result == EPIC_EPEER, "%s", f.sentence);
    bool right = f.num_culprits > 0;
    for (uint32_t i = 0; i < f.num_culprits; i++)
        right = right && (f.culprits[i] == victim) == (rank != victim) && f.culprits[i] != rank;
    CHECK_SAY(right, "rank %d, and rank %d was cut off: %s", rank, victim, f.sentence);
}

static void run_rank(const epic_bootstrap *bootstrap, void *self)
{
    trial *t = self;
    rounds s = {0};
    if (!take_seat(&s, bootstrap)) return;
    for (int i = 0; i < STEPS; i++)
        if (!CHECK_SAY(round_run(&s) == EPIC_OK, "%s", epic_error(s.ctx))) return;
    if (bootstrap->rank == t->victim) {
        net_cut(t->victim);
        __atomic_store_n(&t->cut_ns, run_now_ns(), __ATOMIC_RELEASE);
    }
    while (round_run(&s) == EPIC_OK) continue;
    t->seen_ns[bootstrap->rank] = run_now_ns();
    check_failure(&s, bootstrap->rank, t->victim);
    epic_close(s.ctx);
}

static bool run_cut(int num_ranks, int victim, trial *t)
{
    uint64_t last = 0;
    *t = (trial){.victim = victim};
    if (!net_open(num_ranks)) return false;
    net_run(num_ranks, run_rank, t, 0, 120);
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
    setenv("UCX_NET_DEVICES", "net", 1);
    trial *t = run_share(sizeof *t);
    for (int i = 0; i < cuts; i++)
        if (!run_cut(num_ranks, i * 3 % num_ranks, t))
            return check_skip("a link can be cut in a network namespace alone");
    return check_end();
}
