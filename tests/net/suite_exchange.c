/* SPDX-License-Identifier: Apache-2.0 */
/* Rounds of puts between all ranks. A thread of each rank checks every word. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "net/suite.h"

#define POISON UINT64_MAX
#define SCRAP 0x5c5c5c5c5c5c5c5cull /* written to an outbox that may be used again */

typedef struct party {
    const suite_case *c;
    const epic_bootstrap *bootstrap;
    net *w;
    uint64_t words; /* words from each rank to each other rank */
    uint64_t *inbox,
        *outbox; /* [num_hosts, words]; the inbox ends with [num_hosts] control words */
    uint64_t given[NET_MAX_HOSTS];
    atomic_int taken; /* rounds that the reader has finished */
} party;

static int me(const party *p)
{
    return p->bootstrap->rank;
}

static bool is_over(const party *p)
{
    return atomic_load(&p->c->verdict->over);
}

static void stop(const party *p)
{
    atomic_store(&p->c->verdict->over, true);
}

/* Returns the word number `index` of a round and a pair of ranks. It is never poison, and its
 * halves differ from those of other words. */
static uint64_t word_of(const party *p, int round, int from, int to, uint64_t index)
{
    const uint64_t place = (uint64_t)round << 48 | (uint64_t)from << 40 | (uint64_t)to << 32;
    const uint64_t word = run_mix(p->c->seed + place, index);
    return word == POISON ? 0 : word;
}

/* ---------------------------------------------------------------------------- reading ---- */

/* Returns whether the word is a mixture of the old and the new value. */
static bool is_torn(uint64_t seen, uint64_t wanted)
{
    const uint32_t low = (uint32_t)seen, high = (uint32_t)(seen >> 32);
    const bool low_fits = low == (uint32_t)wanted || low == UINT32_MAX;
    return low_fits && (high == (uint32_t)(wanted >> 32) || high == UINT32_MAX);
}

/* Polls a word until it arrives. Returns false if it does not. */
static bool take_word(party *p, uint64_t *at, uint64_t wanted, uint64_t *last_ns)
{
    suite_verdict *v = p->c->verdict;
    uint64_t seen;
    for (bool is_sure = false;; is_sure = true) {
        while ((seen = __atomic_load_n(at, __ATOMIC_RELAXED)) == POISON ||
               (is_sure && seen != wanted)) {
            if (is_over(p) || run_now_ns() > *last_ns + p->c->patience_ms * 1000000ull)
                return false;
            sched_yield();
        }
        if (seen == wanted) break;
        atomic_fetch_add(is_torn(seen, wanted) ? &v->torn : &v->wrong, !is_sure);
        if (!p->c->tears) return false;
    }
    *last_ns = run_now_ns();
    __atomic_store_n(at, POISON, __ATOMIC_RELAXED);
    atomic_fetch_add_explicit(&v->words, 1, memory_order_relaxed);
    return true;
}

static bool take_round(party *p, int round)
{
    uint64_t last_ns = run_now_ns();
    for (int from = 0; from < p->bootstrap->num_ranks; from++) {
        if (from == me(p)) continue;
        uint64_t *at = p->inbox + (uint64_t)from * p->words;
        for (uint64_t i = 0; i < p->words; i++)
            if (!take_word(p, at + i, word_of(p, round, from, me(p), i), &last_ns))
                return false;
    }
    return true;
}

static void *read_all(void *self)
{
    party *p = self;
    for (int round = 0; round < p->c->rounds; round++) {
        if (!take_round(p, round)) {
            atomic_fetch_add(&p->c->verdict->missing, 1);
            stop(p);
            return NULL;
        }
        atomic_store(&p->taken, round + 1);
    }
    return NULL;
}

/* ---------------------------------------------------------------------------- writing ---- */

static void fill_outbox(party *p, int round)
{
    for (int to = 0; to < p->bootstrap->num_ranks; to++)
        for (uint64_t i = 0; i < p->words; i++)
            p->outbox[(uint64_t)to * p->words + i] = word_of(p, round, me(p), to, i);
}

