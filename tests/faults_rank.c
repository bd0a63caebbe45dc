/* SPDX-License-Identifier: Apache-2.0 */
/* One rank goes wrong; the other ranks check the error and its time. */
#include "faults_rank.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "run.h"

#define TAG 5
#define NUM_MORE_CALLS 2
#define ABORT_SENTENCE "the coffee is out"

const faults_way *way;
tally *totals;
long slack_ms;

/* --------------------------------------------------------------------- what goes wrong ---- */

const fault_kind kinds[NUM_KINDS] = {
    [KILLED] = {"kill -9", true, true, true, EPIC_EPEER},
    [EXITED] = {"exit", true, true, false, EPIC_EPEER},
    [CLOSED] = {"close", false, false, false, EPIC_EPEER},
    [STOPPED] = {"stop", true, false, true, EPIC_ETIMEOUT},
    [PAUSED] = {"pause", true, false, false, EPIC_OK},
    [SKIPPED] = {"skipped call", false, false, false, EPIC_ETIMEOUT},
    [SHAPE] = {"another shape", false, false, false, EPIC_EMISMATCH},
    [OPERATION] = {"another operation", false, false, false, EPIC_EMISMATCH},
    [LATE] = {"late call", false, false, false, EPIC_OK},
    [EMPTY] = {"zero tokens", false, false, false, EPIC_OK},
    [ABORTED] = {"abort", false, false, false, EPIC_EPEER},
};

static bool can_go_wrong(enum kind kind)
{
    if (kinds[kind].needs_process && !way->processes) return false;
    return way->deaths || !kinds[kind].dies;
}

void choose(fault *f, uint64_t seed)
{
    run_random random = {seed};
    *f = (fault){.seed = seed};
    do f->kind = (enum kind)run_below(&random, NUM_KINDS);
    while (!can_go_wrong(f->kind));
    f->middle = kinds[f->kind].middle && run_chance(&random, 50);
    f->operation = (uint32_t)run_between(&random, EPIC_OP_PLAN, EPIC_OP_SUM);
    if (f->kind == EMPTY) f->operation = EPIC_OP_PLAN;
    do f->other = (uint32_t)run_between(&random, EPIC_OP_PLAN, EPIC_OP_SUM);
    while (f->other == f->operation);
    f->num_ranks = (int)run_between(&random, 2, FEW_RANKS);
    if (way->num_ranks) f->num_ranks = way->num_ranks;
    f->victim = (int)run_below(&random, f->num_ranks);
    f->deadline_ms = (uint32_t)run_between(&random, 300, 500);
    f->late_us = (long)f->deadline_ms * 1000 / 3;
    /* these faults end without a deadline, and a late rank may be later on a busy machine */
    f->deadline_ms *= kinds[f->kind].result == EPIC_ETIMEOUT ? 3 : 20;
    f->delay_us = (long)run_between(&random, 500, 20000);
    snprintf(f->name, sizeof f->name, "%s of rank %d of %d %s operation %u, deadline %u ms",
             kinds[f->kind].name, f->victim, f->num_ranks, f->middle ? "amid" : "before",
             f->operation, f->deadline_ms);
}

/* --------------------------------------------------------------------------- the ranks ---- */

void wait_for(_Atomic int *count, int many)
{
    while (atomic_load(count) < many) run_nap_us(200);
}

static epic_result call_once(rank_of_fault *r, uint32_t operation, enum step_change change)
{
    const epic_call call = {.tag = TAG, .timeout_ms = r->f->deadline_ms};
    return step_call(&r->step, operation, &call, change);
}

/* Does what the victim does instead of the call, or before it. */
static epic_result go_wrong(rank_of_fault *r)
{
    const fault *f = r->f;
    if (!f->middle) atomic_store(&r->stage->begin_ns, run_now_ns());
    switch (f->middle ? NUM_KINDS : f->kind) {
    case KILLED:
        raise(SIGKILL);
        break;
    case EXITED:
        _exit(0);
    case CLOSED:
        epic_close(r->ctx);
        r->ctx = NULL;
        return EPIC_EPEER;
    case STOPPED:
    case PAUSED:
        raise(SIGSTOP);
        break;
    case SKIPPED:
        wait_for(&r->stage->done, f->num_ranks - 1);
        break;
    case SHAPE:
        return call_once(r, f->operation, STEP_OTHER_SHAPE);
    case OPERATION:
        return call_once(r, f->other, STEP_SAME);
    case LATE:
        run_nap_us(f->late_us);
        break;
    case EMPTY:
        return call_once(r, f->operation, STEP_EMPTY);
    case ABORTED:
        epic_abort(r->ctx, TAG, ABORT_SENTENCE);
        return EPIC_EPEER;
    default:
        break;
    }
    return call_once(r, f->operation, STEP_SAME);
}

