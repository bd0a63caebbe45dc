/* SPDX-License-Identifier: Apache-2.0 */
/* The transport of the backend mpi, under mpirun with any number of ranks:
 *     mpirun -n 4 transport             runs the checks; 0 pass, 1 fail
 *     mpirun -n 4 transport serialized  the same with MPI_THREAD_SERIALIZED */
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/transport.h"
#include "base/error.h"
#include "check.h"
#include "run.h"

#define NUM_THREADS 8
#define MAX_FLOWS 3
#define PATIENCE_MS 20000
#define LONG_S 40 /* longest wait, for a busy machine */

extern const epic_backend epic_backend_mpi;
static const epic_transport *t;
static int world_rank, world_size;

static double seconds(void)
{
    return 1e-9 * (double)run_now_ns();
}

static void sleep_ms(long ms)
{
    run_nap_us(ms * 1000);
}

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* ------------------------------------------------------------------- groups to test on ---- */

static epic_result gather(void *self, const void *mine, void *all, int64_t bytes)
{
    MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, *(MPI_Comm *)self);
    return EPIC_OK;
}

/* Opens a group of the ranks of `comm`, in their order. */
static epic_result open_with(epic_group **out, MPI_Comm *comm, epic_config config)
{
    static uint64_t number;
    epic_bootstrap bootstrap = {.gather = gather, .self = comm};
    MPI_Comm_rank(*comm, &bootstrap.rank);
    MPI_Comm_size(*comm, &bootstrap.num_ranks);
    config.num_ranks = (uint32_t)bootstrap.num_ranks;
    if (!config.timeout_ms) config.timeout_ms = 60000;
    epic_peer *peers = calloc((size_t)bootstrap.num_ranks, sizeof *peers);
    for (int r = 0; r < bootstrap.num_ranks; r++) peers[r].process[0] = (uint64_t)r;
    char why[256] = "";
    if (!epic_backend_mpi.can_join(peers, bootstrap.num_ranks, &config, why))
        fprintf(stderr, "rank %d: cannot join: %s\n", world_rank, why);
    const epic_join join = {
        .bootstrap = &bootstrap, .config = &config, .peers = peers, .group_id = mix(number++)};
    const epic_result result = epic_backend_mpi.join(out, &join);
    free(peers);
    return result;
}

static epic_group *open_group(MPI_Comm *comm, uint32_t max_in_flight, int64_t staging_bytes)
{
    epic_group *group = NULL;
    const epic_result result = open_with(
        &group, comm,
        (epic_config){.max_in_flight = max_in_flight, .staging_bytes = staging_bytes});
    CHECK(result == EPIC_OK);
    if (result == EPIC_OK) return group;
    fprintf(stderr, "rank %d: %s\n", world_rank, epic_error(NULL));
    MPI_Abort(MPI_COMM_WORLD, 1);
    return NULL;
}

/* -------------------------------------------------------------- an exchange, as core does */

/* How many bytes each rank sends to each other rank; equal on every rank. */
typedef struct script {
    epic_group *group;
    int rank, num_ranks;
    uint64_t tag, sequence;
    int num_flows;
    int64_t entry_bytes[MAX_FLOWS];
    int64_t most[MAX_FLOWS];
    bool check;      /* fill and compare every byte */
    bool first_only; /* only rank 0 sends */
} script;

static int64_t num_entries(const script *s, int flow, int from, int to)
{
    const uint64_t key = mix(s->tag * 1000003 + s->sequence) ^ mix((uint64_t)flow);
    if (s->first_only && from != 0) return 0;
    if (!s->check) return s->most[flow];
    return (int64_t)(mix(key ^ mix((uint64_t)from * 1024 + (uint64_t)to)) %
                     (uint64_t)(s->most[flow] + 1));
}

static void pattern(const script *s, int flow, int from, int to, int64_t entry,
                    unsigned char *out)
{
    const uint64_t key = mix(s->tag ^ mix(s->sequence)) + (uint64_t)entry * 4096 +
                         (uint64_t)flow * 64 + (uint64_t)from * 8 + (uint64_t)to;
    for (int64_t i = 0; i < s->entry_bytes[flow]; i++)
        out[i] = (unsigned char)(key * 7 + i * 13);
}

