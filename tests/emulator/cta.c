/* SPDX-License-Identifier: Apache-2.0 */
/* Runs one CTA. Its threads are fibers that run in turn on one thread of the operating system.
 * A fiber runs until it waits for its warp or its CTA, or until it naps. Then the next fiber of
 * the queue continues. The program ends with an error if lanes that must meet are in different
 * calls, if a copy is never waited for, or if an access is beyond the shared memory. */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include "inner.h"

/* Bytes of a fiber's stack. It is not a multiple of a page: otherwise the tops of all stacks would
 * use the same few sets of the caches, and each switch between fibers would miss them. */
#define STACK_BYTES ((64 << 10) + 832)
/* mark at the lowest address of a stack, which must not change */
#define STACK_END 0x57ac57acu
#define MAX_COPIES 128 /* largest number of unfinished copies of a fiber */
#define MAX_BULK 64    /* largest number of unfinished bulk stores of a fiber */
#define MAX_WARPS (EMULATOR_MAX_THREADS / EMULATOR_WARP)
#define ALL 0xffffffffu
#define JUNK 0xcd
#define MANY_SMS 64
#define CLOCK_CHECKS 1024 /* number of checks of parked fibers between two reads of the clock */
/* If a word has changed, a parked fiber continues only when it has napped for this part of the
 * time for which it has waited before. So it does not run again for each of many words that
 * arrive one after the other. */
#define HOLD_SHARE 4
/* How an SM shares the cores with the other SMs. An SM is a thread of the operating system, and
 * its CTA's threads are fibers. A GPU with more than MANY_SMS SMs uses many_sms. There an SM
 * yields more rarely, because each yield replaces the stacks in the caches by those of another
 * SM. It also parks fibers: a fiber that naps does not run again until one of the words changes
 * that it has loaded in its last poll. Without this, one poll of all threads of a CTA takes about
 * 0.3 ms of processor time, and a CTA with several polling warps never sleeps. */
typedef struct sharing {
    /* One in this many switches between fibers lets other SMs run (sched_yield). */
    uint32_t yield_one_in;
    /* If all threads of a CTA nap, the SM sleeps: first nap_ns, then each time twice as long as
     * before, up to longest_nap_ns, until a thread does not nap. */
    long nap_ns, longest_nap_ns;
    /* A parked fiber runs after this time although no word has changed, because it may wait for
     * its deadline. The time doubles each time, up to longest_park_ns. 0: no fiber is parked. */
    uint64_t park_ns, longest_park_ns;
} sharing;
static const sharing few_sms = {256, 20000, 640000, 0, 0},
                     many_sms = {4096, 500000, 8000000, 64000000, 256000000};

typedef struct copy { /* an unfinished cp.async */
    const void *from;
    uint32_t to, bytes, group;
    bool early; /* true: the data was copied when the copy was issued */
    uint8_t data[16];
} copy;

typedef struct bulk { /* an unfinished cp.async.bulk from shared memory */
    uint8_t *to;
    uint32_t from, bytes, group;
    void (*watch)(const void *);
} bulk;

/* The unfinished copies and bulk stores of a fiber. */
typedef struct transfers {
    copy copies[MAX_COPIES];
    bulk bulk[MAX_BULK];
} transfers;

/* A thread of a CTA. The struct is small, so that the fibers of a CTA lie on few pages: each
 * switch between fibers reads one. */
typedef struct fiber {
    emulator_thread place;
    jmp_buf jump;
    bool started; /* true: it has a stack and can continue */
    bool napping;
    bool parked; /* true: it naps, and does not run until one of its polls changes */
    bool hidden; /* true: bulk stores do not yet see what it wrote */
    unsigned warp_calls;
    uint32_t group, num_copies;
    uint32_t bulk_group, num_bulk;
    unsigned nap_calls; /* value of warp_calls when it last began to nap */
    bool polls_alone;   /* true: it has not met its warp between its last two naps */
    uint64_t wait_began, parked_at, park_ns;
    transfers *unfinished;
} fiber;

typedef struct warp {
    uint32_t arrived, gone;
    emulator_warp_call what;
    uint64_t values[2][EMULATOR_WARP]; /* values of the lanes, for even and odd warp calls */
} warp;

