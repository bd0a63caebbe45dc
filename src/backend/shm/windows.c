/* SPDX-License-Identifier: Apache-2.0 */
/* Windows (memory of a rank into which its peers store rows) for ranks that are processes.
 *
 * A rank sends the descriptor of its memory to every peer before it announces its op header. So
 * when a peer has received the op header, the message with the descriptor has arrived too. A
 * failed call may leave messages unread. So a rank numbers its messages, and its op header
 * contains the number of the message for this window. The peer skips older messages. */
#include "backend/shm/windows.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/shm/connections.h"
#include "backend/shm/handshake.h"
#include "base/error.h"
#include "base/process.h"

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/* A rank sends this handle of a window (WINDOW_HANDLE_BYTES bytes) to its peers in its op
 * header. The handle contains the offset at which the window begins in the file whose
 * descriptor the rank has sent. */
typedef struct shm_handle {
    int64_t fd_offset;
    uint64_t number; /* number of the message with the descriptor */
} shm_handle;

_Static_assert(sizeof(shm_handle) == WINDOW_HANDLE_BYTES, "shm_handle");

static epic_result fail_with_bytes(int64_t bytes)
{
    const bool memory = errno == ENOMEM || errno == ENOSPC || errno == EFBIG;
    return epic_fail(memory ? EPIC_ENOMEM : EPIC_EDEVICE, "bytes is %lld: %s%s; pass less",
                     (long long)bytes, strerror(errno), epic_remedy(errno));
}

/* Creates shared memory and maps it. Seals its size, because peers would crash if a rank could
 * shrink the memory. */
