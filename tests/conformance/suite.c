/* SPDX-License-Identifier: Apache-2.0 */
/* The conformance suite opens groups of several kinds and runs random cases in each. */
#include "suite.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "suite_case.h"

#define MAX_ROW_BYTES 24576
#define NUM_TAGS 16
#define NUM_TAGS_SANITIZED 6
/* Groups of more ranks run fewer cases and tags, with little staging, because every rank
 * computes the expected results of all ranks. */
#define FEW_RANKS 8
#define MOST_WINDOW_RANKS 32 /* of backend p2p */
/* On devices, groups of more than MANY_DEVICE_RANKS ranks are many. They run all parts in one
 * group, with at most MANY_CHOICES choices per rank, because the emulator is slow. With the
 * largest top_k this is one token. */
#define MANY_DEVICE_RANKS 32
#define MANY_CHOICES 64
#define SECONDS 240 /* time after which a rank counts as hung */

/* One rank of one group. */
typedef struct member {
    const char *backend;
    const epic_bootstrap *bootstrap;
    const epic_bootstrap *meeting;  /* over which the members agree; without vacant seats */
    const epic_bootstrap *meetings; /* [num_members]: `meeting` of each, or NULL */
    void *native;
    uint64_t seed;
    int cases;
    bool windows; /* arrays of calls lie in windows of the contexts */
    const world_seats *seats;
    suite_set_members *set_members; /* NULL: no seat is vacant */
    epic_context *group; /* the group that all parts use, or NULL: each part opens its own */
} member;

/* Returns whether the seat of this rank is vacant. */
static bool is_vacant(const member *m)
{
    for (int i = 0; i < m->seats->num_members; i++)
        if (m->seats->of[i] == m->bootstrap->rank) return false;
    return true;
}

/* Returns the least staging that every backend accepts: for each ring two entries of 1,024
 * float64 with a trailer. */
static int64_t least_staging(int num_ranks, int64_t max_in_flight)
{
    return 2 * 8704 * max_in_flight * 2 * (num_ranks > 1 ? num_ranks - 1 : 1);
}

static bool has_many_ranks(const member *m)
{
    return m->bootstrap->num_ranks > FEW_RANKS;
}

static bool has_many_device_ranks(int num_ranks)
{
    return suite_there->device && num_ranks > MANY_DEVICE_RANKS;
}

static epic_context *open_group(const member *m, uint32_t wanted, bool little)
{
    if (m->group) return m->group;
    const uint32_t max_in_flight = has_many_ranks(m) && !wanted ? 4 : wanted;
    const int ranks = m->bootstrap->num_ranks;
    const int64_t least = m->windows ? EPIC_LEAST_STAGING : least_staging(ranks, max_in_flight);
    const epic_config config = {.max_tokens = WORLD_MAX_TOKENS,
                                .max_row_bytes = MAX_ROW_BYTES,
                                .staging_bytes = little || has_many_ranks(m) ? least : 0,
                                .timeout_ms = has_many_ranks(m) ? 400000 : 100000,
                                .max_in_flight = max_in_flight,
                                .max_sms =
                                    suite_there->max_sms ? suite_there->max_sms(ranks) : 0,
                                .backend = m->backend,
                                .native = m->native,
                                .flags = m->set_members ? EPIC_CAN_REGROUP : 0};
    epic_context *ctx;
    const epic_result result = epic_open(&ctx, m->bootstrap, &config);
    if (!CHECK_SAY(result == EPIC_OK, "open: %s", epic_error(ctx))) {
        epic_close(ctx);
        return NULL;
    }
    CHECK_EQ(epic_rank(ctx), m->bootstrap->rank);
    CHECK_EQ(epic_num_ranks(ctx), ranks);
    CHECK(strcmp(epic_backend_name(ctx), m->backend) == 0);
    if (is_vacant(m)) {
        epic_close(ctx);
        return NULL;
    }
    if (m->set_members) m->set_members(ctx, m->seats);
    if (m->windows) case_windows_open(ctx);
    return ctx;
}

/* Closes a group; ctx may be NULL if it was never opened, or if the seat is vacant. Returns
 * false if ranks may have lost each other. */
static bool close_group(const member *m, epic_context *ctx)
{
    if (!ctx) return is_vacant(m);
    const epic_result result = epic_check(ctx);
    CHECK_SAY(result == EPIC_OK, "the group is broken: %s", epic_error(ctx));
    if (ctx == m->group) return result == EPIC_OK; /* later parts use it, too */
    case_windows_close(ctx);
    epic_close(ctx);
    return result == EPIC_OK;
}

