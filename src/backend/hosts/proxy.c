/* SPDX-License-Identifier: Apache-2.0 */
/* The proxy thread sends rows from a GPU over the net (proxy.h). The thread calls
 * proxy_progress() in a loop, and sleeps while there is nothing to do.
 *
 * Kernels post *pieces* through a ring in host memory. A piece is a range of words in the
 * outbox that must be sent to one host. The thread collects pieces in batches, joins them into
 * *puts* (put_batch.h) and passes the puts to the network engine, which only this thread calls.
 * A put is *in flight* while the engine may still read its words, and *done* after that. An
 * *epoch* is one operation of the kernels. *Urgent* pieces are small and kernels wait for them
 * (put_batch.h).
 *
 * The thread exchanges data with kernels through the ring and the words next to it
 * (p2p_ring_words). The thread loads ring entries with acquire order and stores its own words
 * with release order. Other threads of the rank use hosts_proxy_send() and
 * hosts_proxy_wake(). */
#include "backend/hosts/proxy.h"

#include <errno.h>
#include <sched.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "backend/hosts/put_batch.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"

/* Number of epochs in the array `ends`. Kernels wait so that at most two epochs have puts in
 * flight, so four are enough. */
#define MAX_OPEN_EPOCHS 4
/* maximum number of ring entries that the thread reads before it posts puts */
#define MAX_ENTRIES 256
/* A batch that is not full is posted only if fewer than this many puts to the host are in
 * flight. */
#define FEW_IN_FLIGHT 4
/* Limits for the puts in flight to one host. While MAX_URGENT_IN_FLIGHT urgent puts are in
 * flight, new urgent pieces wait and are joined into larger puts. MAX_BYTES_IN_FLIGHT limits
 * the bytes of row puts, because the net may send all of these bytes before an urgent put that
 * is posted later. */
#define MAX_URGENT_IN_FLIGHT 16
#define MAX_BYTES_IN_FLIGHT (2u << 20)
/* An urgent batch that needs more than this many puts is not posted yet. Pieces that arrive
 * later may fill the gaps between its ranges, and then fewer puts are needed. */
#define URGENT_MAX_PUTS 4
/* an urgent batch stops waiting for pieces when no urgent piece has been read for this long */
#define URGENT_QUIET_US 5
/* number of cache lines ahead of the current ring entry that the thread prefetches */
#define PREFETCH_LINES 4
#ifndef IDLE_ROUNDS /* tests with many ranks on few cores set fewer */
/* the thread begins to sleep after this many calls of proxy_progress() without progress */
#define IDLE_ROUNDS 64
#endif
/* polling time in us before the first sleep, if this process has at least SPARE_CORES cores */
#define SPIN_US 200
#define SPARE_CORES 8
/* A sleep takes a 16th of the time without progress, so it makes no pause much longer. */
#define NAP_SHARE 16
#ifndef MIN_NAP_US /* tests with many ranks on few cores set longer sleeps */
#define MIN_NAP_US 20
#endif
#ifndef MAX_NAP_BUSY_US
#define MAX_NAP_BUSY_US 50 /* longest sleep while an operation runs */
#endif
/* Longest sleep while no operation runs. hosts_proxy_wake() ends such a sleep early, but the
 * replay of a CUDA graph does not. */
#define MAX_NAP_IDLE_US 20000
#define MESSAGE_TIMEOUT_MS 2000

/* A one-word value that this rank sends to a fixed offset in one peer's inbox. Puts may arrive
 * in any order, so a new value is sent only after the put of the old value is done. */
typedef struct state_word {
    uint64_t sent;
    /* index of the put that has sent this value; the next value waits until this put is done */
    uint64_t posted;
} state_word;

enum { MESSAGE_IDLE, MESSAGE_REQUESTED, MESSAGE_POSTED };

/* The message of one call of hosts_proxy_send() to one host, with the arguments `at` and `bytes`
 * of that call. `posted` is the index of the put that sends the message. */
typedef struct message {
    uint64_t at, posted;
    uint32_t bytes;
    int state;
} message;

