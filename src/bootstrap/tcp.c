/* SPDX-License-Identifier: Apache-2.0 */
/* Bootstraps over TCP: a star around rank 0, which collects what all bring and sends it back.
 *
 * A failure breaks the bootstrap: rank 0 tells every rank, and later gathers fail with the same
 * sentence.  net.h says what travels. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/sized.h"
#include "bootstrap/tcp.h"

#define TELL_MS 1000 /* for rank 0 to tell all why it failed */
#define DRAIN_MS 500 /* for them to read it, once it closes */

typedef struct line {
    epic_link link;
    bool ready; /* its part of what goes on is over */
    epic_frame frame;
    size_t head;        /* bytes of frame that have come */
    size_t body;        /* and of what follows it */
    epic_letter letter; /* on its way to the peer */
} line;

typedef struct tcp_bootstrap {
    int32_t rank;
    int32_t num_ranks;
    uint32_t timeout_ms;
    uint64_t sequence;  /* the gather that goes on, from 1 */
    epic_result broken; /* EPIC_OK, or what every later gather returns */
    char sentence[512];
    epic_secret secret; /* its text is forgotten: the links have their keys */
    int32_t num_lines;
    struct pollfd *polls; /* [num_lines] */
    line lines[];         /* rank 0: [num_ranks], its own unused; others: [1], to rank 0 */
} tcp_bootstrap;

static unsigned long long number(const tcp_bootstrap *m)
{
    return (unsigned long long)m->sequence;
}

/* Polls the lines that are not ready for `events`, the others for `idle`.  False: the limit has passed. */
static bool poll_lines(tcp_bootstrap *m, short events, short idle, time_limit *limit)
{
    const int32_t first = m->rank == 0 ? 1 : 0; /* poll() refuses more than there may be */
    for (int32_t i = first; i < m->num_lines; i++)
        m->polls[i] = (struct pollfd){.fd = m->lines[i].link.socket,
                                      .events = m->lines[i].ready ? idle : events};
    const int ms = time_limit_look(limit);
    const int changed = poll(m->polls + first, (nfds_t)(m->num_lines - first), ms);
    return changed > 0 || ms > 0;
}

/* ------------------------------------------------------------------------------ rank 0 ---- */

static epic_result fail_lost(const tcp_bootstrap *m, int32_t rank)
{
    return epic_fail(EPIC_EPEER,
                     "gather %llu: rank %d closed its connection to rank 0: it died or "
                     "left the bootstrap",
                     number(m), rank);
}

static epic_result fail_late(const tcp_bootstrap *m, const char *what)
{
    char names[256];
    bool *missing = calloc((size_t)m->num_ranks, sizeof *missing);
    if (missing != NULL)
        for (int32_t r = 1; r < m->num_ranks; r++) missing[r] = !m->lines[r].ready;
    if (missing != NULL) epic_bootstrap_names(names, sizeof names, missing, m->num_ranks);
    const epic_result result =
        epic_fail(EPIC_ETIMEOUT, "gather %llu: %s did not %s within %u ms", number(m),
                  missing != NULL ? names : "some ranks", what, m->timeout_ms);
    free(missing);
    return result;
}

/* What came has no right tag: it is believed in nothing. */
static epic_result fail_foreign(const tcp_bootstrap *m, int32_t rank)
{
    return epic_fail(EPIC_EPEER, "gather %llu: what came from rank %d was not written by it%s",
                     number(m), rank,
                     m->lines[rank].link.secret != NULL
                         ? ": somebody in between changed, repeated or left out something"
                         : "");
}

static epic_result check_frame(tcp_bootstrap *m, int32_t rank, const epic_frame *frame,
                               size_t bytes)
{
    if (!epic_link_check(&m->lines[rank].link, frame)) return fail_foreign(m, rank);
    if (frame->result != EPIC_OK)
        return epic_fail(EPIC_EPEER, "gather %llu: what rank %d sent is not a part of a gather",
                         number(m), rank);
    if (frame->sequence != m->sequence)
        return epic_fail(EPIC_EMISMATCH,
                         "rank %d is at gather %llu of the bootstrap, rank 0 at %llu", rank,
                         (unsigned long long)frame->sequence, number(m));
    if (frame->length != bytes)
        return epic_fail(
            EPIC_EMISMATCH,
            "gather %llu: rank %d brings %llu bytes and rank 0 brings %zu: all ranks "
            "bring equally many",
            number(m), rank, (unsigned long long)frame->length, bytes);
    return EPIC_OK;
}

