/* SPDX-License-Identifier: Apache-2.0 */
/* Tests a striped net over the engine chaos. It must keep the promises of a net: every word
 * arrives whole and once, sources are read until is_done(), and close sends accepted puts.
 * Hosts with fewer stripes and hosts that are gone are handled, a damaged handle is an error,
 * and a stripe that breaks a promise is noticed. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "net/chaos.h"
#include "net/chaos_striped.h"
#include "net/suite.h"

#define WORDS 4096 /* words of an inbox */
#define BYTES 2048 /* bytes of a put that is passed to a thread */
#define MOST_TRIES 50

static const net_engine *const engine = &epic_net_striped;

static void run_case(suite_verdict *v, int hosts, int threads, uint64_t seed,
                     chaos_damage damage)
{
    suite_case c = {.engine = engine,
                    .seed = seed,
                    .bytes = 96 << 10,
                    .most_bytes = 24 << 10,
                    .rounds = 3,
                    .threads = threads,
                    .patience_ms = damage == CHAOS_NONE ? 60000 : 1000,
                    .wanted = threads > 0 ? "stripes" : "chaos",
                    .verdict = v};
    memset(v, 0, sizeof *v);
    check_seed = seed;
    chaos_settings_now =
        (chaos_settings){.seed = seed, .damage = damage, .strict = damage == CHAOS_NONE};
    run_threads(hosts, suite_exchange, &c);
    printf("%d hosts, %d threads: %ld words, %ld torn, %ld wrong, %ld missing, %ld twice\n",
           hosts, threads, v->words, v->torn, v->wrong, v->missing, v->twice);
}

static bool test_promises(suite_verdict *v)
{
    /* puts for which all stripes were full; with few hosts there may be none */
    long refusals = 0;
    for (int hosts = 2; hosts <= 4; hosts++) {
        run_case(v, hosts, hosts - 1, run_seed() + (uint64_t)hosts, CHAOS_NONE);
        if (!CHECK(suite_is_clean(v))) return false;
        refusals += v->refusals;
    }
    CHECK(refusals > 0);
    run_case(v, 2, 100, run_seed(), CHAOS_NONE); /* more threads than the net can use */
    CHECK(suite_is_clean(v));
    run_case(v, 2, 0, run_seed(), CHAOS_NONE);
    return CHECK(suite_is_clean(v));
}

/* ThreadSanitizer would report the race that this damage makes on purpose. */
static bool may_be_tried(int damage)
{
#ifdef __SANITIZE_THREAD__
    return damage != CHAOS_EARLY;
#else
    (void)damage;
    return true;
#endif
}

/* A promise that a stripe breaks is broken by the net. */
static void test_damages(suite_verdict *v)
{
    for (int d = CHAOS_NONE + 1; d < CHAOS_NUM_DAMAGES; d++) {
        if (!may_be_tried(d)) continue;
        for (uint64_t i = 0; i < MOST_TRIES && (i == 0 || suite_is_clean(v)); i++)
            run_case(v, 2, 2, run_seed() + 1000 * i + (uint64_t)(100 + d), (chaos_damage)d);
        CHECK_SAY(!suite_is_clean(v), "damage %d goes unnoticed", d);
    }
}

static uint64_t inboxes[3][WORDS], outboxes[3][WORDS];

static net_setup setup_of(const epic_bootstrap *bootstrap, int threads)
{
    return (net_setup){.host = bootstrap->rank,
                       .num_hosts = bootstrap->num_ranks,
                       .threads = threads,
                       .inbox = inboxes[bootstrap->rank],
                       .inbox_bytes = sizeof inboxes[0],
                       .outbox = outboxes[bootstrap->rank],
                       .outbox_bytes = sizeof outboxes[0]};
}

static void clear_boxes(const epic_bootstrap *bootstrap)
{
    memset(inboxes[bootstrap->rank], 0, sizeof inboxes[0]);
    for (int i = 0; i < WORDS; i++)
        outboxes[bootstrap->rank][i] = (uint64_t)bootstrap->rank + 1;
}

