/* SPDX-License-Identifier: Apache-2.0 */
/* The other ranks' side of the beginning of a TCP bootstrap: connect to rank 0, again and again
 * until it is there and lets us in: hello, proof, entry, begin.
 *
 * A rank that has a secret believes nobody who has not proved it: whatever else listens there or
 * answers is a reason to knock again, never the end of the bootstrap. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bootstrap/tcp.h"

#define FIRST_PAUSE_MS 5
#define LAST_PAUSE_MS 250
#define CONNECT_MS 5000 /* for one address: it may be a hole */
#define HELLO_MS 20000  /* until rank 0 has let us in; then we knock anew */

typedef struct visit {
    const epic_tcp *tcp;
    const epic_secret *secret;
    time_limit *limit; /* of the whole bootstrap */
    bool done;         /* the bootstrap succeeded or failed: no more attempts */
    bool heard;        /* somebody took a connection, */
    bool told;         /* and said something */
    char why[256];     /* what the last of the attempts that got furthest came to */
} visit;

/* 0, or why the socket is not connected. */
static int connect_to(int s, const epic_place *place, time_limit *limit)
{
    int wrong = 0;
    socklen_t wrong_bytes = sizeof wrong;
    if (connect(s, (const struct sockaddr *)&place->address, place->bytes) < 0) wrong = errno;
    if (wrong == EINPROGRESS || wrong == EINTR) {
        wrong = ETIMEDOUT;
        if (epic_frame_wait(s, POLLOUT, limit))
            (void)getsockopt(s, SOL_SOCKET, SO_ERROR, &wrong, &wrong_bytes);
    }
    return wrong;
}

/* Not rank 0, or not yet: another attempt may do better.  The result says no more.  One that ends
 * because the time is up knows less than one before it. */
static epic_result retry(visit *v, const char *why)
{
    if (!v->told || time_limit_look(v->limit) > 0) snprintf(v->why, sizeof v->why, "%s", why);
    v->heard = v->told = true;
    return EPIC_ETIMEOUT;
}

/* The same where nothing was said, as by a rank 0 whose own time is up. */
static epic_result retry_untold(visit *v, const char *why)
{
    const bool knows_more = v->told || (v->heard && time_limit_look(v->limit) == 0);
    if (!knows_more) snprintf(v->why, sizeof v->why, "%s", why);
    v->heard = true;
    return EPIC_ETIMEOUT;
}

static epic_result retry_unheard(visit *v, int wrong)
{
    if (!v->heard) snprintf(v->why, sizeof v->why, "%s", strerror(wrong));
    return EPIC_ETIMEOUT;
}

/* What no other attempt would change, if it is rank 0 who says so: without a secret it must be
 * believed. */
static epic_result give_up(visit *v, epic_result result)
{
    if (v->secret->text != NULL) return retry(v, epic_sentence());
    v->done = true;
    return result;
}

/* Is it worth going on with who sent this hello? */
static epic_result check_zero(visit *v, const epic_hello *theirs)
{
    const bool has_secret = v->secret->text != NULL;
    if (has_secret != (theirs->has_secret != 0))
        return give_up(
            v, epic_fail(EPIC_EINVAL,
                         "rank 0 has %s secret and rank %d has %s: set tcp.secret or "
                         "EPIC_SECRET on all ranks or on none",
                         has_secret ? "no" : "a", v->tcp->rank, has_secret ? "one" : "none"));
    if (theirs->version != FRAME_VERSION)
        return give_up(v, epic_fail(EPIC_EMISMATCH,
                                    "rank %d meets with protocol version %u and rank 0 with "
                                    "%u: use the same EPIC everywhere",
                                    v->tcp->rank, FRAME_VERSION, theirs->version));
    return EPIC_OK;
}

static epic_result send_proof(visit *v, epic_link *link, const epic_hello *theirs,
                              const epic_hello *ours)
{
    uint8_t proof[SECRET_PROOF];
    const bool has_secret = v->secret->text != NULL;
    if ((has_secret && !epic_secret_prove(v->secret, ROLE_CONNECTOR, theirs, ours, proof)) ||
        !epic_link_secure(link, v->secret, false, theirs, ours)) {
        v->done = true;
        return epic_fail(EPIC_ENOTSUP, "libcrypto refused to compute an HMAC");
    }
    if (has_secret) /* its answer will tell */
        (void)epic_frame_send_bytes(link->socket, proof, sizeof proof, v->limit);
    return EPIC_OK;
}

/* A frame that does not prove the secret.  The sentence of a refusal is for the user to judge. */
static epic_result retry_unproved(visit *v, int s, const epic_frame *frame, time_limit *limit)
{
    char sentence[FRAME_SENTENCE + 1] = "", part[200], why[sizeof v->why];
    if (frame->result != EPIC_OK) epic_link_hear(s, frame, sentence, limit);
    if (sentence[0] == '\0')
        return retry(v, "what listens there did not prove the secret (tcp.secret or "
                        "EPIC_SECRET): it is not rank 0, or has another secret");
    epic_fit(part, sizeof part, sentence);
    snprintf(why, sizeof why, "what listens there refused: %s", part);
    return retry(v, why);
}

