/* SPDX-License-Identifier: Apache-2.0 */
/* A net made of several nets of one engine, its stripes (striped.h).
 *
 * The *caller* is the thread that uses the striped net. Only this thread calls the net of the
 * first stripe. The first stripe sends the words of put_word() and small puts, so these never
 * wait behind large puts. Each other stripe has a thread of its own, and only that thread calls
 * the stripe's net. The large puts are distributed round-robin over these stripes. The *driver*
 * of a stripe is the thread that calls its net. In this file, a call of put_word() is a put
 * too. */
#include "net/striped/striped.h"

#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/thread.h"

#ifndef STRIPED_LARGE
#define STRIPED_LARGE (32u << 10) /* puts of at least this many bytes are large */
#endif
#define MAX_JOBS 64 /* maximum number of puts in the queue of a stripe's thread */
/* maximum number of puts (of put() and put_word()) in flight to one host; put() returns false
 * for more puts */
#define MAX_IN_FLIGHT 1024
/* maximum time in ms for which striped_close() still sends accepted puts */
#define CLOSE_MS 1000

/* The thread of a stripe calls progress() of its net in a loop. After IDLE_ROUNDS calls without
 * an event it naps (sleeps) between the calls, each time twice as long as before.
 *
 * If the caller calls striped_progress() at least every POLL_OFTEN_US, the thread assumes that
 * an operation is running, and a nap lasts at most MAX_NAP_BUSY_US. Otherwise a nap lasts at
 * most MAX_NAP_IDLE_US, and the caller's next put ends it. */
#define IDLE_ROUNDS 64
#define FIRST_NAP_US 20
#define MAX_NAP_BUSY_US 50
#define POLL_OFTEN_US 200
#define MAX_NAP_IDLE_US 200000

/* A large put in the queue of a stripe's thread. The members are the arguments of put(). */
typedef struct job {
    uint64_t to;
    const void *from;
    uint32_t bytes;
    int host;
} job;

/* One stripe. Only its driver accesses `posted`. Members that both the driver and the caller
 * access are read and written atomically. */
typedef struct stripe {
    net *net;   /* this stripe's net, opened by striped_over.engine */
    net *owner; /* the striped net to which the stripe belongs */
    /* for each host, number of puts that were passed to `net` */
    uint64_t posted[NET_MAX_HOSTS];
    /* For each host: the puts with numbers below completed[host] are all done. Puts to a host
     * may finish in any order, so later puts may be done too. */
    uint64_t completed[NET_MAX_HOSTS];
    bool failed[NET_MAX_HOSTS]; /* for each host, true if the host is gone */
    pthread_t thread;
    bool has_thread; /* true: the thread was started; it closes `net` before it returns */
    /* queued: number of jobs that the caller has queued. started: number of jobs that the
     * thread has passed to `net`. */
    uint64_t queued, started;
    job jobs[MAX_JOBS];
    int64_t nap_us; /* duration of the current nap; 0: the thread is awake */
    sem_t awake;    /* posted by stripe_wake() to end a nap early */
} stripe;

/* The state of the puts to one host, over all stripes. Puts are numbered from 0 in the order of
 * the caller's calls. */
typedef struct peer {
    /* posted: number of puts that the caller has made. finished: the first
     * `finished` of these puts are all done. */
    uint64_t posted, finished;
    /* stripe_of[i % MAX_IN_FLIGHT]: the stripe that sends put i */
    uint8_t stripe_of[MAX_IN_FLIGHT];
    /* for each stripe, how many of the first `finished` puts it has sent */
    uint64_t num_completed[STRIPED_MAX];
} peer;

struct net {
    net_setup setup;
    int num_stripes, next; /* next: the next large put goes to stripe 1 + next */
    int is_closing;
    uint64_t num_polls; /* number of calls of striped_progress() */
    uint64_t num_calls; /* number of puts that the caller has made, to all hosts */
    peer peers[NET_MAX_HOSTS];
    stripe stripes[STRIPED_MAX];
};

