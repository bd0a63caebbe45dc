/* SPDX-License-Identifier: Apache-2.0 */
/* Words in any order. */
#include "net/chaos.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "run.h"

/* Under the emulator: a peer's store to where one of the rank itself has no fence after it ends the
 * program. */
extern void emulator_check_store(const void *p) __attribute__((weak));

#define DEPTH 128         /* puts to a host under way */
#define MOST_TURNS 60     /* that a put is held back for */
#define MOST_RUNS 64      /* in one look; a run is some words of one put */
#define MOST_WORDS 48     /* of a run */
#define GHOST_LOOKS 200   /* until a word lands once more */
#define LATE 300          /* one put of so many is held back for */
#define LATE_TURNS 1500   /* so long */
#define COPIED 40         /* percent of the puts of a strict net that are */
#define MOST_AGAIN 100    /* looks in which a source is read again, after all has landed */
#define SLOW_NS 20000000  /* without a put, after which a slow net says done(), */
#define LATE_NS 300000000 /* and a late one lands its word: longer than an operation */
#define LAST_NS 100000000 /* the same of the last word of a put */
#define KEPT 30           /* one word of so many may wait as long, one at a time */
#define TURN_NS 40000     /* a look that takes longer, on a busy machine, is several turns */

typedef struct parcel {
    uint64_t to, value, bytes;
    const uint64_t *from; /* NULL: `value` */
    uint64_t num_pieces, landed;
    uint64_t first, step; /* piece i is number (first + i * step) % num_free */
    uint64_t held_until;  /* that turn */
    uint64_t num_free;    /* pieces but the last one, where that waits for its turn; else all */
    uint64_t done_at;     /* the look at which its source is not read again */
    uint64_t source;      /* a sum of its words */
    uint64_t *copy;       /* of the source, which is not read any more; NULL: none */
    bool checked;         /* its source, when it was first said to be done */
} parcel;

/* What a host's peers see of it; freed by the last of them. */
typedef struct shore {
    char *inbox;
    bool gone;
    int users;
} shore;

typedef struct peer {
    shore *shore;
    uint64_t given, finished;
    parcel parcels[DEPTH];
} peer;

struct net {
    net_setup setup;
    chaos_settings settings;
    run_random random;
    shore *own;
    uint64_t looks, turns, looked_ns, overtaken;
    uint64_t *ghost_at, ghost; /* a word to land once more, NULL: none */
    uint64_t ghost_look;
    uint64_t given_ns;       /* when the last put was given, or the last word of one landed */
    uint64_t *kept_at, kept; /* a word that waits until it is quiet, NULL: none */
    uint64_t kept_to;
    int kept_host;
    peer peers[NET_MAX_HOSTS];
};

chaos_settings chaos_settings_now = {.seed = 1};

static bool can(char *why)
{
    (void)why;
    return true;
}

/* The memory of an emulated one is the host's. */
static bool reaches_gpu(void)
{
    return emulator_check_store != NULL;
}

static epic_result open_net(net **out, const net_setup *setup, void *card, char *why)
{
    net *w = calloc(1, sizeof *w);
    if (!w) {
        snprintf(why, NET_WHY, "no host memory");
        return EPIC_ENOMEM;
    }
    w->setup = *setup;
    w->settings = chaos_settings_now;
    w->random.state = run_mix(w->settings.seed, (uint64_t)setup->host);
    w->own = calloc(1, sizeof *w->own);
    if (!w->own) {
        free(w);
        snprintf(why, NET_WHY, "no host memory");
        return EPIC_ENOMEM;
    }
    *w->own = (shore){.inbox = setup->inbox, .users = 1};
    memcpy(card, &w->own, sizeof w->own); /* of this process */
    *out = w;
    return EPIC_OK;
}