/* Ends the test if this rank has waited too long. */
static bool is_vain(const party *p, uint64_t since_ns)
{
    if (run_now_ns() > since_ns + p->c->patience_ms * 1000000ull && !is_over(p)) {
        atomic_fetch_add(&p->c->verdict->missing, 1);
        stop(p);
    }
    return is_over(p);
}

static void insist(party *p, int to, uint64_t offset, const void *from, uint32_t bytes,
                   uint64_t value)
{
    const net_engine *e = p->c->engine;
    const uint64_t since_ns = run_now_ns();
    while (!(from ? e->put(p->w, to, offset, from, bytes)
                  : e->put_word(p->w, to, offset, value))) {
        atomic_fetch_add(&p->c->verdict->refusals, 1);
        if (is_vain(p, since_ns)) return;
        if (e->progress(p->w) == 0) sched_yield();
    }
    p->given[to]++;
}

/* Sends everything for one peer in pieces of random length, the last ones first. */
static void send_all(party *p, int to, run_random *random)
{
    const uint64_t most = p->c->most_bytes / 8;
    for (uint64_t left = p->words; left > 0;) {
        uint64_t count = (uint64_t)run_between(random, 1, (int64_t)most);
        if (run_chance(random, 30)) count = 1;
        if (count > left) count = left;
        left -= count;
        const uint64_t *from = p->outbox + (uint64_t)to * p->words + left;
        insist(p, to, ((uint64_t)me(p) * p->words + left) * 8, from, (uint32_t)count * 8, 0);
        if (run_chance(random, 20)) p->c->engine->progress(p->w);
    }
}

static void await_done(party *p)
{
    const uint64_t since_ns = run_now_ns();
    for (int to = 0; to < p->bootstrap->num_ranks; to++)
        while (to != me(p) && !p->c->engine->is_done(p->w, to, p->given[to])) {
            if (is_vain(p, since_ns)) return;
            if (p->c->engine->progress(p->w) == 0) sched_yield();
        }
}

static uint64_t *control(party *p, int of)
{
    return p->inbox + (uint64_t)p->bootstrap->num_ranks * p->words + of;
}

/* Publishes that this rank has finished the round, and waits until all ranks have. */
static void end_round(party *p, int round)
{
    const net_engine *e = p->c->engine;
    while (atomic_load(&p->taken) <= round && !is_over(p))
        if (e->progress(p->w) == 0) sched_yield();
    const int n = p->bootstrap->num_ranks;
    const uint64_t at = ((uint64_t)n * p->words + (uint64_t)me(p)) * 8;
    for (int to = 0; to < n; to++)
        if (to != me(p)) insist(p, to, at, NULL, 0, (uint64_t)round + 1);
    const uint64_t since_ns = run_now_ns();
    for (int from = 0; from < n; from++)
        while (from != me(p) &&
               __atomic_load_n(control(p, from), __ATOMIC_RELAXED) != (uint64_t)round + 1) {
            if (is_vain(p, since_ns)) return;
            if (e->progress(p->w) == 0) sched_yield();
        }
}

static void write_all(party *p)
{
    const int n = p->bootstrap->num_ranks;
    run_random random = {run_mix(p->c->seed, (uint64_t)me(p))};
    for (int round = 0; round < p->c->rounds && !is_over(p); round++) {
        fill_outbox(p, round);
        for (int i = 1; i < n; i++) send_all(p, (me(p) + i) % n, &random);
        await_done(p);
        if (is_over(p)) return;
        for (uint64_t i = 0; i < (uint64_t)n * p->words; i++) p->outbox[i] = SCRAP;
        end_round(p, round);
    }
}

/* Checks for words that arrive a second time: everything has been read and nothing is in
 * flight. */
static void look_for_more(party *p)
{
    for (int i = 0; i < 500; i++) p->c->engine->progress(p->w);
    for (uint64_t i = 0; i < (uint64_t)p->bootstrap->num_ranks * p->words; i++)
        if (__atomic_load_n(p->inbox + i, __ATOMIC_RELAXED) != POISON)
            atomic_fetch_add(&p->c->verdict->twice, 1);
}

