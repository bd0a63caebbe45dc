/* SPDX-License-Identifier: Apache-2.0 */
/* Bootstraps over TCP. In a gather every rank sends its bytes to rank 0. When rank 0 has
 * received the bytes of all ranks, rank 0 sends all these bytes to every rank.
 *
 * A failure breaks the bootstrap: rank 0 sends the failure to every rank, and later gathers
 * return the same error text. frames.h describes the messages. Only one thread of a rank may
 * use its bootstrap at a time. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/sized.h"
#include "bootstrap/tcp.h"

#define SEND_MS 1000 /* time limit for rank 0 to send a failure to all ranks */
/* time that rank 0 waits after a failure before it closes its sockets, so that the other ranks
 * can read the failure */
#define DRAIN_MS 500

/* A link, and the state of the current gather on it. */
typedef struct connection {
    epic_link link;
    /* Only on rank 0. While rank 0 receives: true if all bytes of this gather have arrived from
     * the peer. While rank 0 sends: true if the bytes of all ranks are sent to the peer. */
    bool is_ready;
    epic_frame frame;
    size_t head;          /* number of bytes received of `frame` */
    size_t body;          /* number of bytes received after `frame` */
    epic_message message; /* the message that is being sent to the peer */
} connection;

typedef struct tcp_bootstrap {
    int32_t rank;
    int32_t num_ranks;
    uint32_t timeout_ms;
    uint64_t sequence; /* number of the current gather, from 1 */
    /* EPIC_OK, or the error of an earlier gather, which every later gather returns */
    epic_result broken;
    char sentence[512];
    /* libcrypto, for the links; after the bootstrap is open, secret.text is NULL, because each
     * link has its own key */
    epic_secret secret;
    int32_t num_connections;
    struct pollfd *polls; /* [num_connections]: the sockets to poll */
    /* on rank 0: [num_ranks], where element 0 is unused; on other ranks: [1], the connection to
     * rank 0 */
    connection connections[];
} tcp_bootstrap;

static unsigned long long gather_number(const tcp_bootstrap *b)
{
    return (unsigned long long)b->sequence;
}

/* Polls for `events` on connections that are not ready, and for `idle` on ready connections.
 * Returns false if the limit has passed and no connection has an event. */
static bool poll_connections(tcp_bootstrap *b, short events, short idle, time_limit *limit)
{
    const int32_t first =
        /* skip the unused entry, because poll() limits its number of entries */
        b->rank == 0 ? 1 : 0;
    for (int32_t i = first; i < b->num_connections; i++)
        b->polls[i] = (struct pollfd){.fd = b->connections[i].link.socket,
                                      .events = b->connections[i].is_ready ? idle : events};
    const int ms = time_limit_look(limit);
    const int changed = poll(b->polls + first, (nfds_t)(b->num_connections - first), ms);
    return changed > 0 || ms > 0;
}

static epic_result fail_lost(const tcp_bootstrap *b, int32_t rank)
{
    return epic_fail(EPIC_EPEER,
                     "gather %llu: rank %d closed its connection to rank 0: it died or "
                     "left the bootstrap",
                     gather_number(b), rank);
}

static epic_result fail_late(const tcp_bootstrap *b, const char *what)
{
    char names[256];
    bool *missing = calloc((size_t)b->num_ranks, sizeof *missing);
    if (missing != NULL)
        for (int32_t r = 1; r < b->num_ranks; r++) missing[r] = !b->connections[r].is_ready;
    if (missing != NULL) epic_bootstrap_list_ranks(names, sizeof names, missing, b->num_ranks);
    const epic_result result =
        epic_fail(EPIC_ETIMEOUT, "gather %llu: %s did not %s within %u ms", gather_number(b),
                  missing != NULL ? names : "some ranks", what, b->timeout_ms);
    free(missing);
    return result;
}

/* Returns the error for a frame that came from `rank`, but does not have the expected
 * authentication tag. */