static epic_result connect_all(net *w, const void *cards, char *why)
{
    if (w->setup.on_gpu && w->settings.out_of_reach == w->setup.host + 1) {
        snprintf(why, NET_WHY, "chaos: host %d reaches no memory on a GPU", w->setup.host);
        return EPIC_ENOTSUP;
    }
    for (int h = 0; h < w->setup.num_hosts; h++) {
        shore **theirs = &w->peers[h].shore;
        memcpy(theirs, (const char *)cards + (size_t)h * NET_CARD_BYTES, sizeof *theirs);
        __atomic_fetch_add(&(*theirs)->users, 1, __ATOMIC_RELAXED);
    }
    return EPIC_OK;
}

static bool gone(const net *w, int host)
{
    return __atomic_load_n(&w->peers[host].shore->gone, __ATOMIC_ACQUIRE);
}

void chaos_kill(net *w)
{
    __atomic_store_n(&w->own->gone, true, __ATOMIC_RELEASE);
}

uint64_t chaos_num_overtaken(const net *w)
{
    return w->overtaken;
}

static uint64_t divisor(uint64_t a, uint64_t b)
{
    return b ? divisor(b, a % b) : a;
}

/* An order of the pieces: any first one, and any step that meets them all. */
static void shuffle(net *w, parcel *p)
{
    if (p->num_free == 0) return;
    p->first = (uint64_t)run_below(&w->random, (int64_t)p->num_free);
    do p->step = (uint64_t)run_between(&w->random, 1, (int64_t)p->num_free);
    while (divisor(p->num_free, p->step) != 1);
}

static void die(const net *w, int host, const parcel *p, const char *what)
{
    fprintf(stderr, "chaos: host %d to host %d, %llu bytes at offset %llu: %s\n", w->setup.host,
            host, (unsigned long long)p->bytes, (unsigned long long)p->to, what);
    _Exit(1);
}

static uint64_t sum_source(const parcel *p)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; p->from && i < p->bytes / 8; i++)
        sum = (sum ^ __atomic_load_n(&p->from[i], __ATOMIC_RELAXED)) * 0x9e3779b97f4a7c15u;
    return sum;
}

/* As a network does that buffers: the put is done, and lands whenever it does. */
static void copy_source(parcel *p)
{
    p->copy = malloc(p->bytes);
    if (!p->copy) return;
    memcpy(p->copy, p->from, p->bytes);
    p->from = p->copy;
}

static bool is_quiet(const net *w)
{
    const uint64_t while_ns = w->settings.late ? LATE_NS : w->settings.last ? LAST_NS : SLOW_NS;
    return w->looked_ns > w->given_ns + while_ns;
}

static bool is_left(const net *w, const parcel *p)
{
    if (w->settings.slow && !is_quiet(w)) return false;
    return p->copy || (p->landed == p->num_pieces && w->looks >= p->done_at);
}

/* Words of this put might land before those of an earlier one, in the same places. */
static void check_places(const net *w, int host, const parcel *p)
{
    const peer *q = &w->peers[host];
    const uint64_t end = p->to + p->bytes;
    for (uint64_t i = q->finished; i + 1 < q->given; i++) {
        const parcel *other = &q->parcels[i % DEPTH];
        if (other->landed < other->num_pieces && other->to < end &&
            p->to < other->to + other->bytes)
            die(w, host, p, "an earlier put to the same place has not landed");
    }
}

/* Whoever puts something there has been told that all of before has been taken. */
static void check_kept(const net *w, int host, const parcel *p)
{
    if (w->kept_at && host == w->kept_host && w->kept_to - p->to < p->bytes)
        die(w, host, p, "a word of an earlier put has not landed: nobody has waited for it");
}