/* Receives rank 0's word that we are in.  Without it there may be another try: rank 0 drops
 * guests when strangers flood it. */
static epic_result await_entry(visit *v, epic_link *link, time_limit *limit)
{
    epic_frame frame;
    if (epic_frame_receive_all(link->socket, &frame, sizeof frame, limit) != FRAME_DONE)
        return retry_untold(v, "it did not let us in");
    if (frame.magic != FRAME_MAGIC || (frame.result == EPIC_OK && frame.length != 0))
        return retry(v, "what listens there is not rank 0 of EPIC");
    if (!epic_link_check(link, &frame)) return retry_unproved(v, link->socket, &frame, limit);
    v->done = true;
    return frame.result == EPIC_OK ? EPIC_OK : epic_link_fail(link, &frame, limit);
}

/* Waits until every rank has come. */
static epic_result await_begin(const visit *v, epic_link *link)
{
    epic_frame frame;
    const epic_tcp *tcp = v->tcp;
    const epic_frame_state state =
        epic_frame_receive_all(link->socket, &frame, sizeof frame, v->limit);
    if (state == FRAME_MORE)
        return epic_fail(
            EPIC_ETIMEOUT,
            "rank 0 at %.64s, port %u let rank %d in, and did not begin the bootstrap "
            "within %u ms: it, or a rank that it waits for, did not come",
            tcp->address, tcp->port, tcp->rank, tcp->timeout_ms);
    if (state == FRAME_LOST)
        return epic_fail(EPIC_EPEER, "rank 0 at %.64s, port %u left before the bootstrap began",
                         tcp->address, tcp->port);
    if (!epic_link_check(link, &frame))
        return epic_fail(EPIC_EPEER,
                         "what came from %.64s, port %u before the bootstrap began was not "
                         "written by rank 0: somebody in between changed it",
                         tcp->address, tcp->port);
    return frame.result == EPIC_OK ? EPIC_OK : epic_link_fail(link, &frame, v->limit);
}

/* All of the beginning, over a fresh connection. */
static epic_result enter(visit *v, epic_link *link)
{
    epic_hello ours, theirs;
    const bool has_secret = v->secret->text != NULL;
    if (!epic_frame_hello(&ours, v->tcp->rank, v->tcp->num_ranks, has_secret, v->limit))
        return retry(v, "no random bytes");
    epic_frame_tune(link->socket);
    time_limit limit = time_limit_begin(HELLO_MS, v->limit);
    if (epic_frame_send_bytes(link->socket, &ours, sizeof ours, &limit) != FRAME_DONE)
        return retry_untold(v, "it took no hello");
    if (epic_frame_receive_all(link->socket, &theirs, sizeof theirs, &limit) != FRAME_DONE)
        return retry_untold(v, "it sent no hello");
    if (theirs.magic != HELLO_MAGIC ||
        theirs.rank != 0) /* our own hello, on a port to itself */
        return retry(v, "what listens there is not rank 0 of EPIC");

    TRY(check_zero(v, &theirs));
    TRY(send_proof(v, link, &theirs, &ours));
    TRY(await_entry(v, link, &limit));
    return await_begin(v, link);
}

static epic_result attempt(epic_link *out, visit *v, const epic_place *place)
{
    epic_link link = {.socket = socket(place->address.ss_family,
                                       SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
    if (link.socket < 0 && errno == EAFNOSUPPORT) return retry_unheard(v, errno);
    if (link.socket < 0) {
        v->done = true; /* our own want, not rank 0's absence */
        return epic_tcp_no_socket(errno);
    }
    time_limit limit = time_limit_begin(CONNECT_MS, v->limit);
    const int wrong = connect_to(link.socket, place, &limit);
    const epic_result result = wrong != 0 ? retry_unheard(v, wrong) : enter(v, &link);
    if (result == EPIC_OK)
        *out = link;
    else
        epic_link_close(&link);
    return result;
}

epic_result epic_tcp_connect(epic_link *out, const epic_tcp *tcp, const epic_secret *secret,
                             time_limit *limit)
{
    visit v = {.tcp = tcp, .secret = secret, .limit = limit};
    epic_places places;
    epic_result result = EPIC_ETIMEOUT;
    TRY(epic_tcp_places(&places, tcp, limit));

    for (int pause = FIRST_PAUSE_MS; !v.done; pause = pause * 3 / 2) {
        for (int i = 0; i < places.count && !v.done; i++)
            result = attempt(out, &v, &places.at[i]);
        if (v.done || time_limit_look(limit) == 0) break;
        if (pause > LAST_PAUSE_MS) pause = LAST_PAUSE_MS;
        time_limit_nap(limit, pause);
    }
    if (v.done) return result;
    return epic_fail(EPIC_ETIMEOUT,
                     "rank 0 did not come to %.64s, port %u within %u ms (best attempt of rank "
                     "%d: %s)",
                     tcp->address, tcp->port, tcp->timeout_ms, tcp->rank, v.why);
}
