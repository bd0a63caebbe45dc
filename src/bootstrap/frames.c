/* SPDX-License-Identifier: Apache-2.0 */
/* Sends and receives the messages of a TCP bootstrap. All sockets are non-blocking, and every
 * wait is a poll() with a time limit. */
#include "bootstrap/frames.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>

bool epic_frame_make_hello(epic_hello *out, int32_t rank, int32_t num_ranks, bool has_secret,
                           const time_limit *limit)
{
    *out = (epic_hello){
        .magic = HELLO_MAGIC,
        .version = FRAME_VERSION,
        .rank = rank,
        .num_ranks = num_ranks,
        .left_ms = time_limit_left_ms(limit),
        .has_secret = has_secret,
    };
    return getrandom(out->nonce, sizeof out->nonce, 0) == (ssize_t)sizeof out->nonce;
}

uint64_t epic_frame_checksum(const void *bytes, size_t length)
{
    /* Hash eight bytes at a time: multiply, then fold the high bits into the low ones, so that
     * every input bit affects the result. */
    const unsigned char *at = bytes;
    uint64_t sum = 0x9e3779b97f4a7c15u ^ length;
    for (uint64_t word; length > 0;) {
        const size_t step = length < sizeof word ? length : sizeof word;
        word = 0;
        memcpy(&word, at, step);
        sum = (sum ^ word) * 0xff51afd7ed558ccdu;
        sum ^= sum >> 32;
        at += step;
        length -= step;
    }
    return sum;
}

/* Returns true if errno of the last socket call means "try again later". */
static bool is_temporary_error(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

epic_frame_state epic_frame_send(int socket, const epic_frame *frame, const void *bytes,
                                 size_t *done)
{
    const size_t head = sizeof *frame;
    while (*done < head + frame->length) {
        const size_t in_head = *done < head ? *done : head;
        const size_t in_bytes = *done - in_head;
        /* the casts remove const for struct iovec; sendmsg() only reads the bytes */
        struct iovec parts[2] = {{(char *)(uintptr_t)frame + in_head, head - in_head}};
        if (frame->length > 0)
            parts[1] =
                (struct iovec){(char *)(uintptr_t)bytes + in_bytes, frame->length - in_bytes};
        const struct msghdr message = {.msg_iov = parts,
                                       .msg_iovlen = frame->length > 0 ? 2 : 1};
        const ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) return is_temporary_error() ? FRAME_MORE : FRAME_LOST;
        *done += (size_t)sent;
    }
    return FRAME_DONE;
}

epic_frame_state epic_frame_receive(int socket, void *to, size_t bytes, size_t *done)
{
    while (*done < bytes) {
        const ssize_t got = recv(socket, (char *)to + *done, bytes - *done, MSG_DONTWAIT);
        if (got < 0) return is_temporary_error() ? FRAME_MORE : FRAME_LOST;
        if (got == 0) return FRAME_LOST;
        *done += (size_t)got;
    }
    return FRAME_DONE;
}

bool epic_frame_wait(int socket, short events, time_limit *limit)
{
    struct pollfd one = {.fd = socket, .events = events};
    for (;;) {
        const int ms = time_limit_look(limit);
        if (poll(&one, 1, ms) > 0) return true;
        if (ms == 0) return false;
    }
}

epic_frame_state epic_frame_send_bytes(int socket, const void *bytes, size_t length,
                                       time_limit *limit)
{
    size_t done = 0;
    while (done < length) {
        const ssize_t sent = send(socket, (const char *)bytes + done, length - done,
                                  MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && !is_temporary_error()) return FRAME_LOST;
        if (sent > 0) done += (size_t)sent;
        if (sent < 0 && !epic_frame_wait(socket, POLLOUT, limit)) return FRAME_MORE;
    }
    return FRAME_DONE;
}

epic_frame_state epic_frame_receive_all(int socket, void *to, size_t bytes, time_limit *limit)
{
    for (size_t done = 0;;) {
        const epic_frame_state state = epic_frame_receive(socket, to, bytes, &done);
        if (state != FRAME_MORE) return state;
        if (!epic_frame_wait(socket, POLLIN, limit)) return FRAME_MORE;
    }
}

void epic_frame_set_no_delay(int socket)
{
    const int one = 1;
    (void)setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}
