/* SPDX-License-Identifier: Apache-2.0 */
/* Finds missing fences. On a GPU a store of a kernel to its own memory may become visible late,
 * after a later store of a peer to the same place. The emulator performs every store at once,
 * but ends the program if a peer stores there before a fence has ordered the two.
 *
 * A store first belongs to its CTA. A fence of that CTA, or its end, makes it the device's. A
 * system fence by a thread of the device, or the end of a kernel, makes all stores of the
 * device visible; a kernel that was given up ends without a fence, and its group is broken. A
 * fence of one thread counts for its whole CTA, because a barrier precedes it wherever other
 * threads' stores must be visible.
 *
 * If EMULATED_LATE is set, some stores of vectors become visible late: when their CTA naps, or
 * some time after it has ended or begun a system fence, which then waits for them. So tests
 * fail if a kernel does not wait for the rows of its peers. */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "inner.h"

#define TABLE_BITS 20
#define PROBES 16
#define MOST_LATE 256  /* largest number of late stores of a CTA */
#define LATE_ONE_IN 16 /* one in this many stores of vectors is late */

typedef struct list {
    uintptr_t *at;
    size_t count, room;
} list;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static list of_device[MAX_DEVICES]; /* guarded by mutex */
static __thread list of_cta;        /* stores of the CTA that runs on this thread */
/* all stores that are not visible, by hash; 0: none */
static uintptr_t unseen[1 << TABLE_BITS];

static uintptr_t *probe_slot(uintptr_t at, int i)
{
    const uint64_t hash = (at >> 4) * 0x9e3779b97f4a7c15u >> (64 - TABLE_BITS);
    return &unseen[(hash + (uint64_t)i) % (1 << TABLE_BITS)];
}

static uintptr_t *find_store(uintptr_t at)
{
    for (int i = 0; i < PROBES; i++)
        if (__atomic_load_n(probe_slot(at, i), __ATOMIC_RELAXED) == at)
            return probe_slot(at, i);
    return NULL;
}

static void push_store(list *l, uintptr_t at)
{
    if (l->count == l->room) {
        l->room = l->room ? 2 * l->room : 1024;
        l->at = realloc(l->at, l->room * sizeof *l->at);
        if (!l->at) emulator_die("no memory for a list of stores");
    }
    l->at[l->count++] = at;
}

/* If the table has no space, a store is not checked. */
void emulator_note_store(const void *p)
{
    const uintptr_t at = (uintptr_t)p;
    if (find_store(at)) return;
    for (int i = 0; i < PROBES; i++) {
        uintptr_t none = 0;
        if (!__atomic_compare_exchange_n(probe_slot(at, i), &none, at, false, __ATOMIC_RELAXED,
                                         __ATOMIC_RELAXED))
            continue;
        push_store(&of_cta, at);
        return;
    }
}

/* EMULATED_FENCES=0 switches the check off, for tests that break groups on purpose. A rank that
 * gives up an operation restores its staging without a fence, while peers that do not know it
 * yet still store there; no thread reads that. */
static bool is_watching(void)
{
    static int watch; /* 0: not read yet, 1: yes, 2: no */
    if (!watch) {
        const char *text = getenv("EMULATED_FENCES");
        watch = text && *text == '0' ? 2 : 1;
    }
    return watch == 1;
}

void emulator_check_store(const void *p)
{
    check_access(p);
    if (is_watching() && find_store((uintptr_t)p))
        emulator_die("a store to %p, where one of the rank itself has no fence after it", p);
}

static void forget_store(uintptr_t at)
{
    uintptr_t *place = find_store(at);
    if (place) __atomic_store_n(place, 0, __ATOMIC_RELAXED);
}

/* Returns the value of EMULATED_LATE, in milliseconds. 0: it is not set. */
static int late_ms(void)
{
    static int ms = -1;
    if (ms < 0) {
        const char *text = getenv("EMULATED_LATE");
        ms = text ? atoi(text) : 0;
    }
    return ms;
}

static __thread struct {
    uint32_t *at[MOST_LATE];
    uint32_t words[MOST_LATE][4];
    int count;
} late_stores; /* of the CTA that runs on this thread */

int emulator_delay_store(void *p, const uint32_t *words)
{
    const int i = late_stores.count;
    if (!late_ms() || i == MOST_LATE || emulator_random() % LATE_ONE_IN) return 0;
    late_stores.at[i] = p;
    for (int w = 0; w < 4; w++) late_stores.words[i][w] = words[w];
    late_stores.count++;
    return 1;
}

bool has_late_stores(void)
{
    return late_stores.count > 0;
}

void finish_late_stores(bool waits)
{
    if (waits && late_stores.count) {
        const long ns = (long)(emulator_random() % (uint32_t)late_ms()) * 1000000;
        nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
    }
    for (int i = 0; i < late_stores.count; i++)
        for (int w = 0; w < 4; w++)
            __atomic_store_n(late_stores.at[i] + w, late_stores.words[i][w], __ATOMIC_RELAXED);
    late_stores.count = 0;
}

void emulator_fence(int system)
{
    if (system) finish_late_stores(true);
    list *device = &of_device[current_device()];
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < of_cta.count; i++) push_store(device, of_cta.at[i]);
    of_cta.count = 0;
    for (size_t i = 0; i < device->count && system; i++) forget_store(device->at[i]);
    if (system) device->count = 0;
    pthread_mutex_unlock(&mutex);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

void see_stores(int device)
{
    list *stores = &of_device[device];
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < stores->count; i++) forget_store(stores->at[i]);
    stores->count = 0;
    pthread_mutex_unlock(&mutex);
}

void forget_stores(const void *begin, size_t bytes)
{
    const uintptr_t first = (uintptr_t)begin;
    for (size_t i = 0; i < sizeof unseen / sizeof *unseen; i++) {
        uintptr_t *place = &unseen[i];
        if (__atomic_load_n(place, __ATOMIC_RELAXED) - first < bytes)
            __atomic_store_n(place, 0, __ATOMIC_RELAXED);
    }
}