static bool wait_well(const script *s, int op_slot, uint32_t phase, const uint64_t *waits_for,
                      double end)
{
    epic_failure_info failure;
    if (t->failure(s->group, &failure)) return false;
    t->wait(s->group, op_slot, phase, waits_for, 1000);
    CHECK(seconds() < end);
    return seconds() < end && !t->failure(s->group, &failure);
}

static bool produce(const script *s, int flow, int op_slot, int64_t *sent, const int64_t *sends)
{
    bool moved = false;
    for (int i = 1; i < s->num_ranks; i++) {
        const int to = (s->rank + i) % s->num_ranks;
        int64_t next = sent[to];
        for (; next < sends[to] && next < sent[to] + 50; next++) {
            unsigned char *entry = t->room(s->group, op_slot, to, next);
            if (!entry) break;
            CHECK((uintptr_t)entry % 64 == 0);
            if (s->check) pattern(s, flow, s->rank, to, next, entry);
        }
        if (next == sent[to]) continue;
        sent[to] = next;
        t->send(s->group, op_slot, to, next);
        moved = true;
    }
    return moved;
}

static void compare(const script *s, int flow, int from, int64_t index, const void *entry)
{
    unsigned char expected[65536];
    if (!s->check) return;
    pattern(s, flow, from, s->rank, index, expected);
    CHECK(memcmp(entry, expected, (size_t)s->entry_bytes[flow]) == 0);
}

static bool consume(const script *s, int flow, int op_slot, int64_t *taken,
                    const int64_t *receives, uint64_t *waits_for)
{
    bool moved = false;
    memset(waits_for, 0, EPIC_MAX_RANKS / 8);
    for (int i = 1; i < s->num_ranks; i++) {
        const int from = (s->rank + i) % s->num_ranks;
        int64_t next = taken[from];
        for (; next < receives[from]; next++) {
            const void *entry = t->entry(s->group, op_slot, from, next);
            if (!entry) break;
            compare(s, flow, from, next, entry);
        }
        if (next < receives[from]) waits_for[from / 64] |= 1ull << (from % 64);
        if (next == taken[from]) continue;
        taken[from] = next;
        t->drop(s->group, op_slot, from, next);
        moved = true;
    }
    return moved;
}

static bool all_done(const script *s, const int64_t *done, const int64_t *of)
{
    for (int r = 0; r < s->num_ranks; r++)
        if (r != s->rank && done[r] < of[r]) return false;
    return true;
}

static bool run_flow(const script *s, int flow, int op_slot, double end)
{
    int64_t sends[64] = {0}, receives[64] = {0}, sent[64] = {0}, taken[64] = {0};
    for (int r = 0; r < s->num_ranks; r++) {
        sends[r] = num_entries(s, flow, s->rank, r);
        receives[r] = num_entries(s, flow, r, s->rank);
    }
    const epic_flow shape = {
        .entry_bytes = s->entry_bytes[flow], .sends = sends, .receives = receives};
    t->shape(s->group, op_slot, &shape);
    uint64_t waits_for[EPIC_MAX_RANKS / 64];
    while (!all_done(s, sent, sends) || !all_done(s, taken, receives)) {
        bool moved = produce(s, flow, op_slot, sent, sends);
        moved |= consume(s, flow, op_slot, taken, receives, waits_for);
        if (!moved && !wait_well(s, op_slot, 1 + (uint32_t)flow, waits_for, end)) return false;
    }
    return true;
}

static int claim_op_slot(const script *s, double end)
{
    int op_slot;
    const uint64_t no_rank[EPIC_MAX_RANKS / 64] = {0};
    while ((op_slot = t->claim(s->group)) < 0)
        if (!wait_well(s, -1, 0, no_rank, end)) return -1;
    return op_slot;
}