/* Returns whether the group can run more cases. After a failure that broke the group all
 * further calls fail and show nothing new. On a device the first failed check ends the
 * suite, because the emulator is slow, most of all with damaged bits. */
static bool whole(const member *m, epic_context *ctx)
{
    if (is_vacant(m)) return false;
    if (!suite_there->device) return ctx && epic_check(ctx) == EPIC_OK;
    return case_agree(m->meeting, ctx && check_num_failed() == 0 && epic_check(ctx) == EPIC_OK);
}

/* ------------------------------------------------------------------------- the parts ---- */

static bool random_cases(const member *m, uint32_t max_in_flight, bool little, bool delays)
{
    epic_context *ctx = open_group(m, max_in_flight, little);
    for (int i = 0; whole(m, ctx) && i < m->cases; i++) {
        world *w = world_new_vacant(run_mix(m->seed, (uint64_t)i), m->seats);
        case_run(ctx, m->meeting, w, (uint64_t)(i % 3), delays);
        world_free(w);
    }
    return close_group(m, ctx);
}

static bool small_lanes(const member *m)
{
    return random_cases(m, 2, true, false);
}

static bool many_cases(const member *m)
{
    return random_cases(m, 0, false, false);
}

static bool delayed_cases(const member *m)
{
    return random_cases(m, 3, false, true);
}

static world *large_world(const member *m)
{
    for (uint64_t seed = m->seed;; seed++) {
        world *w = world_new_vacant(seed, m->seats);
        if (w->plan->total_tokens >= WORLD_MAX_TOKENS) return w;
        world_free(w);
    }
}

/* Repeats one case with different delays; the bits must be equal. */
static bool repeated_case(const member *m)
{
    if (m->seats->num_members == 1) return true;
    epic_context *ctx = open_group(m, 3, false);
    world *w = large_world(m);
    for (int i = 0; whole(m, ctx) && i < m->cases; i++)
        case_run(ctx, m->meeting, w, (uint64_t)i, true);
    world_free(w);
    return close_group(m, ctx);
}

/* Checks that sums over several ranks equal those of one rank. The transport matters little
 * here: one backend runs all cases, the others fewer. */
static bool tree_cases(const member *m)
{
    if (!world_has_tree(m->seats->num_members) || suite_there->lacks & SUITE_TREE) return true;
    epic_context *ctx = open_group(m, 2, false);
    const int cases = strcmp(m->backend, "threads") ? m->cases / 5 + 1 : m->cases;
    for (int i = 0; whole(m, ctx) && i < cases; i++) {
        world *w = world_new_tree(run_mix(m->seed, (uint64_t)i), m->seats->num_members);
        world_take_seats(w, m->seats);
        case_run(ctx, m->meeting, w, 0, false);
        world_free(w);
    }
    return close_group(m, ctx);
}

/* Runs layers of different shapes phase by phase, two in one group and one in another. */
static bool side_by_side(const member *m)
{
    epic_context *groups[2] = {open_group(m, 4, false), open_group(m, 2, true)};
    for (int i = 0; whole(m, groups[0]) && whole(m, groups[1]) && i < m->cases; i++) {
        world *w[3];
        seat seats[3];
        for (int j = 0; j < 3; j++) {
            w[j] = world_new_vacant(run_mix(m->seed, (uint64_t)(3 * i + j)), m->seats);
            case_begin(&seats[j], groups[j / 2], m->meeting, w[j], (uint64_t)(7 + j % 2),
                       false);
        }
        for (int phase = 0; case_phase(&seats[0], phase); phase++) {
            case_phase(&seats[1], phase);
            case_phase(&seats[2], phase);
        }
        for (int j = 0; j < 3; j++) {
            case_end(&seats[j]);
            world_free(w[j]);
        }
    }
    const bool first = close_group(m, groups[0]), second = close_group(m, groups[1]);
    return first && second;
}

typedef struct tagged {
    const member *m;
    epic_context *ctx;
    uint64_t tag;
    long delay_us;
} tagged;

static void *run_tag(void *self)
{
    const tagged *t = self;
    run_nap_us(t->delay_us);
    for (int i = 0; whole(t->m, t->ctx) && i < t->m->cases; i++) {
        const uint64_t seed = run_mix(t->m->seed, t->tag * 1000 + (uint64_t)i);
        world *w = world_new_vacant(seed, t->m->seats);
        case_run(t->ctx, t->m->meeting, w, t->tag, i % 2);
        world_free(w);
    }
    return NULL;
}

/* Starts operations of 16 tags in a different order on every rank, which host contexts
 * allow. Programs with a sanitizer, where threads are slow, start fewer. */