typedef struct sm { /* an operating system thread that runs CTAs */
    const launch *work;
    fiber *fibers;
    uint8_t *stacks;
    uint8_t *shared;
    ucontext_t fresh;
    jmp_buf home;
    fiber *running;
    warp warps[MAX_WARPS];
    int alive, at_barrier, good, result;
    uint16_t queue[EMULATOR_MAX_THREADS]; /* ring buffer of the fibers that can run */
    unsigned first, waiting, napping;
    unsigned idle; /* number of successive turns in which all fibers napped */
    long nap_ns;   /* how long the SM sleeps next */
    uint64_t now;  /* the time when the SM last read the clock */
    unsigned checks;
    uint64_t random;
    const sharing *sharing;
    emulator_thread **place; /* emulator_here of this thread: finding it costs a call */
} sm;

static __thread sm *here __attribute__((tls_model("initial-exec")));
__thread emulator_thread *emulator_here;

void emulator_die(const char *format, ...)
{
    va_list list;
    fputs("emulated GPU: ", stderr);
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    if (emulator_here)
        fprintf(stderr, " (CTA %u, thread %u)", emulator_here->cta, emulator_here->thread);
    fputc('\n', stderr);
    abort();
}

uint64_t emulator_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint32_t draw_random(sm *s)
{
    s->random ^= s->random << 13;
    s->random ^= s->random >> 7;
    s->random ^= s->random << 17;
    return (uint32_t)(s->random >> 32);
}

uint32_t emulator_random(void)
{
    return draw_random(here);
}

/* ------------------------------------------------------------------------ taking turns ---- */

static void push_fiber(sm *s, unsigned thread)
{
    s->queue[(s->first + s->waiting++) % EMULATOR_MAX_THREADS] = (uint16_t)thread;
}

static uint32_t *stack_of(const sm *s, const fiber *f)
{
    return (uint32_t *)(void *)(s->stacks + (size_t)f->place.thread * STACK_BYTES);
}

static void end_barrier(sm *s)
{
    s->result = s->good;
    s->good = 1;
    s->at_barrier = 0;
    for (int i = 0; i < s->work->threads; i++) {
        const uint32_t gone = s->warps[i / EMULATOR_WARP].gone;
        if (&s->fibers[i] != s->running && !(gone >> i % EMULATOR_WARP & 1))
            push_fiber(s, (unsigned)i);
    }
}

static void end_thread(const fiber *me)
{
    warp *w = &here->warps[me->place.thread / EMULATOR_WARP];
    if (*stack_of(here, me) != STACK_END) emulator_die("a thread needs more than its stack");
    if (me->num_copies) emulator_die("a thread has ended with copies under way");
    if (me->num_bulk) emulator_die("a thread has ended with bulk stores under way");
    if (w->arrived) emulator_die("a lane has ended that its warp waits for");
    w->gone |= 1u << me->place.thread % EMULATOR_WARP;
    if (--here->alive && here->at_barrier == here->alive) end_barrier(here);
}

/* A fiber runs its thread of one CTA after another, because making a new fiber costs a system
 * call. */
static void begin_fiber(void)
{
    for (;;) {
        here->work->body(here->work->arguments);
        end_thread(here->running);
        if (!_setjmp(here->running->jump)) longjmp(here->home, here->alive ? 2 : 1);
    }
}

static void switch_to(sm *s, fiber *next)
{
    s->running = next;
    *s->place = &next->place;
    if (next->started) longjmp(next->jump, 1);
    next->started = true;
    *stack_of(s, next) = STACK_END;
    ucontext_t *fresh = &s->fresh;
    fresh->uc_stack.ss_sp = stack_of(s, next);
    fresh->uc_stack.ss_size = STACK_BYTES;
    makecontext(fresh, begin_fiber, 0);
    setcontext(fresh);
}

/* ------------------------------------------------------------------------ parked fibers ---- */

/* Parks a fiber that begins to nap, unless its polls are not known or it has unfinished stores,
 * which only a running fiber finishes. */
static void park_fiber(const sm *s, fiber *f)
{
    emulator_polls *polls = f->place.polls;
    f->parked = s->sharing->park_ns && polls->num_polls && polls->count <= EMULATOR_MAX_POLLS &&
                !f->num_bulk && !has_late_stores();
    if (polls->num_polls > 1) { /* a wait naps after each poll except the first */
        f->wait_began = s->now;
        f->park_ns = s->sharing->park_ns;
    }
    polls->num_polls = 0;
    f->polls_alone = f->warp_calls == f->nap_calls;
    f->nap_calls = f->warp_calls;
    f->parked_at = s->now;
}