static bool give(net *w, int host, uint64_t to, const void *from, uint64_t value,
                 uint64_t bytes)
{
    peer *q = &w->peers[host];
    if (gone(w, host)) return true;
    if (q->given - q->finished == DEPTH || run_chance(&w->random, 10)) return false;
    parcel *p = &q->parcels[q->given++ % DEPTH];
    const bool halves = w->settings.damage == CHAOS_HALVES;
    *p = (parcel){.to = to,
                  .from = from,
                  .value = value,
                  .bytes = bytes,
                  .num_pieces = bytes / (halves ? 4 : 8)};
    p->num_free = p->num_pieces - (w->settings.last && from && to < w->setup.urgent_bytes);
    shuffle(w, p);
    if (run_chance(&w->random, 20))
        p->held_until = w->turns + (uint64_t)run_below(&w->random, MOST_TURNS);
    if (run_below(&w->random, LATE) == 0) p->held_until = w->turns + LATE_TURNS;
    if (!w->settings.strict) return true;
    w->given_ns = run_now_ns();
    check_places(w, host, p);
    check_kept(w, host, p);
    const int copied = w->settings.slow                       ? 0
                       : w->settings.late || w->settings.last ? 100
                                                              : COPIED;
    if (from && run_chance(&w->random, copied)) copy_source(p);
    p->source = sum_source(p);
    return true;
}

static bool put(net *w, int host, uint64_t to, const void *from, uint32_t bytes)
{
    return give(w, host, to, from, 0, bytes);
}

static bool word(net *w, int host, uint64_t to, uint64_t value)
{
    return give(w, host, to, NULL, value, 8);
}

static void land_half(const parcel *p, void *inbox, uint64_t index)
{
    const uint32_t *from = p->from ? (const uint32_t *)(const void *)p->from
                                   : (const uint32_t *)(const void *)&p->value;
    __atomic_store_n((uint32_t *)inbox + index, from[index], __ATOMIC_RELAXED);
}

static bool keep(net *w, int host, uint64_t to, uint64_t *at, uint64_t value)
{
    const bool late =
        w->settings.late && w->setup.host == 0; /* one: others would wait for it */
    if (!late || w->kept_at || run_below(&w->random, KEPT)) return false;
    w->kept_at = at;
    w->kept = value;
    w->kept_to = to;
    w->kept_host = host;
    return true;
}

static void land_kept(net *w)
{
    if (w->kept_at) __atomic_store_n(w->kept_at, w->kept, __ATOMIC_RELAXED);
    w->kept_at = NULL;
}

static void land_piece(net *w, int host, const parcel *p, uint64_t index)
{
    char *inbox = w->peers[host].shore->inbox;
    if (w->settings.damage == CHAOS_HALVES) {
        land_half(p, inbox + p->to, index);
        return;
    }
    if (w->settings.damage == CHAOS_LOST && run_below(&w->random, 5000) == 0) return;
    uint64_t *at = (uint64_t *)(void *)(inbox + p->to) + index;
    if (emulator_check_store) emulator_check_store((void *)((uintptr_t)at & ~(uintptr_t)15));
    const uint64_t value = p->from ? p->from[index] : p->value;
    if (keep(w, host, p->to + 8 * index, at, value)) return;
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
    if (w->settings.damage != CHAOS_TWICE || w->ghost_at || !p->from) return;
    w->ghost_at = at;
    w->ghost = value;
    w->ghost_look = w->looks + GHOST_LOOKS;
}

/* Of words that are kept the one with the lowest place, once all else has landed. */
static void land_last(net *w)
{
    parcel *first = NULL;
    int host = -1;
    for (int h = 0; h < w->setup.num_hosts; h++)
        for (uint64_t i = w->peers[h].finished; i < w->peers[h].given; i++) {
            parcel *p = &w->peers[h].parcels[i % DEPTH];
            if (p->landed == p->num_pieces) continue;
            if (p->landed < p->num_free) return;
            if (!first || p->to < first->to) {
                first = p;
                host = h;
            }
        }
    if (!first || gone(w, host)) return;
    land_piece(w, host, first, first->num_pieces - 1);
    first->landed++;
    w->given_ns = run_now_ns();
}