/* Contents of a handle: the handles of all stripes, without their trailing zero bytes. */
typedef struct handle {
    /* number of bytes of each stripe's handle; 0: the stripe does not exist */
    uint16_t length[STRIPED_MAX];
    unsigned char bytes[NET_HANDLE_BYTES - STRIPED_MAX * sizeof(uint16_t)];
} handle;
_Static_assert(sizeof(handle) == NET_HANDLE_BYTES,
               "a handle must fit into the bytes that the bootstrap carries");

/* ----------------------------------------------------------------- driver of a stripe ---- */

/* Passes one put to the stripe's net. Returns false if the net accepts no more puts now. */
static bool stripe_post(stripe *s, int host, uint64_t to, const void *from, uint32_t bytes)
{
    if (!striped_over.engine->put(s->net, host, to, from, bytes)) return false;
    s->posted[host]++;
    return true;
}

/* Updates completed[host] and failed[host] of the stripe. The caller reads these arrays. */
static void stripe_update(stripe *s, int host)
{
    uint64_t completed = s->completed[host];
    while (completed < s->posted[host] &&
           striped_over.engine->is_done(s->net, host, completed + 1))
        completed++;
    __atomic_store_n(&s->completed[host], completed, __ATOMIC_RELEASE);
    if (striped_over.engine->is_gone(s->net, host))
        __atomic_store_n(&s->failed[host], true, __ATOMIC_RELEASE);
}

/* Calls progress() of the stripe's net, and stripe_update() for each host. Returns the number
 * of events. */
static int stripe_progress(stripe *s)
{
    const net_setup *setup = &s->owner->setup;
    const int moved = striped_over.engine->progress(s->net);
    for (int h = 0; h < setup->num_hosts; h++)
        if (h != setup->host) stripe_update(s, h);
    return moved;
}

/* ----------------------------------------------------------------- thread of a stripe ---- */

/* Passes queued puts to the net of the stripe until that net accepts no more. Returns the
 * number of puts that it passed. */
static int stripe_take_jobs(stripe *s)
{
    const uint64_t queued = __atomic_load_n(&s->queued, __ATOMIC_ACQUIRE);
    uint64_t started = s->started;
    for (; started < queued; started++) {
        const job *j = &s->jobs[started % MAX_JOBS];
        if (!stripe_post(s, j->host, j->to, j->from, j->bytes)) break;
    }
    const int taken = (int)(started - s->started);
    __atomic_store_n(&s->started, started, __ATOMIC_RELEASE);
    return taken;
}

/* Sleeps for at most `us` microseconds. Does not sleep if the striped net is closing, or if the
 * caller has made another put since this thread read num_calls. */
static void stripe_nap(stripe *s, int64_t us, uint64_t num_calls)
{
    const struct timespec end = clock_in_ns(us * 1000);
    __atomic_store_n(&s->nap_us, us, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&s->owner->num_calls, __ATOMIC_SEQ_CST) == num_calls &&
        !__atomic_load_n(&s->owner->is_closing, __ATOMIC_SEQ_CST))
        sem_clockwait(&s->awake, CLOCK_MONOTONIC, &end);
    __atomic_store_n(&s->nap_us, 0, __ATOMIC_SEQ_CST);
}

/* Ends the current nap of the stripe's thread if the nap is longer than `us` microseconds. */
static void stripe_wake(stripe *s, int64_t us)
{
    if (__atomic_load_n(&s->nap_us, __ATOMIC_SEQ_CST) > us &&
        __atomic_exchange_n(&s->nap_us, 0, __ATOMIC_SEQ_CST))
        sem_post(&s->awake);
}

/* Returns the maximum length of the next nap in microseconds. The last nap lasted `us`
 * microseconds, in which the caller has called striped_progress() `num_polls` times. */
static int64_t longest_nap_us(uint64_t num_polls, int64_t us)
{
    return (int64_t)num_polls > us / POLL_OFTEN_US ? MAX_NAP_BUSY_US : MAX_NAP_IDLE_US;
}

