/* SPDX-License-Identifier: Apache-2.0 */
/* The engine chaos: a net on which words arrive in any order. */
#include "net/chaos.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "run.h"

/* Set under the emulator. It ends the program if a store hits memory that its owner stores to
 * without a fence. */
extern void emulator_check_store(const void *p) __attribute__((weak));

#define MAX_IN_FLIGHT 128 /* puts to one host in flight */
#define MOST_TURNS 60     /* longest ordinary delay of a put, in turns */
#define MOST_RUNS 64      /* runs in one progress call; a run is some words of one put */
#define MOST_WORDS 48     /* words in a run */
/* With more hosts, all runs go to hosts with puts in flight. Otherwise most of them would go to
 * other hosts, and land nothing. */
#define MANY_HOSTS 32
#define GHOST_LOOKS 200  /* polls before a word lands a second time */
#define LATE 300         /* one of this many puts is delayed for LATE_TURNS */
#define LATE_TURNS 1500  /* a long delay, in turns */
#define COPIED 40        /* percent of the puts of a strict net that are buffered */
#define MOST_AGAIN 100   /* polls in which a source is still read after everything has landed */
#define SLOW_NS 20000000 /* a slow net reports is_done() after this time without a put */
/* a late net lands its word after this time; longer than an operation */
#define LATE_NS 300000000
#define LAST_NS 100000000 /* the last word of an urgent put lands after this time */
#define KEPT 30           /* one of this many words is held back, one at a time */
#define TURN_NS 40000     /* a progress call that takes longer counts as several turns */

typedef struct chaos_put_op {
    uint64_t to, value, bytes;
    const uint64_t *from; /* NULL: send `value` */
    uint64_t num_pieces, landed;
    uint64_t first, step; /* piece i is number (first + i * step) % num_free */
    uint64_t held_until;  /* held back until this turn */
    uint64_t num_free;    /* all pieces, or all but a last one that is kept */
    uint64_t done_at;     /* the poll from which on its source is not read */
    uint64_t source;      /* checksum of the source */
    uint64_t *copy;       /* the buffered source; NULL: read from `from` */
    bool checked;         /* its source was checked when is_done() first returned true */
} chaos_put_op;

/* The part of a host that its peers see. The last of them frees it. */
typedef struct chaos_host {
    char *inbox;
    bool gone;
    int users;
    int writers; /* number of threads that may be storing to the inbox */
} chaos_host;

typedef struct peer {
    chaos_host *chaos_host;
    uint64_t posted, finished;
    chaos_put_op ops[MAX_IN_FLIGHT];
} peer;

struct net {
    net_setup setup;
    chaos_settings settings;
    run_random random;
    chaos_host *own;
    uint64_t looks, turns, looked_ns, overtaken;
    uint64_t *ghost_at, ghost; /* a word that lands a second time; NULL: none */
    uint64_t ghost_look;
    int ghost_host;
    uint64_t given_ns;       /* when the last put was posted, or the last word of one landed */
    uint64_t *kept_at, kept; /* a word that is kept; NULL: none */
    uint64_t kept_to;
    int kept_host;
    peer peers[NET_MAX_HOSTS];
};

chaos_settings chaos_settings_now = {.seed = 1};

static bool chaos_is_available(char *why)
{
    (void)why;
    return true;
}

/* Memory of an emulated GPU is host memory. */
static bool chaos_can_reach_gpu(void)
{
    return emulator_check_store != NULL;
}

static epic_result chaos_open(net **out, const net_setup *setup, void *handle, char *why)
{
    net *n = calloc(1, sizeof *n);
    if (!n) {
        snprintf(why, NET_WHY_BYTES, "no host memory");
        return EPIC_ENOMEM;
    }
    n->setup = *setup;
    n->settings = chaos_settings_now;
    n->random.state = run_mix(n->settings.seed, (uint64_t)setup->host);
    n->own = calloc(1, sizeof *n->own);
    if (!n->own) {
        free(n);
        snprintf(why, NET_WHY_BYTES, "no host memory");
        return EPIC_ENOMEM;
    }
    *n->own = (chaos_host){.inbox = setup->inbox, .users = 1};
    /* a pointer: all hosts are threads of this process */
    memcpy(handle, &n->own, sizeof n->own);
    *out = n;
    return EPIC_OK;
}

