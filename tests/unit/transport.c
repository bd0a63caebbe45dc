/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the host transports directly: ranks as threads and as processes, random exchanges, and
 * what they leave behind. With the argument "bench" it measures instead. */
#include <pthread.h>

#include "transport.h"

static void some_exchanges(seat *s)
{
    const uint64_t count = s->num_ranks > 4 ? 6 : 24;
    for (uint64_t sequence = 0; sequence < count; sequence++)
        exchange(s, 3, sequence, sequence % 4, MAX_ENTRIES);
    epic_failure_info failure;
    CHECK(!s->t->failure(s->group, &failure));
}

/* Uses op slots again and again; most exchanges move no rows. */
static void many_exchanges(seat *s)
{
    for (uint64_t sequence = 0; sequence < 3000; sequence++)
        exchange(s, 9, sequence, sequence % 16 == 0, 3);
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
    for (uint64_t sequence = 0; sequence < 12; sequence++) {
        dice = mix(dice);
        if (dice % 3 == 0) nap_us((long)(dice / 3 % 1000));
        exchange(l->s, l->tag, sequence, sequence % 3, 30);
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

/* ---------------------------------------------------------------- joining ---- */

static void too_little_staging(void)
{
    epic_config config = config_of(4, 2, 1000);
    shared_layout layout;
    CHECK(shared_layout_of(&config, &layout) == EPIC_EINVAL);
    const char *least = strstr(epic_sentence(), "at least ");
    CHECK(least);
    config.staging_bytes = atoll(least + 9);
    CHECK(shared_layout_of(&config, &layout) == EPIC_OK);
    CHECK(layout.peer_ring_bytes >= 17408 && layout.broadcast_ring_bytes >= 17408);
    CHECK(layout.staging_bytes * layout.num_slots <= config.staging_bytes);
    config.staging_bytes--;
    CHECK(shared_layout_of(&config, &layout) == EPIC_EINVAL);
    for (int64_t given = 300000; given < 100000000; given = given * 5 / 3) {
        config.staging_bytes = given;
        CHECK(shared_layout_of(&config, &layout) == EPIC_OK);
        CHECK(layout.staging_bytes * layout.num_slots <= given);
        CHECK(layout.peer_ring_bytes % 64 == 0 && layout.broadcast_ring_bytes % 64 == 0);
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
    CHECK(!epic_backend_threads.can_join(peers, 2, &config, why) &&
          strstr(why, "ranks 0 and 1"));
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
    CHECK(virtual_kib() - kib < 512 * 1024); /* a segment has 100 MiB */
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

/* Publishes entries and copies those of every peer, like dispatch. */
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
    s->t->shape(s->group, w.op_slot, &f);
    pthread_barrier_wait(&s->arena->barrier);
    const uint64_t start = now();
    uint64_t sleeps = 0, slot = 0;
    for (bool open = true; open;) {
        int64_t next = w.sent[0];
        bool moved = false;
        for (int64_t stop = next + 18; next < stop && next < BENCH_ENTRIES; next++) {
            void *entry = s->t->room(s->group, w.op_slot, EVERYONE, next);
            if (!entry) break;
            memcpy(entry, rows + next % 4096 * BENCH_BYTES, BENCH_BYTES);
        }
        moved |= next > w.sent[0];
        s->t->send(s->group, w.op_slot, EVERYONE, w.sent[0] = next);
        open = next < BENCH_ENTRIES;
        for (int i = 1; i < s->num_ranks; i++) {
            const int r = (s->rank + i) % s->num_ranks;
            int64_t i0 = w.read[r];
            for (int64_t stop = i0 + 18; i0 < stop && i0 < BENCH_ENTRIES; i0++) {
                const void *entry = s->t->entry(s->group, w.op_slot, r, i0);
                if (!entry) break;
                memcpy(out + slot++ % 4096 * BENCH_BYTES, entry, BENCH_BYTES);
            }
            if (i0 > w.read[r])
                s->t->drop(s->group, w.op_slot, r, w.read[r] = i0), moved = true;
            open |= i0 < BENCH_ENTRIES;
        }
        if (!moved && open) sleep_in(&w, now() + 1000000000000u), sleeps++;
    }
    pthread_barrier_wait(&s->arena->barrier);
    const double seconds = (double)(now() - start) / 1e9;
    const double bytes = (double)BENCH_ENTRIES * BENCH_BYTES;
    if (s->rank == 0)
        printf(
            "%-8s %d ranks: everyone ring, all ranks: staged %.2f GB/s, copied out %.2f GB/s, "
            "both %.2f GB/s (rank 0: %llu waits)\n",
            s->backend->name, s->num_ranks, bytes * s->num_ranks / seconds / 1e9,
            bytes * s->num_ranks * (s->num_ranks - 1) / seconds / 1e9,
            bytes * s->num_ranks * s->num_ranks / seconds / 1e9, (unsigned long long)sleeps);
    s->t->finish(s->group, w.op_slot);
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

int main(int argc, char **argv)
{
    begin_tests();
    if (argc > 1 && strcmp(argv[1], "bench") == 0) {
        alarm(0);
        bench();
        return 0;
    }
    too_little_staging();
    who_can_join();
    run(&epic_backend_self, AS_THREADS, config_of(1, 2, 0), some_exchanges, NULL);
    const int ranks[] = {1, 2, 3, 4, 8};
    for (int i = 0; i < 5; i++) {
        both(config_of(ranks[i], 4, 0), some_exchanges);
        both(config_of(ranks[i], 2, 2 * 8 * 17408), some_exchanges); /* little staging memory */
        timed("some exchanges");
    }
    both(config_of(3, 2, 0), many_exchanges);
    timed("op slots used again");
    both(config_of(3, NUM_LINES, 0), many_in_flight);
    timed("many in flight");
    run(&epic_backend_shm, AS_PROCESSES, config_of(64, 64, 0), one_small_exchange, NULL);
    timed("64 ranks");
    leaves_nothing(&epic_backend_threads);
    leaves_nothing(&epic_backend_shm);
    timed("leaves nothing");
    return end_tests();
}
