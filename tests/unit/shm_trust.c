/* SPDX-License-Identifier: Apache-2.0 */
/* Tests what backend shm accepts while its ranks join. A process of another user is refused
 * even if it knows the secret of the rank to which it connects. Memory from rank 0 is refused
 * if its size can still change, because a peer could then remove pages that this rank uses. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "backend/shared/shared.h"
#include "backend/shm/connections.h"
#include "backend/shm/handshake.h"
#include "base/error.h"
#include "check.h"
#include "run.h"

#define GROUP_ID 4711
#define OTHER_USER 65534
#define NAME_BYTES 31

extern const epic_backend epic_backend_shm;

static const epic_config config = {.max_tokens = 16,
                                   .max_row_bytes = 64,
                                   .num_ranks = 2,
                                   .timeout_ms = 3000,
                                   .max_in_flight = 2};

/* The handle of a rank, as backend/shm/connections.c writes it into a gather. */
typedef struct handle {
    uint64_t ready, secret[2];
    char name[NAME_BYTES + 1];
} handle;

/* ------------------------------------------------------------ a caller of another user ---- */

/* Connects to the rank of the handle and sends the handshake of rank 1. Returns the number of
 * bytes of the answer, or 0 if the rank has closed the connection. */
static ssize_t call_rank_0(const handle *theirs)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + 1, theirs->name, NAME_BYTES);
    const socklen_t length = offsetof(struct sockaddr_un, sun_path) + 1 + NAME_BYTES;
    handshake message = {.group_id = GROUP_ID, .rank = 1};
    memcpy(message.secret, theirs->secret, sizeof message.secret);
    const int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(connect(s, (const struct sockaddr *)&address, length) == 0);
    const ssize_t sent = send(s, &message, sizeof message, MSG_NOSIGNAL);
    CHECK(sent == sizeof message || errno == EPIPE || errno == ECONNRESET);
    struct pollfd answer = {.fd = s, .events = POLLIN};
    CHECK(poll(&answer, 1, 2000) == 1);
    ssize_t got = recv(s, &message, sizeof message, MSG_DONTWAIT);
    if (got < 0 && errno == ECONNRESET) got = 0;
    close(s);
    return got;
}

/* The system call changes only this thread, but setresuid() would change the whole process. */
static void *be_stranger(void *self)
{
    CHECK(syscall(SYS_setresuid, -1, OTHER_USER, -1) == 0);
    const ssize_t got = call_rank_0(self);
    CHECK_SAY(got == 0, "rank 0 answered a caller of another user with %zd bytes", got);
    return NULL;
}

/* The bootstrap of rank 1: a stranger that knows the handles connects to rank 0 before rank 1
 * does. */
static epic_result gather_with_stranger(void *self, const void *mine, void *all, int64_t bytes)
{
    pthread_t stranger;
    const epic_bootstrap *inner = self;
    const epic_result result = inner->gather(inner->self, mine, all, bytes);
    if (!CHECK_EQ(bytes, sizeof(handle))) return result;
    pthread_create(&stranger, NULL, be_stranger, all);
    pthread_join(stranger, NULL);
    return result;
}

static void join_with_stranger(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    epic_group *group = NULL;
    epic_bootstrap with_stranger = *bootstrap;
    if (bootstrap->rank == 1) {
        with_stranger.gather = gather_with_stranger;
        with_stranger.self = (void *)(uintptr_t)bootstrap;
    }
    const epic_join join = {
        .bootstrap = &with_stranger, .config = &config, .group_id = GROUP_ID};
    const epic_result result = epic_backend_shm.join(&group, &join);
    CHECK_SAY(result == EPIC_OK, "rank %d: %s", bootstrap->rank, epic_sentence());
    if (group) epic_backend_shm.leave(group);
}

/* -------------------------------------------------------------- memory that can shrink ---- */

#define ALL_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static int make_memory(const shared_layout *l, int seals)
{
    const int memory = memfd_create("epic-shm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(memory >= 0 && ftruncate(memory, l->segment_bytes) == 0);
    void *at = mmap(NULL, (size_t)l->segment_bytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_NORESERVE, memory, 0);
    if (!CHECK(at != MAP_FAILED)) return memory;
    shared_segment_init(at, l, GROUP_ID);
    munmap(at, (size_t)l->segment_bytes);
    CHECK(fcntl(memory, F_ADD_SEALS, seals) == 0);
    return memory;
}

/* Rank 0 sends memory with the seals *self. */
static void join_with_seals(const epic_bootstrap *bootstrap, void *self)
{
    const int seals = *(const int *)self;
    const epic_join join = {.bootstrap = bootstrap, .config = &config, .group_id = GROUP_ID};
    if (bootstrap->rank == 0) {
        shared_layout l;
        shm_connections connections;
        CHECK_EQ(shared_layout_of(&config, &l), EPIC_OK);
        CHECK_EQ(connections_alloc(&connections, 0, 2), EPIC_OK);
        int memory = make_memory(&l, seals);
        CHECK_EQ(connections_open(&connections, &join, true, &memory), EPIC_OK);
        connections_close(&connections);
        close(memory);
        return;
    }
    epic_group *group = NULL;
    const epic_result result = epic_backend_shm.join(&group, &join);
    const epic_result right = seals == ALL_SEALS ? EPIC_OK : EPIC_EDEVICE;
    CHECK_SAY(result == right, "seals 0x%x: %s: %s", (unsigned)seals, epic_result_name(result),
              result == EPIC_OK ? "" : epic_sentence());
    CHECK(result == EPIC_OK || strstr(epic_sentence(), "rank 0 sent") != NULL);
    if (group) epic_backend_shm.leave(group);
}

int main(void)
{
    check_begin();
    run_alarm(60);
    int seals[] = {ALL_SEALS, 0, ALL_SEALS & ~F_SEAL_SHRINK, ALL_SEALS & ~F_SEAL_GROW,
                   ALL_SEALS & ~F_SEAL_SEAL};
    for (size_t i = 0; i < sizeof seals / sizeof *seals; i++)
        run_threads(2, join_with_seals, &seals[i]);
    if (geteuid() == 0)
        run_threads(2, join_with_stranger, NULL);
    else
        printf("left out: only root can call as another user\n");
    return check_end();
}