/* The state of the proxy thread. Members that other threads use too are atomic. */
struct hosts_proxy {
    hosts_proxy_setup setup;
    pthread_t thread;
    pthread_mutex_t mutex; /* held during hosts_proxy_send(), so only one call runs at a time */
    message messages[NET_MAX_HOSTS];
    int is_closing;
    int is_asleep;        /* 1 while the thread sleeps */
    sem_t wake_up;        /* posted by hosts_proxy_wake() to end a sleep early */
    bool is_running;      /* true while kernels of an operation run */
    bool has_read;        /* true if the last call of read_entries() has read an entry */
    bool has_read_urgent; /* true if the last call of read_entries() has read an urgent piece */
    /* for each host: true if the net accepts no more puts to the host at the moment */
    bool full[NET_MAX_HOSTS];
    int64_t urgent_at; /* time in us (clock_us()) at which an urgent piece was last read */
    /* true: the thread has read the ring entry that follows the last piece of the epoch; the
     * epoch ends when all its batches are posted */
    bool epoch_ends_next;
    put_batcher *batcher;
    uint64_t num_read; /* ring entries read so far */
    /* number of read entries that are pieces; the other entries mark the end of an epoch */
    uint64_t pieces;
    /* number of bytes and of puts posted for pieces, without state words and messages */
    uint64_t bytes, puts;
    uint64_t max_puts_in_flight; /* limit for the number of row puts in flight to one host */
    /* number of puts posted to each host, including state words and messages */
    uint64_t posted[NET_MAX_HOSTS];
    uint64_t num_urgent[NET_MAX_HOSTS]; /* number of urgent puts posted to each host */
    /* urgent[host][n % MAX_URGENT_IN_FLIGHT]: value of posted[host] just after the n-th urgent
     * put to that host (from 0) was posted; only the values of the last MAX_URGENT_IN_FLIGHT
     * urgent puts are kept */
    uint64_t urgent[NET_MAX_HOSTS][MAX_URGENT_IN_FLIGHT];
    /* ends[n % MAX_OPEN_EPOCHS]: copy of `posted` at the end of epoch n; only the last
     * MAX_OPEN_EPOCHS epochs are kept */
    uint64_t ends[MAX_OPEN_EPOCHS][NET_MAX_HOSTS];
    uint64_t num_ends;
    uint64_t num_freed; /* number of epochs whose puts are all done */
    state_word waits[NET_MAX_HOSTS], broken[NET_MAX_HOSTS];
};

static bool is_done(const hosts_proxy *p, int host, uint64_t count)
{
    return p->setup.engine->is_done(p->setup.net, host, count);
}

static bool is_peer(const hosts_proxy *p, int host)
{
    return host != p->setup.host && host < p->setup.num_hosts;
}

/* ----------------------------------------------------------------- puts of the kernels ---- */

/* Ends an epoch: records the number of puts posted to each host so far. free_epochs() later
 * waits for these puts. */
static void end_epoch(hosts_proxy *p)
{
    memcpy(p->ends[p->num_ends++ % MAX_OPEN_EPOCHS], p->posted, sizeof p->posted);
    p->is_running = false;
}

/* Posts a put from offset `at` of the outbox to the same offset of the host's inbox. Returns
 * false if the net cannot accept a put now. */
static bool post_put(hosts_proxy *p, int host, uint64_t at, uint32_t bytes)
{
    const hosts_proxy_setup *s = &p->setup;
    if (!s->engine->put(s->net, host, at, s->outbox + at, bytes)) return false;
    p->posted[host]++;
    return true;
}

/* Adds to the batcher a piece that a kernel has posted. */
static void read_piece(hosts_proxy *p, int host, uint64_t entry)
{
    const uint64_t word = P2P_ENTRY_WORD(entry);
    put_batcher_add(p->batcher, host, word, P2P_ENTRY_WORDS(entry));
    /* atomic, because hosts_proxy_counts() reads `pieces` in another thread */
    __atomic_store_n(&p->pieces, p->pieces + 1, __ATOMIC_RELAXED);
    p->has_read_urgent |= put_batcher_is_urgent(p->batcher, word);
}