static epic_result fail_forged(const tcp_bootstrap *b, int32_t rank)
{
    return epic_fail(EPIC_EPEER, "gather %llu: the data from rank %d was not written by it%s",
                     gather_number(b), rank,
                     b->connections[rank].link.secret != NULL
                         ? ": it was changed, repeated or left out on the way"
                         : "");
}

/* Checks that a frame is the next frame of its rank, belongs to this gather, and has `bytes`
 * bytes. */
static epic_result check_frame(tcp_bootstrap *b, int32_t rank, const epic_frame *frame,
                               size_t bytes)
{
    if (!epic_link_check(&b->connections[rank].link, frame)) return fail_forged(b, rank);
    if (frame->result != EPIC_OK)
        return epic_fail(EPIC_EPEER,
                         "gather %llu: the frame from rank %d does not belong to a gather",
                         gather_number(b), rank);
    if (frame->sequence != b->sequence)
        return epic_fail(EPIC_EMISMATCH,
                         "rank %d is at gather %llu of the bootstrap, rank 0 at %llu", rank,
                         (unsigned long long)frame->sequence, gather_number(b));
    if (frame->length != bytes)
        return epic_fail(
            EPIC_EMISMATCH,
            "gather %llu: bytes is %llu on rank %d and %zu on rank 0: must be equal "
            "on all ranks",
            gather_number(b), (unsigned long long)frame->length, rank, bytes);
    return EPIC_OK;
}

/* Receives bytes that a rank has sent. Sets is_ready of its connection when all bytes of this
 * gather have arrived. */
static epic_result receive_part(tcp_bootstrap *b, int32_t rank, char *to, size_t bytes,
                                time_limit *limit)
{
    connection *c = &b->connections[rank];
    /* A ready connection has an event only if its peer has closed it. If rank 0's limit has
     * passed, too, the peer probably closed the connection because the peer's limit passed
     * while other ranks were missing. So the error text lists the missing ranks. */
    if (c->is_ready)
        return time_limit_left_ms(limit) == 0 ? fail_late(b, "join") : fail_lost(b, rank);
    if (c->head < sizeof c->frame) {
        const epic_frame_state state =
            epic_frame_receive(c->link.socket, &c->frame, sizeof c->frame, &c->head);
        if (state == FRAME_LOST) return fail_lost(b, rank);
        if (state == FRAME_MORE) return EPIC_OK;
        TRY(check_frame(b, rank, &c->frame, bytes));
        epic_tcp_answer_earlier(limit, c->frame.left_ms);
    }
    const epic_frame_state state = epic_frame_receive(c->link.socket, to, bytes, &c->body);
    if (state == FRAME_LOST) return fail_lost(b, rank);
    if (state == FRAME_MORE) return EPIC_OK;
    if (!epic_link_check_bytes(&c->link, &c->frame, to))
        return epic_fail(EPIC_EPEER, "gather %llu: the bytes of rank %d arrived damaged",
                         gather_number(b), rank);
    c->is_ready = true;
    return EPIC_OK;
}

/* Receives the bytes of all ranks into `all` [num_ranks, bytes], in parallel. Returns an error
 * if a rank closes its connection while the bytes of another rank are missing. */
static epic_result collect_parts(tcp_bootstrap *b, char *all, size_t bytes, time_limit *limit)
{
    int32_t num_ready = 0;
    for (int32_t r = 1; r < b->num_ranks; r++) {
        connection *c = &b->connections[r];
        c->is_ready = false;
        c->head = c->body = 0;
    }
    while (num_ready < b->num_ranks - 1) {
        if (!poll_connections(b, POLLIN, POLLRDHUP, limit)) return fail_late(b, "join");
        for (int32_t r = 1; r < b->num_ranks; r++) {
            if (b->polls[r].revents == 0) continue;
            TRY(receive_part(b, r, all + (size_t)r * bytes, bytes, limit));
            num_ready += b->connections[r].is_ready;
        }
    }
    return EPIC_OK;
}

