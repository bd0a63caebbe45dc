/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the host transports directly when something goes wrong while a rank waits or joins.
 * Ranks die, leave early and break the group, strangers connect, and descriptors run out. */
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include "transport.h"

/* ---------------------------------------------------------------- when things go wrong ---- */

static int claim_and_announce(seat *s, uint64_t tag, uint64_t sequence)
{
    const int op_slot = s->t->claim(s->group);
    epic_op_header header = {.common = {4}};
    CHECK(op_slot >= 0);
    s->t->announce(s->group, op_slot, tag, sequence, &header);
    return op_slot;
}

static epic_failure_info failure_of(const seat *s)
{
    epic_failure_info failure = {
        .result = EPIC_EPEER, .operation = 4, .tag = 8, .rank = s->rank, .num_culprits = 1};
    snprintf(failure.sentence, sizeof failure.sentence, "reported by rank %d", s->rank);
    return failure;
}

static bool has_pidfds(void)
{
    const int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

/* Rank 2 is killed while it waits. The parent does not reap it before the other ranks have
 * noticed, and a child of rank 2 lives on with all its open descriptors. */
static void killed_peer(seat *s)
{
    uint64_t mask[RANK_WORDS];
    others(s, mask);
    const int op_slot = claim_and_announce(s, 1, s->rank == 2 ? 0 : 1);
    const uint64_t deadline = now() + PATIENCE_S * 1000000000ull;
    epic_peer_status status = {0};
    if (s->rank == 2 && has_pidfds() && fork() == 0) {
        nap_us(4000000);
        _exit(0);
    }
    atomic_fetch_add(&s->arena->ready, 1);
    while (!status.is_gone && now() < deadline) {
        s->t->wait(s->group, op_slot, 2, mask, 1000);
        s->t->look(s->group, 2, 1, 0, &status);
    }
    CHECK(status.is_gone && !status.has_closed);
    CHECK(now() - atomic_load(&s->arena->stamp) < 3000000000u); /* the child lives for 4 s */
    CHECK(status.operation == 4 && status.tag == 1 && status.sequence == 0 && status.is_inside);
    const epic_failure_info mine = failure_of(s);
    epic_failure_info failure;
    s->t->break_group(s->group, &mine);
    CHECK(s->t->failure(s->group, &failure));
    CHECK(failure.rank != 2 && failure.result == EPIC_EPEER);
    s->t->finish(s->group, op_slot);
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

/* Rank 1 dies while it writes the group's failure record. The other ranks report their own
 * failures. */
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
    CHECK(failure.rank == 0 && strcmp(failure.sentence, "reported by rank 0") == 0);
}

static void kill_rank_1(void)
{
    while (atomic_load(&shared->ready) < 1) nap_us(1000);
    kill(shared->pids[1], SIGKILL);
    nap_us(50000);
    atomic_store(&shared->stamp, now());
}

/* All ranks wait for something that never comes, one of them for a free op slot. Then the last
 * rank breaks the group. */
static void broken_group(seat *s)
{
    uint64_t mask[RANK_WORDS];
    others(s, mask);
    const int num_op_slots = (int)s->config.max_in_flight;
    int op_slot = -1;
    for (int i = 0; i < num_op_slots; i++)
        op_slot = claim_and_announce(s, (uint64_t)(s->rank * 100 + i), 0);
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
        s->t->wait(s->group, s->rank == 0 ? -1 : op_slot, 1, mask, 20000);
    /* much less than the 20 s of the wait */
    CHECK(now() - atomic_load(&s->arena->stamp) < 10000000000u);
    CHECK(failure.rank == s->num_ranks - 1);
    for (int i = 0; i < num_op_slots; i++) s->t->finish(s->group, i);
}

/* Rank 0 leaves right after it has sent, and rank 1 reads later. */
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
    s->t->shape(s->group, w.op_slot, &f);
    for (int64_t i = 0; s->rank == 0 && i < 5; i++) {
        fill(&w, 0, EVERYONE, i, s->t->room(s->group, w.op_slot, EVERYONE, i));
        s->t->send(s->group, w.op_slot, EVERYONE, i + 1);
    }
    if (s->rank == 0) CHECK(s->t->bytes_sent(s->group) == 5000);
    epic_peer_status status = {0};
    const uint64_t deadline = now() + 5000000000u;
    while (s->rank == 1 && !status.is_gone && now() < deadline) {
        uint64_t mask[RANK_WORDS] = {1};
        s->t->wait(s->group, w.op_slot, 1, mask, 1000);
        s->t->look(s->group, 0, 1, 0, &status);
    }
    CHECK(s->rank == 0 ||
          (status.is_gone && status.has_closed && status.has_announced && !status.is_inside));
    for (int64_t i = 0; s->rank == 1 && i < 5; i++) {
        const void *entry = s->t->entry(s->group, w.op_slot, 0, i);
        CHECK(entry && is_filled(&w, 0, EVERYONE, i, entry));
        s->t->drop(s->group, w.op_slot, 0, i + 1);
    }
    s->t->finish(s->group, w.op_slot);
}