static bool check_notes(const script *s, int op_slot, double end)
{
    for (;;) {
        uint64_t waits_for[EPIC_MAX_RANKS / 64] = {0};
        bool all = true;
        for (int r = 0; r < s->num_ranks; r++) {
            if (r == s->rank) continue;
            const epic_op_header *header = t->op_header(s->group, op_slot, r);
            if (header) {
                CHECK(header->local[0] ==
                      (int64_t)mix(s->tag + s->sequence * 77 + (uint64_t)r));
                CHECK(header->local[11] == r && header->common[23] == (int64_t)s->sequence);
                continue;
            }
            waits_for[r / 64] |= 1ull << (r % 64);
            all = false;
        }
        if (all) return true;
        if (!wait_well(s, op_slot, 0, waits_for, end)) return false;
    }
}

static int begin(const script *s, double end)
{
    const int op_slot = claim_op_slot(s, end);
    CHECK(op_slot >= 0);
    epic_op_header header = {.common = {EPIC_OP_SUM}};
    header.common[23] = (int64_t)s->sequence;
    header.local[0] = (int64_t)mix(s->tag + s->sequence * 77 + (uint64_t)s->rank);
    header.local[11] = s->rank;
    if (op_slot >= 0) t->announce(s->group, op_slot, s->tag, s->sequence, &header);
    return op_slot;
}

/* Runs one exchange. Returns false if the group broke or a wait took too long. */
static bool run(const script *s)
{
    const double end = seconds() + PATIENCE_MS / 1000.0;
    const int op_slot = begin(s, end);
    if (op_slot < 0) return false;
    bool good = check_notes(s, op_slot, end);
    for (int f = 0; good && f < s->num_flows; f++) good = run_flow(s, f, op_slot, end);
    t->finish(s->group, op_slot);
    return good;
}

static script script_on(epic_group *group, MPI_Comm comm, uint64_t tag, uint64_t sequence)
{
    script s = {.group = group, .tag = tag, .sequence = sequence, .check = true};
    MPI_Comm_rank(comm, &s.rank);
    MPI_Comm_size(comm, &s.num_ranks);
    return s;
}

/* -------------------------------------------------------------------------------- checks */

static void check_lanes(MPI_Comm *comm)
{
    static const int64_t sizes[] = {1, 3, 64, 100, 777, 4096, 8703, 8704};
    const int64_t lanes = world_size > 1 ? 2 * (world_size - 1) * 3 : 1;
    epic_group *group = open_group(comm, 3, lanes * 2 * 8704);
    uint64_t bytes = 0;
    for (uint64_t sequence = 0; sequence < 24; sequence++) {
        script s = script_on(group, *comm, 5, sequence);
        s.num_flows = 1 + (int)(sequence % MAX_FLOWS);
        for (int f = 0; f < s.num_flows; f++) {
            s.entry_bytes[f] = sizes[(sequence + (uint64_t)f * 3) % 8];
            s.most[f] = sequence % 5 == 0 ? 1 : 300;
            for (int r = 0; r < s.num_ranks; r++)
                if (r != s.rank)
                    bytes += (uint64_t)(num_entries(&s, f, s.rank, r) * s.entry_bytes[f]);
        }
        CHECK(run(&s));
    }
    CHECK(t->bytes_sent(group) == bytes);
    epic_backend_mpi.leave(group);
}

static void check_recycling(MPI_Comm *comm)
{
    epic_group *group = open_group(comm, 2, 0);
    for (uint64_t sequence = 0; sequence < 2000; sequence++) {
        script s = script_on(group, *comm, sequence % 3, sequence / 3);
        s.num_flows = sequence % 7 == 0;
        s.entry_bytes[0] = 24;
        s.most[0] = 5;
        if (!run(&s)) {
            CHECK(!"an exchange failed");
            break;
        }
    }
    epic_backend_mpi.leave(group);
}

typedef struct worker {
    epic_group *group;
    MPI_Comm comm;
    uint64_t tag, seed;
} worker;

static void *work(void *self)
{
    const worker *w = self;
    uint64_t random = w->seed;
    for (uint64_t sequence = 0; sequence < 12; sequence++) {
        script s = script_on(w->group, w->comm, w->tag, sequence);
        random = mix(random);
        if (random % 3 == 0) sleep_ms((long)(random >> 8) % 4);
        s.num_flows = (int)(sequence % 3);
        for (int f = 0; f < s.num_flows; f++) {
            s.entry_bytes[f] = 1 + (int64_t)(mix(w->tag * 31 + sequence) % 8000);
            s.most[f] = 60;
        }
        CHECK(run(&s));
    }
    return NULL;
}