static bool has_changed(const emulator_polls *polls)
{
    for (uint32_t i = 0; i < polls->count; i++) {
        const uint64_t value =
            polls->num_bytes[i] == 8
                ? __atomic_load_n((const uint64_t *)polls->at[i], __ATOMIC_RELAXED)
                : __atomic_load_n((const uint32_t *)polls->at[i], __ATOMIC_RELAXED);
        if (value != polls->values[i]) return true;
    }
    return false;
}

/* Returns whether a parked fiber of the queue need not run yet. */
static bool stays_parked(sm *s, fiber *f)
{
    if (!f->parked) return false;
    if (s->checks++ % CLOCK_CHECKS == 0) s->now = emulator_now();
    const uint64_t parked_ns = s->now - f->parked_at;
    if (has_changed(f->place.polls)) {
        if (parked_ns < (f->parked_at - f->wait_began) / HOLD_SHARE) return true;
        f->park_ns = s->sharing->park_ns;
        s->nap_ns = s->sharing->nap_ns;
        s->idle = 0;
        return false;
    }
    if (parked_ns < f->park_ns) return true;
    if (f->park_ns < s->sharing->longest_park_ns) f->park_ns *= 2;
    return false;
}

/* Lets all lanes of a fiber's warp run, because the fiber will wait for them. */
static void unpark_warp(fiber *f)
{
    fiber *warp = f - f->place.thread % EMULATOR_WARP;
    for (int i = 0; i < EMULATOR_WARP; i++) warp[i].parked = false;
}

/* Requires that all fibers of the queue nap. The SM sleeps if each fiber has had a turn since
 * this began. */
static void sleep_sm(sm *s)
{
    if (++s->idle <= s->waiting) return;
    s->idle = 0;
    nanosleep(&(struct timespec){.tv_nsec = s->nap_ns}, NULL);
    if (s->nap_ns < s->sharing->longest_nap_ns) s->nap_ns *= 2;
    s->now = emulator_now();
}

static fiber *pop_fiber(sm *s)
{
    if (!s->waiting) emulator_die("all threads of the CTA wait for each other");
    fiber *next = &s->fibers[s->queue[s->first]];
    s->first = (s->first + 1) % EMULATOR_MAX_THREADS;
    s->waiting--;
    return next;
}

/* Continues with the first fiber of the queue that is not parked. */
static void run_next(sm *s)
{
    fiber *next = pop_fiber(s);
    for (; next->napping; next = pop_fiber(s)) {
        if (s->napping > s->waiting) {
            sleep_sm(s);
        } else {
            s->idle = 0;
            s->nap_ns = s->sharing->nap_ns;
        }
        if (!stays_parked(s, next)) {
            if (!next->polls_alone) unpark_warp(next);
            next->napping = false;
            next->place.polls->count = 0;
            s->napping--;
            break;
        }
        push_fiber(s, next->place.thread);
    }
    switch_to(s, next);
}

/* Sometimes lets other operating system threads run before the remaining lanes. */
static void leave_the_sm(sm *s)
{
    if (draw_random(s) % s->sharing->yield_one_in == 0) sched_yield();
    if (!_setjmp(s->running->jump)) run_next(s);
}

static void do_bulk(const bulk *b)
{
    for (uint32_t i = 0; i < b->bytes; i += 4) {
        uint32_t word;
        memcpy(&word, here->shared + b->from + i, 4);
        if (b->watch == emulator_check_store && i % 16 == 0) b->watch(b->to + i);
        __atomic_store_n((uint32_t *)(void *)(b->to + i), word, __ATOMIC_RELAXED);
        if (b->watch == emulator_note_store && i % 16 == 0) b->watch(b->to + i);
    }
}

/* Performs all bulk stores of a fiber, whether or not it waits for them. */
static void do_all_bulk(fiber *f)
{
    for (uint32_t i = 0; i < f->num_bulk; i++) do_bulk(&f->unfinished->bulk[i]);
    f->num_bulk = 0;
}

