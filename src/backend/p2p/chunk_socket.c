/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/p2p/chunk_socket.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/error.h"

#define NAME_BYTES \
    6 /* a zero and five digits: the name that Linux chooses (unix(7), autobind) */

/* A buffer for the control data of a message: descriptors and the identity of the sender. */
typedef union control {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(P2P_MAX_CHUNKS * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))];
} control;

static socklen_t address_of(const char name[8], struct sockaddr_un *out)
{
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(out->sun_path, name, NAME_BYTES);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + NAME_BYTES);
}

int p2p_chunk_socket(char name[8])
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t length = sizeof address;
    const int on = 1;
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0 &&
        bind(fd, (struct sockaddr *)&address, sizeof address.sun_family) == 0 &&
        getsockname(fd, (struct sockaddr *)&address, &length) == 0) {
        memset(name, 0, 8);
        memcpy(name, address.sun_path, NAME_BYTES);
        return fd;
    }
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* Attaches the descriptors of the chunks to a message. */
static void attach_descriptors(struct msghdr *message, control *to,
                               const p2p_exported_chunks *chunks)
{
    const size_t bytes = (size_t)chunks->num_descriptors * sizeof(int);
    if (!bytes) return;
    message->msg_control = to->bytes;
    message->msg_controllen = CMSG_SPACE(bytes);
    struct cmsghdr *c = CMSG_FIRSTHDR(message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(bytes);
    memcpy(CMSG_DATA(c), chunks->descriptors, bytes);
}

epic_result p2p_chunk_send(int socket, int to, const char name[8],
                           const p2p_chunk_header *header, const p2p_exported_chunks *chunks,
                           bool *is_sent)
{
    struct sockaddr_un address;
    control descriptors = {0};
    struct iovec parts[] = {
        {(void *)(uintptr_t)header, sizeof *header},
        {(void *)(uintptr_t)chunks,
         offsetof(p2p_exported_chunks, chunks) + (size_t)chunks->num * sizeof *chunks->chunks}};
    struct msghdr message = {.msg_name = &address, .msg_iov = parts, .msg_iovlen = 2};
    message.msg_namelen = address_of(name, &address);
    attach_descriptors(&message, &descriptors, chunks);
    *is_sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
    /* ETOOMANYREFS: too many descriptors of this user are in messages that no process has
     * received yet */
    if (*is_sent || errno == EAGAIN || errno == EINTR || errno == ENOBUFS || errno == ENOMEM ||
        errno == ETOOMANYREFS)
        return EPIC_OK;
    return epic_fail(
        EPIC_ENOTSUP,
        "the descriptors of memory of cuMemCreate cannot be sent to rank %d (%s): all ranks "
        "must be in one network namespace",
        to, strerror(errno));
}

/* Copies to `chunks` the descriptors that arrived with a message. Sets *pid to the id of the
 * process that sent the message. */
static void read_control(struct msghdr *message, p2p_exported_chunks *chunks, int64_t *pid)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        struct ucred sender;
        if (c->cmsg_level != SOL_SOCKET) continue;
        if (c->cmsg_type == SCM_CREDENTIALS) {
            memcpy(&sender, CMSG_DATA(c), sizeof sender);
            *pid = sender.pid;
        } else if (c->cmsg_type == SCM_RIGHTS) {
            const size_t bytes = c->cmsg_len - CMSG_LEN(0);
            chunks->num_descriptors = (int32_t)(bytes / sizeof(int));
            memcpy(chunks->descriptors, CMSG_DATA(c), bytes);
        }
    }
}

/* Returns whether the values in a received message are in range. `bytes` bytes of *chunks and
 * num_descriptors descriptors have arrived. */
static bool is_valid(const p2p_exported_chunks *chunks, size_t bytes, int num_descriptors)
{
    int count = 0;
    if (bytes < offsetof(p2p_exported_chunks, chunks) || chunks->num < 1 ||
        chunks->num > P2P_MAX_CHUNKS ||
        bytes != offsetof(p2p_exported_chunks, chunks) +
                     (size_t)chunks->num * sizeof *chunks->chunks)
        return false;
    for (int i = 0; i < chunks->num; i++) {
        const uint32_t type = chunks->chunks[i].type;
        const bool has_descriptor = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        if (!has_descriptor && type != CU_MEM_HANDLE_TYPE_FABRIC) return false;
        if (chunks->chunks[i].bytes < 1 || chunks->chunks[i].bytes >> 48) return false;
        count += has_descriptor;
    }
    return count == num_descriptors;
}

epic_result p2p_chunk_receive(int socket, p2p_chunk_header *header, p2p_exported_chunks *chunks,
                              int64_t *pid)
{
    control descriptors = {0};
    struct iovec parts[] = {{header, sizeof *header}, {chunks, sizeof *chunks}};
    struct msghdr message = {.msg_iov = parts,
                             .msg_iovlen = 2,
                             .msg_control = descriptors.bytes,
                             .msg_controllen = sizeof descriptors.bytes};
    *pid = 0;
    const ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        chunks->num_descriptors = 0;
        return EPIC_OK;
    }
    if (got < 0)
        return epic_fail(EPIC_EDEVICE, "receiving descriptors of memory: %s", strerror(errno));
    chunks->num_descriptors = 0;
    read_control(&message, chunks, pid);
    if (message.msg_flags & MSG_CTRUNC) {
        p2p_chunks_close(chunks);
        return epic_fail(EPIC_ENOTSUP,
                         "this process has too many open files to receive descriptors of "
                         "memory: raise the limit (ulimit -n)");
    }
    if (got >= (ssize_t)sizeof *header &&
        is_valid(chunks, (size_t)got - sizeof *header, chunks->num_descriptors))
        return EPIC_OK;
    p2p_chunks_close(chunks);
    header->rank = -1;
    return EPIC_OK;
}
