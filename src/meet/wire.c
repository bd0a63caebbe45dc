/* SPDX-License-Identifier: Apache-2.0 */
/* What travels between two ranks of a TCP meeting.  Sockets are non-blocking; every wait is a
 * poll() with a deadline. */
#include "meet/wire.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>

bool epic_wire_hello(epic_hello *out, int32_t rank, int32_t num_ranks, bool has_secret,
                     int64_t end)
{
    *out = (epic_hello){
        .magic = WIRE_HELLO,
        .version = WIRE_VERSION,
        .rank = rank,
        .num_ranks = num_ranks,
        .left_ms = (uint32_t)epic_meet_left(end),
        .has_secret = has_secret,
    };
    return getrandom(out->nonce, sizeof out->nonce, 0) == (ssize_t)sizeof out->nonce;
}

uint64_t epic_wire_checksum(const void *bytes, size_t length)
{
    /* Multiply and fold, eight bytes at a time: every bit reaches every later one. */
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

epic_letter epic_wire_letter(epic_result result, uint64_t sequence, const void *bytes,
                             size_t length, int64_t end)
{
    const epic_frame frame = {
        .magic = WIRE_FRAME,
        .result = (uint32_t)result,
        .sequence = sequence,
        .length = length,
        .checksum = epic_wire_checksum(bytes, length),
        .left_ms = (uint32_t)epic_meet_left(end),
    };
    return (epic_letter){.frame = frame, .bytes = bytes};
}

static bool again(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

epic_wire epic_wire_send(int socket, epic_letter *letter)
{
    const size_t head = sizeof letter->frame;
    const size_t total = head + letter->frame.length;
    while (letter->done < total) {
        const size_t in_head = letter->done < head ? letter->done : head;
        const size_t in_bytes = letter->done - in_head;
        struct iovec parts[2] = {{(char *)&letter->frame + in_head, head - in_head}};
        if (letter->frame.length > 0) /* sendmsg does not write to the bytes that it is given */
            parts[1] = (struct iovec){(char *)(uintptr_t)letter->bytes + in_bytes,
                                      letter->frame.length - in_bytes};
        const struct msghdr message = {.msg_iov = parts,
                                       .msg_iovlen = letter->frame.length > 0 ? 2 : 1};
        const ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) return again() ? WIRE_MORE : WIRE_LOST;
        letter->done += (size_t)sent;
    }
    return WIRE_DONE;
}

epic_wire epic_wire_receive(int socket, void *to, size_t bytes, size_t *done)
{
    while (*done < bytes) {
        const ssize_t got = recv(socket, (char *)to + *done, bytes - *done, MSG_DONTWAIT);
        if (got < 0) return again() ? WIRE_MORE : WIRE_LOST;
        if (got == 0) return WIRE_LOST;
        *done += (size_t)got;
    }
    return WIRE_DONE;
}

bool epic_wire_wait(int socket, short events, int64_t end)
{
    struct pollfd one = {.fd = socket, .events = events};
    for (;;) {
        const int left = epic_meet_left(end);
        if (poll(&one, 1, left) > 0) return true;
        if (left == 0) return false;
    }
}

epic_wire epic_wire_send_bytes(int socket, const void *bytes, size_t length, int64_t end)
{
    size_t done = 0;
    while (done < length) {
        const ssize_t sent = send(socket, (const char *)bytes + done, length - done,
                                  MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && !again()) return WIRE_LOST;
        if (sent > 0) done += (size_t)sent;
        if (sent < 0 && !epic_wire_wait(socket, POLLOUT, end)) return WIRE_MORE;
    }
    return WIRE_DONE;
}

epic_wire epic_wire_send_all(int socket, epic_letter *letter, int64_t end)
{
    for (;;) {
        const epic_wire state = epic_wire_send(socket, letter);
        if (state != WIRE_MORE) return state;
        if (!epic_wire_wait(socket, POLLOUT, end)) return WIRE_MORE;
    }
}

epic_wire epic_wire_receive_all(int socket, void *to, size_t bytes, int64_t end)
{
    for (size_t done = 0;;) {
        const epic_wire state = epic_wire_receive(socket, to, bytes, &done);
        if (state != WIRE_MORE) return state;
        if (!epic_wire_wait(socket, POLLIN, end)) return WIRE_MORE;
    }
}

void epic_wire_tell(int socket, epic_result result, const char *sentence, int64_t end)
{
    const size_t length = strlen(sentence);
    epic_letter letter = epic_wire_letter(result, 0, sentence, length, end);
    (void)epic_wire_send_all(socket, &letter, end);
}

epic_result epic_wire_fail(int socket, const epic_frame *frame, int64_t end)
{
    char sentence[WIRE_SENTENCE + 1] = {0};
    if (frame->result > EPIC_ECLOSED || frame->length > WIRE_SENTENCE ||
        epic_wire_receive_all(socket, sentence, frame->length, end) != WIRE_DONE ||
        epic_wire_checksum(sentence, frame->length) != frame->checksum)
        return epic_fail(EPIC_EPEER, "rank 0 failed, and its reason did not arrive whole");

    /* It may end on somebody's terminal. */
    for (char *at = sentence; *at != '\0'; at++)
        if ((unsigned char)*at < ' ' || *at == 127) *at = '?';
    return epic_fail((epic_result)frame->result, "%s", sentence);
}

void epic_wire_tune(int socket)
{
    const int one = 1;
    (void)setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}
