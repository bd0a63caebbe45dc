/* SPDX-License-Identifier: Apache-2.0 */
/* The part of a TCP bootstrap that runs on all ranks except rank 0: connects to rank 0.
 *
 * The rank tries again and again until rank 0 listens and admits it. On each connection the
 * rank sends its hello and its proof of the secret. After that, the rank receives two frames
 * (bootstrap/frames.h). The entry frame admits the rank. The begin frame follows when all ranks
 * have joined.
 *
 * A rank with a secret trusts an answer only if the answer proves that rank 0 has the secret.
 * After any other answer it tries again, so another program at the address cannot end the
 * bootstrap. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bootstrap/tcp.h"

#define FIRST_PAUSE_MS 5
#define LAST_PAUSE_MS 250
#define CONNECT_MS 5000 /* time limit for connecting to one address, which may never answer */
/* time limit for rank 0 to admit this rank; when it passes, the rank connects again */
#define HELLO_MS 20000

/* State of a rank that connects. Only the thread that opens the bootstrap uses it. */
typedef struct connector {
    const epic_tcp *tcp;
    const epic_secret *secret;
    time_limit *limit; /* limit of the whole bootstrap */
    /* true: the bootstrap has succeeded or failed, so there are no more attempts */
    bool is_done;
    bool was_reached;  /* true: in some attempt a listener accepted the connection */
    bool has_answered; /* true: in some attempt the other end sent bytes */
    char why[256];     /* why the attempt that got furthest failed, for the error text */
} connector;

/* Connects a socket to an endpoint within the limit. Returns 0 or an errno. */
static int connect_socket(int s, const epic_endpoint *endpoint, time_limit *limit)
{
    int wrong = 0;
    socklen_t wrong_bytes = sizeof wrong;
    if (connect(s, (const struct sockaddr *)&endpoint->address, endpoint->bytes) < 0)
        wrong = errno;
    if (wrong == EINPROGRESS || wrong == EINTR) {
        wrong = ETIMEDOUT;
        if (epic_frame_wait(s, POLLOUT, limit))
            (void)getsockopt(s, SOL_SOCKET, SO_ERROR, &wrong, &wrong_bytes);
    }
    return wrong;
}

/* Called after a failed attempt in which the other end sent bytes. Stores the reason `why`. If
 * the time limit ended this attempt and an earlier attempt has already stored a reason here,
 * keeps the earlier reason, because it has more detail. Returns EPIC_ETIMEOUT, which means: try
 * again. */
static epic_result retry_after_answer(connector *c, const char *why)
{
    if (!c->has_answered || time_limit_look(c->limit) > 0)
        snprintf(c->why, sizeof c->why, "%s", why);
    c->was_reached = c->has_answered = true;
    return EPIC_ETIMEOUT;
}

/* Called after a failed attempt in which the connection was accepted, but no bytes arrived.
 * Stores the reason `why`, unless an earlier attempt got further. Returns EPIC_ETIMEOUT. */
static epic_result retry_after_silence(connector *c, const char *why)
{
    const bool knows_more =
        c->has_answered || (c->was_reached && time_limit_look(c->limit) == 0);
    if (!knows_more) snprintf(c->why, sizeof c->why, "%s", why);
    c->was_reached = true;
    return EPIC_ETIMEOUT;
}

/* Called after a failed attempt that found no listener. Stores the errno `wrong` as the reason,
 * unless an earlier attempt got further. Returns EPIC_ETIMEOUT (try again). */
static epic_result retry_unreached(connector *c, int wrong)
{
    if (!c->was_reached) snprintf(c->why, sizeof c->why, "%s", strerror(wrong));
    return EPIC_ETIMEOUT;
}

/* Handles an error that would occur in every attempt. Without a secret, ends the bootstrap with
 * this error. With a secret, the answer may not be from rank 0, so the caller tries again. */
static epic_result fail_or_retry(connector *c, epic_result result)
{
    if (c->secret->text != NULL) return retry_after_answer(c, epic_sentence());
    c->is_done = true;
    return result;
}

/* Checks the hello of rank 0: the version must be this rank's version, and rank 0 must have a
 * secret if and only if this rank has a secret. */