static epic_result chaos_connect(net *n, const void *cards, char *why)
{
    if (n->setup.on_gpu && n->settings.out_of_reach == n->setup.host + 1) {
        snprintf(why, NET_WHY_BYTES, "chaos: host %d reaches no memory on a GPU",
                 n->setup.host);
        return EPIC_ENOTSUP;
    }
    for (int h = 0; h < n->setup.num_hosts; h++) {
        chaos_host **theirs = &n->peers[h].chaos_host;
        memcpy(theirs, (const char *)cards + (size_t)h * NET_HANDLE_BYTES, sizeof *theirs);
        __atomic_fetch_add(&(*theirs)->users, 1, __ATOMIC_RELAXED);
    }
    return EPIC_OK;
}

static bool chaos_is_gone(const net *n, int host)
{
    return __atomic_load_n(&n->peers[host].chaos_host->gone, __ATOMIC_SEQ_CST);
}

/* Are puts to this host dropped? */
static bool is_dropped(const net *n, int host)
{
    return chaos_is_gone(n, host) ||
           (n->settings.cut_from == n->setup.host + 1 && n->settings.cut_to == host + 1);
}

void chaos_kill(net *n)
{
    __atomic_store_n(&n->own->gone, true, __ATOMIC_SEQ_CST);
}

/* Call this before storing to the inbox of a host, and end_writing() after it. Returns false if
 * puts to the host are dropped. If it returns true, the inbox stays allocated until
 * end_writing(), because chaos_close() waits for it. */
static bool begin_writing(const net *n, int host)
{
    int *writers = &n->peers[host].chaos_host->writers;
    __atomic_fetch_add(writers, 1, __ATOMIC_SEQ_CST);
    if (!is_dropped(n, host)) return true;
    __atomic_fetch_sub(writers, 1, __ATOMIC_SEQ_CST);
    return false;
}

static void end_writing(const net *n, int host)
{
    __atomic_fetch_sub(&n->peers[host].chaos_host->writers, 1, __ATOMIC_SEQ_CST);
}

static void wait_for_writers(const net *n)
{
    while (__atomic_load_n(&n->own->writers, __ATOMIC_SEQ_CST)) sched_yield();
}

uint64_t chaos_num_overtaken(const net *n)
{
    return n->overtaken;
}

static uint64_t gcd_of(uint64_t a, uint64_t b)
{
    return b ? gcd_of(b, a % b) : a;
}

/* Chooses the order of the pieces: any first one, and any step that visits all of them. */
static void choose_order(net *n, chaos_put_op *p)
{
    if (p->num_free == 0) return;
    p->first = (uint64_t)run_below(&n->random, (int64_t)p->num_free);
    do p->step = (uint64_t)run_between(&n->random, 1, (int64_t)p->num_free);
    while (gcd_of(p->num_free, p->step) != 1);
}

static void fail_run(const net *n, int host, const chaos_put_op *p, const char *what)
{
    fprintf(stderr, "chaos: host %d to host %d, %llu bytes at offset %llu: %s\n", n->setup.host,
            host, (unsigned long long)p->bytes, (unsigned long long)p->to, what);
    _Exit(1);
}

static uint64_t sum_source(const chaos_put_op *p)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; p->from && i < p->bytes / 8; i++)
        sum = (sum ^ __atomic_load_n(&p->from[i], __ATOMIC_RELAXED)) * 0x9e3779b97f4a7c15u;
    return sum;
}

/* Acts like a network that buffers: the put is done, and lands later. */
static void copy_source(chaos_put_op *p)
{
    p->copy = malloc(p->bytes);
    if (!p->copy) return;
    memcpy(p->copy, p->from, p->bytes);
    p->from = p->copy;
}