/* Sends the bytes of all ranks to every rank. If a connection is lost, still sends the bytes to
 * the other ranks, and then returns the error. */
static epic_result send_answers(tcp_bootstrap *b, const char *all, size_t bytes,
                                time_limit *limit)
{
    int32_t num_ready = 0;
    int32_t lost = 0;
    const epic_frame frame =
        epic_link_make_frame(b->connections[1].link.secret, EPIC_OK, b->sequence, all,
                             (size_t)b->num_ranks * bytes, limit);
    for (int32_t r = 1; r < b->num_ranks; r++) {
        b->connections[r].is_ready = false;
        b->connections[r].message = epic_link_message(&b->connections[r].link, &frame, all);
    }
    while (num_ready < b->num_ranks - 1) {
        if (!poll_connections(b, POLLOUT, 0, limit)) return fail_late(b, "receive the answer");
        for (int32_t r = 1; r < b->num_ranks; r++) {
            connection *c = &b->connections[r];
            if (b->polls[r].revents == 0 || c->is_ready) continue;
            const epic_frame_state state = epic_link_send(&c->link, &c->message);
            if (state == FRAME_LOST) lost = r;
            c->is_ready = state != FRAME_MORE;
            num_ready += c->is_ready;
        }
    }
    return lost == 0 ? EPIC_OK : fail_lost(b, lost);
}

/* Sends the failure stored in `b` to every rank that has not yet received a part of an answer.
 * A rank that has received a part would read the failure frame as the rest of the answer, so it
 * gets no failure frame and only notices that the connection is closed. */
static void send_failure_to_all(tcp_bootstrap *b)
{
    time_limit limit = time_limit_begin(SEND_MS, NULL);
    for (int32_t r = 1; r < b->num_ranks; r++) {
        const epic_message *message = &b->connections[r].message;
        epic_link *link = &b->connections[r].link;
        const size_t length = sizeof message->frame + message->frame.length;
        if (message->frame.magic == FRAME_MAGIC && message->done == 0)
            epic_link_reuse_number(link);
        if (message->done == 0 || message->done == length)
            epic_link_send_failure(link, b->broken, b->sentence, &limit);
        else
            (void)shutdown(link->socket, SHUT_WR);
    }
}

static epic_result gather_at_zero(tcp_bootstrap *b, const void *mine, char *all, size_t bytes,
                                  time_limit *limit)
{
    if (bytes > 0) memmove(all, mine, bytes);
    TRY(collect_parts(b, all, bytes, limit));
    return send_answers(b, all, bytes, limit);
}

static epic_result fail_silent(const tcp_bootstrap *b)
{
    return epic_fail(
        EPIC_ETIMEOUT,
        "gather %llu: rank 0 did not answer rank %d within %u ms: it, or a rank that "
        "it waits for, did not join",
        gather_number(b), b->rank, b->timeout_ms);
}

static epic_result fail_rank_0_lost(const tcp_bootstrap *b)
{
    return epic_fail(EPIC_EPEER,
                     "gather %llu: rank 0 closed its connection to rank %d: it died or "
                     "left the bootstrap",
                     gather_number(b), b->rank);
}

/* Sends this rank's bytes and at the same time receives the frame of the answer, because rank 0
 * may send a failure before it has received all bytes. If the rank only sent, it could wait for
 * room in the socket forever and never read the failure. */
static epic_result exchange_heads(tcp_bootstrap *b, epic_message *message, time_limit *limit)
{
    connection *c = &b->connections[0];
    bool sending = true;
    c->head = 0;
    c->is_ready = false;
    for (;;) {
        if (sending) sending = epic_link_send(&c->link, message) == FRAME_MORE;
        const epic_frame_state state =
            epic_frame_receive(c->link.socket, &c->frame, sizeof c->frame, &c->head);
        if (state == FRAME_LOST) return fail_rank_0_lost(b);
        if (state == FRAME_DONE) return EPIC_OK;
        const short events = (short)(sending ? POLLIN | POLLOUT : POLLIN);
        if (!poll_connections(b, events, 0, limit)) return fail_silent(b);
    }
}

