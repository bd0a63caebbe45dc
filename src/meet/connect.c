/* SPDX-License-Identifier: Apache-2.0 */
/* The other ranks' side of the beginning of a TCP meeting: connect to rank 0, again and again
 * until it is there and lets us in: hello, proof, entry, begin. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "meet/tcp.h"

#define FIRST_PAUSE_MS 5
#define LAST_PAUSE_MS 250
#define CONNECT_MS 5000 /* for one address: it may be a hole */
#define HELLO_MS 20000  /* until rank 0 has let us in; then we knock anew */

typedef struct visit {
    const epic_tcp *tcp;
    const epic_secret *secret;
    int64_t end;
    bool done;     /* the meeting succeeded or failed: no more attempts */
    char why[128]; /* what the last attempt came to */
} visit;

int64_t epic_tcp_grace(uint32_t timeout_ms)
{
    return timeout_ms / 2 < 1000 ? timeout_ms / 2 : 1000;
}

static int64_t soonest(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* A connected socket, or -1 and errno. */
static int connect_to(const struct addrinfo *address, int64_t end)
{
    int wrong = 0;
    socklen_t wrong_bytes = sizeof wrong;
    const int s = socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (s < 0) return -1;
    if (connect(s, address->ai_addr, address->ai_addrlen) < 0) wrong = errno;
    if (wrong == EINPROGRESS || wrong == EINTR) {
        wrong = ETIMEDOUT;
        if (epic_wire_wait(s, POLLOUT, end))
            (void)getsockopt(s, SOL_SOCKET, SO_ERROR, &wrong, &wrong_bytes);
    }
    if (wrong == 0) return s;
    close(s);
    errno = wrong;
    return -1;
}

/* Not rank 0, or not yet: another attempt may do better.  The result says no more. */
static epic_result retry(visit *v, const char *why)
{
    snprintf(v->why, sizeof v->why, "%s", why);
    return EPIC_ETIMEOUT;
}

static epic_result check_secrets(const visit *v, const epic_hello *theirs)
{
    const bool has_secret = v->secret->text != NULL;
    if (has_secret == (theirs->has_secret != 0)) return EPIC_OK;
    return epic_fail(
        EPIC_EINVAL,
        "rank 0 has %s secret and rank %d has %s: set tcp.secret or EPIC_SECRET on "
        "all ranks or on none",
        has_secret ? "no" : "a", v->tcp->rank, has_secret ? "one" : "none");
}

static epic_result send_proof(const visit *v, int s, const epic_hello *theirs,
                              const epic_hello *ours)
{
    uint8_t proof[SECRET_PROOF];
    if (v->secret->text == NULL) return EPIC_OK;
    if (!epic_secret_prove(v->secret, false, theirs, ours, proof))
        return epic_fail(EPIC_ENOTSUP, "libcrypto refused to compute an HMAC");
    (void)epic_wire_send_bytes(s, proof, sizeof proof, v->end); /* its answer will tell */
    return EPIC_OK;
}

/* Receives rank 0's word that we are in, and its proof.  Without it there may be another try:
 * rank 0 drops guests when strangers flood it. */
static epic_result await_entry(visit *v, int s, const epic_hello *theirs,
                               const epic_hello *ours, int64_t limit)
{
    epic_frame frame;
    uint8_t proof[SECRET_PROOF];
    if (epic_wire_receive_all(s, &frame, sizeof frame, limit) != WIRE_DONE)
        return retry(v, "it did not let us in");
    if (frame.magic != WIRE_FRAME || (frame.result == EPIC_OK && frame.length != sizeof proof))
        return retry(v, "what listens there is not rank 0 of EPIC");
    if (frame.result != EPIC_OK) {
        v->done = true;
        return epic_wire_fail(s, &frame, limit);
    }
    if (epic_wire_receive_all(s, proof, sizeof proof, limit) != WIRE_DONE)
        return retry(v, "it did not let us in");

    v->done = true;
    if (v->secret->text == NULL || epic_secret_check(v->secret, true, theirs, ours, proof))
        return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     "what listens at %.64s, port %u did not prove the secret (tcp.secret or "
                     "EPIC_SECRET) of rank %d: it is not rank 0",
                     v->tcp->address, v->tcp->port, v->tcp->rank);
}