static bool is_quiet(const net *n)
{
    const uint64_t while_ns = n->settings.late ? LATE_NS : n->settings.last ? LAST_NS : SLOW_NS;
    return n->looked_ns > n->given_ns + while_ns;
}

static bool is_left(const net *n, const chaos_put_op *p)
{
    if (n->settings.slow && !is_quiet(n)) return false;
    return p->copy || (p->landed == p->num_pieces && n->looks >= p->done_at);
}

/* Fails if words of this put could land before words of an earlier put to the same place. */
static void check_places(const net *n, int host, const chaos_put_op *p)
{
    const peer *q = &n->peers[host];
    const uint64_t end = p->to + p->bytes;
    for (uint64_t i = q->finished; i + 1 < q->posted; i++) {
        const chaos_put_op *other = &q->ops[i % MAX_IN_FLIGHT];
        if (other->landed < other->num_pieces && other->to < end &&
            p->to < other->to + other->bytes)
            fail_run(n, host, p, "an earlier put to the same place has not landed");
    }
}

/* Fails if a kept word has not landed, although this put proves that its reader has taken
 * everything before. */
static void check_kept(const net *n, int host, const chaos_put_op *p)
{
    if (n->kept_at && host == n->kept_host && n->kept_to - p->to < p->bytes)
        fail_run(n, host, p,
                 "a word of an earlier put has not landed: no reader has waited for it");
}

static bool chaos_post(net *n, int host, uint64_t to, const void *from, uint64_t value,
                       uint64_t bytes)
{
    peer *q = &n->peers[host];
    if (chaos_is_gone(n, host)) return true;
    if (q->posted - q->finished == MAX_IN_FLIGHT || run_chance(&n->random, 10)) return false;
    chaos_put_op *p = &q->ops[q->posted++ % MAX_IN_FLIGHT];
    const bool halves = n->settings.damage == CHAOS_HALVES;
    *p = (chaos_put_op){.to = to,
                        .from = from,
                        .value = value,
                        .bytes = bytes,
                        .num_pieces = bytes / (halves ? 4 : 8)};
    p->num_free = p->num_pieces - (n->settings.last && from && to < n->setup.urgent_bytes);
    choose_order(n, p);
    if (run_chance(&n->random, 20))
        p->held_until = n->turns + (uint64_t)run_below(&n->random, MOST_TURNS);
    if (run_below(&n->random, LATE) == 0) p->held_until = n->turns + LATE_TURNS;
    if (!n->settings.strict) return true;
    n->given_ns = run_now_ns();
    check_places(n, host, p);
    check_kept(n, host, p);
    const int copied = n->settings.slow                       ? 0
                       : n->settings.late || n->settings.last ? 100
                                                              : COPIED;
    if (from && run_chance(&n->random, copied)) copy_source(p);
    p->source = sum_source(p);
    return true;
}

static bool chaos_put(net *n, int host, uint64_t to, const void *from, uint32_t bytes)
{
    return chaos_post(n, host, to, from, 0, bytes);
}

static bool chaos_put_word(net *n, int host, uint64_t to, uint64_t value)
{
    return chaos_post(n, host, to, NULL, value, 8);
}

static void land_half(const chaos_put_op *p, void *inbox, uint64_t index)
{
    const uint32_t *from = p->from ? (const uint32_t *)(const void *)p->from
                                   : (const uint32_t *)(const void *)&p->value;
    __atomic_store_n((uint32_t *)inbox + index, from[index], __ATOMIC_RELAXED);
}

static bool keep_word(net *n, int host, uint64_t to, uint64_t *at, uint64_t value)
{
    const bool late =
        n->settings.late && n->setup.host == 0; /* only one host: others would wait for it */
    if (!late || n->kept_at || run_below(&n->random, KEPT)) return false;
    n->kept_at = at;
    n->kept = value;
    n->kept_to = to;
    n->kept_host = host;
    return true;
}