static bool many_tags(const member *m)
{
    if (suite_there->device) return true;
    epic_context *ctx = open_group(m, 0, false);
    if (!ctx) return is_vacant(m);
    const int most = run_is_sanitized() && run_scale() < 1 ? NUM_TAGS_SANITIZED : NUM_TAGS;
    const int num_tags = has_many_ranks(m) ? 2 : most;
    tagged tags[NUM_TAGS];
    pthread_t threads[NUM_TAGS];
    run_random random = {run_mix(m->seed, 77 + (uint64_t)m->bootstrap->rank)};
    for (int t = 0; t < num_tags; t++) {
        tags[t] = (tagged){m, ctx, run_mix(m->seed, (uint64_t)t), run_below(&random, 4000)};
        pthread_create(&threads[t], NULL, run_tag, &tags[t]);
    }
    for (int t = 0; t < num_tags; t++) pthread_join(threads[t], NULL);
    return close_group(m, ctx);
}

/* Makes a case with a valid plan, and tokens on `victim`. It has few experts because sizes
 * do not matter here. */
static world *good_world(const member *m, uint64_t seed, int victim, bool distinct)
{
    for (;; seed++) {
        world *w = world_new_vacant(seed, m->seats);
        const uint32_t lacks = suite_there->lacks;
        const bool there = !(w->logical_of && lacks & SUITE_REPLICAS) &&
                           !(w->layer.sum_order == EPIC_TREE && lacks & SUITE_TREE);
        const bool good = w->plan->result == EPIC_OK && w->layer.num_experts <= 64;
        const bool kind = distinct == ((w->layer.flags & EPIC_DISTINCT) != 0);
        if (there && good && kind && w->tokens_of[victim] > 0) return w;
        world_free(w);
    }
}

/* Runs bad plans, and after each of them a complete good case. */
static bool bad_data(const member *m)
{
    run_random common = {m->seed};
    epic_context *ctx = open_group(m, 2, false);
    for (int i = 0; whole(m, ctx) && i < m->cases; i++) {
        const int victim = (int)run_below(&common, m->seats->num_members);
        world *w = good_world(m, run_mix(m->seed, (uint64_t)i), victim, i % 2 == 0);
        case_bad_choice(ctx, m->meeting, w, 0, victim);
        if (whole(m, ctx)) case_run(ctx, m->meeting, w, 0, false);
        world_free(w);
    }
    return close_group(m, ctx);
}

/* The dispatcher has no placement of experts, so it needs a member on every seat. */
static bool simple_step(const member *m)
{
    if (m->set_members) return true;
    const bool many = has_many_device_ranks(m->bootstrap->num_ranks);
    epic_context *ctx = open_group(m, 2, false);
    for (int gradients = 0; whole(m, ctx) && gradients < 2; gradients++) {
        const int least = !many ? 4 : gradients ? 3 : 1; /* round 2 has no weights */
        case_easy(ctx, m->bootstrap, m->cases > least ? m->cases : least, gradients);
    }
    return close_group(m, ctx);
}

static const struct {
    const char *name;
    bool (*run)(const member *); /* returns false if the suite should stop */
    int cases;
    bool few; /* for at most FEW_RANKS ranks; more ranks have a similar part */
} parts[] = {
    {"random cases", many_cases, 60, false},
    {"lanes shorter than rows", small_lanes, 40, false},
    {"random delays", delayed_cases, 10, true}, /* "one case repeated" has delays, too */
    {"one case repeated", repeated_case, 100, false},
    {"tree order", tree_cases, 100, false},
    {"side by side", side_by_side, 7, true}, /* "many tags" also has several layers at once */
    {"many tags", many_tags, 2, false},
    {"bad data", bad_data, 6, false},
    {"simple step", simple_step, 12, false},
};

/* Returns whether the arrays of a part lie in windows, too. Where rows are never stored into
 * windows directly, the first part shows that windows work as any memory. On GPUs, where the
 * emulator is slow, and with many ranks only the random cases and bad data use windows. Backend
 * p2p has no windows on several hosts, which tests set with EPIC_HOST. */
static bool has_windows(const char *backend, int num_ranks, size_t part)
{
    const bool stores =
        !strcmp(backend, "threads") || !strcmp(backend, "shm") ||
        (!strcmp(backend, "p2p") && num_ranks <= MOST_WINDOW_RANKS && !getenv("EPIC_HOST"));
    if (!stores) return part == 0 && !suite_there->device;
    return part == 0 || part == 7 || (!suite_there->device && num_ranks <= FEW_RANKS);
}