static uint64_t give(net *w, int host, uint64_t to, uint32_t bytes)
{
    while (!engine->put(w, host, to, outboxes[0], bytes)) engine->progress(w);
    return 1;
}

static void fill(net *w, int host)
{
    for (uint64_t at = 0; at < WORDS * 8; at += BYTES) give(w, host, at, BYTES);
}

static void check_full(int host, uint64_t value)
{
    for (int i = 0; i < WORDS; i++)
        if (!CHECK_SAY(inboxes[host][i] == value, "word %d of host %d is %llu", i, host,
                       (unsigned long long)inboxes[host][i]))
            return;
}

/* Host r has r + 1 threads. All use as many stripes as every host has. */
static void differ(const epic_bootstrap *bootstrap, void *self)
{
    char said[512];
    (void)self;
    clear_boxes(bootstrap);
    const net_setup setup = setup_of(bootstrap, bootstrap->rank + 1);
    net *w = suite_open(engine, bootstrap, &setup);
    if (!w) return;
    engine->describe(w, said, sizeof said);
    CHECK_SAY(strstr(said, ", over 2 stripes") != NULL, "%s", said);
    suite_wait_for_all(engine, w, bootstrap); /* a chaos net connects only to open nets */
    if (bootstrap->rank == 0) {
        for (int h = 1; h < bootstrap->num_ranks; h++) fill(w, h);
        engine->close(w); /* sends accepted puts */
    }
    suite_wait_for_all(engine, bootstrap->rank == 0 ? NULL : w, bootstrap);
    if (bootstrap->rank == 0) return;
    check_full(bootstrap->rank, 1);
    engine->close(w);
}

/* Host 1 loses its power while its peer posts large and small puts. All of them complete. */
static void lose_power(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    clear_boxes(bootstrap);
    const net_setup setup = setup_of(bootstrap, 3);
    net *w = suite_open(engine, bootstrap, &setup);
    if (!w) return;
    suite_wait_for_all(engine, w, bootstrap);
    if (bootstrap->rank == 1) {
        engine->close(w);
        suite_wait_for_all(engine, NULL, bootstrap);
    } else {
        suite_wait_for_all(engine, w, bootstrap);
        uint64_t given = 0;
        for (int i = 0; i < 3000; i++) given += give(w, 1, 0, i % 3 ? BYTES : 8);
        while (!engine->is_done(w, 1, given)) engine->progress(w);
        CHECK(engine->is_gone(w, 1) && !engine->is_gone(w, 0));
        engine->close(w);
    }
    suite_wait_for_all(engine, NULL, bootstrap);
}

static void be_refused(const epic_bootstrap *bootstrap, void *self)
{
    unsigned char mine[NET_HANDLE_BYTES] = {0}, handles[2][NET_HANDLE_BYTES];
    char why[NET_WHY_BYTES] = "";
    net *w = NULL;
    (void)self;
    const net_setup setup = setup_of(bootstrap, 2);
    if (!CHECK_SAY(engine->open(&w, &setup, mine, why) == EPIC_OK, "%s", why)) return;
    for (int byte = 0; byte < 256; byte += 255) { /* no stripe; longer than the handle */
        memcpy(handles[0], mine, sizeof mine);
        memset(handles[1], byte, sizeof handles[1]);
        CHECK(engine->connect(w, handles, why) == EPIC_EMISMATCH);
        CHECK_SAY(strstr(why, "handle of host 1 is damaged") != NULL, "%s", why);
    }
    engine->close(w);
    engine->close(NULL);
}

int main(void)
{
    check_begin();
    run_alarm(400);
    suite_verdict *v = run_share(sizeof *v);
    if (!test_promises(v)) return check_end(); /* the next test would hang */
    test_damages(v);
    chaos_settings_now = (chaos_settings){.seed = run_seed()};
    run_threads(3, differ, NULL);
    run_threads(2, lose_power, NULL);
    const epic_bootstrap alone = {.rank = 0, .num_ranks = 2};
    be_refused(&alone, NULL);
    return check_end();
}