static void land_kept(net *n)
{
    if (n->kept_at && begin_writing(n, n->kept_host)) {
        __atomic_store_n(n->kept_at, n->kept, __ATOMIC_RELAXED);
        end_writing(n, n->kept_host);
    }
    n->kept_at = NULL;
}

static void land_piece(net *n, int host, const chaos_put_op *p, uint64_t index)
{
    char *inbox = n->peers[host].chaos_host->inbox;
    if (n->settings.damage == CHAOS_HALVES) {
        land_half(p, inbox + p->to, index);
        return;
    }
    if (n->settings.damage == CHAOS_LOST && run_below(&n->random, 5000) == 0) return;
    uint64_t *at = (uint64_t *)(void *)(inbox + p->to) + index;
    if (emulator_check_store) emulator_check_store((void *)((uintptr_t)at & ~(uintptr_t)15));
    const uint64_t value = p->from ? p->from[index] : p->value;
    if (keep_word(n, host, p->to + 8 * index, at, value)) return;
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
    if (n->settings.damage != CHAOS_TWICE || n->ghost_at || !p->from) return;
    n->ghost_at = at;
    n->ghost = value;
    n->ghost_look = n->looks + GHOST_LOOKS;
    n->ghost_host = host;
}

/* Lands the kept word with the lowest offset, once everything else has landed. */
static void land_last(net *n)
{
    chaos_put_op *first = NULL;
    int host = -1;
    for (int h = 0; h < n->setup.num_hosts; h++)
        for (uint64_t i = n->peers[h].finished; i < n->peers[h].posted; i++) {
            chaos_put_op *p = &n->peers[h].ops[i % MAX_IN_FLIGHT];
            if (p->landed == p->num_pieces) continue;
            if (p->landed < p->num_free) return;
            if (!first || p->to < first->to) {
                first = p;
                host = h;
            }
        }
    if (!first || !begin_writing(n, host)) return;
    land_piece(n, host, first, first->num_pieces - 1);
    end_writing(n, host);
    first->landed++;
    n->given_ns = run_now_ns();
}

/* Lands some words of one put to the host. */
static int land_run(net *n, int host)
{
    peer *q = &n->peers[host];
    const uint64_t under_way = q->posted - q->finished;
    const uint64_t index = q->finished + (uint64_t)run_below(&n->random, (int64_t)under_way);
    chaos_put_op *p = &q->ops[index % MAX_IN_FLIGHT];
    int moved = 0;
    if (under_way == 0 || p->held_until > n->turns) return 0;
    const uint64_t most = p->num_free < 1            ? 1
                          : p->num_free < MOST_WORDS ? p->num_free
                                                     : MOST_WORDS;
    const int count = (int)run_between(&n->random, 1, (int64_t)most);
    for (; p->landed < p->num_free && moved < count; moved++, p->landed++)
        land_piece(n, host, p, (p->first + p->landed * p->step) % p->num_free);
    if (p->landed < p->num_pieces && run_chance(&n->random, 5)) /* the others land late */
        p->held_until = n->turns + LATE_TURNS / 4;
    if (moved > 0 && p->landed == p->num_pieces) {
        if (index > q->finished) n->overtaken++;
        p->done_at = n->looks + (uint64_t)run_below(&n->random, MOST_AGAIN);
    }
    return moved;
}

/* A put may be done before earlier ones. */
static void check_sources(net *n, int host)
{
    peer *q = &n->peers[host];
    for (uint64_t i = q->finished; i < q->posted; i++) {
        chaos_put_op *p = &q->ops[i % MAX_IN_FLIGHT];
        if (p->checked || !is_left(n, p)) continue;
        p->checked = true;
        if (p->source != sum_source(p))
            fail_run(n, host, p, "its source has been written before it was done");
    }
}