/* Takes what has come from a rank; ready once that is all. */
static epic_result collect_one(tcp_bootstrap *m, int32_t rank, char *to, size_t bytes,
                               time_limit *limit)
{
    line *l = &m->lines[rank];
    if (l->ready) /* it only was watched for its end; past ours it left because of who is late */
        return time_limit_left_ms(limit) == 0 ? fail_late(m, "come") : fail_lost(m, rank);
    if (l->head < sizeof l->frame) {
        const epic_frame_state state =
            epic_frame_receive(l->link.socket, &l->frame, sizeof l->frame, &l->head);
        if (state == FRAME_LOST) return fail_lost(m, rank);
        if (state == FRAME_MORE) return EPIC_OK;
        TRY(check_frame(m, rank, &l->frame, bytes));
        epic_tcp_answer_earlier(limit, l->frame.left_ms);
    }
    const epic_frame_state state = epic_frame_receive(l->link.socket, to, bytes, &l->body);
    if (state == FRAME_LOST) return fail_lost(m, rank);
    if (state == FRAME_MORE) return EPIC_OK;
    if (!epic_link_check_bytes(&l->link, &l->frame, to))
        return epic_fail(EPIC_EPEER, "gather %llu: the bytes of rank %d arrived damaged",
                         number(m), rank);
    l->ready = true;
    return EPIC_OK;
}

static epic_result collect(tcp_bootstrap *m, char *all, size_t bytes, time_limit *limit)
{
    int32_t num_ready = 0;
    for (int32_t r = 1; r < m->num_ranks; r++) {
        line *l = &m->lines[r];
        l->ready = false;
        l->head = l->body = 0;
    }
    while (num_ready < m->num_ranks - 1) {
        if (!poll_lines(m, POLLIN, POLLRDHUP, limit)) return fail_late(m, "come");
        for (int32_t r = 1; r < m->num_ranks; r++) {
            if (m->polls[r].revents == 0) continue;
            TRY(collect_one(m, r, all + (size_t)r * bytes, bytes, limit));
            num_ready += m->lines[r].ready;
        }
    }
    return EPIC_OK;
}

/* Sends everyone everything.  A rank that is lost does not keep the others from getting it. */
static epic_result answer(tcp_bootstrap *m, const char *all, size_t bytes, time_limit *limit)
{
    int32_t num_ready = 0;
    int32_t lost = 0;
    const epic_frame frame = epic_link_frame(m->lines[1].link.secret, EPIC_OK, m->sequence, all,
                                             (size_t)m->num_ranks * bytes, limit);
    for (int32_t r = 1; r < m->num_ranks; r++) {
        m->lines[r].ready = false;
        m->lines[r].letter = epic_link_letter(&m->lines[r].link, &frame, all);
    }
    while (num_ready < m->num_ranks - 1) {
        if (!poll_lines(m, POLLOUT, 0, limit)) return fail_late(m, "take what all brought");
        for (int32_t r = 1; r < m->num_ranks; r++) {
            line *l = &m->lines[r];
            if (m->polls[r].revents == 0 || l->ready) continue;
            const epic_frame_state state = epic_link_send(&l->link, &l->letter);
            if (state == FRAME_LOST) lost = r;
            l->ready = state != FRAME_MORE;
            num_ready += l->ready;
        }
    }
    return lost == 0 ? EPIC_OK : fail_lost(m, lost);
}

/* Tells every rank the sentence of this failure; one that took half an answer sees its end. */
static void tell_all(tcp_bootstrap *m)
{
    time_limit limit = time_limit_begin(TELL_MS, NULL);
    for (int32_t r = 1; r < m->num_ranks; r++) {
        const epic_letter *letter = &m->lines[r].letter;
        epic_link *link = &m->lines[r].link;
        const size_t length = sizeof letter->frame + letter->frame.length;
        if (letter->frame.magic == FRAME_MAGIC && letter->done == 0) epic_link_take_back(link);
        if (letter->done == 0 || letter->done == length)
            epic_link_tell(link, m->broken, m->sentence, &limit);
        else
            (void)shutdown(link->socket, SHUT_WR);
    }
}

static epic_result gather_at_zero(tcp_bootstrap *m, const void *mine, char *all, size_t bytes,
                                  time_limit *limit)
{
    if (bytes > 0) memmove(all, mine, bytes);
    TRY(collect(m, all, bytes, limit));
    return answer(m, all, bytes, limit);
}