/* Waits until every rank has come. */
static epic_result await_begin(const visit *v, int s)
{
    epic_frame frame;
    const epic_tcp *tcp = v->tcp;
    const int64_t end = v->end + epic_tcp_grace(tcp->timeout_ms);
    const epic_wire state = epic_wire_receive_all(s, &frame, sizeof frame, end);
    if (state == WIRE_MORE)
        return epic_fail(
            EPIC_ETIMEOUT,
            "rank 0 at %.64s, port %u let rank %d in, and did not begin the meeting "
            "within %u ms: it, or a rank that it waits for, did not come",
            tcp->address, tcp->port, tcp->rank, tcp->timeout_ms);
    if (state == WIRE_LOST || frame.magic != WIRE_FRAME)
        return epic_fail(EPIC_EPEER, "rank 0 at %.64s, port %u left before the meeting began",
                         tcp->address, tcp->port);
    return frame.result == EPIC_OK ? EPIC_OK : epic_wire_fail(s, &frame, end);
}

/* What no other attempt would change: EPIC_OK, or the end of this rank's meeting. */
static epic_result check_zero(const visit *v, int s, const epic_hello *theirs,
                              const epic_hello *ours)
{
    TRY(check_secrets(v, theirs));
    TRY(send_proof(v, s, theirs, ours));
    if (theirs->version == WIRE_VERSION) return EPIC_OK;
    return epic_fail(EPIC_EMISMATCH,
                     "rank %d meets with protocol version %u and rank 0 with %u: use the same "
                     "EPIC everywhere",
                     v->tcp->rank, WIRE_VERSION, theirs->version);
}

/* All of the beginning, over a fresh connection. */
static epic_result enter(visit *v, int s)
{
    epic_hello ours, theirs;
    const bool has_secret = v->secret->text != NULL;
    if (!epic_wire_hello(&ours, v->tcp->rank, v->tcp->num_ranks, has_secret, v->end))
        return retry(v, "no random bytes");
    epic_wire_tune(s);
    const int64_t limit = soonest(v->end, epic_meet_now() + HELLO_MS);
    if (epic_wire_send_bytes(s, &ours, sizeof ours, limit) != WIRE_DONE)
        return retry(v, "it took no hello");
    if (epic_wire_receive_all(s, &theirs, sizeof theirs, limit) != WIRE_DONE)
        return retry(v, "it sent no hello");
    if (theirs.magic != WIRE_HELLO || theirs.rank != 0) /* our own hello, on a port to itself */
        return retry(v, "what listens there is not rank 0 of EPIC");

    epic_result result = check_zero(v, s, &theirs, &ours);
    v->done = result != EPIC_OK;
    if (result == EPIC_OK) result = await_entry(v, s, &theirs, &ours, limit);
    return result == EPIC_OK ? await_begin(v, s) : result;
}

static epic_result attempt(int *out, visit *v, const struct addrinfo *address)
{
    const int s = connect_to(address, soonest(v->end, epic_meet_now() + CONNECT_MS));
    if (s < 0) return retry(v, strerror(errno));
    const epic_result result = enter(v, s);
    if (result == EPIC_OK)
        *out = s;
    else
        close(s);
    return result;
}

epic_result epic_tcp_connect(int *out, const epic_tcp *tcp, const epic_secret *secret,
                             int64_t end)
{
    visit v = {.tcp = tcp, .secret = secret, .end = end};
    struct addrinfo *addresses = NULL;
    epic_result result = EPIC_ETIMEOUT;
    TRY(epic_tcp_resolve(&addresses, tcp, end));

    for (int pause = FIRST_PAUSE_MS; !v.done; pause = pause * 3 / 2) {
        for (const struct addrinfo *at = addresses; at != NULL && !v.done; at = at->ai_next)
            result = attempt(out, &v, at);
        if (v.done || epic_meet_left(end) == 0) break;
        if (pause > LAST_PAUSE_MS) pause = LAST_PAUSE_MS;
        const int left = epic_meet_left(end);
        poll(NULL, 0, pause < left ? pause : left);
    }
    freeaddrinfo(addresses);
    if (v.done) return result;
    return epic_fail(EPIC_ETIMEOUT,
                     "rank 0 did not come to %.64s, port %u within %u ms (last attempt of rank "
                     "%d: %s)",
                     tcp->address, tcp->port, tcp->timeout_ms, tcp->rank, v.why);
}