static void finish_puts(net *n, int host)
{
    peer *q = &n->peers[host];
    const bool dropped = is_dropped(n, host);
    if (n->settings.strict && !dropped) check_sources(n, host);
    for (; q->finished < q->posted; q->finished++) {
        chaos_put_op *p = &q->ops[q->finished % MAX_IN_FLIGHT];
        if (!dropped && (p->landed < p->num_pieces || !is_left(n, p))) return;
        free(p->copy);
        p->copy = NULL;
    }
}

static void count_look(net *n)
{
    const uint64_t now = run_now_ns();
    n->looks++;
    n->turns += 1 + (n->looked_ns ? (now - n->looked_ns) / TURN_NS : 0);
    n->looked_ns = now;
}

/* Writes to `hosts` the hosts to which runs go, and returns their number. */
static int find_targets(const net *n, int hosts[NET_MAX_HOSTS])
{
    int count = 0;
    for (int h = 0; h < n->setup.num_hosts; h++)
        if (n->setup.num_hosts <= MANY_HOSTS || n->peers[h].posted != n->peers[h].finished)
            hosts[count++] = h;
    return count;
}

static int chaos_progress(net *n)
{
    int moved = 0, targets[NET_MAX_HOSTS];
    const int num_targets = find_targets(n, targets);
    count_look(n);
    for (int64_t runs = run_between(&n->random, 1, MOST_RUNS); runs > 0 && num_targets;
         runs--) {
        const int host = targets[run_below(&n->random, num_targets)];
        if (host == n->setup.host || !begin_writing(n, host)) continue;
        moved += land_run(n, host);
        end_writing(n, host);
    }
    for (int h = 0; h < n->setup.num_hosts; h++)
        if (h != n->setup.host) finish_puts(n, h);
    if (is_quiet(n)) land_kept(n);
    if (n->settings.last && is_quiet(n)) land_last(n);
    if (n->ghost_at && n->looks >= n->ghost_look) {
        if (begin_writing(n, n->ghost_host)) {
            __atomic_store_n(n->ghost_at, n->ghost, __ATOMIC_RELAXED);
            end_writing(n, n->ghost_host);
        }
        n->ghost_at = NULL;
    }
    return moved;
}

static bool chaos_is_done(const net *n, int host, uint64_t count)
{
    const peer *q = &n->peers[host];
    uint64_t left = q->finished;
    if (n->settings.damage == CHAOS_EARLY) return true;
    while (left < q->posted && left < count && is_left(n, &q->ops[left % MAX_IN_FLIGHT]))
        left++;
    return left >= count || (is_dropped(n, host) && q->finished == q->posted);
}

static void chaos_describe(const net *n, char *to, size_t size)
{
    snprintf(to, size, "chaos, %s memory, seed %llu", n->setup.on_gpu ? "GPU" : "host",
             (unsigned long long)n->settings.seed);
}

static void release_host(chaos_host *s)
{
    if (s && __atomic_fetch_sub(&s->users, 1, __ATOMIC_ACQ_REL) == 1) free(s);
}

static void chaos_close(net *n)
{
    if (!n) return;
    for (int h = 0; h < n->setup.num_hosts; h++)
        while (n->peers[h].finished < n->peers[h].posted) chaos_progress(n);
    land_kept(n);
    chaos_kill(n);
    wait_for_writers(n);
    for (int h = 0; h < n->setup.num_hosts; h++) release_host(n->peers[h].chaos_host);
    release_host(n->own);
    free(n);
}

const net_engine epic_net_chaos = {.name = "chaos",
                                   .preferred_bytes = 2 << 10,
                                   .is_available = chaos_is_available,
                                   .can_reach_gpu = chaos_can_reach_gpu,
                                   .open = chaos_open,
                                   .connect = chaos_connect,
                                   .put = chaos_put,
                                   .put_word = chaos_put_word,
                                   .progress = chaos_progress,
                                   .is_done = chaos_is_done,
                                   .is_gone = chaos_is_gone,
                                   .describe = chaos_describe,
                                   .close = chaos_close};
