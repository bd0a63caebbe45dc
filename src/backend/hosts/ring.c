/* SPDX-License-Identifier: Apache-2.0 */
/* One turn of the thread after the other; it naps when turns move nothing. */
#include "backend/hosts/ring.h"

#include <errno.h>
#include <sched.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "backend/hosts/parcels.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"

#define ENDS 4    /* epochs whose sources are being read: two, as kernels wait for that */
#define TAKEN 256 /* entries of a turn, some 8 us: what has come is given, and freed, between */
#define UNDER_WAY 4 /* puts to a host, with which its net has something to do */
/* Urgent puts to a host, at most: what comes while they are read is joined.  And bytes of rows to a
 * host, at most, because what is urgent may wait behind them. */
#define URGENT_UNDER_WAY 16
#define MOST_UNDER_WAY (2u << 20)
#define FEW_PUTS 4 /* of a parcel that is urgent; what is in more pieces waits for the rest, */
#define QUIET_US 5 /* until so long none has come */
#define LINES_AHEAD 4 /* of entries, that are fetched before they are looked at */
#define TURNS 64      /* that move nothing before the thread naps, */
#define SPIN_US 200   /* and where there are cores to spare, so long */
#define CORES_TO_SPARE 8
#define NAP_US 20         /* at first, while an operation runs; then twice as long each time, */
#define BUSY_NAP_US 50    /* up to this, */
#define IDLE_NAP_US 20000 /* or this, when none runs, unless a call is made */
#define TELL_MS 2000

/* A word of peers' heaps that is no data but what is so now: what comes last counts.  So one is under
 * way at a time, and it is the newest. */
typedef struct mirror {
    uint64_t told;
    uint64_t given; /* with that one */
} mirror;

enum { NOTHING, ASKED, GIVEN }; /* of a message */

typedef struct message { /* to a host */
    uint64_t at, given;
    uint32_t bytes;
    int state;
} message;

struct hosts_ring {
    hosts_ring_setup setup;
    pthread_t thread;
    pthread_mutex_t mutex; /* one call of tell() at a time */
    message messages[NET_MAX_HOSTS];
    int leave;
    int asleep;   /* the thread, until */
    sem_t awake;  /* a call is made or its nap is over */
    bool running; /* an operation */
    bool took;    /* entries, in this turn, */
    bool took_urgent;
    uint32_t full;     /* hosts for which the net had no room, in this turn */
    int64_t urgent_at; /* when one was */
    bool ends_next;    /* its epoch, once all of `parcels` has been given */
    parcels *parcels;
    uint64_t taken;                     /* entries */
    uint64_t pieces;                    /* those of them that are no ends of epochs, */
    uint64_t bytes, puts;               /* what they have become */
    uint64_t most;                      /* puts of rows to a host that are under way */
    uint64_t given[NET_MAX_HOSTS];      /* puts and words to a host */
    uint64_t num_urgent[NET_MAX_HOSTS]; /* puts of those, and the numbers of the last ones */
    uint64_t urgent[NET_MAX_HOSTS][URGENT_UNDER_WAY];
    uint64_t ends[ENDS][NET_MAX_HOSTS]; /* `given`, when an epoch ended */
    uint64_t num_ends, num_freed;       /* epochs */
    mirror waits[NET_MAX_HOSTS], broken[NET_MAX_HOSTS];
};

static bool is_done(const hosts_ring *r, int host, uint64_t count)
{
    return r->setup.engine->done(r->setup.net, host, count);
}

static bool is_peer(const hosts_ring *r, int host)
{
    return host != r->setup.host && host < r->setup.num_hosts;
}

/* ---------------------------------------------------------------------- of the kernels ---- */

static void end_epoch(hosts_ring *r)
{
    memcpy(r->ends[r->num_ends++ % ENDS], r->given, sizeof r->given);
    r->running = false;
}

static bool put(hosts_ring *r, int host, uint64_t at, uint32_t bytes)
{
    const hosts_ring_setup *s = &r->setup;
    if (!s->engine->put(s->net, host, at, s->outbox + at, bytes)) return false;
    r->given[host]++;
    return true;
}