/* ------------------------------------------------------------------------- other ranks ---- */

static epic_result fail_silent(const tcp_bootstrap *m)
{
    return epic_fail(
        EPIC_ETIMEOUT,
        "gather %llu: rank 0 did not answer rank %d within %u ms: it, or a rank that "
        "it waits for, did not come",
        number(m), m->rank, m->timeout_ms);
}

static epic_result fail_without_zero(const tcp_bootstrap *m)
{
    return epic_fail(EPIC_EPEER,
                     "gather %llu: rank 0 closed its connection to rank %d: it died or "
                     "left the bootstrap",
                     number(m), m->rank);
}

/* Sends our part and receives the head of the answer.  Rank 0 answers before it has our part
 * only to say that it failed: so both at once; who cannot send may still be told why. */
static epic_result exchange_heads(tcp_bootstrap *m, epic_letter *letter, time_limit *limit)
{
    line *l = &m->lines[0];
    bool sending = true;
    l->head = 0;
    l->ready = false;
    for (;;) {
        if (sending) sending = epic_link_send(&l->link, letter) == FRAME_MORE;
        const epic_frame_state state =
            epic_frame_receive(l->link.socket, &l->frame, sizeof l->frame, &l->head);
        if (state == FRAME_LOST) return fail_without_zero(m);
        if (state == FRAME_DONE) return EPIC_OK;
        const short events = (short)(sending ? POLLIN | POLLOUT : POLLIN);
        if (!poll_lines(m, events, 0, limit)) return fail_silent(m);
    }
}

static epic_result gather_elsewhere(tcp_bootstrap *m, const void *mine, char *all, size_t bytes,
                                    time_limit *limit)
{
    const size_t total = (size_t)m->num_ranks * bytes;
    epic_link *link = &m->lines[0].link;
    const epic_frame *frame = &m->lines[0].frame;
    const epic_frame ours =
        epic_link_frame(link->secret, EPIC_OK, m->sequence, mine, bytes, limit);
    epic_letter letter = epic_link_letter(link, &ours, mine);
    TRY(exchange_heads(m, &letter, limit));
    if (!epic_link_check(link, frame)) return fail_foreign(m, 0);
    if (frame->result != EPIC_OK) return epic_link_fail(link, frame, limit);
    if (frame->sequence != m->sequence || frame->length != total)
        return epic_fail(EPIC_EPEER, "gather %llu: what rank 0 sent is not its answer",
                         number(m));

    const epic_frame_state state = epic_frame_receive_all(link->socket, all, total, limit);
    if (state == FRAME_LOST) return fail_without_zero(m);
    if (state == FRAME_MORE) return fail_silent(m);
    if (!epic_link_check_bytes(link, frame, all))
        return epic_fail(EPIC_EPEER, "gather %llu: the answer of rank 0 arrived damaged",
                         number(m));
    return EPIC_OK;
}

/* ------------------------------------------------------------------- open, use, close ---- */

static epic_result gather(void *self, const void *mine, void *all, int64_t bytes)
{
    tcp_bootstrap *m = self;
    TRY(epic_bootstrap_check(mine, all, bytes));
    if (m->broken != EPIC_OK) return epic_fail(m->broken, "%s", m->sentence);

    time_limit limit = time_limit_begin(m->timeout_ms, NULL);
    m->sequence++;
    const epic_result result = m->rank == 0 ? gather_at_zero(m, mine, all, bytes, &limit)
                                            : gather_elsewhere(m, mine, all, bytes, &limit);
    if (result == EPIC_OK) return EPIC_OK;
    m->broken = result;
    snprintf(m->sentence, sizeof m->sentence, "%s", epic_sentence());
    if (m->rank == 0) tell_all(m);
    return result;
}

/* Rank 0 told its peers why it failed: a close with bytes unread would reset the connections
 * and could overtake that.  Reads and forgets what they still send, until they are gone. */
static void drain(tcp_bootstrap *m)
{
    char rubbish[4096];
    time_limit limit = time_limit_begin(DRAIN_MS, NULL);
    for (int32_t r = 1; r < m->num_ranks; r++) {
        m->lines[r].ready = false;
        (void)shutdown(m->lines[r].link.socket, SHUT_WR);
    }
    for (int32_t r = 1; r < m->num_ranks; r++)
        for (epic_frame_state state = FRAME_DONE; state != FRAME_LOST;) {
            size_t done = 0;
            const int s = m->lines[r].link.socket;
            state = epic_frame_receive(s, rubbish, sizeof rubbish, &done);
            if (state == FRAME_MORE && !epic_frame_wait(s, POLLIN, &limit)) break;
        }
}