/* Reads ring entries until the epoch ends, the batcher is full, the ring is empty, or
 * MAX_ENTRIES entries were read. Returns the number of entries read.
 *
 * Kernels fill the ring again and again. The top byte of an entry is the lap in which it was
 * written (P2P_ENTRY_LAP), so the thread recognizes an entry of an earlier lap, which it has
 * already read. The acquire load of an entry makes the words in the outbox visible that the
 * entry describes. The store to `taken` allows kernels to reuse the ring entries. */
static int read_entries(hosts_proxy *p)
{
    int num_read = 0;
    p->has_read_urgent = false;
    while (!p->epoch_ends_next && num_read < MAX_ENTRIES) {
        const uint64_t *from = &p->setup.ring.entries[p->num_read % P2P_RING_ENTRIES];
        const uint64_t entry = __atomic_load_n(from, __ATOMIC_ACQUIRE);
        const int host = P2P_ENTRY_PEER(entry);
        if (entry >> 56 << 56 != P2P_ENTRY_LAP(p->num_read)) break;
        if (!put_batcher_has_room(p->batcher, P2P_ENTRY_WORDS(entry))) break;
        /* prefetching past the end of the ring does no harm */
        __builtin_prefetch(from + PREFETCH_LINES * 8);
        if (P2P_ENTRY_WORD(entry) == P2P_EPOCH_ENDS)
            p->epoch_ends_next = true;
        else if (is_peer(p, host))
            read_piece(p, host, entry);
        p->num_read++;
        num_read++;
    }
    p->has_read = num_read > 0;
    if (p->has_read_urgent) p->urgent_at = clock_us();
    if (p->has_read) p->is_running = true;
    __atomic_store_n(&p->setup.ring.words->taken, p->num_read, __ATOMIC_RELEASE);
    return num_read;
}

static bool has_fewer_in_flight(const hosts_proxy *p, int host, uint64_t max_puts_in_flight)
{
    const uint64_t posted = p->posted[host];
    return posted < max_puts_in_flight || is_done(p, host, posted - max_puts_in_flight + 1);
}

/* Implements put_batch_may_go: decides which batches are posted now.
 * - Full batches of rows are posted while few puts are in flight to the host
 *   (max_puts_in_flight). If many are in flight, the batches wait here, because the net would
 *   send later urgent puts only after them.
 * - Urgent batches are posted as soon as no more urgent pieces arrive. The warps of a plan
 *   kernel post about a thousand small urgent pieces one after the other, and joining them
 *   saves puts.
 * - Partial batches are posted while kernels post nothing and the net has little to do.
 * - At the end of an epoch, all urgent and partial batches are posted. */
static bool may_go(const void *self, int host, put_batch_kind kind, int puts)
{
    const hosts_proxy *p = self;
    const uint64_t urgent = p->num_urgent[host];
    if (p->full[host]) return false;
    if (kind == BATCH_COMPLETE) return has_fewer_in_flight(p, host, p->max_puts_in_flight);
    if (p->epoch_ends_next) return true;
    if (kind == BATCH_PARTIAL)
        return !p->has_read && has_fewer_in_flight(p, host, FEW_IN_FLIGHT);
    if (puts > URGENT_MAX_PUTS && clock_us() - p->urgent_at < URGENT_QUIET_US) return false;
    return !p->has_read_urgent &&
           (urgent < MAX_URGENT_IN_FLIGHT ||
            is_done(p, host, p->urgent[host][urgent % MAX_URGENT_IN_FLIGHT]));
}

static void record_urgent(hosts_proxy *p, int host)
{
    p->urgent[host][p->num_urgent[host]++ % MAX_URGENT_IN_FLIGHT] = p->posted[host];
}

/* Posts all batches that may_go() allows, and returns the number of puts. Ends the epoch when
 * all its batches are posted.
 *
 * If the net accepts no more puts to one host, the function still posts puts to the other
 * hosts. If the function returned instead, the other hosts would wait for rows of this rank and
 * report this rank as the culprit. */