static void take_pieces(hosts_ring *r, int host, uint64_t entry)
{
    const uint64_t word = P2P_ENTRY_WORD(entry);
    parcels_add(r->parcels, host, word, P2P_ENTRY_WORDS(entry));
    __atomic_store_n(&r->pieces, r->pieces + 1, __ATOMIC_RELAXED); /* as `puts` below */
    r->took_urgent |= parcels_is_urgent(r->parcels, word);
}

/* Takes what there is of an epoch, as long as there is room for it. */
static int take_entries(hosts_ring *r)
{
    int taken = 0;
    r->took_urgent = false;
    while (!r->ends_next && taken < TAKEN) {
        const uint64_t *from = &r->setup.ring.entries[r->taken % P2P_RING_ENTRIES];
        const uint64_t entry = __atomic_load_n(from, __ATOMIC_ACQUIRE);
        const int host = P2P_ENTRY_HOST(entry);
        if (entry >> 56 << 56 != P2P_ENTRY_LAP(r->taken)) break;
        if (!parcels_have_room(r->parcels, P2P_ENTRY_WORDS(entry))) break;
        __builtin_prefetch(from + LINES_AHEAD * 8); /* past the end, too: it does no harm */
        if (P2P_ENTRY_WORD(entry) == P2P_EPOCH_ENDS)
            r->ends_next = true;
        else if (is_peer(r, host))
            take_pieces(r, host, entry);
        r->taken++;
        taken++;
    }
    r->took = taken > 0;
    if (r->took_urgent) r->urgent_at = clock_us();
    if (r->took) r->running = true;
    __atomic_store_n(&r->setup.ring.words->taken, r->taken, __ATOMIC_RELEASE);
    return taken;
}

/* Are fewer than `most` of what has been given to a host on its way? */
static bool are_fewer(const hosts_ring *r, int host, uint64_t most)
{
    const uint64_t given = r->given[host];
    return given < most || is_done(r, host, given - most + 1);
}

/* What is urgent goes as soon as no more of it comes: a plan's records are a thousand pieces, of which
 * warps ship one after the other.  Rows are kept here rather than given to the
 * net all at once: it would give nothing else for as long as they take.  Parts of parcels go where
 * the net has little to do while kernels ship nothing; at the end of an epoch all must go. */
static bool may_go(const void *self, int host, parcel_kind kind, int puts)
{
    const hosts_ring *r = self;
    const uint64_t urgent = r->num_urgent[host];
    if (r->full >> host & 1) return false;
    if (kind == PARCEL_WHOLE) return are_fewer(r, host, r->most);
    if (r->ends_next) return true;
    if (kind == PARCEL_PART) return !r->took && are_fewer(r, host, UNDER_WAY);
    if (puts > FEW_PUTS && clock_us() - r->urgent_at < QUIET_US) return false;
    return !r->took_urgent && (urgent < URGENT_UNDER_WAY ||
                               is_done(r, host, r->urgent[host][urgent % URGENT_UNDER_WAY]));
}

static void note_urgent(hosts_ring *r, int host)
{
    r->urgent[host][r->num_urgent[host]++ % URGENT_UNDER_WAY] = r->given[host];
}

/* Gives it to the net, as long as that has room.  Where it has none for one host, what goes to others
 * goes on: they would wait with that one, and be blamed for it. */
static int give_parcels(hosts_ring *r)
{
    int given = 0;
    run next;
    r->full = 0;
    while (parcels_next(r->parcels, may_go, r, &next)) {
        if (!put(r, next.host, next.word * 8, next.words * 8)) {
            r->full |= 1u << next.host;
            parcels_put_back(r->parcels);
            continue;
        }
        if (parcels_is_urgent(r->parcels, next.word)) note_urgent(r, next.host);
        parcels_pass(r->parcels);
        /* who reads it is another thread */
        __atomic_store_n(&r->bytes, r->bytes + next.words * 8, __ATOMIC_RELAXED);
        __atomic_store_n(&r->puts, r->puts + 1, __ATOMIC_RELAXED);
        given++;
    }
    if (!r->ends_next || !parcels_are_empty(r->parcels)) return given;
    end_epoch(r);
    r->ends_next = false;
    return given;
}