static epic_result check_rank_0(connector *c, const epic_hello *theirs)
{
    const bool has_secret = c->secret->text != NULL;
    if (has_secret != (theirs->has_secret != 0))
        return fail_or_retry(
            c, epic_fail(EPIC_EINVAL,
                         "rank 0 has %s secret and rank %d has %s: set tcp.secret or "
                         "EPIC_SECRET on all ranks or on none",
                         has_secret ? "no" : "a", c->tcp->rank, has_secret ? "one" : "none"));
    if (theirs->version != FRAME_VERSION)
        return fail_or_retry(
            c, epic_fail(EPIC_EMISMATCH,
                         "rank %d has bootstrap protocol version %u and rank 0 has "
                         "%u: use the same version of EPIC on all ranks",
                         c->tcp->rank, FRAME_VERSION, theirs->version));
    return EPIC_OK;
}

/* If there is a secret, sends this rank's proof that it has the secret, and computes the key of
 * the link. */
static epic_result send_proof(connector *c, epic_link *link, const epic_hello *theirs,
                              const epic_hello *ours)
{
    uint8_t proof[SECRET_PROOF];
    const bool has_secret = c->secret->text != NULL;
    if ((has_secret && !epic_secret_prove(c->secret, ROLE_CONNECTOR, theirs, ours, proof)) ||
        !epic_link_secure(link, c->secret, false, theirs, ours)) {
        c->is_done = true;
        return epic_fail(EPIC_ENOTSUP, "libcrypto refused to compute an HMAC");
    }
    /* an error of the send is ignored here, because wait_for_entry() will report it */
    if (has_secret) (void)epic_frame_send_bytes(link->socket, proof, sizeof proof, c->limit);
    return EPIC_OK;
}

/* Called after a failed attempt that received a frame without a valid authentication tag.
 * Stores the reason for the error text of this rank. If the frame is a refusal, the reason
 * contains the frame's error text. Any program may have sent the frame, so this rank only
 * prints its text and tries again. */
static epic_result retry_unproved(connector *c, int s, const epic_frame *frame,
                                  time_limit *limit)
{
    char sentence[FRAME_SENTENCE + 1] = "", part[200], why[sizeof c->why];
    if (frame->result != EPIC_OK) epic_link_receive_unproved(s, frame, sentence, limit);
    if (sentence[0] == '\0')
        return retry_after_answer(c,
                                  "what listens there did not prove the secret (tcp.secret or "
                                  "EPIC_SECRET): it is not rank 0, or has another secret");
    epic_fit_text(part, sizeof part, sentence);
    snprintf(why, sizeof why, "what listens there refused: %s", part);
    return retry_after_answer(c, why);
}

/* Receives the entry frame, with which rank 0 admits this rank, or a failure frame. If no frame
 * arrives, this rank tries again, because rank 0 closes some connections if too many ranks
 * connect. */
static epic_result wait_for_entry(connector *c, epic_link *link, time_limit *limit)
{
    epic_frame frame;
    if (epic_frame_receive_all(link->socket, &frame, sizeof frame, limit) != FRAME_DONE)
        return retry_after_silence(c, "it did not admit this rank");
    if (frame.magic != FRAME_MAGIC || (frame.result == EPIC_OK && frame.length != 0))
        return retry_after_answer(c, "what listens there is not rank 0 of EPIC");
    if (!epic_link_check(link, &frame)) return retry_unproved(c, link->socket, &frame, limit);
    c->is_done = true;
    return frame.result == EPIC_OK ? EPIC_OK : epic_link_receive_failure(link, &frame, limit);
}

/* Receives the begin frame, which rank 0 sends when all ranks have joined. In this phase every
 * error ends the bootstrap. */
