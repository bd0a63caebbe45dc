/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that the engine chaos keeps exactly the promises of a net, and that the suite notices
 * each promise that it breaks. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "net/chaos.h"
#include "net/suite.h"

#define MOST_TRIES 100

static const char *const damages[CHAOS_NUM_DAMAGES] = {"none", "halves", "twice", "lost",
                                                       "early"};

static void run_case(suite_verdict *v, int hosts, uint64_t seed, chaos_damage damage)
{
    suite_case c = {.engine = &epic_net_chaos,
                    .seed = seed,
                    .bytes = 96 << 10,
                    .most_bytes = 24 << 10,
                    .rounds = 3,
                    .patience_ms = damage == CHAOS_NONE ? 60000 : 1000,
                    .wanted = "chaos",
                    .verdict = v};
    memset(v, 0, sizeof *v);
    check_seed = seed;
    chaos_settings_now = (chaos_settings){.seed = seed, .damage = damage};
    run_threads(hosts, suite_exchange, &c);
    printf(
        "%d hosts, damage %s: %ld words, %ld torn, %ld wrong, %ld missing, %ld twice; %ld puts "
        "found no room\n",
        hosts, damages[damage], v->words, v->torn, v->wrong, v->missing, v->twice, v->refusals);
}

static void test_promises(suite_verdict *v)
{
    for (int hosts = 2; hosts <= 4; hosts++) {
        run_case(v, hosts, run_seed() + (uint64_t)hosts, CHAOS_NONE);
        CHECK(suite_is_clean(v) && v->refusals > 0);
    }
}

/* A second copy of a word is noticed only if it lands after the first was read. One run cannot
 * promise that, so there are several. */
static void test_damages(suite_verdict *v)
{
    for (int d = CHAOS_NONE + 1; d < CHAOS_NUM_DAMAGES; d++) {
        for (uint64_t i = 0; i < MOST_TRIES && (i == 0 || suite_is_clean(v)); i++)
            run_case(v, 2, run_seed() + 1000 * i + (uint64_t)(100 + d), (chaos_damage)d);
        CHECK_SAY(!suite_is_clean(v), "damage \"%s\" goes unnoticed", damages[d]);
    }
}

/* A net of two ranks. */
static uint64_t inboxes[2][4096], outboxes[2][4096];

static net *open_pair(const epic_bootstrap *bootstrap)
{
    const net_setup setup = {.host = bootstrap->rank,
                             .num_hosts = 2,
                             .inbox = inboxes[bootstrap->rank],
                             .inbox_bytes = sizeof inboxes[0],
                             .outbox = outboxes[bootstrap->rank],
                             .outbox_bytes = sizeof outboxes[0]};
    return suite_open(&epic_net_chaos, bootstrap, &setup);
}

/* The second rank loses its power while puts are in flight. */
static void lose_power(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    net *w = open_pair(bootstrap);
    if (!w) return;
    if (bootstrap->rank == 0) {
        uint64_t given = 0;
        while (given < 20) given += epic_net_chaos.put(w, 1, 0, outboxes[0], 8192);
        CHECK(!epic_net_chaos.is_gone(w, 1) && !epic_net_chaos.is_done(w, 1, given));
        suite_wait_for_all(&epic_net_chaos, w, bootstrap);
        suite_wait_for_all(&epic_net_chaos, w, bootstrap);
        epic_net_chaos.progress(w);
        CHECK(epic_net_chaos.is_gone(w, 1) && epic_net_chaos.is_done(w, 1, given));
        CHECK(epic_net_chaos.put(w, 1, 0, outboxes[0], 8) &&
              epic_net_chaos.put_word(w, 1, 0, 1));
        CHECK(epic_net_chaos.is_done(w, 1, given + 2));
    } else {
        suite_wait_for_all(&epic_net_chaos, w, bootstrap);
        chaos_kill(w);
        suite_wait_for_all(&epic_net_chaos, w, bootstrap);
    }
    suite_wait_for_all(&epic_net_chaos, w, bootstrap);
    epic_net_chaos.close(w);
}

/* A flag that is put after its data may land before it, so no caller may rely on the order. */
static void count_overtaken(const epic_bootstrap *bootstrap, void *self)
{
    uint64_t *overtaken = self;
    net *w = open_pair(bootstrap);
    if (!w) return;
    for (uint64_t given = 0; bootstrap->rank == 0 && given < 400;) {
        epic_net_chaos.progress(w);
        given += epic_net_chaos.put(w, 1, 0, outboxes[0], 4096);
        given += epic_net_chaos.put_word(w, 1, 8192, given);
    }
    suite_wait_for_all(&epic_net_chaos, w, bootstrap);
    if (bootstrap->rank == 0) *overtaken = chaos_num_overtaken(w);
    epic_net_chaos.close(w);
    suite_wait_for_all(&epic_net_chaos, NULL, bootstrap);
}

int main(void)
{
    check_begin();
    run_alarm(300);
    suite_verdict *v = run_share(sizeof *v);
    uint64_t overtaken = 0;
    test_promises(v);
    test_damages(v);
    chaos_settings_now = (chaos_settings){.seed = run_seed()};
    run_threads(2, lose_power, NULL);
    run_threads(2, count_overtaken, &overtaken);
    CHECK_SAY(overtaken > 20, "%llu puts overtook others", (unsigned long long)overtaken);
    return check_end();
}