/* Tells kernels of which epochs the net has read all. */
static void free_epochs(hosts_ring *r)
{
    while (r->num_freed < r->num_ends) {
        const uint64_t *given = r->ends[r->num_freed % ENDS];
        for (int h = 0; h < r->setup.num_hosts; h++)
            if (is_peer(r, h) && !is_done(r, h, given[h])) return;
        __atomic_store_n(&r->setup.ring.words->freed, ++r->num_freed, __ATOMIC_RELEASE);
    }
}

/* ------------------------------------------------------------------------ of the rank ---- */

static void tell_word(hosts_ring *r, mirror *m, int host, int64_t at, uint64_t value)
{
    const hosts_ring_setup *s = &r->setup;
    if (value == m->told || !is_done(r, host, m->given)) return;
    if (!s->engine->word(s->net, host, (uint64_t)at, value)) return;
    m->told = value;
    m->given = ++r->given[host];
}

/* What this rank has found out and all must know; 0: nothing. */
static uint64_t broken_word(const hosts_ring *r)
{
    const p2p_status *s = r->setup.status;
    const uint32_t result = __atomic_load_n(&s->result, __ATOMIC_ACQUIRE);
    if (result == EPIC_OK || (int)s->reporter != r->setup.host) return 0;
    return P2P_BROKEN(result, s->operation, s->reporter, s->phase, s->culprits);
}

static void tell_peers(hosts_ring *r)
{
    const hosts_ring_setup *s = &r->setup;
    const uint64_t waits = __atomic_load_n(&s->ring.words->waits, __ATOMIC_RELAXED);
    const uint64_t broken = broken_word(r);
    for (int h = 0; h < s->num_hosts; h++) {
        if (!is_peer(r, h)) continue;
        tell_word(r, &r->waits[h], h, s->at.waits + 8 * s->host, waits);
        tell_word(r, &r->broken[h], h, s->at.broken, broken);
    }
}

static void carry_message(hosts_ring *r, int host)
{
    message *m = &r->messages[host];
    const int state = __atomic_load_n(&m->state, __ATOMIC_ACQUIRE);
    if (state == ASKED && is_done(r, host, r->given[host]) && put(r, host, m->at, m->bytes)) {
        m->given = r->given[host];
        __atomic_store_n(&m->state, GIVEN, __ATOMIC_RELEASE);
    } else if (state == GIVEN && is_done(r, host, m->given)) {
        __atomic_store_n(&m->state, NOTHING, __ATOMIC_RELEASE);
    }
}

static void bury(const hosts_ring *r)
{
    const hosts_ring_setup *s = &r->setup;
    for (int h = 0; h < s->num_hosts; h++)
        if (is_peer(r, h) &&
            (net_lines_look(s->lines, h) == LINE_DEAD || s->engine->gone(s->net, h)))
            __atomic_fetch_or(&s->status->dead, 1u << h, __ATOMIC_RELEASE);
}

/* ------------------------------------------------------------------------- the thread ---- */

/* Returns how much has moved. */
static int turn(hosts_ring *r)
{
    int moved = take_entries(r);
    moved += give_parcels(r);
    moved += r->setup.engine->look(r->setup.net);
    free_epochs(r);
    tell_peers(r);
    for (int h = 0; h < r->setup.num_hosts; h++) carry_message(r, h);
    bury(r);
    return moved;
}

static void nap(int64_t us)
{
    nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
}

/* Until a call is made, true, or the time is up. */
static bool nap_until_called(hosts_ring *r, int64_t us)
{
    const struct timespec end = clock_in_ns(us * 1000);
    __atomic_store_n(&r->asleep, 1, __ATOMIC_SEQ_CST);
    const bool called = sem_clockwait(&r->awake, CLOCK_MONOTONIC, &end) == 0;
    __atomic_store_n(&r->asleep, 0, __ATOMIC_SEQ_CST);
    return called;
}

void hosts_ring_wake(hosts_ring *r)
{
    if (__atomic_exchange_n(&r->asleep, 0, __ATOMIC_SEQ_CST)) sem_post(&r->awake);
}

static bool has_spare_cores(void)
{
    cpu_set_t mine;
    return sched_getaffinity(0, sizeof mine, &mine) == 0 && CPU_COUNT(&mine) >= CORES_TO_SPARE;
}