static epic_result create_memory(epic_window_memory *memory, int *fd)
{
    errno = EFBIG;
    if (!process_may_create_file(memory->bytes)) return fail_with_bytes(memory->bytes);
    *fd = memfd_create("epic-window", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0 || ftruncate(*fd, memory->bytes) != 0 || fcntl(*fd, F_ADD_SEALS, SEALS) != 0)
        return fail_with_bytes(memory->bytes);
    void *data = mmap(NULL, (size_t)memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (data == MAP_FAILED) return fail_with_bytes(memory->bytes);
    memory->data = data;
    return EPIC_OK;
}

/* Maps bytes [offset, offset + bytes) of a file. A mapping begins at a page boundary, so it may
 * begin before `offset`. Returns the address of byte `offset`, or MAP_FAILED with errno set. */
static void *map_file(int fd, int64_t offset, int64_t bytes)
{
    const int64_t before = offset % sysconf(_SC_PAGESIZE);
    struct stat status;
    errno = EINVAL;
    if (fstat(fd, &status) != 0 || offset < 0 || bytes > status.st_size ||
        offset > status.st_size - bytes)
        return MAP_FAILED;
    char *at = mmap(NULL, (size_t)(before + bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                    (off_t)(offset - before));
    return at == MAP_FAILED ? MAP_FAILED : at + before;
}

static void unmap_file(void *at, int64_t bytes)
{
    const int64_t before = (int64_t)((uintptr_t)at % (uintptr_t)sysconf(_SC_PAGESIZE));
    munmap((char *)at - before, (size_t)(before + bytes));
}

/* Returns whether `data` in the caller's memory and `mapped` in EPIC's mapping are the same
 * byte of a file. Changes *data for a moment, and checks whether *mapped changes too. If the
 * caller's memory is a private mapping, *mapped does not change, because changes of a private
 * mapping do not reach the file. */
static bool is_same_byte(volatile unsigned char *data, volatile unsigned char *mapped)
{
    const unsigned char old = *data, other = old ^ 0xff;
    *data = other;
    const bool same = *mapped == other;
    *data = old;
    return same && *mapped == old;
}

/* Checks that the caller's memory (memory->data) is a shared mapping of the file memory->fd at
 * the offset that the caller has passed. */
static epic_result check_memory(const epic_window_memory *memory)
{
    if (memory->fd < 0)
        return epic_fail(
            EPIC_ENOTSUP,
            "fd is not given: must be the file (of memfd_create or shm_open) that data "
            "maps with MAP_SHARED, because other processes map it; or use "
            "epic_window_alloc");
    unsigned char *at = map_file(memory->fd, memory->fd_offset, memory->bytes);
    if (at == MAP_FAILED)
        return epic_fail(
            EPIC_ENOTSUP,
            "fd %d cannot be mapped at fd_offset %lld for %lld bytes (%s): must be "
            "a memfd or shm_open file of that size, open for writing",
            memory->fd, (long long)memory->fd_offset, (long long)memory->bytes,
            strerror(errno));
    const int64_t last = memory->bytes - 1;
    unsigned char *data = memory->data;
    const bool same = is_same_byte(data, at) && is_same_byte(data + last, at + last);
    unmap_file(at, memory->bytes);
    if (same) return EPIC_OK;
    return epic_fail(EPIC_ENOTSUP,
                     "data is not a shared mapping of fd %d at fd_offset %lld: must be mapped "
                     "with MAP_SHARED from there",
                     memory->fd, (long long)memory->fd_offset);
}

/* Sends the descriptor `fd` and the number of the message to all peers. Ignores a peer that has
 * closed its connection, because the later wait for the peer's op header returns the error. */
static epic_result send_to_all(epic_group *g, uint64_t number, int fd)
{
    const shm_connections *c = g->backend_data;
    for (int r = 0; r < g->num_ranks; r++) {
        if (r == g->rank || !seat_set_has(&g->members, r)) continue;
        if (shm_send_message(c->sockets[r], &number, sizeof number, fd) ==
                (ssize_t)sizeof number ||
            errno == EPIPE || errno == ECONNRESET)
            continue;
        return shm_fail_with_errno("sending the descriptor of a window");
    }
    return EPIC_OK;
}

/* Implements epic_window_transport.offer: makes this rank's memory of a window available to the
 * peers, as a file descriptor. */
static epic_result shm_offer(epic_group *g, epic_window_memory *memory, unsigned char *handle)
{
    const bool allocates = memory->data == NULL;
    shm_connections *c = g->backend_data;
    const shm_handle mine = {.fd_offset = memory->fd_offset, .number = ++c->num_offers};
    int fd = memory->fd;
    epic_result result = allocates ? create_memory(memory, &fd) : check_memory(memory);
    if (result == EPIC_OK) result = send_to_all(g, mine.number, fd);
    if (allocates && result != EPIC_OK && memory->data)
        munmap(memory->data, (size_t)memory->bytes);
    /* The mapping, and the messages with the descriptor that are in flight, keep the memory
     * alive. */
    if (allocates && fd >= 0) close(fd);
    memcpy(handle, &mine, sizeof mine);
    return result;
}

/* Receives the descriptor that the peer has sent in message `wanted`. Skips messages that the
 * peer sent before it: descriptors of earlier calls, and messages of epic_regroup. Does
 * not read messages that the peer sent after the descriptor, because the peer may have called
 * epic_regroup already. Returns -1 if the descriptor has not arrived, and HANDSHAKE_NO_ROOM if
 * this process has too many open files to receive it. */
static int receive_descriptor(epic_group *g, int peer, uint64_t wanted)
{
    const shm_connections *c = g->backend_data;
    for (;;) {
        uint64_t number = 0;
        int fd = -1;
        const ssize_t got = shm_receive_any(c->sockets[peer], &number, sizeof number, &fd);
        if (got == (ssize_t)sizeof number && number == wanted) return fd;
        if (fd >= 0) close(fd);
        if (got <= 0) return -1;
    }
}

/* Implements epic_window_transport.map: maps the memory that a peer offers for a window. */
static epic_result shm_map(epic_group *g, int peer, const unsigned char *handle, int64_t bytes,
                           void **at)
{
    shm_handle theirs;
    memcpy(&theirs, handle, sizeof theirs);
    const int fd = receive_descriptor(g, peer, theirs.number);
    if (fd == HANDSHAKE_NO_ROOM)
        return epic_fail(EPIC_EDEVICE,
                         "the window of rank %d cannot be received: this process has too many "
                         "open files; raise ulimit -n",
                         peer);
    if (fd < 0)
        return epic_fail(EPIC_EDEVICE, "rank %d sent no descriptor of its window", peer);
    void *mapped = map_file(fd, theirs.fd_offset, bytes);
    const int error = errno;
    close(fd);
    if (mapped == MAP_FAILED)
        return epic_fail(error == ENOMEM ? EPIC_ENOMEM : EPIC_EDEVICE,
                         "the window of rank %d, %lld bytes, cannot be mapped: %s%s", peer,
                         (long long)bytes, strerror(error), epic_remedy(error));
    *at = mapped;
    return EPIC_OK;
}

static void shm_unmap(epic_group *group, void *at, int64_t bytes)
{
    (void)group;
    unmap_file(at, bytes);
}

const epic_window_transport shm_windows = {.offer = shm_offer,
                                           .map = shm_map,
                                           .unmap = shm_unmap,
                                           .begin_stores = shared_begin_stores,
                                           .end_stores = shared_end_stores,
                                           .may_store = shared_may_store,
                                           .close = shared_close_windows};