static int post_batches(hosts_proxy *p)
{
    int posted = 0;
    put_range next;
    memset(p->full, 0, sizeof p->full);
    while (put_batcher_next(p->batcher, may_go, p, &next)) {
        if (!post_put(p, next.host, next.word * 8, next.words * 8)) {
            p->full[next.host] = true;
            put_batcher_put_back(p->batcher);
            continue;
        }
        if (put_batcher_is_urgent(p->batcher, next.word)) record_urgent(p, next.host);
        put_batcher_mark_posted(p->batcher);
        /* atomic, because hosts_proxy_counts() reads these counters in another thread */
        __atomic_store_n(&p->bytes, p->bytes + next.words * 8, __ATOMIC_RELAXED);
        __atomic_store_n(&p->puts, p->puts + 1, __ATOMIC_RELAXED);
        posted++;
    }
    if (!p->epoch_ends_next || !put_batcher_is_empty(p->batcher)) return posted;
    end_epoch(p);
    p->epoch_ends_next = false;
    return posted;
}

/* Publishes to the kernels the number of epochs that are completely sent (`freed`). Epochs use
 * the two halves of the outbox alternately. When all puts of an epoch are done, kernels may
 * overwrite the half of the outbox that the epoch used. */
static void free_epochs(hosts_proxy *p)
{
    while (p->num_freed < p->num_ends) {
        const uint64_t *posted = p->ends[p->num_freed % MAX_OPEN_EPOCHS];
        for (int h = 0; h < p->setup.num_hosts; h++)
            if (is_peer(p, h) && !is_done(p, h, posted[h])) return;
        __atomic_store_n(&p->setup.ring.words->freed, ++p->num_freed, __ATOMIC_RELEASE);
    }
}

/* ------------------------------------------------------ state and messages of the rank ---- */

/* Sends a state word with value `value` to offset `at` of a host's inbox, if the value is new
 * and the put of the previous value is done. */
static void send_state_word(hosts_proxy *p, state_word *m, int host, int64_t at, uint64_t value)
{
    const hosts_proxy_setup *s = &p->setup;
    if (value == m->sent || !is_done(p, host, m->posted)) return;
    if (!s->engine->put_word(s->net, host, (uint64_t)at, value)) return;
    m->sent = value;
    m->posted = ++p->posted[host];
}

/* Returns the word that describes the failure that this rank has reported, or 0. Only the rank
 * that reported a failure sends this word. */
static uint64_t broken_word(const hosts_proxy *p)
{
    const p2p_status *s = p->setup.status;
    const uint32_t result = __atomic_load_n(&s->result, __ATOMIC_ACQUIRE);
    if (result == EPIC_OK || (int)s->reporter != p->setup.host) return 0;
    return P2P_BROKEN(result, s->operation, s->reporter, s->phase, s->culprits);
}

/* Sends two state words to all peers: the ranks that this rank waits for, and the failure that
 * it has reported. */
static void send_state(hosts_proxy *p)
{
    const hosts_proxy_setup *s = &p->setup;
    const uint64_t waits = __atomic_load_n(&s->ring.words->waits, __ATOMIC_RELAXED);
    const uint64_t broken = broken_word(p);
    for (int h = 0; h < s->num_hosts; h++) {
        if (!is_peer(p, h)) continue;
        send_state_word(p, &p->waits[h], h, s->at.waits + 8 * s->host, waits);
        send_state_word(p, &p->broken[h], h, s->at.broken, broken);
    }
}

/* Advances the message to one host: posts a requested message when no other put to the host is
 * in flight, and marks the message as idle when its put is done. */
static void progress_message(hosts_proxy *p, int host)
{
    message *m = &p->messages[host];
    const int state = __atomic_load_n(&m->state, __ATOMIC_ACQUIRE);
    if (state == MESSAGE_REQUESTED && is_done(p, host, p->posted[host]) &&
        post_put(p, host, m->at, m->bytes)) {
        m->posted = p->posted[host];
        __atomic_store_n(&m->state, MESSAGE_POSTED, __ATOMIC_RELEASE);
    } else if (state == MESSAGE_POSTED && is_done(p, host, m->posted)) {
        __atomic_store_n(&m->state, MESSAGE_IDLE, __ATOMIC_RELEASE);
    }
}