static int64_t longer(int64_t us)
{
    return us < IDLE_NAP_US / 2 ? us * 2 : IDLE_NAP_US;
}

static void *run_ring(void *self)
{
    hosts_ring *r = self;
    const int64_t spin_us = has_spare_cores() ? SPIN_US : 0;
    int64_t us = NAP_US, moved_at = clock_us();
    for (int idle = 0; !__atomic_load_n(&r->leave, __ATOMIC_ACQUIRE);) {
        bool called = false;
        p2p_beat(r->setup.beats, r->setup.status);
        if (turn(r) > 0) {
            idle = 0;
            us = NAP_US;
            moved_at = clock_us();
        } else if (++idle < TURNS || clock_us() - moved_at < spin_us) {
            sched_yield();
        } else if (r->running) {
            nap(us < BUSY_NAP_US ? us : BUSY_NAP_US);
            us = longer(us);
        } else {
            called = nap_until_called(r, us);
            us = longer(us);
        }
        if (!called) continue;
        idle = 0;
        us = NAP_US;
        moved_at = clock_us();
    }
    p2p_beats_end(r->setup.status);
    return NULL;
}

epic_result hosts_ring_open(hosts_ring **out, const hosts_ring_setup *setup)
{
    hosts_ring *r = calloc(1, sizeof *r);
    parcels *all =
        parcels_new(setup->num_hosts, (uint64_t)setup->at.bytes / 8,
                    (uint64_t)p2p_heap_poison(&setup->at) / 8, setup->engine->best_bytes / 8);
    if (!r || !all) {
        parcels_free(all);
        free(r);
        return epic_fail(EPIC_ENOMEM, "no host memory for a context");
    }
    r->setup = *setup;
    r->parcels = all;
    r->most = MOST_UNDER_WAY / setup->engine->best_bytes;
    pthread_mutex_init(&r->mutex, NULL);
    sem_init(&r->awake, 0, 0);
    const int error = thread_start(&r->thread, run_ring, r);
    if (error) {
        pthread_mutex_destroy(&r->mutex);
        sem_destroy(&r->awake);
        parcels_free(r->parcels);
        free(r);
        return epic_fail(EPIC_EDEVICE, "backend hosts: no thread for the net: %s",
                         strerror(error));
    }
    *out = r;
    return EPIC_OK;
}

static bool is_idle(const message *m)
{
    return __atomic_load_n(&m->state, __ATOMIC_ACQUIRE) == NOTHING;
}

/* Until the message has come, or a moment has passed. */
static void wait_for_message(message *m)
{
    for (int i = 0; i < TELL_MS * 10 && !is_idle(m); i++) nap(100);
}

void hosts_ring_tell(hosts_ring *r, int host, uint64_t at, uint32_t bytes)
{
    message *m = &r->messages[host]; /* one that a host does not read stays, others go on */
    pthread_mutex_lock(&r->mutex);
    wait_for_message(m);
    if (is_idle(m)) {
        m->at = at;
        m->bytes = bytes;
        __atomic_store_n(&m->state, ASKED, __ATOMIC_RELEASE);
        hosts_ring_wake(r);
        wait_for_message(m);
    }
    int asked = ASKED; /* what was not begun is given up */
    __atomic_compare_exchange_n(&m->state, &asked, NOTHING, false, __ATOMIC_ACQ_REL,
                                __ATOMIC_RELAXED);
    pthread_mutex_unlock(&r->mutex);
}

void hosts_ring_given(const hosts_ring *r, uint64_t given[3])
{
    given[0] = __atomic_load_n(&r->bytes, __ATOMIC_RELAXED);
    given[1] = __atomic_load_n(&r->puts, __ATOMIC_RELAXED);
    given[2] = __atomic_load_n(&r->pieces, __ATOMIC_RELAXED);
}

void hosts_ring_close(hosts_ring *r)
{
    if (!r) return;
    __atomic_store_n(&r->leave, 1, __ATOMIC_RELEASE);
    hosts_ring_wake(r);
    pthread_join(r->thread, NULL);
    pthread_mutex_destroy(&r->mutex);
    sem_destroy(&r->awake);
    parcels_free(r->parcels);
    free(r);
}