/* Some words of some put. */
static int land_run(net *w, int host)
{
    peer *q = &w->peers[host];
    const uint64_t under_way = q->given - q->finished;
    const uint64_t index = q->finished + (uint64_t)run_below(&w->random, (int64_t)under_way);
    parcel *p = &q->parcels[index % DEPTH];
    int moved = 0;
    if (under_way == 0 || p->held_until > w->turns) return 0;
    const uint64_t most = p->num_free < 1            ? 1
                          : p->num_free < MOST_WORDS ? p->num_free
                                                     : MOST_WORDS;
    const int count = (int)run_between(&w->random, 1, (int64_t)most);
    for (; p->landed < p->num_free && moved < count; moved++, p->landed++)
        land_piece(w, host, p, (p->first + p->landed * p->step) % p->num_free);
    if (p->landed < p->num_pieces && run_chance(&w->random, 5)) /* the rest comes late */
        p->held_until = w->turns + LATE_TURNS / 4;
    if (moved > 0 && p->landed == p->num_pieces) {
        if (index > q->finished) w->overtaken++;
        p->done_at = w->looks + (uint64_t)run_below(&w->random, MOST_AGAIN);
    }
    return moved;
}

/* What is done may be so before others that were given earlier. */
static void check_sources(net *w, int host)
{
    peer *q = &w->peers[host];
    for (uint64_t i = q->finished; i < q->given; i++) {
        parcel *p = &q->parcels[i % DEPTH];
        if (p->checked || !is_left(w, p)) continue;
        p->checked = true;
        if (p->source != sum_source(p))
            die(w, host, p, "its source has been written before it was done");
    }
}

static void settle(net *w, int host)
{
    peer *q = &w->peers[host];
    const bool dropped = gone(w, host);
    if (w->settings.strict && !dropped) check_sources(w, host);
    for (; q->finished < q->given; q->finished++) {
        parcel *p = &q->parcels[q->finished % DEPTH];
        if (!dropped && (p->landed < p->num_pieces || !is_left(w, p))) return;
        free(p->copy);
        p->copy = NULL;
    }
}

static void count_look(net *w)
{
    const uint64_t now = run_now_ns();
    w->looks++;
    w->turns += 1 + (w->looked_ns ? (now - w->looked_ns) / TURN_NS : 0);
    w->looked_ns = now;
}

static int look(net *w)
{
    int moved = 0;
    count_look(w);
    for (int64_t runs = run_between(&w->random, 1, MOST_RUNS); runs > 0; runs--) {
        const int host = (int)run_below(&w->random, w->setup.num_hosts);
        if (host != w->setup.host && !gone(w, host)) moved += land_run(w, host);
    }
    for (int h = 0; h < w->setup.num_hosts; h++)
        if (h != w->setup.host) settle(w, h);
    if (is_quiet(w)) land_kept(w);
    if (w->settings.last && is_quiet(w)) land_last(w);
    if (w->ghost_at && w->looks >= w->ghost_look) {
        __atomic_store_n(w->ghost_at, w->ghost, __ATOMIC_RELAXED);
        w->ghost_at = NULL;
    }
    return moved;
}

static bool done(const net *w, int host, uint64_t count)
{
    const peer *q = &w->peers[host];
    uint64_t left = q->finished;
    if (w->settings.damage == CHAOS_EARLY) return true;
    while (left < q->given && left < count && is_left(w, &q->parcels[left % DEPTH])) left++;
    return left >= count || (gone(w, host) && q->finished == q->given);
}

static void say(const net *w, char *to, size_t size)
{
    snprintf(to, size, "chaos, %s memory, seed %llu", w->setup.on_gpu ? "GPU" : "host",
             (unsigned long long)w->settings.seed);
}

static void leave(shore *s)
{
    if (s && __atomic_fetch_sub(&s->users, 1, __ATOMIC_ACQ_REL) == 1) free(s);
}

static void close_net(net *w)
{
    if (!w) return;
    for (int h = 0; h < w->setup.num_hosts; h++)
        while (w->peers[h].finished < w->peers[h].given) look(w);
    land_kept(w);
    chaos_kill(w);
    for (int h = 0; h < w->setup.num_hosts; h++) leave(w->peers[h].shore);
    leave(w->own);
    free(w);
}

const net_engine epic_net_chaos = {.name = "chaos", .best_bytes = 2 << 10, NET_ENGINE_CALLS};