/* Records an error that came later than promised. It is not a failure yet, because the
 * machine may be busy. */
static void check_late(const rank_of_fault *r, long ms, long limit, const char *what)
{
    if (ms <= limit + slack_ms || atomic_fetch_add(&r->stage->late, 1) > 0) return;
    snprintf(r->stage->lateness, sizeof r->stage->lateness,
             "rank %d: %s after %ld ms, limit %ld ms", r->step.rank, what, ms, limit);
}

static void check_time(const rank_of_fault *r, epic_result result)
{
    const fault *f = r->f;
    const long ms = (long)((run_now_ns() - atomic_load(&r->stage->begin_ns)) / 1000000);
    const long deadline = (long)f->deadline_ms;
    long limit = 100;
    if (kinds[f->kind].result == EPIC_ETIMEOUT) limit = deadline + 50;
    if (kinds[f->kind].dies || f->kind == CLOSED) limit = 1000;
    if (kinds[f->kind].result == EPIC_OK) limit = deadline + 50;
    const long slow = kinds[f->kind].result == EPIC_ETIMEOUT ? ms - deadline : ms;
    if (slow > atomic_load(&totals->slowest_ms[f->kind]))
        atomic_store(&totals->slowest_ms[f->kind], slow);
    check_late(r, ms, limit, epic_result_name(result));
    if (result == EPIC_ETIMEOUT)
        CHECK_SAY(ms >= deadline / 2, "%s: gave up after %ld ms", f->name, ms);
}

static bool names_victim(const rank_of_fault *r, const epic_failure_info *info)
{
    char name[16];
    if (r->f->kind != SHAPE && r->f->kind != OPERATION)
        return info->num_culprits == 1 && info->culprits[0] == r->f->victim;
    snprintf(name, sizeof name, "rank %d", r->f->victim);
    return strstr(info->sentence, name) != NULL;
}

/* Checks the error of a rank that made no mistake. */
static void check_failure(rank_of_fault *r, epic_result result)
{
    const fault *f = r->f;
    const epic_result expected = kinds[f->kind].result;
    if (!CHECK_SAY(result == expected, "%s: rank %d got %s instead of %s: %s", f->name,
                   r->step.rank, epic_result_name(result), epic_result_name(expected),
                   result ? epic_error(r->ctx) : ""))
        atomic_fetch_add(&totals->wrong_results, 1);
    check_time(r, result);
    if (result == EPIC_OK || result != expected) return;
    epic_failure_info info;
    CHECK(epic_failure(r->ctx, &info) == EPIC_OK);
    CHECK_EQ(info.result, result);
    if (f->kind != ABORTED) {
        CHECK(info.tag == TAG || f->middle);
        CHECK_SAY(info.operation == f->operation || f->kind == OPERATION,
                  "%s: failed in operation %u", f->name, info.operation);
    }
    if (!CHECK_SAY(names_victim(r, &info), "%s: the error of rank %d, with %u culprits, is: %s",
                   f->name, r->step.rank, info.num_culprits, info.sentence))
        atomic_fetch_add(&totals->wrong_culprits, 1);
    if (f->kind == ABORTED) CHECK(strstr(info.sentence, ABORT_SENTENCE) != NULL);
}

/* Checks that every further call on the broken group fails at once. */
static void check_broken(rank_of_fault *r, epic_result result)
{
    const uint64_t begin = run_now_ns();
    for (uint32_t op = EPIC_OP_PLAN; op <= EPIC_OP_SUM; op++)
        CHECK_EQ(call_once(r, op, STEP_SAME), result);
    CHECK_EQ(epic_check(r->ctx), result);
    const long ms = (long)((run_now_ns() - begin) / 1000000);
    check_late(r, ms, 50, "what a broken group says");
}

static epic_context *open_seat(const epic_bootstrap *bootstrap, const fault *f)
{
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .timeout_ms = 20000,
                                .max_in_flight = 4,
                                .backend = way->backend};
    epic_context *ctx;
    const epic_result result = epic_open(&ctx, bootstrap, &config);
    if (CHECK_SAY(result == EPIC_OK, "%s: open: %s", f->name, epic_error(ctx))) return ctx;
    epic_close(ctx);
    return NULL;
}