/* Sets the bits of dead ranks in status->dead, which kernels read. A rank is dead if its
 * liveness connection is lost, or if the network engine reports that the rank is gone. */
static void mark_dead(const hosts_proxy *p)
{
    const hosts_proxy_setup *s = &p->setup;
    for (int h = 0; h < s->num_hosts; h++)
        if (is_peer(p, h) && (net_liveness_state(s->liveness, h) == NET_PEER_DEAD ||
                              s->engine->is_gone(s->net, h)))
            __atomic_fetch_or(&s->status->dead[h / 32], 1u << h % 32, __ATOMIC_RELEASE);
}

/* --------------------------------------------------------------------------- main loop ---- */

/* Performs each task of the thread once: reads ring entries, posts puts, lets the net progress,
 * and sends this rank's state. Returns the number of entries plus the number of puts and of net
 * events. */
static int proxy_progress(hosts_proxy *p)
{
    int moved = read_entries(p);
    moved += post_batches(p);
    moved += p->setup.engine->progress(p->setup.net);
    free_epochs(p);
    send_state(p);
    for (int h = 0; h < p->setup.num_hosts; h++) progress_message(p, h);
    mark_dead(p);
    return moved;
}

static void nap_us(int64_t us)
{
    nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
}

/* Sleeps for `us` microseconds, or until hosts_proxy_wake() ends the sleep. Returns whether
 * hosts_proxy_wake() ended the sleep. */
static bool nap_until_called(hosts_proxy *p, int64_t us)
{
    const struct timespec end = clock_in_ns(us * 1000);
    __atomic_store_n(&p->is_asleep, 1, __ATOMIC_SEQ_CST);
    const bool called = sem_clockwait(&p->wake_up, CLOCK_MONOTONIC, &end) == 0;
    __atomic_store_n(&p->is_asleep, 0, __ATOMIC_SEQ_CST);
    return called;
}

void hosts_proxy_wake(hosts_proxy *p)
{
    if (__atomic_exchange_n(&p->is_asleep, 0, __ATOMIC_SEQ_CST)) sem_post(&p->wake_up);
}

static bool has_spare_cores(void)
{
    cpu_set_t mine;
    return sched_getaffinity(0, sizeof mine, &mine) == 0 && CPU_COUNT(&mine) >= SPARE_CORES;
}

/* Returns how long the thread sleeps after `idle_us` without progress. */
static int64_t nap_after(int64_t idle_us, int64_t max_us)
{
    const int64_t us = idle_us / NAP_SHARE;
    return us < MIN_NAP_US ? MIN_NAP_US : us < max_us ? us : max_us;
}

/* The main function of the proxy thread: calls proxy_progress() until the proxy is closed.
 * While nothing happens, the thread first yields the core, then sleeps longer and longer. */
static void *proxy_run(void *self)
{
    hosts_proxy *p = self;
    const int64_t spin_us = has_spare_cores() ? SPIN_US : 0;
    int64_t moved_at = clock_us();
    for (int idle = 0; !__atomic_load_n(&p->is_closing, __ATOMIC_ACQUIRE);) {
        p2p_beat(p->setup.beats, p->setup.status);
        if (proxy_progress(p) > 0) {
            idle = 0;
            moved_at = clock_us();
            continue;
        }
        const int64_t idle_us = ++idle < IDLE_ROUNDS ? 0 : clock_us() - moved_at;
        if (idle < IDLE_ROUNDS || idle_us < spin_us) {
            sched_yield();
        } else if (p->is_running) {
            nap_us(nap_after(idle_us, MAX_NAP_BUSY_US));
        } else if (nap_until_called(p, nap_after(idle_us, MAX_NAP_IDLE_US))) {
            idle = 0;
            moved_at = clock_us();
        }
    }
    p2p_beats_end(p->setup.status);
    return NULL;
}

