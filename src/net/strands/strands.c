/* SPDX-License-Identifier: Apache-2.0 */
/* The first strand is the caller's: words and small puts go by it, and find nothing large before
 * them.  Larger puts are dealt to the threads in turn. */
#include "net/strands/strands.h"

#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/thread.h"

#ifndef STRANDS_LARGE
#define STRANDS_LARGE (32u << 10) /* bytes of a put, from which on a thread takes it */
#endif
#define JOBS 64        /* of a strand that its thread has not begun */
#define UNDER_WAY 1024 /* puts and words to a host; more come again later */
#define CLOSE_MS 1000  /* how long what was taken is still sent */

/* A thread naps when so many of its turns have moved nothing, each time twice as long: for a moment
 * at most while the caller looks often, else until the caller gives anything, and so begins an
 * operation.  What has come before that can wait. */
#define TURNS 64
#define NAP_US 20
#define BUSY_NAP_US 50
#define OFTEN_US 200
#define IDLE_NAP_US 200000

typedef struct job {
    uint64_t to;
    const void *from;
    uint32_t bytes;
    int host;
} job;

/* `given` belongs to who looks at the strand; all that both sides read is atomic. */
typedef struct strand {
    net *net;
    net *all; /* that it is of */
    uint64_t given[NET_MAX_HOSTS];
    uint64_t left[NET_MAX_HOSTS]; /* of those, the first ones */
    uint32_t gone;                /* hosts that it has given up */
    pthread_t thread;
    bool runs;             /* the thread, and it closes its net at its end */
    uint64_t asked, begun; /* jobs */
    job jobs[JOBS];
    int64_t naps; /* us, 0: it is awake */
    sem_t awake;
} strand;

typedef struct peer {
    uint64_t given, finished;
    uint8_t by[UNDER_WAY]; /* the strand of each that is under way */
    uint64_t passed[STRANDS_MOST];
} peer;

struct net {
    net_setup setup;
    int num_strands, next;
    int leave;
    uint64_t looks, calls; /* of the caller: `calls` gave something */
    peer peers[NET_MAX_HOSTS];
    strand strands[STRANDS_MOST];
};

/* Cards of strands, one after the other, each without the zeros at its end. */
typedef struct card {
    uint16_t length[STRANDS_MOST]; /* 0: there is no such strand */
    unsigned char bytes[NET_CARD_BYTES - STRANDS_MOST * sizeof(uint16_t)];
} card;
_Static_assert(sizeof(card) == NET_CARD_BYTES, "a card is what the bootstrap carries");

/* ------------------------------------------------------------------------- of a strand ---- */

static bool give(strand *s, int host, uint64_t to, const void *from, uint32_t bytes)
{
    if (!strands_of.net->put(s->net, host, to, from, bytes)) return false;
    s->given[host]++;
    return true;
}

static void settle(strand *s, int host)
{
    uint64_t left = s->left[host];
    while (left < s->given[host] && strands_of.net->done(s->net, host, left + 1)) left++;
    __atomic_store_n(&s->left[host], left, __ATOMIC_RELEASE);
    if (strands_of.net->gone(s->net, host))
        __atomic_fetch_or(&s->gone, 1u << host, __ATOMIC_RELEASE);
}

static int look_at(strand *s)
{
    const net_setup *setup = &s->all->setup;
    const int moved = strands_of.net->look(s->net);
    for (int h = 0; h < setup->num_hosts; h++)
        if (h != setup->host) settle(s, h);
    return moved;
}

/* -------------------------------------------------------------------------- its thread ---- */

static int take_jobs(strand *s)
{
    const uint64_t asked = __atomic_load_n(&s->asked, __ATOMIC_ACQUIRE);
    uint64_t begun = s->begun;
    for (; begun < asked; begun++) {
        const job *j = &s->jobs[begun % JOBS];
        if (!give(s, j->host, j->to, j->from, j->bytes)) break;
    }
    const int taken = (int)(begun - s->begun);
    __atomic_store_n(&s->begun, begun, __ATOMIC_RELEASE);
    return taken;
}

/* Until it is woken, unless calls were made since there were `calls`, or the net closes. */
static void nap(strand *s, int64_t us, uint64_t calls)
{
    const struct timespec end = clock_in_ns(us * 1000);
    __atomic_store_n(&s->naps, us, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&s->all->calls, __ATOMIC_SEQ_CST) == calls &&
        !__atomic_load_n(&s->all->leave, __ATOMIC_SEQ_CST))
        sem_clockwait(&s->awake, CLOCK_MONOTONIC, &end);
    __atomic_store_n(&s->naps, 0, __ATOMIC_SEQ_CST);
}

/* From a nap that is longer than `us`. */
static void wake(strand *s, int64_t us)
{
    if (__atomic_load_n(&s->naps, __ATOMIC_SEQ_CST) > us &&
        __atomic_exchange_n(&s->naps, 0, __ATOMIC_SEQ_CST))
        sem_post(&s->awake);
}