/* The main function of a stripe's thread. When the striped net closes, it sends the queued puts
 * for at most CLOSE_MS, and closes the stripe's net. */
static void *stripe_run(void *self)
{
    stripe *s = self;
    const net *n = s->owner;
    int64_t us = FIRST_NAP_US;
    for (int idle = 0; !__atomic_load_n(&n->is_closing, __ATOMIC_ACQUIRE);) {
        const uint64_t num_calls = __atomic_load_n(&n->num_calls, __ATOMIC_SEQ_CST);
        const uint64_t num_polls = __atomic_load_n(&n->num_polls, __ATOMIC_RELAXED);
        if (stripe_take_jobs(s) + stripe_progress(s) > 0) {
            idle = 0;
            us = FIRST_NAP_US;
        } else if (++idle < IDLE_ROUNDS) {
            sched_yield();
        } else {
            stripe_nap(s, us, num_calls);
            const int64_t most = longest_nap_us(
                __atomic_load_n(&n->num_polls, __ATOMIC_RELAXED) - num_polls, us);
            us = 2 * us < most ? 2 * us : most;
        }
    }
    const int64_t end = clock_us() + CLOSE_MS * 1000;
    while (s->started < s->queued && clock_us() < end)
        if (stripe_take_jobs(s) + stripe_progress(s) == 0) sched_yield();
    striped_over.engine->close(s->net);
    return NULL;
}

static epic_result stripe_start(stripe *s, char *why)
{
    const int error = thread_start(&s->thread, stripe_run, s);
    s->has_thread = error == 0;
    if (s->has_thread) return EPIC_OK;
    snprintf(why, NET_WHY_BYTES, "net \"%s\": no thread for a stripe: %s",
             striped_over.engine->name, strerror(error));
    return EPIC_EDEVICE;
}

/* ----------------------------------------------------------------------------- opening ---- */

/* Returns the size of a handle in bytes, without its trailing zero bytes. */
static size_t handle_length(const unsigned char *bytes)
{
    size_t length = NET_HANDLE_BYTES;
    while (length > 0 && !bytes[length - 1]) length--;
    return length;
}

/* Opens one more stripe. Appends its handle to all->bytes after the first *used bytes, which
 * are in use. Returns EPIC_ENOTSUP if the handle does not fit. On any error, writes the reason
 * to `why`. */
static epic_result add_stripe(net *n, handle *all, size_t *used, char *why)
{
    unsigned char mine[NET_HANDLE_BYTES] = {0};
    net_setup setup = n->setup;
    stripe *s = &n->stripes[n->num_stripes];
    setup.threads = 0;
    s->owner = n;
    const epic_result result = striped_over.engine->open(&s->net, &setup, mine, why);
    if (result != EPIC_OK) return result;
    const size_t length = handle_length(mine);
    if (length > sizeof all->bytes - *used) {
        snprintf(why, NET_WHY_BYTES, "net \"%s\": a handle of %zu bytes is too large",
                 striped_over.engine->name, length);
        striped_over.engine->close(s->net);
        return EPIC_ENOTSUP;
    }
    memcpy(all->bytes + *used, mine, length);
    *used += length;
    all->length[n->num_stripes++] = (uint16_t)length;
    sem_init(&s->awake, 0, 0);
    return EPIC_OK;
}

/* Opens the first stripe and, if more stripes would be faster (can_gain), up to
 * n->setup.threads more. If the handle of a stripe does not fit, opens no further stripe and
 * returns EPIC_OK. */
static epic_result add_stripes(net *n, handle *all, char *why)
{
    size_t used = 0;
    int wanted = 1 + n->setup.threads;
    if (wanted > STRIPED_MAX) wanted = STRIPED_MAX;
    epic_result result = add_stripe(n, all, &used, why);
    if (result != EPIC_OK || !striped_over.can_gain(n->stripes[0].net)) return result;
    while (result == EPIC_OK && n->num_stripes < wanted)
        result = add_stripe(n, all, &used, why);
    /* if a handle did not fit, continue with the open stripes */
    return result == EPIC_ENOTSUP ? EPIC_OK : result;
}