/* Runs all parts. `base` has all fields but seed, cases and windows. Returns false if the suite
 * should stop. */
static bool run_parts(const member *base, bool windows)
{
    const char *backend = base->backend;
    const epic_bootstrap *bootstrap = base->bootstrap;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const int ranks = bootstrap->num_ranks;
        if (windows && (base->meetings || !has_windows(backend, ranks, i))) continue;
        if (parts[i].few && ranks > FEW_RANKS) continue;
        const uint64_t begin = run_now_ns();
        const int64_t cases = parts[i].cases;
        const int64_t fewer =
            ranks > FEW_RANKS ? (cases * FEW_RANKS + ranks - 1) / ranks : cases;
        member m = *base;
        m.seed = run_mix(run_seed(), i);
        m.cases = (int)run_scaled(fewer);
        m.windows = windows;
        check_seed = m.seed;
        if (!parts[i].run(&m)) return false;
        if (bootstrap->rank == 0)
            printf("%s, %d ranks of %d: %s%s, %.1f s\n", backend, m.seats->num_members,
                   m.seats->num_seats, parts[i].name, windows ? " in windows" : "",
                   (double)(run_now_ns() - begin) * 1e-9);
    }
    return true;
}

/* Runs all parts in one group, without windows: such groups have none. */
static void run_parts_in_one_group(member *m)
{
    epic_context *const ctx = open_group(m, 2, true);
    m->group = ctx;
    if (ctx) run_parts(m, false);
    m->group = NULL;
    close_group(m, ctx);
}

static void run_member(member *m)
{
    m->meeting = m->bootstrap;
    for (int i = 0; m->meetings && i < m->seats->num_members; i++)
        if (m->seats->of[i] == m->bootstrap->rank) m->meeting = &m->meetings[i];
    if (suite_there->open) suite_there->open(m->bootstrap);
    if (has_many_device_ranks(m->bootstrap->num_ranks))
        run_parts_in_one_group(m);
    else if (run_parts(m, false))
        run_parts(m, true);
    if (suite_there->close) suite_there->close();
}

/* Sets the seats of a group without vacant seats. */
static world_seats all_seats(int num_ranks)
{
    world_seats seats = {.num_seats = num_ranks, .num_members = num_ranks};
    for (int r = 0; r < num_ranks; r++) seats.of[r] = r;
    return seats;
}

void suite_rank(const char *backend, const epic_bootstrap *bootstrap, void *native)
{
    const world_seats seats = all_seats(bootstrap->num_ranks);
    member m = {.backend = backend, .bootstrap = bootstrap, .native = native, .seats = &seats};
    run_member(&m);
}

static void body(const epic_bootstrap *bootstrap, void *self)
{
    member m = *(const member *)self;
    m.bootstrap = bootstrap;
    run_member(&m);
}

static void run_ranks(member *m)
{
    const int slower = m->seats->num_seats > 64 ? 8 : 1;
    if (has_many_device_ranks(m->seats->num_seats)) world_most_choices = MANY_CHOICES;
    const unsigned seconds = (unsigned)(SECONDS * slower * (run_scale() > 1 ? run_scale() : 1));
    if (strcmp(m->backend, "shm") == 0)
        run_processes(m->seats->num_seats, body, m, seconds);
    else
        run_threads(m->seats->num_seats, body, m);
}

void suite_run(const char *backend, int num_ranks)
{
    const world_seats seats = all_seats(num_ranks);
    run_ranks(&(member){.backend = backend, .seats = &seats});
}

void suite_run_vacant(const char *backend, const world_seats *seats,
                      suite_set_members *set_members)
{
    epic_bootstrap meetings[RUN_MAX_RANKS];
    member m = {.backend = backend, .seats = seats, .set_members = set_members};
    if (suite_there->device) { /* where ranks are threads, and must agree */
        if (!CHECK(epic_bootstrap_threads(meetings, seats->num_members, SECONDS * 1000) ==
                   EPIC_OK))
            return;
        m.meetings = meetings;
    }
    run_ranks(&m);
    for (int i = 0; m.meetings && i < seats->num_members; i++)
        epic_bootstrap_close(&meetings[i]);
}

int suite_main(const char *backend, const int *counts, int argc, char **argv)
{
    check_begin();
    printf("seed %llu\n", (unsigned long long)run_seed());
    for (int i = 1; i < argc; i++) suite_run(backend, atoi(argv[i]));
    for (int i = 0; argc == 1 && counts[i]; i++) suite_run(backend, counts[i]);
    if (suite_there->lacks)
        printf("%ld calls refused as not there yet (EPIC_ENOTSUP), ", case_num_lacked());
    return check_end();
}