/* The longest nap, if the caller has looked so often in one of `us`. */
static int64_t most_nap(uint64_t looks, int64_t us)
{
    return (int64_t)looks > us / OFTEN_US ? BUSY_NAP_US : IDLE_NAP_US;
}

static void *run(void *self)
{
    strand *s = self;
    const net *w = s->all;
    int64_t us = NAP_US;
    for (int idle = 0; !__atomic_load_n(&w->leave, __ATOMIC_ACQUIRE);) {
        const uint64_t calls = __atomic_load_n(&w->calls, __ATOMIC_SEQ_CST);
        const uint64_t looks = __atomic_load_n(&w->looks, __ATOMIC_RELAXED);
        if (take_jobs(s) + look_at(s) > 0) {
            idle = 0;
            us = NAP_US;
        } else if (++idle < TURNS) {
            sched_yield();
        } else {
            nap(s, us, calls);
            const int64_t most =
                most_nap(__atomic_load_n(&w->looks, __ATOMIC_RELAXED) - looks, us);
            us = 2 * us < most ? 2 * us : most;
        }
    }
    const int64_t end = clock_us() + CLOSE_MS * 1000;
    while (s->begun < s->asked && clock_us() < end)
        if (take_jobs(s) + look_at(s) == 0) sched_yield();
    strands_of.net->close(s->net);
    return NULL;
}

static epic_result start(strand *s, char *why)
{
    const int error = thread_start(&s->thread, run, s);
    s->runs = error == 0;
    if (s->runs) return EPIC_OK;
    snprintf(why, NET_WHY, "net \"%s\": no thread for a strand: %s", strands_of.net->name,
             strerror(error));
    return EPIC_EDEVICE;
}

/* ----------------------------------------------------------------------------- opening ---- */

static size_t length_of(const unsigned char *bytes)
{
    size_t length = NET_CARD_BYTES;
    while (length > 0 && !bytes[length - 1]) length--;
    return length;
}

/* One more strand, and its card behind those of the others.  EPIC_ENOTSUP: that has no room. */
static epic_result add_strand(net *w, card *all, size_t *used, char *why)
{
    unsigned char mine[NET_CARD_BYTES] = {0};
    net_setup setup = w->setup;
    strand *s = &w->strands[w->num_strands];
    setup.threads = 0;
    s->all = w;
    const epic_result result = strands_of.net->open(&s->net, &setup, mine, why);
    if (result != EPIC_OK) return result;
    const size_t length = length_of(mine);
    if (length > sizeof all->bytes - *used) {
        snprintf(why, NET_WHY, "net \"%s\": a card of %zu bytes is too large",
                 strands_of.net->name, length);
        strands_of.net->close(s->net);
        return EPIC_ENOTSUP;
    }
    memcpy(all->bytes + *used, mine, length);
    *used += length;
    all->length[w->num_strands++] = (uint16_t)length;
    sem_init(&s->awake, 0, 0);
    return EPIC_OK;
}

static epic_result add_strands(net *w, card *all, char *why)
{
    size_t used = 0;
    int wanted = 1 + w->setup.threads;
    if (wanted > STRANDS_MOST) wanted = STRANDS_MOST;
    epic_result result = add_strand(w, all, &used, why);
    if (result != EPIC_OK || !strands_of.gains(w->strands[0].net)) return result;
    while (result == EPIC_OK && w->num_strands < wanted)
        result = add_strand(w, all, &used, why);
    return result == EPIC_ENOTSUP ? EPIC_OK : result; /* with those that there are */
}

epic_result strands_open(net **out, const net_setup *setup, void *bytes, char *why)
{
    net *w = calloc(1, sizeof *w);
    if (!w) {
        snprintf(why, NET_WHY, "net \"%s\": no host memory", strands_of.net->name);
        return EPIC_ENOMEM;
    }
    w->setup = *setup;
    const epic_result result = add_strands(w, bytes, why);
    if (result == EPIC_OK)
        *out = w;
    else
        strands_close(w);
    return result;
}

/* -------------------------------------------------------------------------- connecting ---- */

/* The strands that a card has; 0: it is damaged. */
static int count_of(const card *c)
{
    size_t used = 0;
    int count = 0;
    for (; count < STRANDS_MOST && c->length[count]; count++) used += c->length[count];
    return used <= sizeof c->bytes ? count : 0;
}

static void copy_card(const card *from, int strand, unsigned char *to)
{
    size_t at = 0;
    for (int s = 0; s < strand; s++) at += from->length[s];
    memset(to, 0, NET_CARD_BYTES);
    memcpy(to, from->bytes + at, from->length[strand]);
}

/* As many strands as every host has; the others are closed. */
static epic_result agree(net *w, const card *cards, char *why)
{
    int count = w->num_strands;
    for (int h = 0; h < w->setup.num_hosts; h++) {
        const int theirs = count_of(&cards[h]);
        if (h == w->setup.host) continue;
        if (theirs == 0) {
            snprintf(why, NET_WHY, "net \"%s\": the card of host %d is damaged",
                     strands_of.net->name, h);
            return EPIC_EMISMATCH;
        }
        if (theirs < count) count = theirs;
    }
    while (w->num_strands > count) strands_of.net->close(w->strands[--w->num_strands].net);
    return EPIC_OK;
}

