/* SPDX-License-Identifier: Apache-2.0 */
/* Runs operations without pauses: random cases from a pool, no synchronization between them,
 * and random delays of each host. From time to time it checks the results bit by bit.
 *
 *   gpu_storm RANKS GPUS threads|processes OPERATIONS SEED */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "case.h"
#include "scaled_cases.h"

#define POOL 16
#define MAX_CASE_TOKENS 96
#define MAX_ROW_BYTES 4096
#define ARENA_BYTES ((size_t)256 << 20)
#define LOOK_EVERY 40 /* check after this many rounds, and after the last round */

/* number of cases of the pool that run alone at first, all with low-latency kernels */
#define FEW (HOSTS ? 0 : 8)

static int operations;
static uint64_t first_seed;

typedef struct entry { /* a case of the pool */
    bench b;
    arrays a;
    sums s;
} entry;

static void prepare_entry(entry *e, team_rank *me, uint64_t seed, case_kind kind)
{
    memset(e, 0, sizeof *e);
    e->b = (bench){.me = me, .arena_bytes = ARENA_BYTES};
    CHECK_CUDA(cudaMalloc((void **)&e->b.arena, ARENA_BYTES));
    for (;; seed += 1000) { /* draw again until the rows of the case are moved */
        draw_case(&e->b.c, seed, me->num_ranks, MAX_CASE_TOKENS, MAX_ROW_BYTES, kind);
        if (case_moves(&e->b.c)) break;
        free_routing(&e->b.c.r);
    }
    e->b.call = (epic_call){.stream = me->stream, .tag = seed};
    make_inputs(&e->b, &e->a);
    make_sums(&e->b, &e->s);
}

/* Enqueues five operations, or four, and returns their number; 0: refused. */
static int enqueue_operations(entry *e)
{
    bench *b = &e->b;
    dirty_received(b, &e->a);
    dirty_sums(b, &e->s);
    if (b->c.fused ? !call_plan_dispatch(b, &e->a)
                   : !call_plan(b, &e->a) || !call_dispatch(b, &e->a))
        return 0;
    const bool good = call_combine(b, &e->a, &e->s) && call_combine_backward(b, &e->a, &e->s) &&
                      call_dispatch_backward(b, &e->a, &e->s);
    return good ? (b->c.fused ? 4 : 5) : 0;
}

static void check_results(entry *e)
{
    CHECK_CUDA(cudaStreamSynchronize(e->b.me->stream));
    epic_failure_info failure; /* if the group is broken, no other result is correct */
    if (p2p_ops.poll_failure(e->b.me->group, &failure) != EPIC_OK)
        report_wrong(&e->b, "%s", failure.sentence);
    check_plan(&e->b, &e->a);
    check_dispatch(&e->b, &e->a, "dispatch");
    check_sums(&e->b, &e->s);
}

static int run_rank(team_rank *me)
{
    entry *pool = calloc(POOL, sizeof *pool);
    uint64_t same = first_seed, own = first_seed * 31 + (uint64_t)me->rank + 1;
    int done = 0;
    for (int i = 0; i < POOL; i++)
        prepare_entry(&pool[i], me, first_seed + (uint64_t)i, i < FEW ? CASE_PLAIN : CASE_ANY);
    team_barrier(me);
    for (int round = 1; done < operations; round++) {
        const int most = FEW && done < operations / 2 ? FEW : POOL;
        entry *e = &pool[draw_between(&same, 0, most - 1)];
        if (draw_between(&own, 0, 3) == 0) usleep((unsigned)draw_between(&own, 0, 400));
        const int count = enqueue_operations(e);
        done += count;
        if (round % LOOK_EVERY == 0 || done >= operations) check_results(e);
        if (!count || e->b.wrong) team_stop();
    }
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    team_barrier(me);
    for (int i = 0; i < POOL; i++) { /* contents that no later round uses */
        free_routing(&pool[i].b.c.r);
        CHECK_CUDA(cudaFree(pool[i].b.arena));
    }
    if (me->rank == 0) printf("%d operations\n", done);
    free(pool);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 6) return 2;
    operations = scaled_cases(atoi(argv[4]));
    first_seed = strtoull(argv[5], NULL, 10);
    team t = {.num_ranks = atoi(argv[1]),
              .num_gpus = atoi(argv[2]),
              .ranks_per_process = team_ranks_per_process(argv[3]),
              .max_tokens = MAX_CASE_TOKENS,
              .lowlat_tokens = TEAM_LOWLAT_TOKENS,
              .max_row_bytes = MAX_ROW_BYTES,
              .timeout_ms = TEAM_LONG_MS,
              .work = run_rank};
    const int failed = team_run(&t);
    printf("gpu_storm %s ranks, %s GPUs, %s, %d operations from seed %llu: %s\n", argv[1],
           argv[2], argv[3], operations, (unsigned long long)first_seed,
           failed ? "WRONG" : "good");
    return failed != 0;
}