/* Runs eight exchanges at the same time, started in a different order on every rank. */
static void check_threads(MPI_Comm *comm)
{
    epic_group *group = open_group(comm, NUM_THREADS, 0);
    pthread_t threads[NUM_THREADS];
    worker workers[NUM_THREADS];
    for (int i = 0; i < NUM_THREADS; i++) {
        workers[i] = (worker){group, *comm, (uint64_t)(i + world_rank * 3) % NUM_THREADS,
                              mix((uint64_t)(world_rank * 100 + i))};
        pthread_create(&threads[i], NULL, work, &workers[i]);
    }
    for (int i = 0; i < NUM_THREADS; i++) pthread_join(threads[i], NULL);
    epic_backend_mpi.leave(group);
}

static void check_claims(MPI_Comm *comm)
{
    epic_group *group = open_group(comm, 2, 0);
    const int a = t->claim(group), b = t->claim(group);
    CHECK(a >= 0 && b >= 0 && a != b);
    CHECK(t->claim(group) == -1);
    const uint64_t no_rank[EPIC_MAX_RANKS / 64] = {0};
    const double start = seconds();
    t->wait(group, -1, 0, no_rank, 30);
    CHECK(seconds() - start > 0.025);
    CHECK(!t->shares && t->ring_bytes(group, false) >= 65536);
    CHECK(t->ring_bytes(group, false) % 64 == 0);
    epic_backend_mpi.leave(group);
}

/* Returns whether every lower rank except the first waits for the rank below it. */
static bool sees_waits(const script *s)
{
    for (int r = 1; r < s->rank; r++) {
        epic_peer_status status;
        t->look(s->group, r, s->tag, s->sequence, &status);
        if (!status.is_waiting || status.phase != 7 || status.waits_for[0] != 1ull << (r - 1))
            return false;
    }
    return true;
}

/* Rank 0 is late, and each other rank waits for the rank below it. All of them see this chain
 * of waits down to rank 0, which does not wait. */
static void look_down(const script *s, int op_slot, double end)
{
    const uint64_t waits_for[EPIC_MAX_RANKS / 64] = {1ull << (s->rank - 1)};
    do t->wait(s->group, op_slot, 7, waits_for, 100);
    while (seconds() < end && !sees_waits(s));
    for (int r = 0; r < s->rank; r++) {
        epic_peer_status status;
        t->look(s->group, r, s->tag, s->sequence, &status);
        CHECK(!status.is_gone && !status.has_closed);
        CHECK(status.has_announced == (r != 0));
        CHECK(status.is_waiting == (r != 0));
        if (r == 0) CHECK(status.operation == 0);
        if (r == 0) continue;
        CHECK(status.phase == 7 && status.waits_for[0] == 1ull << (r - 1));
        CHECK(status.is_inside && status.operation == EPIC_OP_SUM && status.tag == s->tag);
    }
}

/* Waits until all ranks have seen it. A rank that waits keeps waiting until then. */
static void wait_for_lookers(const script *s, int op_slot, MPI_Comm comm)
{
    const uint64_t waits_for[EPIC_MAX_RANKS / 64] = {1ull << (s->rank > 0 ? s->rank - 1 : 0)};
    MPI_Request all;
    int over = 0;
    for (MPI_Ibarrier(comm, &all); !over; MPI_Test(&all, &over, MPI_STATUS_IGNORE))
        if (s->rank > 0)
            t->wait(s->group, op_slot, 7, waits_for, 10);
        else
            sleep_ms(10);
}

static void check_peer_statuses(MPI_Comm *comm)
{
    epic_group *group = open_group(comm, 2, 0);
    script s = script_on(group, *comm, 9, 0);
    const double end = seconds() + LONG_S;
    MPI_Barrier(*comm);
    if (s.rank == 0) {
        wait_for_lookers(&s, -1, *comm);
        CHECK(run(&s));
    } else {
        const int op_slot = begin(&s, end);
        look_down(&s, op_slot, end);
        wait_for_lookers(&s, op_slot, *comm);
        CHECK(check_notes(&s, op_slot, end));
        t->finish(group, op_slot);
    }
    epic_backend_mpi.leave(group);
}