/* ------------------------------------------------------------------------------ a rank ---- */

net *suite_open(const net_engine *e, const epic_bootstrap *bootstrap, const net_setup *setup)
{
    static _Thread_local unsigned char mine[NET_HANDLE_BYTES];
    char why[NET_WHY_BYTES] = "";
    net *w = NULL;
    memset(mine, 0, sizeof mine);
    unsigned char *handles = malloc((size_t)bootstrap->num_ranks * NET_HANDLE_BYTES);
    const bool opened = e->open(&w, setup, mine, why) == EPIC_OK;
    const bool met =
        bootstrap->gather(bootstrap->self, mine, handles, NET_HANDLE_BYTES) == EPIC_OK;
    if (!CHECK_SAY(opened && met && e->connect(w, handles, why) == EPIC_OK, "%s", why)) {
        e->close(w);
        w = NULL;
    }
    free(handles);
    return w;
}

typedef struct waiter {
    const epic_bootstrap *bootstrap;
    atomic_bool over;
} waiter;

static void *wait_for_all(void *self)
{
    waiter *a = self;
    unsigned char all[RUN_MAX_RANKS], mine = 1;
    CHECK(a->bootstrap->gather(a->bootstrap->self, &mine, all, 1) == EPIC_OK);
    atomic_store(&a->over, true);
    return NULL;
}

void suite_wait_for_all(const net_engine *e, net *w, const epic_bootstrap *bootstrap)
{
    waiter a = {.bootstrap = bootstrap};
    pthread_t thread;
    if (!w) {
        wait_for_all(&a);
        return;
    }
    if (!CHECK(pthread_create(&thread, NULL, wait_for_all, &a) == 0)) return;
    while (!atomic_load(&a.over))
        if (e->progress(w) == 0) run_nap_us(100);
    pthread_join(thread, NULL);
}

static void prepare(party *p)
{
    const uint64_t all = (uint64_t)p->bootstrap->num_ranks * p->words;
    p->inbox = malloc((all + NET_MAX_HOSTS) * 8);
    p->outbox = malloc(all * 8);
    memset(p->inbox, 0xff, all * 8);
    memset(p->inbox + all, 0, NET_MAX_HOSTS * 8);
    memset(p->outbox, 0x5c, all * 8);
}

void suite_exchange(const epic_bootstrap *bootstrap, void *self)
{
    party p = {.c = self, .bootstrap = bootstrap, .words = ((suite_case *)self)->bytes / 8};
    prepare(&p);
    const net_setup setup = {.host = bootstrap->rank,
                             .num_hosts = bootstrap->num_ranks,
                             .rdma = p.c->rdma,
                             .threads = p.c->threads,
                             .inbox = p.inbox,
                             .inbox_bytes =
                                 (bootstrap->num_ranks * p.words + NET_MAX_HOSTS) * 8,
                             .outbox = p.outbox,
                             .outbox_bytes = bootstrap->num_ranks * p.words * 8};
    p.w = suite_open(p.c->engine, bootstrap, &setup);
    if (p.w) {
        pthread_t reader;
        char said[512];
        CHECK(pthread_create(&reader, NULL, read_all, &p) == 0);
        write_all(&p);
        suite_wait_for_all(p.c->engine, p.w, bootstrap);
        pthread_join(reader, NULL);
        look_for_more(&p);
        suite_wait_for_all(p.c->engine, p.w, bootstrap);
        p.c->engine->describe(p.w, said, sizeof said);
        CHECK_SAY(!p.c->wanted || strstr(said, p.c->wanted), "not %s: %s", p.c->wanted, said);
        if (me(&p) == 0) printf("%s\n", said);
        p.c->engine->close(p.w);
    }
    suite_wait_for_all(p.c->engine, NULL,
                       bootstrap); /* afterwards no peer writes into this memory */
    free(p.inbox);
    free(p.outbox);
}

bool suite_is_clean(const suite_verdict *v)
{
    return v->words > 0 && !v->torn && !v->wrong && !v->missing && !v->twice;
}