/* Rank 0 reads the status of rank 1, which waits, and of rank 2, which has announced its
 * operation and then sleeps elsewhere. */
static void peer_statuses(seat *s)
{
    if (s->rank == 0) {
        epic_peer_status status;
        s->t->look(s->group, 1, 6, 0, &status);
        CHECK(!status.has_announced && !status.operation && !status.is_waiting &&
              !status.is_gone);
    }
    pthread_barrier_wait(&s->arena->barrier);
    const int op_slot = claim_and_announce(s, 6, 0);
    pthread_barrier_wait(&s->arena->barrier);
    const uint64_t cpu = cpu_time();
    uint64_t mask[RANK_WORDS] = {4};
    while (s->rank == 1 && !atomic_load(&s->arena->ready))
        s->t->wait(s->group, op_slot, 3, mask, 1000);
    CHECK(cpu_time() - cpu < 40000000u); /* a rank that waits uses no CPU time */
    if (s->rank == 2) s->t->wait(s->group, op_slot, 1, mask, 1);
    if (s->rank != 1) nap_us(350000);
    if (s->rank == 0) {
        epic_peer_status status = {0};
        const uint64_t stop = now() + 10000000000u;
        while (!status.is_waiting && now() < stop) s->t->look(s->group, 1, 6, 0, &status);
        CHECK(status.has_announced && status.is_waiting && status.phase == 3 &&
              status.waits_for[0] == 4);
        CHECK(status.operation == 4 && status.tag == 6 && status.sequence == 0 &&
              status.is_inside);
        s->t->look(s->group, 1, 7, 0, &status); /* it waits, but in another operation */
        CHECK(!status.has_announced && status.is_waiting && status.waits_for[0] == 4 &&
              !status.is_gone);
        s->t->look(s->group, 2, 6, 0, &status);
        CHECK(status.has_announced && !status.is_waiting && status.phase == 1);
        atomic_store(&s->arena->ready, 1);
    }
    pthread_barrier_wait(&s->arena->barrier);
    for (int r = 0; r < 3; r++) CHECK(r == s->rank || s->t->op_header(s->group, op_slot, r));
    s->t->finish(s->group, op_slot);
    pthread_barrier_wait(&s->arena->barrier);
    epic_peer_status status;
    s->t->look(s->group, (s->rank + 1) % 3, 6, 0, &status);
    CHECK(status.has_announced && !status.is_inside && !status.is_waiting);
    pthread_barrier_wait(&s->arena->barrier);
}

/* ---------------------------------------------------------------- joining ---- */

/* Connects twice to a listening address of /proc/net/unix: once it sends garbage, once nothing.
 */
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

/* Strangers connect to the ranks while they join. */
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

/* The last rank joins after the strangers have connected. */
static epic_result join_late(epic_group **out, const epic_join *join)
{
    const bool last = join->bootstrap->rank == join->bootstrap->num_ranks - 1;
    while (last && atomic_load(&shared->stamp) == 0) nap_us(1000);
    return epic_backend_shm.join(out, join);
}

static void strangers(void)
{
    epic_backend late = epic_backend_shm;
    late.join = join_late;
    run(&late, AS_PROCESSES, config_of(3, 4, 0), one_small_exchange, call_as_stranger);
}

/* The last rank may open so few descriptors that it fails before or after the ranks have
 * connected. The other ranks notice at once. */
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
    const bool last = join->bootstrap->rank == join->bootstrap->num_ranks - 1;
    epic_group *none = NULL;
    const uint64_t start = now();
    if (last) limit_files();
    const epic_result result = epic_backend_shm.join(&none, join);
    CHECK(now() - start < 2000000000u);
    pthread_barrier_wait(&shared->barrier); /* as the core does after joining */
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

int main(void)
{
    begin_tests();
    both(config_of(4, 3, 0), broken_group);
    timed("broken group");
    both(config_of(2, 3, 0), early_leaver);
    timed("early leaver");
    both(config_of(3, 3, 0), peer_statuses);
    timed("peer statuses");
    run(&epic_backend_shm, AS_PROCESSES, config_of(3, 3, 0), killed_peer, kill_rank_2);
    run(&epic_backend_shm, AS_PROCESSES, config_of(2, 3, 0), killed_writer, kill_rank_1);
    timed("killed");
    strangers();
    timed("strangers");
    failing_joins();
    timed("failing joins");
    return end_tests();
}