static epic_result gather_at_other_rank(tcp_bootstrap *b, const void *mine, char *all,
                                        size_t bytes, time_limit *limit)
{
    const size_t total = (size_t)b->num_ranks * bytes;
    epic_link *link = &b->connections[0].link;
    const epic_frame *frame = &b->connections[0].frame;
    const epic_frame ours =
        epic_link_make_frame(link->secret, EPIC_OK, b->sequence, mine, bytes, limit);
    epic_message message = epic_link_message(link, &ours, mine);
    TRY(exchange_heads(b, &message, limit));
    if (!epic_link_check(link, frame)) return fail_forged(b, 0);
    if (frame->result != EPIC_OK) return epic_link_receive_failure(link, frame, limit);
    if (frame->sequence != b->sequence || frame->length != total)
        return epic_fail(EPIC_EPEER, "gather %llu: the frame from rank 0 is not its answer",
                         gather_number(b));

    const epic_frame_state state = epic_frame_receive_all(link->socket, all, total, limit);
    if (state == FRAME_LOST) return fail_rank_0_lost(b);
    if (state == FRAME_MORE) return fail_silent(b);
    if (!epic_link_check_bytes(link, frame, all))
        return epic_fail(EPIC_EPEER, "gather %llu: the answer of rank 0 arrived damaged",
                         gather_number(b));
    return EPIC_OK;
}

static epic_result tcp_gather(void *self, const void *mine, void *all, int64_t bytes)
{
    tcp_bootstrap *b = self;
    TRY(epic_bootstrap_check(mine, all, bytes));
    if (b->broken != EPIC_OK) return epic_fail(b->broken, "%s", b->sentence);

    time_limit limit = time_limit_begin(b->timeout_ms, NULL);
    b->sequence++;
    const epic_result result = b->rank == 0 ? gather_at_zero(b, mine, all, bytes, &limit)
                                            : gather_at_other_rank(b, mine, all, bytes, &limit);
    if (result == EPIC_OK) return EPIC_OK;
    b->broken = result;
    snprintf(b->sentence, sizeof b->sentence, "%s", epic_sentence());
    if (b->rank == 0) send_failure_to_all(b);
    return result;
}

/* Reads and discards bytes from the peers until they close. Rank 0 does this after a failure
 * before it closes its sockets, because TCP resets a connection with unread bytes, and the peer
 * could lose the failure. */
static void drain_connections(tcp_bootstrap *b)
{
    char rubbish[4096];
    time_limit limit = time_limit_begin(DRAIN_MS, NULL);
    for (int32_t r = 1; r < b->num_ranks; r++) {
        b->connections[r].is_ready = false;
        (void)shutdown(b->connections[r].link.socket, SHUT_WR);
    }
    for (int32_t r = 1; r < b->num_ranks; r++)
        for (epic_frame_state state = FRAME_DONE; state != FRAME_LOST;) {
            size_t done = 0;
            const int s = b->connections[r].link.socket;
            state = epic_frame_receive(s, rubbish, sizeof rubbish, &done);
            if (state == FRAME_MORE && !epic_frame_wait(s, POLLIN, &limit)) break;
        }
}

static void close_bootstrap(void *self)
{
    tcp_bootstrap *b = self;
    if (b->rank == 0 && b->broken != EPIC_OK) drain_connections(b);
    for (int32_t i = 0; i < b->num_connections; i++) epic_link_close(&b->connections[i].link);
    epic_secret_close(&b->secret);
    free(b->polls);
    free(b);
}