epic_result strands_connect(net *w, const void *bytes, char *why)
{
    const card *cards = bytes;
    const int hosts = w->setup.num_hosts;
    epic_result result = agree(w, cards, why);
    if (result != EPIC_OK) return result;
    unsigned char *own = malloc((size_t)hosts * NET_CARD_BYTES);
    if (!own) {
        snprintf(why, NET_WHY, "net \"%s\": no host memory", strands_of.net->name);
        return EPIC_ENOMEM;
    }
    for (int s = 0; s < w->num_strands && result == EPIC_OK; s++) {
        for (int h = 0; h < hosts; h++)
            copy_card(&cards[h], s, own + (size_t)h * NET_CARD_BYTES);
        result = strands_of.net->connect(w->strands[s].net, own, why);
    }
    free(own);
    for (int s = 1; s < w->num_strands && result == EPIC_OK; s++)
        result = start(&w->strands[s], why);
    return result;
}

/* ----------------------------------------------------------------------------- sending ---- */

static bool has_room(const net *w, int host)
{
    return w->peers[host].given - w->peers[host].finished < UNDER_WAY;
}

/* Something was given to a strand; what the peers answer may come by any. */
static bool note(net *w, int host, int strand)
{
    peer *p = &w->peers[host];
    p->by[p->given++ % UNDER_WAY] = (uint8_t)strand;
    __atomic_store_n(&w->calls, w->calls + 1, __ATOMIC_SEQ_CST);
    for (int s = 1; s < w->num_strands; s++)
        wake(&w->strands[s], s == strand ? 0 : BUSY_NAP_US);
    return true;
}

/* To the next thread. */
static bool deal(net *w, const job *j)
{
    const int number = 1 + w->next;
    strand *s = &w->strands[number];
    if (s->asked - __atomic_load_n(&s->begun, __ATOMIC_ACQUIRE) == JOBS) return false;
    s->jobs[s->asked % JOBS] = *j;
    __atomic_store_n(&s->asked, s->asked + 1, __ATOMIC_RELEASE);
    w->next = number % (w->num_strands - 1);
    return note(w, j->host, number);
}

bool strands_put(net *w, int host, uint64_t to, const void *from, uint32_t bytes)
{
    if (!has_room(w, host)) return false;
    if (w->num_strands > 1 && bytes >= STRANDS_LARGE)
        return deal(w, &(job){.to = to, .from = from, .bytes = bytes, .host = host});
    return give(&w->strands[0], host, to, from, bytes) && note(w, host, 0);
}

bool strands_word(net *w, int host, uint64_t to, uint64_t value)
{
    strand *s = &w->strands[0];
    if (!has_room(w, host) || !strands_of.net->word(s->net, host, to, value)) return false;
    s->given[host]++;
    return note(w, host, 0);
}

/* Those that have left, up to the first that has not. */
static int pass(net *w, int host)
{
    peer *p = &w->peers[host];
    const uint64_t before = p->finished;
    for (; p->finished < p->given; p->finished++) {
        const int s = p->by[p->finished % UNDER_WAY];
        const uint64_t left = __atomic_load_n(&w->strands[s].left[host], __ATOMIC_ACQUIRE);
        if (left == p->passed[s]) break;
        p->passed[s]++;
    }
    return (int)(p->finished - before);
}

int strands_look(net *w)
{
    int moved = look_at(&w->strands[0]);
    __atomic_store_n(&w->looks, w->looks + 1, __ATOMIC_RELAXED);
    for (int h = 0; h < w->setup.num_hosts; h++) moved += pass(w, h);
    return moved;
}

bool strands_done(const net *w, int host, uint64_t count)
{
    return w->peers[host].finished >= count;
}

bool strands_are_gone(const net *w, int host)
{
    for (int s = 0; s < w->num_strands; s++)
        if (__atomic_load_n(&w->strands[s].gone, __ATOMIC_ACQUIRE) >> host & 1) return true;
    return false;
}

void strands_say(const net *w, char *to, size_t size)
{
    strands_of.net->say(w->strands[0].net, to, size);
    const size_t used = strlen(to);
    if (w->num_strands > 1) snprintf(to + used, size - used, ", in %d strands", w->num_strands);
}

/* ----------------------------------------------------------------------------- closing ---- */

void strands_close(net *w)
{
    if (!w) return;
    __atomic_store_n(&w->leave, 1, __ATOMIC_SEQ_CST);
    for (int s = 0; s < w->num_strands; s++) {
        wake(&w->strands[s], 0);
        if (!w->strands[s].runs) strands_of.net->close(w->strands[s].net);
    }
    for (int s = 0; s < w->num_strands; s++) {
        if (w->strands[s].runs) pthread_join(w->strands[s].thread, NULL);
        sem_destroy(&w->strands[s].awake);
    }
    free(w);
}