static void close_bootstrap(void *self)
{
    tcp_bootstrap *m = self;
    if (m->rank == 0 && m->broken != EPIC_OK) drain(m);
    for (int32_t i = 0; i < m->num_lines; i++) epic_link_close(&m->lines[i].link);
    epic_secret_close(&m->secret);
    free(m->polls);
    free(m);
}

static epic_result check_tcp(const epic_tcp *tcp)
{
    if (tcp->num_ranks < 1 || tcp->num_ranks > BOOTSTRAP_MAX_RANKS)
        return epic_fail(EPIC_EINVAL, "tcp.num_ranks is %d: from 1 to %d", tcp->num_ranks,
                         BOOTSTRAP_MAX_RANKS);
    if (tcp->rank < 0 || tcp->rank >= tcp->num_ranks)
        return epic_fail(EPIC_EINVAL,
                         "tcp.rank is %d: from 0 to tcp.num_ranks - 1, which is %d", tcp->rank,
                         tcp->num_ranks - 1);
    if (tcp->port < 1 || tcp->port > 65535)
        return epic_fail(EPIC_EINVAL, "tcp.port is %u: from 1 to 65535", tcp->port);
    return EPIC_OK;
}

/* Connects the ranks of a bootstrap whose memory is there. */
static epic_result bootstrap(tcp_bootstrap *m, const epic_tcp *tcp)
{
    time_limit limit = time_limit_begin(tcp->timeout_ms, NULL);
    epic_link *links = calloc((size_t)m->num_lines, sizeof *links);
    if (links == NULL)
        return epic_fail(EPIC_ENOMEM, "no memory for a bootstrap of %d ranks", tcp->num_ranks);
    epic_result result = epic_secret_open(&m->secret, tcp->secret);
    if (result == EPIC_OK)
        result = tcp->rank == 0 ? epic_tcp_accept(links, tcp, &m->secret, &limit)
                                : epic_tcp_connect(links, tcp, &m->secret, &limit);
    for (int32_t i = 0; i < m->num_lines && result == EPIC_OK; i++) m->lines[i].link = links[i];
    m->secret.text = NULL;
    free(links);
    return result;
}

static epic_result open_bootstrap(epic_bootstrap *out, const epic_tcp *tcp)
{
    const int32_t num_lines = tcp->rank == 0 ? tcp->num_ranks : 1;
    tcp_bootstrap *m = calloc(1, sizeof *m + (size_t)num_lines * sizeof m->lines[0]);
    struct pollfd *polls = calloc((size_t)num_lines, sizeof *polls);
    if (m == NULL || polls == NULL) {
        free(polls);
        free(m);
        return epic_fail(EPIC_ENOMEM, "no memory for a bootstrap of %d ranks", tcp->num_ranks);
    }
    m->rank = tcp->rank;
    m->num_ranks = tcp->num_ranks;
    m->timeout_ms = tcp->timeout_ms;
    m->num_lines = num_lines;
    m->polls = polls;
    for (int32_t i = 0; i < num_lines; i++) m->lines[i].link.socket = -1;
    const epic_result result = bootstrap(m, tcp);
    if (result == EPIC_OK)
        *out = (epic_bootstrap){tcp->rank, tcp->num_ranks, gather, close_bootstrap, m};
    else
        close_bootstrap(m);
    return result;
}

epic_result epic_bootstrap_tcp_v1(epic_bootstrap *out, const epic_tcp *theirs, size_t size)
{
    epic_tcp tcp;
    if (out == NULL)
        return epic_fail(EPIC_EINVAL, "out is NULL: pass an epic_bootstrap to fill in");
    *out = (epic_bootstrap){0}; /* so that a failed bootstrap can be closed too */
    TRY(READ_SIZED(&tcp, theirs, size, "epic_tcp"));
    TRY(check_tcp(&tcp));
    if (tcp.address == NULL) tcp.address = "127.0.0.1";
    if (tcp.timeout_ms == 0) tcp.timeout_ms = BOOTSTRAP_TIMEOUT_MS;
    if (tcp.num_ranks > 1) return open_bootstrap(out, &tcp);
    epic_bootstrap_alone(out);
    return EPIC_OK;
}
