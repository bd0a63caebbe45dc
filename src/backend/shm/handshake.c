/* SPDX-License-Identifier: Apache-2.0 */
/* Sends and receives messages on the connections, among them handshakes. A message may carry a
 * file descriptor. */
#include "backend/shm/handshake.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"

/* A buffer for the descriptor that travels with a message. */
typedef union descriptor {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int))];
} descriptor;

epic_result shm_fail_with_errno(const char *what)
{
    const bool memory = errno == ENOMEM || errno == ENOBUFS;
    return epic_fail(memory ? EPIC_ENOMEM : EPIC_EDEVICE, "shm: %s: %s%s", what,
                     strerror(errno), epic_remedy(errno));
}

epic_result shm_fail_with_left(int peer)
{
    return epic_fail(EPIC_EPEER, "shm: rank %d left while the group was joined", peer);
}

static void attach_descriptor(struct msghdr *message, descriptor *control, int memory)
{
    message->msg_control = control->bytes;
    message->msg_controllen = sizeof control->bytes;
    struct cmsghdr *c = CMSG_FIRSTHDR(message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &memory, sizeof memory);
}

ssize_t shm_send_message(int fd, const void *bytes, size_t size, int memory)
{
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    descriptor control = {0};
    if (memory >= 0) attach_descriptor(&message, &control, memory);
    ssize_t sent;
    do sent = sendmsg(fd, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent;
}

ssize_t shm_receive_any(int fd, void *bytes, size_t size, int *memory)
{
    struct iovec part = {.iov_base = bytes, .iov_len = size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    descriptor control = {0};
    if (memory) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_LEN(sizeof(int)); /* room for exactly one descriptor */
    }
    ssize_t got;
    do got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC | MSG_TRUNC);
    while (got < 0 && errno == EINTR);
    const struct cmsghdr *c = got < 0 ? NULL : CMSG_FIRSTHDR(&message);
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
        memcpy(memory, CMSG_DATA(c), sizeof *memory);
    else if (got > 0 && memory && message.msg_flags & MSG_CTRUNC)
        *memory = HANDSHAKE_NO_ROOM;
    return got;
}

bool shm_receive_message(int fd, void *bytes, size_t size, int *memory)
{
    return shm_receive_any(fd, bytes, size, memory) == (ssize_t)size;
}

epic_result handshake_send(int fd, const handshake *message, int to, int memory)
{
    if (shm_send_message(fd, message, sizeof *message, memory) == (ssize_t)sizeof *message)
        return EPIC_OK;
    return errno == EPIPE || errno == ECONNRESET ? shm_fail_with_left(to)
                                                 : shm_fail_with_errno("sendmsg");
}

bool handshake_receive(int fd, handshake *message, int *memory)
{
    return shm_receive_message(fd, message, sizeof *message, memory);
}

bool handshake_is_same_user(int fd)
{
    struct ucred who;
    socklen_t length = sizeof who;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 && who.uid == geteuid();
}