epic_result striped_open(net **out, const net_setup *setup, void *bytes, char *why)
{
    net *n = calloc(1, sizeof *n);
    if (!n) {
        snprintf(why, NET_WHY_BYTES, "net \"%s\": no host memory", striped_over.engine->name);
        return EPIC_ENOMEM;
    }
    n->setup = *setup;
    const epic_result result = add_stripes(n, bytes, why);
    if (result == EPIC_OK)
        *out = n;
    else
        striped_close(n);
    return result;
}

/* -------------------------------------------------------------------------- connecting ---- */

static int count_stripes(const handle *c)
{
    size_t used = 0;
    int count = 0;
    for (; count < STRIPED_MAX && c->length[count]; count++) used += c->length[count];
    return used <= sizeof c->bytes ? count : 0;
}

static void copy_handle(const handle *from, int stripe, unsigned char *to)
{
    size_t at = 0;
    for (int s = 0; s < stripe; s++) at += from->length[s];
    memset(to, 0, NET_HANDLE_BYTES);
    memcpy(to, from->bytes + at, from->length[stripe]);
}

/* Closes stripes until this rank has as many as the peer with the fewest stripes. All ranks
 * read the same handles, so they all keep the same number of stripes. Returns EPIC_EMISMATCH if
 * a handle is damaged. */
static epic_result agree_on_count(net *n, const handle *handles, char *why)
{
    int count = n->num_stripes;
    for (int h = 0; h < n->setup.num_hosts; h++) {
        const int theirs = count_stripes(&handles[h]);
        if (h == n->setup.host) continue;
        if (theirs == 0) {
            snprintf(why, NET_WHY_BYTES, "net \"%s\": the handle of host %d is damaged",
                     striped_over.engine->name, h);
            return EPIC_EMISMATCH;
        }
        if (theirs < count) count = theirs;
    }
    while (n->num_stripes > count) striped_over.engine->close(n->stripes[--n->num_stripes].net);
    return EPIC_OK;
}

/* Implements net_engine.connect. Connects the stripes that all peers have, and starts the
 * threads of all these stripes except the first. */
epic_result striped_connect(net *n, const void *bytes, char *why)
{
    const handle *handles = bytes;
    const int hosts = n->setup.num_hosts;
    epic_result result = agree_on_count(n, handles, why);
    if (result != EPIC_OK) return result;
    unsigned char *own = malloc((size_t)hosts * NET_HANDLE_BYTES);
    if (!own) {
        snprintf(why, NET_WHY_BYTES, "net \"%s\": no host memory", striped_over.engine->name);
        return EPIC_ENOMEM;
    }
    for (int s = 0; s < n->num_stripes && result == EPIC_OK; s++) {
        for (int h = 0; h < hosts; h++)
            copy_handle(&handles[h], s, own + (size_t)h * NET_HANDLE_BYTES);
        result = striped_over.engine->connect(n->stripes[s].net, own, why);
    }
    free(own);
    for (int s = 1; s < n->num_stripes && result == EPIC_OK; s++)
        result = stripe_start(&n->stripes[s], why);
    return result;
}

/* ----------------------------------------------------------------------------- sending ---- */

static bool has_room(const net *n, int host)
{
    return n->peers[host].posted - n->peers[host].finished < MAX_IN_FLIGHT;
}

/* Records that a put was passed to stripe `stripe`. Wakes the thread of that stripe from any
 * nap, and the other threads from long naps: the peer may reply on any stripe, so all threads
 * must poll soon. Returns true. */
static bool record_put(net *n, int host, int stripe)
{
    peer *p = &n->peers[host];
    p->stripe_of[p->posted++ % MAX_IN_FLIGHT] = (uint8_t)stripe;
    __atomic_store_n(&n->num_calls, n->num_calls + 1, __ATOMIC_SEQ_CST);
    for (int s = 1; s < n->num_stripes; s++)
        stripe_wake(&n->stripes[s], s == stripe ? 0 : MAX_NAP_BUSY_US);
    return true;
}

