/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of a host transport that is called directly, as threads or as processes, and random
 * exchanges between them. */
#ifndef TRANSPORT_H
#define TRANSPORT_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "backend/shared/shared.h"
#include "backend/transport.h"
#include "base/error.h"

extern const epic_backend epic_backend_self, epic_backend_threads, epic_backend_shm;

#define MAX_TEST_RANKS 64
#define GATHER_BYTES 128
#define PATIENCE_S 40 /* longest time for any wait here */

/* ---------------------------------------------------------------- ranks of a test ---- */

/* Memory that the ranks of one test share, in addition to the transport under test. */
typedef struct arena {
    pthread_barrier_t barrier;
    unsigned char gathered[MAX_TEST_RANKS][GATHER_BYTES];
    _Atomic int failures;
    _Atomic uint64_t stamp; /* a time that one rank passes to the others */
    _Atomic int ready;
    pid_t pids[MAX_TEST_RANKS];
} arena;

typedef struct seat {
    arena *arena;
    const epic_backend *backend;
    const epic_transport *t;
    epic_group *group;
    epic_config config;
    int rank, num_ranks;
    void (*body)(struct seat *);
} seat;

static arena *shared;

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            atomic_fetch_add(&shared->failures, 1);                                   \
        }                                                                             \
    } while (0)