/* A rank that has continued with other work still serves rows that a slow peer receives later.
 * Returns how long the peer took. */
static double drain(MPI_Comm *comm)
{
    epic_group *group = open_group(comm, 2, 0);
    script s = script_on(group, *comm, 1, 0);
    s.num_flows = 1;
    s.entry_bytes[0] = 8000;
    s.most[0] = 120; /* more than MPI and a socket can buffer */
    s.check = false;
    s.first_only = true;
    const double end = seconds() + LONG_S;
    const int op_slot = begin(&s, end);
    CHECK(check_notes(&s, op_slot, end));
    if (s.rank == 1) sleep_ms(200);
    const double start = seconds();
    CHECK(run_flow(&s, 0, op_slot, end));
    const double took = s.rank == 1 ? seconds() - start : 0;
    t->finish(group, op_slot);
    if (s.rank == 0) sleep_ms(1000);
    epic_backend_mpi.leave(group);
    return took;
}

/* If a peer had to wait for the other work, it would do so every time. */
static void check_draining(MPI_Comm *comm)
{
    double longest = 1;
    for (int i = 0; i < 5 && longest >= 0.5; i++) {
        const double took = drain(comm);
        MPI_Allreduce(&took, &longest, 1, MPI_DOUBLE, MPI_MAX, *comm);
    }
    CHECK(longest < 0.5);
}

static void check_parts(MPI_Comm *comm)
{
    MPI_Comm turned, part;
    MPI_Comm_split(*comm, 0, -world_rank, &turned);
    MPI_Comm_split(*comm, world_rank % 2, world_rank, &part);
    epic_group *group = open_group(&turned, 2, 0);
    epic_group *half = open_group(&part, 2, 0);
    epic_group *native = NULL;
    CHECK(open_with(&native, &part, (epic_config){.max_in_flight = 1, .native = comm}) ==
          EPIC_OK);
    for (uint64_t sequence = 0; sequence < 5; sequence++) {
        script a = script_on(group, turned, 1, sequence),
               b = script_on(half, part, 1, sequence), c = script_on(native, part, 1, sequence);
        a.num_flows = b.num_flows = c.num_flows = 1;
        a.entry_bytes[0] = b.entry_bytes[0] = c.entry_bytes[0] = 333;
        a.most[0] = b.most[0] = c.most[0] = 40;
        CHECK(run(&a) && run(&b) && run(&c));
    }
    epic_backend_mpi.leave(native);
    epic_backend_mpi.leave(half);
    epic_backend_mpi.leave(group);
    MPI_Comm_free(&turned);
    MPI_Comm_free(&part);
}

static void check_closed(MPI_Comm *comm)
{
    epic_group *group = open_group(comm, 2, 0);
    script s = script_on(group, *comm, 3, 0);
    CHECK(run(&s));
    if (s.rank == 0) {
        epic_backend_mpi.leave(group);
        MPI_Barrier(*comm);
        return;
    }
    const double end = seconds() + LONG_S;
    epic_peer_status status = {0};
    while (!status.has_closed && seconds() < end) t->look(group, 0, 3, 1, &status);
    CHECK(status.has_closed && status.is_gone && !status.has_announced);
    CHECK(status.operation == EPIC_OP_SUM && status.tag == 3 && !status.is_inside);
    MPI_Barrier(*comm);
    epic_backend_mpi.leave(group);
}

static void *wait_for_break(void *self)
{
    const worker *w = self;
    script s = script_on(w->group, w->comm, w->tag, 0);
    const double end = seconds() + LONG_S;
    const int op_slot = begin(&s, end);
    CHECK(!check_notes(&s, op_slot, end)); /* the last rank never announces */
    t->finish(w->group, op_slot);
    return NULL;
}