/* Queues a large put for the next thread (round-robin). Returns false if the queue of this
 * thread is full. */
static bool queue_put(net *n, const job *j)
{
    const int number = 1 + n->next;
    stripe *s = &n->stripes[number];
    if (s->queued - __atomic_load_n(&s->started, __ATOMIC_ACQUIRE) == MAX_JOBS) return false;
    s->jobs[s->queued % MAX_JOBS] = *j;
    __atomic_store_n(&s->queued, s->queued + 1, __ATOMIC_RELEASE);
    n->next = number % (n->num_stripes - 1);
    return record_put(n, j->host, number);
}

/* Implements net_engine.put: small puts go to the first stripe, large ones to a thread's
 * queue. */
bool striped_put(net *n, int host, uint64_t to, const void *from, uint32_t bytes)
{
    if (!has_room(n, host)) return false;
    if (n->num_stripes > 1 && bytes >= STRIPED_LARGE)
        return queue_put(n, &(job){.to = to, .from = from, .bytes = bytes, .host = host});
    return stripe_post(&n->stripes[0], host, to, from, bytes) && record_put(n, host, 0);
}

bool striped_put_word(net *n, int host, uint64_t to, uint64_t value)
{
    stripe *s = &n->stripes[0];
    if (!has_room(n, host) || !striped_over.engine->put_word(s->net, host, to, value))
        return false;
    s->posted[host]++;
    return record_put(n, host, 0);
}

/* Sets peer.finished to the number of the first put that is not done. Returns the increase. */
static int advance_finished(net *n, int host)
{
    peer *p = &n->peers[host];
    const uint64_t before = p->finished;
    for (; p->finished < p->posted; p->finished++) {
        const int s = p->stripe_of[p->finished % MAX_IN_FLIGHT];
        const uint64_t completed =
            __atomic_load_n(&n->stripes[s].completed[host], __ATOMIC_ACQUIRE);
        if (completed == p->num_completed[s]) break;
        p->num_completed[s]++;
    }
    return (int)(p->finished - before);
}

/* Implements net_engine.progress. Calls progress() of the first stripe's net, because the
 * first stripe has no thread. Then updates peer.finished for each host. */
int striped_progress(net *n)
{
    int moved = stripe_progress(&n->stripes[0]);
    __atomic_store_n(&n->num_polls, n->num_polls + 1, __ATOMIC_RELAXED);
    for (int h = 0; h < n->setup.num_hosts; h++) moved += advance_finished(n, h);
    return moved;
}

bool striped_is_done(const net *n, int host, uint64_t count)
{
    return n->peers[host].finished >= count;
}

bool striped_is_gone(const net *n, int host)
{
    for (int s = 0; s < n->num_stripes; s++)
        if (__atomic_load_n(&n->stripes[s].failed[host], __ATOMIC_ACQUIRE)) return true;
    return false;
}

void striped_describe(const net *n, char *to, size_t size)
{
    striped_over.engine->describe(n->stripes[0].net, to, size);
    const size_t used = strlen(to);
    if (n->num_stripes > 1)
        snprintf(to + used, size - used, ", over %d stripes", n->num_stripes);
}

/* ----------------------------------------------------------------------------- closing ---- */

/* Implements net_engine.close. The threads send the queued puts for at most CLOSE_MS, close the
 * nets of their stripes, and return. */
void striped_close(net *n)
{
    if (!n) return;
    __atomic_store_n(&n->is_closing, 1, __ATOMIC_SEQ_CST);
    for (int s = 0; s < n->num_stripes; s++) {
        stripe_wake(&n->stripes[s], 0);
        if (!n->stripes[s].has_thread) striped_over.engine->close(n->stripes[s].net);
    }
    for (int s = 0; s < n->num_stripes; s++) {
        if (n->stripes[s].has_thread) pthread_join(n->stripes[s].thread, NULL);
        sem_destroy(&n->stripes[s].awake);
    }
    free(n);
}