static epic_result check_tcp(const epic_tcp *tcp)
{
    if (tcp->num_ranks < 1 || tcp->num_ranks > BOOTSTRAP_MAX_RANKS)
        return epic_fail(EPIC_EINVAL, "tcp.num_ranks is %d: must be from 1 to %d",
                         tcp->num_ranks, BOOTSTRAP_MAX_RANKS);
    if (tcp->rank < 0 || tcp->rank >= tcp->num_ranks)
        return epic_fail(EPIC_EINVAL,
                         "tcp.rank is %d: must be from 0 to tcp.num_ranks - 1, which is %d",
                         tcp->rank, tcp->num_ranks - 1);
    if (tcp->port < 1 || tcp->port > 65535)
        return epic_fail(EPIC_EINVAL, "tcp.port is %u: must be from 1 to 65535", tcp->port);
    return EPIC_OK;
}

/* Connects this rank's links: rank 0 accepts all other ranks, and another rank connects to rank
 * 0. Requires that the bootstrap's memory is allocated. */
static epic_result connect_ranks(tcp_bootstrap *b, const epic_tcp *tcp)
{
    time_limit limit = time_limit_begin(tcp->timeout_ms, NULL);
    epic_link *links = calloc((size_t)b->num_connections, sizeof *links);
    if (links == NULL)
        return epic_fail(EPIC_ENOMEM, "no memory for a bootstrap of %d ranks", tcp->num_ranks);
    epic_result result = epic_secret_open(&b->secret, tcp->secret);
    if (result == EPIC_OK)
        result = tcp->rank == 0 ? epic_tcp_accept(links, tcp, &b->secret, &limit)
                                : epic_tcp_connect(links, tcp, &b->secret, &limit);
    for (int32_t i = 0; i < b->num_connections && result == EPIC_OK; i++)
        b->connections[i].link = links[i];
    b->secret.text = NULL;
    free(links);
    return result;
}

static epic_result open_bootstrap(epic_bootstrap *out, const epic_tcp *tcp)
{
    const int32_t num_connections = tcp->rank == 0 ? tcp->num_ranks : 1;
    tcp_bootstrap *b =
        calloc(1, sizeof *b + (size_t)num_connections * sizeof b->connections[0]);
    struct pollfd *polls = calloc((size_t)num_connections, sizeof *polls);
    if (b == NULL || polls == NULL) {
        free(polls);
        free(b);
        return epic_fail(EPIC_ENOMEM, "no memory for a bootstrap of %d ranks", tcp->num_ranks);
    }
    b->rank = tcp->rank;
    b->num_ranks = tcp->num_ranks;
    b->timeout_ms = tcp->timeout_ms;
    b->num_connections = num_connections;
    b->polls = polls;
    for (int32_t i = 0; i < num_connections; i++) b->connections[i].link.socket = -1;
    const epic_result result = connect_ranks(b, tcp);
    if (result == EPIC_OK)
        *out = (epic_bootstrap){tcp->rank, tcp->num_ranks, tcp_gather, close_bootstrap, b};
    else
        close_bootstrap(b);
    return result;
}

epic_result epic_bootstrap_tcp_v1(epic_bootstrap *out, const epic_tcp *theirs, size_t size)
{
    epic_tcp tcp;
    if (out == NULL)
        return epic_fail(EPIC_EINVAL, "out is NULL: pass an epic_bootstrap to fill in");
    /* makes *out valid for epic_bootstrap_close(), even if this function returns an error */
    *out = (epic_bootstrap){0};
    TRY(READ_SIZED(&tcp, theirs, size, "epic_tcp"));
    TRY(check_tcp(&tcp));
    if (tcp.address == NULL) tcp.address = "127.0.0.1";
    if (tcp.timeout_ms == 0) tcp.timeout_ms = BOOTSTRAP_TIMEOUT_MS;
    if (tcp.num_ranks > 1) return open_bootstrap(out, &tcp);
    epic_bootstrap_of_one(out);
    return EPIC_OK;
}