/* The last rank breaks the group while rows of one tag and headers of other tags are sent. */
static void check_break(MPI_Comm *comm)
{
    epic_group *group = open_group(comm, NUM_THREADS, 0);
    const int last = world_size - 1;
    script s = script_on(group, *comm, 100, 0);
    const double end = seconds() + LONG_S;
    const int op_slot = begin(&s, end);
    CHECK(check_notes(&s, op_slot, end));
    const epic_failure_info failure = {
        .result = EPIC_EPEER, .tag = 100, .rank = last, .sentence = "on purpose"};
    if (world_rank == last) {
        sleep_ms(150);
        t->break_group(group, &failure);
        t->finish(group, op_slot);
    } else {
        pthread_t threads[3];
        worker workers[3];
        for (int i = 0; i < 3; i++) {
            workers[i] = (worker){group, *comm, (uint64_t)i, 0};
            pthread_create(&threads[i], NULL, wait_for_break, &workers[i]);
        }
        s.num_flows = 1;
        s.entry_bytes[0] = 30000;
        s.most[0] = 100000;
        s.check = false;
        CHECK(!run_flow(&s, 0, op_slot, end));
        t->finish(group, op_slot);
        for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    }
    epic_failure_info seen = {0};
    CHECK(t->failure(group, &seen));
    CHECK(seen.result == EPIC_EPEER && seen.rank == last && seen.tag == 100);
    CHECK(strcmp(seen.sentence, "on purpose") == 0);
    const double start = seconds();
    epic_backend_mpi.leave(group);
    CHECK(seconds() - start < LONG_S / 2); /* does not wait for the peers */
}

static void check_refusals(MPI_Comm *comm)
{
    epic_memory_info memory = {0};
    epic_config config = {
        .max_in_flight = 64, .num_ranks = (uint32_t)world_size, .staging_bytes = 1000};
    (void)comm;
    if (world_size > 1) {
        CHECK(epic_backend_mpi.memory(&config, &memory) == EPIC_EINVAL);
        char least[32];
        snprintf(least, sizeof least, "needs %d ", 2 * (world_size - 1) * 64 * 2 * 8704);
        CHECK(strstr(epic_error(NULL), least));
    }
    config.staging_bytes = 0;
    epic_peer *peers = calloc((size_t)world_size + 2, sizeof *peers);
    char why[256] = "";
    if (world_size > 1) {
        CHECK(!epic_backend_mpi.can_join(peers, world_size, &config, why));
        CHECK(strstr(why, "threads of one process"));
    }
    for (int r = 0; r < world_size + 1; r++) peers[r].process[1] = (uint64_t)r;
    CHECK(epic_backend_mpi.can_join(peers, world_size, &config, why));
    CHECK(!epic_backend_mpi.can_join(peers, world_size + 1, &config, why));
    free(peers);
    CHECK(epic_backend_mpi.memory(&config, &memory) == EPIC_OK);
    CHECK(memory.host_bytes > 0 && memory.host_bytes < 320ll << 20);
    CHECK(memory.shared_bytes == 0 && memory.device_bytes == 0);
}

static void run_check(const char *name, void (*check)(MPI_Comm *), MPI_Comm *comm)
{
    const double start = seconds();
    check(comm);
    MPI_Barrier(*comm);
    if (world_rank == 0) printf("%-10s %.2f s\n", name, seconds() - start);
}

int main(int argc, char **argv)
{
    int level;
    check_begin();
    const bool serialized = argc > 1 && strcmp(argv[1], "serialized") == 0;
    MPI_Init_thread(&argc, &argv, serialized ? MPI_THREAD_SERIALIZED : MPI_THREAD_MULTIPLE,
                    &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    t = epic_backend_mpi.transport;
    run_check("refusals", check_refusals, &comm);
    run_check("claims", check_claims, &comm);
    run_check("lanes", check_lanes, &comm);
    run_check("recycling", check_recycling, &comm);
    run_check("threads", check_threads, &comm);
    run_check("parts", check_parts, &comm);
    run_check("peer statuses", check_peer_statuses, &comm);
    if (world_size > 1) run_check("draining", check_draining, &comm);
    if (world_size > 1) run_check("closed", check_closed, &comm);
    if (world_size > 1) run_check("break", check_break, &comm);
    run_check("lanes", check_lanes, &comm);
    long failed = check_num_failed(), all = 0;
    MPI_Allreduce(&failed, &all, 1, MPI_LONG, MPI_SUM, comm);
    MPI_Comm_free(&comm);
    MPI_Finalize();
    return all != 0;
}