void emulator_nap(void)
{
    sm *s = here;
    if (draw_random(s) % 4 == 0) do_all_bulk(s->running);
    if (draw_random(s) % 4 == 0) finish_late_stores(false);
    park_fiber(s, s->running);
    s->running->napping = true;
    s->napping++;
    push_fiber(s, s->running->place.thread);
    leave_the_sm(s);
}

const uint64_t *emulator_warp_sync(emulator_warp_call what, uint64_t value)
{
    sm *s = here;
    fiber *me = s->running;
    const unsigned thread = me->place.thread, lane = thread % EMULATOR_WARP;
    warp *w = &s->warps[thread / EMULATOR_WARP];
    uint64_t *values = w->values[me->warp_calls++ & 1];
    if (w->gone) emulator_die("a warp meets when lanes have ended: %08x", w->gone);
    if (!w->arrived) w->what = what;
    if (w->what != what)
        emulator_die("lanes of a warp meet for different things: %d and %d", w->what, what);
    values[lane] = value;
    w->arrived |= 1u << lane;
    if (w->arrived == ALL) {
        w->arrived = 0;
        for (unsigned i = 0; i < EMULATOR_WARP; i++)
            if (i != lane) push_fiber(s, thread - lane + i);
    } else {
        leave_the_sm(s);
    }
    return values;
}

int emulator_sync(int good)
{
    sm *s = here;
    s->good &= good;
    if (++s->at_barrier == s->alive)
        end_barrier(s);
    else
        leave_the_sm(s);
    return s->result;
}

/* ----------------------------------------------------------------------- shared memory ---- */

void *emulator_shared(uint32_t at, uint32_t bytes)
{
    if (at % bytes || (uint64_t)at + bytes > emulator_here->shared_bytes)
        emulator_die("%u bytes at %u of %u bytes of shared memory", bytes, at,
                     emulator_here->shared_bytes);
    return emulator_here->shared + at;
}

/* Copies words that peers may be writing. */
static void load_vectors(uint8_t *to, const void *from, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes / 4; i++) {
        const uint32_t word = __atomic_load_n((const uint32_t *)from + i, __ATOMIC_RELAXED);
        memcpy(to + i * 4, &word, 4);
    }
}

void emulator_copy(uint32_t to, const void *from, uint32_t bytes)
{
    fiber *me = here->running;
    if (me->num_copies == MAX_COPIES) emulator_die("%d copies under way", MAX_COPIES);
    if ((uintptr_t)from % bytes) emulator_die("a copy from an address that is not aligned");
    copy *c = &me->unfinished->copies[me->num_copies++];
    *c = (copy){from, to, bytes, me->group, emulator_random() & 1, {0}};
    if (c->early) load_vectors(c->data, from, bytes);
    memset(emulator_shared(to, bytes), JUNK, bytes);
}

void emulator_end_copies(void)
{
    here->running->group++;
}

void emulator_wait_copies(int pending)
{
    fiber *me = here->running;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < me->num_copies; i++) {
        copy *c = &me->unfinished->copies[i];
        if (c->group + (uint32_t)pending >= me->group) {
            me->unfinished->copies[kept++] = *c;
            continue;
        }
        if (!c->early) load_vectors(c->data, c->from, c->bytes);
        memcpy(emulator_shared(c->to, c->bytes), c->data, c->bytes);
        me->hidden = true;
    }
    me->num_copies = kept;
}

/* ------------------------------------------------------------------------- bulk stores ---- */

void emulator_hide_bulk(void)
{
    here->running->hidden = true;
}

void emulator_show_bulk(void)
{
    here->running->hidden = false;
}

/* Performs a bulk store now or as late as possible. */
void emulator_bulk(void *to, uint32_t from, uint32_t bytes, void (*watch)(const void *))
{
    fiber *me = here->running;
    const bulk b = {to, from, bytes, me->bulk_group, watch};
    const fiber *warp = me - me->place.thread % EMULATOR_WARP;
    if ((uintptr_t)to % 16 || from % 16 || bytes % 16 || bytes == 0)
        emulator_die("a bulk store of %u bytes at %u to %p: not vectors", bytes, from, to);
    if ((uint64_t)from + bytes > me->place.shared_bytes)
        emulator_die("a bulk store of %u bytes at %u of %u bytes of shared memory", bytes, from,
                     me->place.shared_bytes);
    for (int i = 0; i < EMULATOR_WARP; i++)
        if (warp[i].hidden) emulator_die("a bulk store of what lane %d has not shown", i);
    if (me->num_bulk == MAX_BULK || emulator_random() & 1)
        do_bulk(&b);
    else
        me->unfinished->bulk[me->num_bulk++] = b;
}