static void close_and_reopen(rank_of_fault *r)
{
    const uint64_t begin = run_now_ns();
    epic_close(r->ctx);
    const long ms = (long)((run_now_ns() - begin) / 1000000);
    check_late(r, ms, 1000, "the end of close");
    r->ctx = open_seat(&r->again, r->f);
    if (r->ctx) CHECK_SAY(step_works(r->ctx, TAG), "%s: the next group", r->f->name);
    epic_close(r->ctx);
}

/* For a fault in the middle: makes calls one after the other until one fails. */
static epic_result make_call_of_fault(rank_of_fault *r)
{
    const bool until = r->f->middle;
    epic_result result = EPIC_OK;
    if (r->victim && !until) return go_wrong(r);
    do result = call_once(r, r->f->operation, STEP_SAME);
    while (until && result == EPIC_OK);
    return result;
}

/* ------------------------------------------------------- operations of other tags, too ---- */

typedef struct more_calls {
    rank_of_fault *r;
    step step;
    pthread_t thread;
    uint64_t tag;
} more_calls;

static void *run_more_calls(void *self)
{
    more_calls *b = self;
    const fault *f = b->r->f;
    const epic_call call = {.tag = b->tag, .timeout_ms = f->deadline_ms};
    check_seed = f->seed;
    wait_for(&b->r->stage->opened, f->num_ranks);
    epic_result result = EPIC_OK;
    while (result == EPIC_OK) result = step_call(&b->step, f->operation, &call, STEP_SAME);
    CHECK_SAY(result == kinds[f->kind].result, "%s: tag %d got %s: %s", f->name, (int)b->tag,
              epic_result_name(result), epic_error(b->r->ctx));
    return NULL;
}

/* Starts operations of other tags that are running when the fault comes. */
static void begin_more_calls(rank_of_fault *r, more_calls *all)
{
    for (int i = 0; i < NUM_MORE_CALLS && r->f->middle; i++) {
        all[i] = (more_calls){.r = r, .tag = (uint64_t)(TAG + 1 + i)};
        step_open(&all[i].step, r->ctx, STEP_MAX_TOKENS / 2, 300);
        CHECK(step_all(&all[i].step, all[i].tag));
        pthread_create(&all[i].thread, NULL, run_more_calls, &all[i]);
    }
}

static void end_more_calls(const rank_of_fault *r, more_calls *all)
{
    for (int i = 0; i < NUM_MORE_CALLS && r->f->middle; i++) {
        pthread_join(all[i].thread, NULL);
        step_close(&all[i].step);
    }
}

void be_rank(rank_of_fault *r)
{
    const fault *f = r->f;
    more_calls others[NUM_MORE_CALLS];
    check_seed = f->seed;
    r->victim = r->bootstrap.rank == f->victim;
    r->ctx = open_seat(&r->bootstrap, f);
    if (!r->ctx) return;
    step_open(&r->step, r->ctx, f->middle ? STEP_MAX_TOKENS : 9, f->middle ? 1024 : 64);
    CHECK(step_all(&r->step, TAG));
    begin_more_calls(r, others);
    if (r->victim) atomic_store(&r->stage->victim, getpid());
    atomic_fetch_add(&r->stage->opened, 1);
    wait_for(&r->stage->opened, f->num_ranks);
    const epic_result result = make_call_of_fault(r);
    const epic_result expected = kinds[f->kind].result;
    if (!r->victim) {
        check_failure(r, result);
        atomic_fetch_add(&r->stage->done, 1);
    } else if (expected != EPIC_OK)
        CHECK_SAY(result == expected, "%s: the victim got %s: %s", f->name,
                  epic_result_name(result), epic_error(r->ctx));
    else
        CHECK_SAY(result == EPIC_OK, "%s: the victim: %s", f->name, epic_error(r->ctx));
    wait_for(&r->stage->done, f->num_ranks - 1); /* by then all ranks have their error */
    end_more_calls(r, others);
    if (expected != EPIC_OK && r->ctx && result == expected) check_broken(r, result);
    if (expected == EPIC_OK && result == EPIC_OK && f->operation != EPIC_OP_PLAN)
        CHECK(step_all(&r->step, TAG));
    step_close(&r->step);
    close_and_reopen(r);
}
