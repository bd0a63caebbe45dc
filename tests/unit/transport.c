/* SPDX-License-Identifier: Apache-2.0 */
/* The host transports, driven directly: ranks as threads and as processes, random exchanges, and
 * everything that may go wrong while somebody waits.  With the argument "bench" it measures. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "backend/backend.h"
#include "backend/shared/shared.h"
#include "base/error.h"

extern const epic_backend epic_backend_self, epic_backend_threads, epic_backend_shm;

#define MAX_TEST_RANKS 64
#define GATHER_BYTES 128
#define PATIENCE_S 40 /* nothing here may take longer */

/* ---------------------------------------------------------------- ranks of a test ---- */

/* What the ranks of one test share beside the transport under test. */
typedef struct arena {
    pthread_barrier_t barrier;
    unsigned char gathered[MAX_TEST_RANKS][GATHER_BYTES];
    _Atomic int failures;
    _Atomic uint64_t stamp; /* a time that one rank tells the others */
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

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t cpu_time(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void nap_us(long us)
{
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static uint64_t mix4(uint64_t a, uint64_t b, uint64_t c, uint64_t d)
{
    return mix(mix(mix(mix(a) ^ b) ^ c) ^ d);
}

static epic_result gather(void *self, const void *mine, void *all, size_t bytes)
{
    seat *s = self;
    memcpy(s->arena->gathered[s->rank], mine, bytes);
    pthread_barrier_wait(&s->arena->barrier);
    for (int r = 0; r < s->num_ranks; r++)
        memcpy((char *)all + (size_t)r * bytes, s->arena->gathered[r], bytes);
    pthread_barrier_wait(&s->arena->barrier);
    return EPIC_OK;
}

static epic_result join_group(seat *s)
{
    epic_peer peers[MAX_TEST_RANKS];
    memset(peers, 0, sizeof peers);
    char why[256] = "";
    CHECK(s->backend->can_join(peers, s->num_ranks, &s->config, why));
    const epic_meet meet = {
        .rank = s->rank, .num_ranks = s->num_ranks, .gather = gather, .self = s};
    const epic_join join = {
        .meet = &meet, .config = &s->config, .peers = peers, .group_id = 4711};
    return s->backend->join(&s->group, &join);
}

static void *run_rank(void *arg)
{
    seat *s = arg;
    const epic_result result = join_group(s);
    if (result != EPIC_OK) fprintf(stderr, "join: %s\n", epic_sentence());
    CHECK(result == EPIC_OK);
    if (result != EPIC_OK) return NULL;
    pthread_barrier_wait(&s->arena->barrier); /* as the core does after a join */
    s->body(s);
    fflush(stdout); /* a process ends without it */
    if (s->group) s->backend->leave(s->group);
    return NULL;
}

static void open_arena(int num_ranks)
{
    pthread_barrierattr_t across;
    pthread_barrierattr_init(&across);
    pthread_barrierattr_setpshared(&across, PTHREAD_PROCESS_SHARED);
    memset(shared->gathered, 0, sizeof shared->gathered);
    pthread_barrier_init(&shared->barrier, &across, (unsigned)num_ranks);
    atomic_store(&shared->stamp, 0);
    atomic_store(&shared->ready, 0);
}

static epic_config config_of(int num_ranks, int max_in_flight, int64_t staging)
{
    return (epic_config){.max_tokens = 4096,
                         .max_row_bytes = 16384,
                         .staging_bytes = staging,
                         .num_ranks = (uint32_t)num_ranks,
                         .timeout_ms = 30000,
                         .max_in_flight = (uint32_t)max_in_flight};
}

enum how { AS_THREADS, AS_PROCESSES };

static void run_processes(seat *seats, int num_ranks, void (*meanwhile)(void))
{
    for (int r = 0; r < num_ranks; r++) {
        const pid_t pid = fork();
        if (pid > 0) shared->pids[r] = pid;
        if (pid != 0) continue;
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

static void run(const epic_backend *backend, enum how how, epic_config config,
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

/* One exchange of one rank; everything random follows from (seed, tag, place), so that all ranks
 * think of the same flows. */
typedef struct walk {
    seat *s;
    uint64_t tag, place, seed;
    uint64_t dice; /* this rank's own */
    int cell;
    int64_t entry_bytes;
    bool everyone;
    uint64_t flow;
    int64_t sends[MAX_TEST_RANKS], receives[MAX_TEST_RANKS];
    int64_t sent[MAX_TEST_RANKS], read[MAX_TEST_RANKS], dropped[MAX_TEST_RANKS];
} walk;

static uint64_t roll(walk *w, uint64_t sides)
{
    w->dice = mix(w->dice);
    return w->dice % sides;
}

static void others(const seat *s, uint64_t *mask)
{
    memset(mask, 0, RANK_WORDS * sizeof *mask);
    for (int r = 0; r < s->num_ranks; r++)
        if (r != s->rank) mask[r / 64] |= 1ull << (r % 64);
}

static bool sleep_in(walk *w, uint64_t deadline)
{
    uint64_t mask[RANK_WORDS];
    others(w->s, mask);
    w->s->t->wait(w->s->group, w->cell, 1, mask, 1000);
    CHECK(now() < deadline);
    return now() < deadline;
}

static void fill(const walk *w, int from, int to, int64_t index, unsigned char *entry)
{
    uint64_t word =
        mix4(w->tag * 1000 + w->place, w->flow, (uint64_t)(from * 1000 + to), (uint64_t)index);
    for (int64_t i = 0; i < w->entry_bytes; i += 8, word += 0x9e3779b97f4a7c15ull) {
        const int64_t left = w->entry_bytes - i;
        memcpy(entry + i, &word, left < 8 ? (size_t)left : 8);
    }
}

static bool is_filled(const walk *w, int from, int to, int64_t index,
                      const unsigned char *entry)
{
    unsigned char expected[32768];
    fill(w, from, to, index, expected);
    return memcmp(expected, entry, (size_t)w->entry_bytes) == 0;
}

static bool begin(walk *w)
{
    const seat *s = w->s;
    const uint64_t deadline = now() + PATIENCE_S * 1000000000ull;
    uint64_t mask[RANK_WORDS];
    others(s, mask);
    while ((w->cell = s->t->claim(s->group)) < 0) {
        s->t->wait(s->group, -1, 0, mask, 1000);
        CHECK(now() < deadline);
        if (now() >= deadline) return false;
    }
    epic_note note = {.same = {7, (int64_t)w->tag}, .own = {s->rank, (int64_t)w->place}};
    s->t->announce(s->group, w->cell, w->tag, w->place, &note);
    for (int r = 0; r < s->num_ranks; r++) {
        const epic_note *theirs;
        if (r == s->rank) continue;
        while (!(theirs = s->t->note(s->group, w->cell, r)))
            if (!sleep_in(w, deadline)) return false;
        CHECK(theirs->own[0] == r && theirs->own[1] == (int64_t)w->place);
        CHECK(theirs->same[1] == (int64_t)w->tag);
    }
    return true;
}

static void shape(walk *w, int64_t most)
{
    const seat *s = w->s;
    const uint64_t key = mix4(w->seed, w->tag, w->place, w->flow);
    w->everyone = key % 2;
    const int64_t half = s->t->lane_bytes(s->group, w->everyone) / 2;
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
    s->t->shape(s->group, w->cell, &flow);
}

static bool push(walk *w, int to)
{
    const seat *s = w->s;
    int64_t *sent = &w->sent[to == EVERYONE ? s->rank : to];
    const int64_t total = w->sends[to == EVERYONE ? s->rank : to];
    int64_t next = *sent;
    for (uint64_t batch = 1 + roll(w, 8); batch > 0 && next < total; batch--, next++) {
        unsigned char *entry = s->t->room(s->group, w->cell, to, next);
        if (!entry) break;
        CHECK((uintptr_t)entry % 64 == 0);
        CHECK(entry == s->t->room(s->group, w->cell, to, next));
        fill(w, s->rank, to, next, entry);
    }
    const bool moved = next > *sent;
    *sent = next;
    s->t->send(s->group, w->cell, to, next);
    return moved;
}

static bool pull(walk *w, int from)
{
    const seat *s = w->s;
    const int64_t first = w->read[from];
    for (uint64_t batch = 1 + roll(w, 8); batch > 0 && w->read[from] < w->receives[from];
         batch--) {
        if (w->everyone && roll(w, 8) == 0) { /* not wanted: dropped unseen */
            w->read[from]++;
            continue;
        }
        const void *entry = s->t->entry(s->group, w->cell, from, w->read[from]);
        if (!entry) break;
        CHECK(is_filled(w, from, w->everyone ? EVERYONE : s->rank, w->read[from], entry));
        w->read[from]++;
    }
    if (w->read[from] > w->dropped[from] &&
        (w->read[from] == w->receives[from] || w->read[from] == first || roll(w, 2)))
        s->t->drop(s->group, w->cell, from, w->dropped[from] = w->read[from]);
    return w->read[from] > first;
}

static bool flow(walk *w, int64_t most)
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

static void exchange(seat *s, uint64_t tag, uint64_t place, uint64_t num_flows, int64_t most)
{
    walk w = {.s = s, .tag = tag, .place = place, .seed = 1};
    w.dice = mix4(tag, place, (uint64_t)s->rank, 3);
    if (!begin(&w)) return;
    for (w.flow = 0; w.flow < num_flows && s->num_ranks > 1; w.flow++)
        if (!flow(&w, most)) return;
    s->t->finish(s->group, w.cell);
}

static void some_exchanges(seat *s)
{
    const uint64_t count = s->num_ranks > 4 ? 6 : 24;
    for (uint64_t place = 0; place < count; place++)
        exchange(s, 3, place, place % 4, MAX_ENTRIES);
    epic_failure_info failure;
    CHECK(!s->t->failure(s->group, &failure));
}

/* Cells are used again and again: mostly nothing flows. */
static void many_exchanges(seat *s)
{
    for (uint64_t place = 0; place < 3000; place++) exchange(s, 9, place, place % 16 == 0, 3);
}

static void one_small_exchange(seat *s)
{
    exchange(s, 5, 0, 0, 0);
    exchange(s, 5, 1, 2, 2);
}

/* ---------------------------------------------------------------- many in flight ---- */

#define NUM_LINES 16

typedef struct line {
    seat *s;
    uint64_t tag;
} line;

static void *walk_line(void *arg)
{
    line *l = arg;
    uint64_t dice = mix4(l->tag, (uint64_t)l->s->rank, 1, 2);
    for (uint64_t place = 0; place < 12; place++) {
        dice = mix(dice);
        if (dice % 3 == 0) nap_us((long)(dice / 3 % 1000));
        exchange(l->s, l->tag, place, place % 3, 30);
    }
    return NULL;
}

static void many_in_flight(seat *s)
{
    pthread_t threads[NUM_LINES];
    line lines[NUM_LINES];
    for (int i = 0; i < NUM_LINES; i++) {
        lines[i] = (line){.s = s, .tag = 100 + (uint64_t)((i * 7 + s->rank * 5) % NUM_LINES)};
        pthread_create(&threads[i], NULL, walk_line, &lines[i]);
    }
    for (int i = 0; i < NUM_LINES; i++) pthread_join(threads[i], NULL);
}

/* ---------------------------------------------------------------- when things go wrong ---- */

static int claim_and_announce(seat *s, uint64_t tag, uint64_t place)
{
    const int cell = s->t->claim(s->group);
    epic_note note = {.same = {4}};
    CHECK(cell >= 0);
    s->t->announce(s->group, cell, tag, place, &note);
    return cell;
}

static epic_failure_info failure_of(const seat *s)
{
    epic_failure_info failure = {
        .result = EPIC_EPEER, .operation = 4, .tag = 8, .rank = s->rank, .num_culprits = 1};
    snprintf(failure.sentence, sizeof failure.sentence, "told by rank %d", s->rank);
    return failure;
}

static bool has_pidfds(void)
{
    const int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

/* Rank 2 is killed while it waits; the parent does not reap it before the others have seen, and
 * a child of it lives on and holds all that it had open. */
static void killed_peer(seat *s)
{
    uint64_t mask[RANK_WORDS];
    others(s, mask);
    const int cell = claim_and_announce(s, 1, s->rank == 2 ? 0 : 1);
    const uint64_t deadline = now() + PATIENCE_S * 1000000000ull;
    epic_sight sight = {0};
    if (s->rank == 2 && has_pidfds() && fork() == 0) {
        nap_us(4000000);
        _exit(0);
    }
    atomic_fetch_add(&s->arena->ready, 1);
    while (!sight.gone && now() < deadline) {
        s->t->wait(s->group, cell, 2, mask, 1000);
        s->t->look(s->group, 2, 1, 0, &sight);
    }
    CHECK(sight.gone && !sight.closed);
    CHECK(now() - atomic_load(&s->arena->stamp) < 1000000000u);
    CHECK(sight.operation == 4 && sight.tag == 1 && sight.place == 0 && sight.inside);
    const epic_failure_info mine = failure_of(s);
    epic_failure_info failure;
    s->t->break_group(s->group, &mine);
    CHECK(s->t->failure(s->group, &failure));
    CHECK(failure.rank != 2 && failure.result == EPIC_EPEER);
    s->t->finish(s->group, cell);
}

static void kill_rank_2(void)
{
    while (atomic_load(&shared->ready) < 3) nap_us(1000);
    nap_us(150000);
    atomic_store(&shared->stamp, now());
    kill(shared->pids[2], SIGKILL);
    for (int r = 0; r < 2; r++) waitpid(shared->pids[r], NULL, WNOHANG | WNOWAIT);
    nap_us(1500000);
}

/* Rank 1 dies while it writes the group's failure: the others report theirs. */
static void killed_writer(seat *s)
{
    if (s->rank == 1) {
        atomic_store(&s->group->header->failure_state, 2);
        atomic_fetch_add(&s->arena->ready, 1);
        for (;;) pause();
    }
    while (atomic_load(&s->arena->stamp) == 0) nap_us(1000);
    const epic_failure_info mine = failure_of(s);
    epic_failure_info failure;
    s->t->break_group(s->group, &mine);
    CHECK(s->t->failure(s->group, &failure));
    CHECK(failure.rank == 0 && strcmp(failure.sentence, "told by rank 0") == 0);
}

static void kill_rank_1(void)
{
    while (atomic_load(&shared->ready) < 1) nap_us(1000);
    kill(shared->pids[1], SIGKILL);
    nap_us(50000);
    atomic_store(&shared->stamp, now());
}

/* All wait for what never comes, one of them for a free cell; the last rank breaks the group. */
static void broken_group(seat *s)
{
    uint64_t mask[RANK_WORDS];
    others(s, mask);
    const int num_cells = (int)s->config.max_in_flight;
    int cell = -1;
    for (int i = 0; i < num_cells; i++)
        cell = claim_and_announce(s, (uint64_t)(s->rank * 100 + i), 0);
    CHECK(s->t->claim(s->group) == -1);
    pthread_barrier_wait(&s->arena->barrier);
    if (s->rank == s->num_ranks - 1) {
        nap_us(50000);
        const epic_failure_info mine = failure_of(s);
        atomic_store(&s->arena->stamp, now());
        s->t->break_group(s->group, &mine);
    }
    epic_failure_info failure;
    while (!s->t->failure(s->group, &failure))
        s->t->wait(s->group, s->rank == 0 ? -1 : cell, 1, mask, 20000);
    CHECK(now() - atomic_load(&s->arena->stamp) < 500000000u);
    CHECK(failure.rank == s->num_ranks - 1);
    for (int i = 0; i < num_cells; i++) s->t->finish(s->group, i);
}

/* Rank 0 leaves right after it has sent; rank 1 reads later. */
static void early_leaver(seat *s)
{
    walk w = {.s = s, .tag = 1, .seed = 1, .everyone = true, .entry_bytes = 1000};
    if (!begin(&w)) return;
    w.sends[1] = w.receives[0] = 5;
    w.sends[0] = w.receives[1] = 0;
    const int64_t none[2] = {0, 0};
    const epic_flow f = {.entry_bytes = 1000,
                         .everyone = true,
                         .sends = s->rank == 0 ? w.sends : none,
                         .receives = s->rank == 0 ? none : w.receives};
    s->t->shape(s->group, w.cell, &f);
    for (int64_t i = 0; s->rank == 0 && i < 5; i++) {
        fill(&w, 0, EVERYONE, i, s->t->room(s->group, w.cell, EVERYONE, i));
        s->t->send(s->group, w.cell, EVERYONE, i + 1);
    }
    if (s->rank == 0) CHECK(s->t->bytes_sent(s->group) == 5000);
    epic_sight sight = {0};
    const uint64_t deadline = now() + 5000000000u;
    while (s->rank == 1 && !sight.gone && now() < deadline) {
        uint64_t mask[RANK_WORDS] = {1};
        s->t->wait(s->group, w.cell, 1, mask, 1000);
        s->t->look(s->group, 0, 1, 0, &sight);
    }
    CHECK(s->rank == 0 || (sight.gone && sight.closed && sight.came && !sight.inside));
    for (int64_t i = 0; s->rank == 1 && i < 5; i++) {
        const void *entry = s->t->entry(s->group, w.cell, 0, i);
        CHECK(entry && is_filled(&w, 0, EVERYONE, i, entry));
        s->t->drop(s->group, w.cell, 0, i + 1);
    }
    s->t->finish(s->group, w.cell);
}

/* Rank 0 watches rank 1, who waits, and rank 2, who has come and then sleeps elsewhere. */
static void sights(seat *s)
{
    if (s->rank == 0) {
        epic_sight sight;
        s->t->look(s->group, 1, 6, 0, &sight);
        CHECK(!sight.came && !sight.operation && !sight.waiting && !sight.gone);
    }
    pthread_barrier_wait(&s->arena->barrier);
    const int cell = claim_and_announce(s, 6, 0);
    pthread_barrier_wait(&s->arena->barrier);
    const uint64_t stop = now() + 400000000u, cpu = cpu_time();
    uint64_t mask[RANK_WORDS] = {4};
    while (s->rank == 1 && now() < stop) s->t->wait(s->group, cell, 3, mask, 100);
    CHECK(cpu_time() - cpu < 40000000u); /* who waits takes no time from the others */
    if (s->rank == 2) s->t->wait(s->group, cell, 1, mask, 1);
    if (s->rank != 1) nap_us(350000);
    if (s->rank == 0) {
        epic_sight sight;
        s->t->look(s->group, 1, 6, 0, &sight);
        CHECK(sight.came && sight.waiting && sight.phase == 3 && sight.waits_for[0] == 4);
        CHECK(sight.operation == 4 && sight.tag == 6 && sight.place == 0 && sight.inside);
        s->t->look(s->group, 1, 7, 0, &sight); /* it waits, though not here */
        CHECK(!sight.came && sight.waiting && sight.waits_for[0] == 4 && !sight.gone);
        s->t->look(s->group, 2, 6, 0, &sight);
        CHECK(sight.came && !sight.waiting && sight.phase == 1);
    }
    pthread_barrier_wait(&s->arena->barrier);
    for (int r = 0; r < 3; r++) CHECK(r == s->rank || s->t->note(s->group, cell, r));
    s->t->finish(s->group, cell);
    pthread_barrier_wait(&s->arena->barrier);
    epic_sight sight;
    s->t->look(s->group, (s->rank + 1) % 3, 6, 0, &sight);
    CHECK(sight.came && !sight.inside && !sight.waiting);
    pthread_barrier_wait(&s->arena->barrier);
}

/* ---------------------------------------------------------------- joining ---- */

static void too_little_staging(void)
{
    epic_config config = config_of(4, 2, 1000);
    shared_layout layout;
    CHECK(shared_layout_of(&config, &layout) == EPIC_EINVAL);
    const char *least = strstr(epic_sentence(), "give ");
    CHECK(least);
    config.staging_bytes = atoll(least + 5);
    CHECK(shared_layout_of(&config, &layout) == EPIC_OK);
    CHECK(layout.private_bytes >= 17408 && layout.everyone_bytes >= 17408);
    CHECK(layout.staging_bytes * layout.num_cells <= config.staging_bytes);
    config.staging_bytes--;
    CHECK(shared_layout_of(&config, &layout) == EPIC_EINVAL);
    for (int64_t given = 300000; given < 100000000; given = given * 5 / 3) {
        config.staging_bytes = given;
        CHECK(shared_layout_of(&config, &layout) == EPIC_OK);
        CHECK(layout.staging_bytes * layout.num_cells <= given);
        CHECK(layout.private_bytes % 64 == 0 && layout.everyone_bytes % 64 == 0);
    }
}

static void who_can_join(void)
{
    const epic_config config = config_of(2, 2, 0);
    char why[256];
    epic_peer peers[2] = {{.host = {1, 2}, .process = {3, 4}, .uid = 5, .network_ns = 6},
                          {.host = {1, 2}, .process = {3, 4}, .uid = 5, .network_ns = 6}};
    CHECK(epic_backend_self.can_join(peers, 1, &config, why));
    CHECK(!epic_backend_self.can_join(peers, 2, &config, why) && strlen(why) > 0);
    CHECK(epic_backend_threads.can_join(peers, 2, &config, why));
    CHECK(epic_backend_shm.can_join(peers, 2, &config, why));
    peers[1].process[1] = 7;
    CHECK(!epic_backend_threads.can_join(peers, 2, &config, why) && strstr(why, "rank 1"));
    CHECK(epic_backend_shm.can_join(peers, 2, &config, why));
    peers[1].network_ns = 7;
    CHECK(!epic_backend_shm.can_join(peers, 2, &config, why) && strstr(why, "namespace"));
    peers[1].uid = 7;
    CHECK(!epic_backend_shm.can_join(peers, 2, &config, why) && strstr(why, "user"));
    peers[1].host[0] = 7;
    CHECK(!epic_backend_shm.can_join(peers, 2, &config, why) && strstr(why, "host"));
}

static int count_lines(const char *path, const char *part)
{
    FILE *file = fopen(path, "r");
    char text[512];
    int count = 0;
    while (file && fgets(text, sizeof text, file)) count += strstr(text, part) != NULL;
    if (file) fclose(file);
    return count;
}

static int count_open_files(void)
{
    int count = 0;
    for (int fd = 0; fd < 256; fd++) count += dup2(fd, fd) == fd;
    return count;
}

static long virtual_kib(void)
{
    FILE *file = fopen("/proc/self/status", "r");
    char text[256];
    long kib = 0;
    while (file && fgets(text, sizeof text, file))
        if (strncmp(text, "VmSize:", 7) == 0) kib = atol(text + 7);
    if (file) fclose(file);
    return kib;
}

static void leaves_nothing(const epic_backend *backend)
{
    const epic_config config = config_of(3, 8, 0);
    for (int i = 0; i < 3; i++) run(backend, AS_THREADS, config, one_small_exchange, NULL);
    const int files = count_open_files();
    const long kib = virtual_kib();
    for (int i = 0; i < 50; i++) run(backend, AS_THREADS, config, one_small_exchange, NULL);
    CHECK(count_open_files() == files);
    CHECK(count_lines("/proc/self/maps", "epic-shm") == 0);
    CHECK(virtual_kib() - kib < 512 * 1024); /* a segment is 100 MiB */
}

/* Calls a listening address twice, as /proc/net/unix shows it: talks nonsense, and is silent. */
static int call_twice(const char *name, int *callers)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const size_t length = strcspn(name, "\n");
    int count = 0;
    memcpy(address.sun_path + 1, name + 1, length - 1);
    for (int i = 0; i < 2; i++) {
        const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        const size_t bytes = offsetof(struct sockaddr_un, sun_path) + length;
        if (connect(fd, (struct sockaddr *)&address, (socklen_t)bytes) != 0) {
            close(fd);
            continue;
        }
        callers[count++] = fd;
        if (i == 0) send(fd, name, length, MSG_NOSIGNAL);
    }
    return count;
}

/* Strangers call the ranks while they join. */
static void call_as_stranger(void)
{
    char text[512];
    int callers[64], count = 0;
    const uint64_t deadline = now() + 5000000000u;
    while (count < 4 && now() < deadline) {
        nap_us(20000);
        FILE *file = fopen("/proc/net/unix", "r");
        while (file && fgets(text, sizeof text, file)) {
            const char *name = strstr(text, "@epic.");
            const bool listens = strstr(text, " 00010000 ") != NULL;
            if (name && listens && count + 2 <= 64) count += call_twice(name, callers + count);
        }
        if (file) fclose(file);
    }
    CHECK(count >= 4);
    atomic_store(&shared->stamp, 1);
    nap_us(200000);
    for (int i = 0; i < count; i++) close(callers[i]);
}

/* The last rank joins once the strangers have called. */
static epic_result join_late(epic_group **out, const epic_join *join)
{
    const bool last = join->meet->rank == join->meet->num_ranks - 1;
    while (last && atomic_load(&shared->stamp) == 0) nap_us(1000);
    return epic_backend_shm.join(out, join);
}

static void strangers(void)
{
    epic_backend late = epic_backend_shm;
    late.join = join_late;
    run(&late, AS_PROCESSES, config_of(3, 4, 0), one_small_exchange, call_as_stranger);
}

/* The last rank may open so few files that it fails before or after the ranks have met; the
 * others hear of it at once. */
static int files_left;

static void limit_files(void)
{
    int next = dup(0);
    close(next);
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = (rlim_t)(next + files_left);
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

static epic_result join_without_files(epic_group **out, const epic_join *join)
{
    const bool last = join->meet->rank == join->meet->num_ranks - 1;
    epic_group *none = NULL;
    const uint64_t start = now();
    if (last) limit_files();
    const epic_result result = epic_backend_shm.join(&none, join);
    CHECK(now() - start < 2000000000u);
    pthread_barrier_wait(&shared->barrier); /* as the core does after a join */
    if (last) CHECK(result == EPIC_EDEVICE && strstr(epic_sentence(), "ulimit -n"));
    if (last || files_left == 0) CHECK(result != EPIC_OK && !none);
    if (!last && result != EPIC_OK)
        CHECK(result == EPIC_EPEER && strstr(epic_sentence(), "rank"));
    if (result == EPIC_OK) epic_backend_shm.leave(none);
    return epic_backend_self.join(out, join);
}

static void nothing(seat *s)
{
    (void)s;
}

static void failing_joins(void)
{
    epic_backend without = epic_backend_shm;
    without.join = join_without_files;
    without.leave = epic_backend_self.leave;
    for (files_left = 0; files_left < 4; files_left++)
        run(&without, AS_PROCESSES, config_of(5, 4, 0), nothing, NULL);
}

/* ---------------------------------------------------------------- measuring ---- */

#define BENCH_ROUNDS 20000
#define BENCH_ENTRIES 20000
#define BENCH_BYTES 14336

static void bench_empty(seat *s)
{
    for (uint64_t i = 0; i < 100; i++) exchange(s, 1, i, 0, 0);
    const uint64_t start = now();
    for (uint64_t i = 100; i < 100 + BENCH_ROUNDS; i++) exchange(s, 1, i, 0, 0);
    const double us = (double)(now() - start) / 1e3 / BENCH_ROUNDS;
    if (s->rank == 0)
        printf("%-8s %d ranks: empty exchange %.2f us\n", s->backend->name, s->num_ranks, us);
}

/* Stages entries and copies out every peer's, as dispatch does. */
static void bench_everyone(seat *s)
{
    walk w = {.s = s, .tag = 2, .everyone = true, .entry_bytes = BENCH_BYTES};
    unsigned char *rows = malloc((size_t)4096 * BENCH_BYTES);
    unsigned char *out = malloc((size_t)4096 * BENCH_BYTES);
    memset(rows, s->rank, (size_t)4096 * BENCH_BYTES);
    memset(out, s->rank, (size_t)4096 * BENCH_BYTES);
    if (!begin(&w)) return;
    for (int r = 0; r < s->num_ranks; r++) w.sends[r] = w.receives[r] = BENCH_ENTRIES;
    const epic_flow f = {
        .entry_bytes = BENCH_BYTES, .everyone = true, .sends = w.sends, .receives = w.receives};
    s->t->shape(s->group, w.cell, &f);
    pthread_barrier_wait(&s->arena->barrier);
    const uint64_t start = now();
    uint64_t sleeps = 0, slot = 0;
    for (bool open = true; open;) {
        int64_t next = w.sent[0];
        bool moved = false;
        for (int64_t stop = next + 18; next < stop && next < BENCH_ENTRIES; next++) {
            void *entry = s->t->room(s->group, w.cell, EVERYONE, next);
            if (!entry) break;
            memcpy(entry, rows + next % 4096 * BENCH_BYTES, BENCH_BYTES);
        }
        moved |= next > w.sent[0];
        s->t->send(s->group, w.cell, EVERYONE, w.sent[0] = next);
        open = next < BENCH_ENTRIES;
        for (int i = 1; i < s->num_ranks; i++) {
            const int r = (s->rank + i) % s->num_ranks;
            int64_t i0 = w.read[r];
            for (int64_t stop = i0 + 18; i0 < stop && i0 < BENCH_ENTRIES; i0++) {
                const void *entry = s->t->entry(s->group, w.cell, r, i0);
                if (!entry) break;
                memcpy(out + slot++ % 4096 * BENCH_BYTES, entry, BENCH_BYTES);
            }
            if (i0 > w.read[r]) s->t->drop(s->group, w.cell, r, w.read[r] = i0), moved = true;
            open |= i0 < BENCH_ENTRIES;
        }
        if (!moved && open) sleep_in(&w, now() + 1000000000000u), sleeps++;
    }
    pthread_barrier_wait(&s->arena->barrier);
    const double seconds = (double)(now() - start) / 1e9;
    const double bytes = (double)BENCH_ENTRIES * BENCH_BYTES;
    if (s->rank == 0)
        printf(
            "%-8s %d ranks: everyone lane, all ranks: staged %.2f GB/s, copied out %.2f GB/s, "
            "both %.2f GB/s (rank 0: %llu waits)\n",
            s->backend->name, s->num_ranks, bytes * s->num_ranks / seconds / 1e9,
            bytes * s->num_ranks * (s->num_ranks - 1) / seconds / 1e9,
            bytes * s->num_ranks * s->num_ranks / seconds / 1e9, (unsigned long long)sleeps);
    s->t->finish(s->group, w.cell);
    free(rows);
    free(out);
}

static void bench_copy(seat *s)
{
    const size_t bytes = (size_t)4096 * BENCH_BYTES;
    unsigned char *from = malloc(bytes), *to = malloc(bytes);
    memset(from, 1, bytes);
    memset(to, 1, bytes);
    pthread_barrier_wait(&s->arena->barrier);
    const uint64_t start = now();
    for (int i = 0; i < 20; i++)
        for (size_t at = 0; at < bytes; at += BENCH_BYTES)
            memcpy(to + at, from + at, BENCH_BYTES);
    pthread_barrier_wait(&s->arena->barrier);
    const double seconds = (double)(now() - start) / 1e9;
    if (s->rank == 0)
        printf("memcpy   %d ranks: %.2f GB/s, all ranks\n", s->num_ranks,
               20.0 * (double)bytes * s->num_ranks / seconds / 1e9);
    free(from);
    free(to);
}

static void bench(void)
{
    run(&epic_backend_shm, AS_PROCESSES, config_of(4, 4, 0), bench_copy, NULL);
    for (int n = 2; n <= 4; n += 2) {
        run(&epic_backend_threads, AS_THREADS, config_of(n, 4, 0), bench_empty, NULL);
        run(&epic_backend_shm, AS_PROCESSES, config_of(n, 4, 0), bench_empty, NULL);
        run(&epic_backend_threads, AS_THREADS, config_of(n, 4, 0), bench_everyone, NULL);
        run(&epic_backend_shm, AS_PROCESSES, config_of(n, 4, 0), bench_everyone, NULL);
    }
    run(&epic_backend_shm, AS_PROCESSES, config_of(4, 4, 0), bench_copy, NULL);
}

/* ---------------------------------------------------------------- all ---- */

static void both(epic_config config, void (*body)(seat *))
{
    run(&epic_backend_threads, AS_THREADS, config, body, NULL);
    run(&epic_backend_shm, AS_PROCESSES, config, body, NULL);
}

static void timed(const char *what)
{
    static uint64_t last;
    const uint64_t at = now();
    if (getenv("VERBOSE"))
        printf("%6llu ms %s\n", (unsigned long long)(at - last) / 1000000, what);
    fflush(stdout);
    last = now();
}

int main(int argc, char **argv)
{
    shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 1;
    if (argc > 1 && strcmp(argv[1], "bench") == 0) {
        bench();
        return 0;
    }
    alarm(200);
    timed("start");
    too_little_staging();
    who_can_join();
    run(&epic_backend_self, AS_THREADS, config_of(1, 2, 0), some_exchanges, NULL);
    const int ranks[] = {1, 2, 3, 4, 8};
    for (int i = 0; i < 5; i++) {
        both(config_of(ranks[i], 4, 0), some_exchanges);
        both(config_of(ranks[i], 2, 2 * 8 * 17408), some_exchanges); /* little room */
        timed("some exchanges");
    }
    both(config_of(3, 2, 0), many_exchanges);
    timed("cells used again");
    both(config_of(3, NUM_LINES, 0), many_in_flight);
    timed("many in flight");
    both(config_of(4, 3, 0), broken_group);
    timed("broken group");
    both(config_of(2, 3, 0), early_leaver);
    timed("early leaver");
    both(config_of(3, 3, 0), sights);
    timed("sights");
    run(&epic_backend_shm, AS_PROCESSES, config_of(3, 3, 0), killed_peer, kill_rank_2);
    run(&epic_backend_shm, AS_PROCESSES, config_of(2, 3, 0), killed_writer, kill_rank_1);
    timed("killed");
    strangers();
    timed("strangers");
    failing_joins();
    timed("failing joins");
    run(&epic_backend_shm, AS_PROCESSES, config_of(64, 64, 0), one_small_exchange, NULL);
    timed("64 ranks");
    leaves_nothing(&epic_backend_threads);
    leaves_nothing(&epic_backend_shm);
    timed("leaves nothing");
    const int failures = atomic_load(&shared->failures);
    if (failures) fprintf(stderr, "%d failures\n", failures);
    return failures ? 1 : 0;
}