void emulator_end_bulk(void)
{
    here->running->bulk_group++;
}

void emulator_wait_bulk(int pending)
{
    fiber *me = here->running;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < me->num_bulk; i++)
        if (me->unfinished->bulk[i].group + (uint32_t)pending >= me->bulk_group)
            me->unfinished->bulk[kept++] = me->unfinished->bulk[i];
        else
            do_bulk(&me->unfinished->bulk[i]);
    me->num_bulk = kept;
}

/* ------------------------------------------------------------------------------- a CTA ---- */

static void *map_stack(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) emulator_die("no memory for %zu bytes", bytes);
    return p;
}

static sm *make_sm(void)
{
    static uint64_t made;
    const char *seed = getenv("EMULATED_SEED");
    sm *s = map_stack(sizeof *s);
    s->fibers = map_stack(EMULATOR_MAX_THREADS * sizeof *s->fibers);
    s->stacks = map_stack((size_t)EMULATOR_MAX_THREADS * STACK_BYTES);
    transfers *unfinished = map_stack(EMULATOR_MAX_THREADS * sizeof *unfinished);
    emulator_polls *polls = map_stack(EMULATOR_MAX_THREADS * sizeof *polls);
    for (int i = 0; i < EMULATOR_MAX_THREADS; i++) {
        s->fibers[i].unfinished = &unfinished[i];
        s->fibers[i].place.polls = &polls[i];
    }
    s->shared = map_stack(SHARED_BYTES);
    s->place = &emulator_here;
    s->sharing = num_sms() > MANY_SMS ? &many_sms : &few_sms;
    s->random = (seed ? strtoull(seed, NULL, 10) : 0) * 0x9e3779b97f4a7c15u +
                (__atomic_add_fetch(&made, 1, __ATOMIC_RELAXED) << 20) + 0x2545f491u;
    return s;
}

/* Warps start in random order. */
static void queue_warps(sm *s, int warps)
{
    int order[MAX_WARPS];
    for (int i = 0; i < warps; i++) {
        const int j = (int)(emulator_random() % (unsigned)(i + 1));
        order[i] = order[j];
        order[j] = i;
    }
    for (int i = 0; i < warps; i++)
        for (int lane = 0; lane < EMULATOR_WARP; lane++)
            push_fiber(s, (unsigned)(order[i] * EMULATOR_WARP + lane));
}

static void reset_sm(sm *s, const launch *work, int cta)
{
    s->work = work;
    s->alive = work->threads;
    s->at_barrier = 0;
    s->good = 1;
    s->first = s->waiting = s->napping = s->idle = 0;
    s->nap_ns = s->sharing->nap_ns;
    s->now = emulator_now();
    memset(s->warps, 0, sizeof s->warps);
    /* otherwise the memory keeps what the last CTA left there */
    if (emulator_random() & 1) memset(s->shared, JUNK, (size_t)work->shared_bytes);
    for (int i = 0; i < work->threads; i++) {
        fiber *f = &s->fibers[i];
        f->place =
            (emulator_thread){(unsigned)i,          (unsigned)cta, (unsigned)work->threads,
                              (unsigned)work->ctas, s->shared,     (uint32_t)work->shared_bytes,
                              f->place.polls};
        f->place.polls->count = 0;
        f->napping = f->parked = false;
        f->wait_began = s->now;
        f->park_ns = s->sharing->park_ns;
        f->nap_calls = f->warp_calls = f->group = f->num_copies = f->bulk_group = f->num_bulk =
            0;
        f->hidden = false;
    }
    queue_warps(s, work->threads / EMULATOR_WARP);
}

void run_cta(const launch *work, int cta)
{
    if (!here) {
        here = make_sm();
        if (getcontext(&here->fresh)) emulator_die("no context");
    }
    reset_sm(here, work, cta);
    if (_setjmp(here->home) != 1) run_next(here); /* 2: a fiber has ended */
    finish_late_stores(true);
    emulator_fence(0);
    emulator_here = NULL;
}