static inline uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline uint64_t cpu_time(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void nap_us(long us)
{
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

static inline uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static inline uint64_t mix4(uint64_t a, uint64_t b, uint64_t c, uint64_t d)
{
    return mix(mix(mix(mix(a) ^ b) ^ c) ^ d);
}

static inline epic_result gather(void *self, const void *mine, void *all, int64_t bytes)
{
    seat *s = self;
    memcpy(s->arena->gathered[s->rank], mine, bytes);
    pthread_barrier_wait(&s->arena->barrier);
    for (int r = 0; r < s->num_ranks; r++)
        memcpy((char *)all + (size_t)r * bytes, s->arena->gathered[r], bytes);
    pthread_barrier_wait(&s->arena->barrier);
    return EPIC_OK;
}

static inline epic_result join_group(seat *s)
{
    epic_peer peers[MAX_TEST_RANKS];
    memset(peers, 0, sizeof peers);
    char why[256] = "";
    CHECK(s->backend->can_join(peers, s->num_ranks, &s->config, why));
    const epic_bootstrap bootstrap = {
        .rank = s->rank, .num_ranks = s->num_ranks, .gather = gather, .self = s};
    const epic_join join = {
        .bootstrap = &bootstrap, .config = &s->config, .peers = peers, .group_id = 4711};
    return s->backend->join(&s->group, &join);
}

static inline void *run_rank(void *arg)
{
    seat *s = arg;
    const epic_result result = join_group(s);
    if (result != EPIC_OK) fprintf(stderr, "join: %s\n", epic_sentence());
    CHECK(result == EPIC_OK);
    if (result != EPIC_OK) return NULL;
    pthread_barrier_wait(&s->arena->barrier); /* as the core does after joining */
    s->body(s);
    fflush(stdout); /* a process that ends this way does not flush */
    if (s->group) s->backend->leave(s->group);
    return NULL;
}

static inline void open_arena(int num_ranks)
{
    pthread_barrierattr_t across;
    pthread_barrierattr_init(&across);
    pthread_barrierattr_setpshared(&across, PTHREAD_PROCESS_SHARED);
    memset(shared->gathered, 0, sizeof shared->gathered);
    pthread_barrier_init(&shared->barrier, &across, (unsigned)num_ranks);
    atomic_store(&shared->stamp, 0);
    atomic_store(&shared->ready, 0);
}

static inline epic_config config_of(int num_ranks, int max_in_flight, int64_t staging)
{
    return (epic_config){.max_tokens = 4096,
                         .max_row_bytes = 16384,
                         .staging_bytes = staging,
                         .num_ranks = (uint32_t)num_ranks,
                         .timeout_ms = 30000,
                         .max_in_flight = (uint32_t)max_in_flight};
}

enum how { AS_THREADS, AS_PROCESSES };

static inline void run_processes(seat *seats, int num_ranks, void (*meanwhile)(void))
{
    for (int r = 0; r < num_ranks; r++) {
        const pid_t pid = fork();
        if (pid > 0) shared->pids[r] = pid;
        if (pid != 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(200);
        run_rank(&seats[r]);
        _exit(0);
    }
    if (meanwhile) meanwhile();
    for (int r = 0; r < num_ranks; r++) {
        int status;
        while (waitpid(shared->pids[r], &status, 0) < 0 && errno == EINTR) continue;
        const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        CHECK(WIFEXITED(status) || (meanwhile && killed));
        CHECK(!WIFEXITED(status) || WEXITSTATUS(status) == 0);
    }
}

static inline void run(const epic_backend *backend, enum how how, epic_config config,
                       void (*body)(seat *), void (*meanwhile)(void))
{
    const int n = (int)config.num_ranks;
    seat seats[MAX_TEST_RANKS];
    pthread_t threads[MAX_TEST_RANKS];
    open_arena(n);
    for (int r = 0; r < n; r++)
        seats[r] = (seat){.arena = shared,
                          .backend = backend,
                          .t = backend->transport,
                          .config = config,
                          .rank = r,
                          .num_ranks = n,
                          .body = body};
    if (how == AS_PROCESSES) {
        run_processes(seats, n, meanwhile);
    } else {
        for (int r = 0; r < n; r++) pthread_create(&threads[r], NULL, run_rank, &seats[r]);
        if (meanwhile) meanwhile();
        for (int r = 0; r < n; r++) pthread_join(threads[r], NULL);
    }
    pthread_barrier_destroy(&shared->barrier);
}

/* ---------------------------------------------------------------- random exchanges ---- */

#define MAX_ENTRIES 200

/* One exchange of one rank. All random numbers follow from (seed, tag, sequence), so that every
 * rank computes the same flows. */
typedef struct walk {
    seat *s;
    uint64_t tag, sequence, seed;
    uint64_t dice; /* random numbers of this rank alone */
    int op_slot;
    int64_t entry_bytes;
    bool everyone;
    uint64_t flow;
    int64_t sends[MAX_TEST_RANKS], receives[MAX_TEST_RANKS];
    int64_t sent[MAX_TEST_RANKS], read[MAX_TEST_RANKS], dropped[MAX_TEST_RANKS];
} walk;

static inline uint64_t roll(walk *w, uint64_t sides)
{
    w->dice = mix(w->dice);
    return w->dice % sides;
}

static inline void others(const seat *s, uint64_t *mask)
{
    memset(mask, 0, RANK_WORDS * sizeof *mask);
    for (int r = 0; r < s->num_ranks; r++)
        if (r != s->rank) mask[r / 64] |= 1ull << (r % 64);
}

static inline bool sleep_in(walk *w, uint64_t deadline)
{
    uint64_t mask[RANK_WORDS];
    others(w->s, mask);
    w->s->t->wait(w->s->group, w->op_slot, 1, mask, 1000);
    CHECK(now() < deadline);
    return now() < deadline;
}

static inline void fill(const walk *w, int from, int to, int64_t index, unsigned char *entry)
{
    uint64_t word = mix4(w->tag * 1000 + w->sequence, w->flow, (uint64_t)(from * 1000 + to),
                         (uint64_t)index);
    for (int64_t i = 0; i < w->entry_bytes; i += 8, word += 0x9e3779b97f4a7c15ull) {
        const int64_t left = w->entry_bytes - i;
        memcpy(entry + i, &word, left < 8 ? (size_t)left : 8);
    }
}

static inline bool is_filled(const walk *w, int from, int to, int64_t index,
                             const unsigned char *entry)
{
    unsigned char expected[32768];
    fill(w, from, to, index, expected);
    return memcmp(expected, entry, (size_t)w->entry_bytes) == 0;
}

static inline bool begin(walk *w)
{
    const seat *s = w->s;
    const uint64_t deadline = now() + PATIENCE_S * 1000000000ull;
    uint64_t mask[RANK_WORDS];
    others(s, mask);
    while ((w->op_slot = s->t->claim(s->group)) < 0) {
        s->t->wait(s->group, -1, 0, mask, 1000);
        CHECK(now() < deadline);
        if (now() >= deadline) return false;
    }
    epic_op_header header = {.common = {7, (int64_t)w->tag},
                             .local = {s->rank, (int64_t)w->sequence}};
    s->t->announce(s->group, w->op_slot, w->tag, w->sequence, &header);
    for (int r = 0; r < s->num_ranks; r++) {
        const epic_op_header *theirs;
        if (r == s->rank) continue;
        while (!(theirs = s->t->op_header(s->group, w->op_slot, r)))
            if (!sleep_in(w, deadline)) return false;
        CHECK(theirs->local[0] == r && theirs->local[1] == (int64_t)w->sequence);
        CHECK(theirs->common[1] == (int64_t)w->tag);
    }
    return true;
}

static inline void shape(walk *w, int64_t most)
{
    const seat *s = w->s;
    const uint64_t key = mix4(w->seed, w->tag, w->sequence, w->flow);
    w->everyone = key % 2;
    const int64_t half = s->t->ring_bytes(s->group, w->everyone) / 2;
    const int64_t sizes[] = {1 + (int64_t)(key / 2 % 100), 1 + (int64_t)(key / 2 % 3000), 14336,
                             half};
    w->entry_bytes = sizes[key / 256 % 4];
    if (w->entry_bytes > half) w->entry_bytes = half;
    if (w->entry_bytes > 20000) w->entry_bytes = 20000;
    for (int r = 0; r < s->num_ranks; r++) {
        const int from_me = w->everyone ? 0 : r + 1, from_them = w->everyone ? 0 : s->rank + 1;
        const uint64_t limit = (uint64_t)most + 1;
        w->sends[r] = (int64_t)(mix4(key, (uint64_t)s->rank, (uint64_t)from_me, 5) % limit);
        w->receives[r] = (int64_t)(mix4(key, (uint64_t)r, (uint64_t)from_them, 5) % limit);
        w->sent[r] = w->read[r] = w->dropped[r] = 0;
    }
    const epic_flow flow = {.entry_bytes = w->entry_bytes,
                            .everyone = w->everyone,
                            .sends = w->sends,
                            .receives = w->receives};
    s->t->shape(s->group, w->op_slot, &flow);
}

static inline bool push(walk *w, int to)
{
    const seat *s = w->s;
    int64_t *sent = &w->sent[to == EVERYONE ? s->rank : to];
    const int64_t total = w->sends[to == EVERYONE ? s->rank : to];
    int64_t next = *sent;
    for (uint64_t batch = 1 + roll(w, 8); batch > 0 && next < total; batch--, next++) {
        unsigned char *entry = s->t->room(s->group, w->op_slot, to, next);
        if (!entry) break;
        CHECK((uintptr_t)entry % 64 == 0);
        CHECK(entry == s->t->room(s->group, w->op_slot, to, next));
        fill(w, s->rank, to, next, entry);
    }
    const bool moved = next > *sent;
    *sent = next;
    s->t->send(s->group, w->op_slot, to, next);
    return moved;
}

static inline bool pull(walk *w, int from)
{
    const seat *s = w->s;
    const int64_t first = w->read[from];
    for (uint64_t batch = 1 + roll(w, 8); batch > 0 && w->read[from] < w->receives[from];
         batch--) {
        /* not needed, so it is released without reading */
        if (w->everyone && roll(w, 8) == 0) {
            w->read[from]++;
            continue;
        }
        const void *entry = s->t->entry(s->group, w->op_slot, from, w->read[from]);
        if (!entry) break;
        CHECK(is_filled(w, from, w->everyone ? EVERYONE : s->rank, w->read[from], entry));
        w->read[from]++;
    }
    if (w->read[from] > w->dropped[from] &&
        (w->read[from] == w->receives[from] || w->read[from] == first || roll(w, 2)))
        s->t->drop(s->group, w->op_slot, from, w->dropped[from] = w->read[from]);
    return w->read[from] > first;
}

static inline bool flow(walk *w, int64_t most)
{
    const seat *s = w->s;
    const uint64_t deadline = now() + PATIENCE_S * 1000000000ull;
    shape(w, most);
    for (;;) {
        bool moved = false, open = false;
        if (w->everyone && s->num_ranks > 1 && w->sent[s->rank] < w->sends[s->rank]) {
            moved |= push(w, EVERYONE);
            open = true;
        }
        for (int r = 0; r < s->num_ranks; r++) {
            if (r == s->rank) continue;
            if (!w->everyone && w->sent[r] < w->sends[r]) moved |= push(w, r), open = true;
            if (w->dropped[r] < w->receives[r]) moved |= pull(w, r), open = true;
        }
        if (!open) return true;
        if (roll(w, 50) == 0) nap_us((long)roll(w, 200));
        if (!moved && !sleep_in(w, deadline)) return false;
    }
}

static inline void exchange(seat *s, uint64_t tag, uint64_t sequence, uint64_t num_flows,
                            int64_t most)
{
    walk w = {.s = s, .tag = tag, .sequence = sequence, .seed = 1};
    w.dice = mix4(tag, sequence, (uint64_t)s->rank, 3);
    if (!begin(&w)) return;
    for (w.flow = 0; w.flow < num_flows && s->num_ranks > 1; w.flow++)
        if (!flow(&w, most)) return;
    s->t->finish(s->group, w.op_slot);
}

static inline void one_small_exchange(seat *s)
{
    exchange(s, 5, 0, 0, 0);
    exchange(s, 5, 1, 2, 2);
}

/* ---------------------------------------------------------------- all ---- */

static inline void both(epic_config config, void (*body)(seat *))
{
    run(&epic_backend_threads, AS_THREADS, config, body, NULL);
    run(&epic_backend_shm, AS_PROCESSES, config, body, NULL);
}

static inline void timed(const char *what)
{
    static uint64_t last;
    const uint64_t at = now();
    if (getenv("VERBOSE"))
        printf("%6llu ms %s\n", (unsigned long long)(at - last) / 1000000, what);
    fflush(stdout);
    last = now();
}

/* Start main() and end it. */
static inline void begin_tests(void)
{
    shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) exit(1);
    alarm(200);
    timed("start");
}

static inline int end_tests(void)
{
    const int failures = atomic_load(&shared->failures);
    if (failures) fprintf(stderr, "%d failures\n", failures);
    return failures ? 1 : 0;
}

#endif