static epic_result wait_for_begin(const connector *c, epic_link *link)
{
    epic_frame frame;
    const epic_tcp *tcp = c->tcp;
    const epic_frame_state state =
        epic_frame_receive_all(link->socket, &frame, sizeof frame, c->limit);
    if (state == FRAME_MORE)
        return epic_fail(
            EPIC_ETIMEOUT,
            "rank 0 at %.64s, port %u admitted rank %d, and did not begin the bootstrap "
            "within %u ms: rank 0, or a rank that it waits for, is late",
            tcp->address, tcp->port, tcp->rank, tcp->timeout_ms);
    if (state == FRAME_LOST)
        return epic_fail(EPIC_EPEER, "rank 0 at %.64s, port %u left before the bootstrap began",
                         tcp->address, tcp->port);
    if (!epic_link_check(link, &frame))
        return epic_fail(EPIC_EPEER,
                         "the data from %.64s, port %u was not written by rank 0: it was "
                         "changed on the way",
                         tcp->address, tcp->port);
    return frame.result == EPIC_OK ? EPIC_OK
                                   : epic_link_receive_failure(link, &frame, c->limit);
}

/* Joins over a new connection: exchanges hellos and proofs, then waits for all ranks. */
static epic_result join_rank_0(connector *c, epic_link *link)
{
    epic_hello ours, theirs;
    const bool has_secret = c->secret->text != NULL;
    if (!epic_frame_make_hello(&ours, c->tcp->rank, c->tcp->num_ranks, has_secret, c->limit))
        return retry_after_answer(c, "no random bytes");
    epic_frame_set_no_delay(link->socket);
    time_limit limit = time_limit_begin(HELLO_MS, c->limit);
    if (epic_frame_send_bytes(link->socket, &ours, sizeof ours, &limit) != FRAME_DONE)
        return retry_after_silence(c, "it did not receive our hello");
    if (epic_frame_receive_all(link->socket, &theirs, sizeof theirs, &limit) != FRAME_DONE)
        return retry_after_silence(c, "it sent no hello");
    /* A socket that is accidentally connected to itself receives this rank's own hello, whose
     * rank is not 0. */
    if (theirs.magic != HELLO_MAGIC || theirs.rank != 0)
        return retry_after_answer(c, "what listens there is not rank 0 of EPIC");

    TRY(check_rank_0(c, &theirs));
    TRY(send_proof(c, link, &theirs, &ours));
    TRY(wait_for_entry(c, link, &limit));
    return wait_for_begin(c, link);
}

static epic_result try_endpoint(epic_link *out, connector *c, const epic_endpoint *endpoint)
{
    epic_link link = {.socket = socket(endpoint->address.ss_family,
                                       SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
    if (link.socket < 0 && errno == EAFNOSUPPORT) return retry_unreached(c, errno);
    if (link.socket < 0) {
        c->is_done = true; /* the cause is on this rank, so further attempts would fail too */
        return epic_tcp_no_socket(errno);
    }
    time_limit limit = time_limit_begin(CONNECT_MS, c->limit);
    const int wrong = connect_socket(link.socket, endpoint, &limit);
    const epic_result result = wrong != 0 ? retry_unreached(c, wrong) : join_rank_0(c, &link);
    if (result == EPIC_OK)
        *out = link;
    else
        epic_link_close(&link);
    return result;
}

epic_result epic_tcp_connect(epic_link *out, const epic_tcp *tcp, const epic_secret *secret,
                             time_limit *limit)
{
    connector c = {.tcp = tcp, .secret = secret, .limit = limit};
    epic_endpoints endpoints;
    epic_result result = EPIC_ETIMEOUT;
    TRY(epic_tcp_endpoints(&endpoints, tcp, limit));

    for (int pause = FIRST_PAUSE_MS; !c.is_done; pause = pause * 3 / 2) {
        for (int i = 0; i < endpoints.count && !c.is_done; i++)
            result = try_endpoint(out, &c, &endpoints.at[i]);
        if (c.is_done || time_limit_look(limit) == 0) break;
        if (pause > LAST_PAUSE_MS) pause = LAST_PAUSE_MS;
        time_limit_nap(limit, pause);
    }
    if (c.is_done) return result;
    return epic_fail(
        EPIC_ETIMEOUT,
        "rank 0 did not accept rank %d at %.64s, port %u within %u ms (best attempt: %s)",
        tcp->rank, tcp->address, tcp->port, tcp->timeout_ms, c.why);
}