epic_result hosts_proxy_open(hosts_proxy **out, const hosts_proxy_setup *setup)
{
    hosts_proxy *p = calloc(1, sizeof *p);
    put_batcher *batcher = put_batcher_new(setup->num_hosts, (uint64_t)setup->at.bytes / 8,
                                           (uint64_t)p2p_heap_poison(&setup->at) / 8,
                                           setup->engine->preferred_bytes / 8);
    if (!p || !batcher) {
        put_batcher_free(batcher);
        free(p);
        return epic_fail(EPIC_ENOMEM, "no host memory for a context");
    }
    p->setup = *setup;
    p->batcher = batcher;
    p->max_puts_in_flight = MAX_BYTES_IN_FLIGHT / setup->engine->preferred_bytes;
    pthread_mutex_init(&p->mutex, NULL);
    sem_init(&p->wake_up, 0, 0);
    const int error = thread_start(&p->thread, proxy_run, p);
    if (error) {
        pthread_mutex_destroy(&p->mutex);
        sem_destroy(&p->wake_up);
        put_batcher_free(p->batcher);
        free(p);
        return epic_fail(EPIC_EDEVICE, "backend hosts: no thread for the net: %s",
                         strerror(error));
    }
    *out = p;
    return EPIC_OK;
}

static bool is_idle(const message *m)
{
    return __atomic_load_n(&m->state, __ATOMIC_ACQUIRE) == MESSAGE_IDLE;
}

static bool are_idle(const hosts_proxy *p, const seat_set *hosts)
{
    for (int h = 0; h < p->setup.num_hosts; h++)
        if (seat_set_has(hosts, h) && !is_idle(&p->messages[h])) return false;
    return true;
}

/* Requests the message to each host in `left` whose earlier message is sent, and removes these
 * hosts from `left`. */
static void request_messages(hosts_proxy *p, seat_set *left, uint64_t at, uint32_t bytes)
{
    seat_set requested = {0};
    for (int h = 0; h < p->setup.num_hosts; h++) {
        message *m = &p->messages[h];
        if (!seat_set_has(left, h) || !is_idle(m)) continue;
        m->at = at;
        m->bytes = bytes;
        __atomic_store_n(&m->state, MESSAGE_REQUESTED, __ATOMIC_RELEASE);
        seat_set_add(&requested, h);
    }
    seat_set_subtract(left, &requested);
    if (seat_set_count(&requested)) hosts_proxy_wake(p);
}

/* Withdraws a message that is not posted yet. */
static void withdraw_message(message *m)
{
    int asked = MESSAGE_REQUESTED;
    __atomic_compare_exchange_n(&m->state, &asked, MESSAGE_IDLE, false, __ATOMIC_ACQ_REL,
                                __ATOMIC_RELAXED);
}

void hosts_proxy_send(hosts_proxy *p, const seat_set *hosts, uint64_t at, uint32_t bytes)
{
    /* each host has its own message, so a host that does not receive delays no other host */
    seat_set left = *hosts;
    pthread_mutex_lock(&p->mutex);
    request_messages(p, &left, at, bytes);
    for (int i = 0; i < MESSAGE_TIMEOUT_MS * 10; i++) {
        if (seat_set_count(&left) == 0 && are_idle(p, hosts)) break;
        nap_us(100);
        request_messages(p, &left, at, bytes);
    }
    for (int h = 0; h < p->setup.num_hosts; h++)
        if (seat_set_has(hosts, h)) withdraw_message(&p->messages[h]);
    pthread_mutex_unlock(&p->mutex);
}

void hosts_proxy_counts(const hosts_proxy *p, uint64_t posted[3])
{
    posted[0] = __atomic_load_n(&p->bytes, __ATOMIC_RELAXED);
    posted[1] = __atomic_load_n(&p->puts, __ATOMIC_RELAXED);
    posted[2] = __atomic_load_n(&p->pieces, __ATOMIC_RELAXED);
}

void hosts_proxy_close(hosts_proxy *p)
{
    if (!p) return;
    __atomic_store_n(&p->is_closing, 1, __ATOMIC_RELEASE);
    hosts_proxy_wake(p);
    pthread_join(p->thread, NULL);
    pthread_mutex_destroy(&p->mutex);
    sem_destroy(&p->wake_up);
    put_batcher_free(p->batcher);
    free(p);
}
