/* SPDX-License-Identifier: Apache-2.0 */
/* Rank 0 of a TCP bootstrap: accepts the connections of the other ranks.
 *
 * A new connection is a joiner. Rank 0 checks the joiner's hello (its rank and number of ranks)
 * and, if there is a secret, the joiner's proof that it has the secret. If the hello and the
 * proof are valid, rank 0 admits the joiner: the joiner's rank has joined. One poll loop serves
 * all joiners. Each joiner has its own time limit, so a silent connection does not delay other
 * joiners.
 *
 * A connection that sends bytes that EPIC would not send is refused, and the bootstrap
 * continues. If there is a secret, bytes that a joiner sends before a valid proof have no other
 * effect. If a joiner's number of ranks or protocol version differs from that of rank 0, the
 * bootstrap fails on every rank. After that rank 0 accepts connections for LINGER_MS, so that
 * slow ranks receive the error, too. */
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bootstrap/tcp.h"

#define JOINER_MS 10000 /* a joiner must send its hello and proof within this time */
/* time after a failure in which slow ranks can still connect and receive the failure */
#define LINGER_MS 2000
#define SEND_MS 1000 /* time limit for sending a short message */
/* time that rank 0 waits for a free descriptor before the bootstrap fails */
#define FULL_MS 1000
#define FULL_NAP_MS 10 /* duration of one sleep while rank 0 waits for a descriptor */
#define MAX_JOINERS 1024
/* rank 0 serves at most one joiner per rank plus this many at a time */
#define SPARE_JOINERS 64

/* A connection whose rank has not joined yet. */
typedef struct joiner {
    epic_link link;
    time_limit limit;
    bool is_proving; /* true: both hellos are exchanged, and the proof is expected next */
    size_t done;     /* number of bytes received of the hello or of the proof */
    epic_hello theirs;
    epic_hello ours;
    uint8_t proof[SECRET_PROOF];
} joiner;

/* State of rank 0 while it accepts connections. Only the thread that opens the bootstrap uses
 * this state. */
typedef struct acceptor {
    const epic_tcp *tcp;
    const epic_secret *secret;
    time_limit *limit; /* limit of the whole bootstrap; a failure shortens it to LINGER_MS */

    int listeners[TCP_MAX_ENDPOINTS];
    int num_listeners;
    int num_joiners;
    int max_joiners;
    int num_joined;
    joiner *joiners;  /* [max_joiners]: connections whose ranks have not joined */
    epic_link *links; /* [num_ranks]; socket -1: the rank has not joined */
    /* the sockets to poll: listeners, then joiners, then the ranks that have joined */
    struct pollfd *polls;

    epic_result failed; /* EPIC_OK until the bootstrap has failed */
    char sentence[FRAME_SENTENCE + 1];
    bool *was_notified; /* [num_ranks]: true if the rank has received the failure */
    int num_notified;
    /* rank 0 stops accepting connections when this many ranks have received the failure */
    int num_to_notify;

    int full_ms; /* time in ms that rank 0 has waited for a free descriptor */
    int num_refused;
    char refusal[160]; /* why the last joiner was refused */
    /* a rank that two processes use; 0: all processes use different ranks */
    int32_t rank_of_second;
} acceptor;

void epic_tcp_answer_earlier(time_limit *limit, uint32_t left_ms)
{
    const uint32_t travel = left_ms / 4 < 250 ? left_ms / 4 : 250;
    time_limit_shorten(limit, left_ms - travel);
}

static void drop_joiner(acceptor *a, int i)
{
    epic_link_close(&a->joiners[i].link);
    a->joiners[i] = a->joiners[--a->num_joiners];
}

static void note_refusal(acceptor *a, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(a->refusal, sizeof a->refusal, format, list);
    va_end(list);
    a->num_refused++;
}

static void refuse_joiner(acceptor *a, joiner *j, const char *sentence)
{
    note_refusal(a, "%s", sentence);
    time_limit limit = time_limit_begin(SEND_MS, a->limit);
    epic_link_send_failure(&j->link, EPIC_EINVAL, sentence, &limit);
}

static void send_failure(acceptor *a, int32_t rank, epic_link *link)
{
    time_limit limit = time_limit_begin(SEND_MS, a->limit);
    epic_link_send_failure(link, a->failed, a->sentence, &limit);
    if (rank < a->tcp->num_ranks) a->was_notified[rank] = true;
    a->num_notified++;
}

/* Returns true if `rank` was already notified of this bootstrap's failure. In this case `rank`
 * connects again to join the next bootstrap on this port, so rank 0 must stop accepting
 * connections. To make it stop, sets num_notified to num_to_notify. */
static bool has_reconnected(acceptor *a, int32_t rank)
{
    if (rank < 0 || rank >= a->tcp->num_ranks || !a->was_notified[rank]) return false;
    a->num_notified = a->num_to_notify;
    return true;
}

/* Fails the bootstrap with `result` and the last error text, and sends both to the ranks that
 * have joined. Ranks that join later also receive them, until rank 0 has notified num_to_notify
 * ranks or LINGER_MS has passed. */
static void fail_all_ranks(acceptor *a, epic_result result, int num_to_notify)
{
    a->failed = result;
    a->num_to_notify = num_to_notify;
    snprintf(a->sentence, sizeof a->sentence, "%s", epic_sentence());
    time_limit_shorten(a->limit, LINGER_MS);
    for (int32_t r = 1; r < a->tcp->num_ranks; r++) {
        if (a->links[r].socket < 0) continue;
        send_failure(a, r, &a->links[r]);
        epic_link_close(&a->links[r]);
    }
}

/* Writes a text about the refused connections to `note`, for the error about missing ranks. If
 * two processes use the same rank, the text begins with this rank, because one of the two
 * processes was probably meant to have the missing rank. */
static void describe_refused(const acceptor *a, char *note, size_t size)
{
    int used = 0;
    note[0] = '\0';
    if (a->rank_of_second != 0)
        used = snprintf(note, size,
                        "; another process connected as rank %d, which had joined already: "
                        "each process must have its own rank",
                        a->rank_of_second);
    if (a->num_refused > 0)
        snprintf(note + used, size - (size_t)used, "; connections refused: %d, the last: %s",
                 a->num_refused, a->refusal);
}

static void fail_late(acceptor *a)
{
    char names[200];
    char note[sizeof a->refusal + 192];
    const char *where =
        a->tcp->secret == NULL ? " (without a secret it listens on loopback alone)" : "";
    bool *missing = calloc((size_t)a->tcp->num_ranks, sizeof *missing);
    if (missing != NULL)
        for (int32_t r = 1; r < a->tcp->num_ranks; r++) missing[r] = a->links[r].socket < 0;
    if (missing != NULL)
        epic_bootstrap_list_ranks(names, sizeof names, missing, a->tcp->num_ranks);
    describe_refused(a, note, sizeof note);
    fail_all_ranks(a,
                   epic_fail(EPIC_ETIMEOUT,
                             "%s did not connect to rank 0 at %.64s, port %u within "
                             "%u ms%s%s",
                             missing != NULL ? names : "some ranks", a->tcp->address,
                             a->tcp->port, a->tcp->timeout_ms, where, note),
                   0);
    free(missing);
}

/* Returns whether epic_bootstrap_tcp() could have sent this hello. */
static bool is_valid_hello(const epic_hello *hello)
{
    return hello->num_ranks > 1 && hello->num_ranks <= BOOTSTRAP_MAX_RANKS && hello->rank > 0 &&
           hello->rank < hello->num_ranks;
}

/* Fails the bootstrap if the joiner's version or number of ranks differs from that of rank 0.
 * Returns true if the bootstrap has failed. */
static bool is_mismatch(acceptor *a, const epic_hello *theirs)
{
    const int32_t num_ranks = a->tcp->num_ranks;
    const int most = theirs->num_ranks > num_ranks ? theirs->num_ranks : num_ranks;
    if (theirs->version != FRAME_VERSION)
        fail_all_ranks(a,
                       epic_fail(EPIC_EMISMATCH,
                                 "rank %d has bootstrap protocol version %u and rank 0 has %u: "
                                 "use the same version of EPIC on all ranks",
                                 theirs->rank, theirs->version, FRAME_VERSION),
                       most - 1);
    else if (theirs->num_ranks != num_ranks)
        fail_all_ranks(a,
                       epic_fail(EPIC_EMISMATCH,
                                 "num_ranks is %d on rank 0 and %d on rank %d: must be equal "
                                 "on all ranks",
                                 num_ranks, theirs->num_ranks, theirs->rank),
                       most - 1);
    return a->failed != EPIC_OK;
}

/* Admits a joiner with a valid hello and proof: sends the entry frame, and stores the
 * connection as the link of the joiner's rank. With a secret, the frame's authentication tag
 * proves that rank 0 has the secret. If the frame cannot be sent, the rank must connect
 * again. */
static void admit_joiner(acceptor *a, joiner *j)
{
    time_limit limit = time_limit_begin(SEND_MS, a->limit);
    const epic_frame frame = epic_link_make_frame(a->secret, EPIC_OK, 0, NULL, 0, &limit);
    epic_message message = epic_link_message(&j->link, &frame, NULL);
    if (epic_link_send_all(&j->link, &message, &limit) != FRAME_DONE) return;
    epic_tcp_answer_earlier(a->limit, j->theirs.left_ms);
    a->links[j->theirs.rank] = j->link;
    a->num_joined++;
    j->link.socket = -1;
}

/* Admits a joiner whose hello and proof are valid, or sends it an error. */
static void handle_proved_joiner(acceptor *a, joiner *j)
{
    char sentence[FRAME_SENTENCE + 1];
    const int32_t rank = j->theirs.rank;
    if (has_reconnected(a, rank)) return;
    if (!epic_link_secure(&j->link, a->secret, true, &j->ours, &j->theirs)) {
        refuse_joiner(a, j, "rank 0's libcrypto refused to compute an HMAC");
    } else if (a->failed != EPIC_OK || is_mismatch(a, &j->theirs)) {
        send_failure(a, rank, &j->link);
    } else if (a->links[rank].socket >= 0) {
        snprintf(sentence, sizeof sentence,
                 "rank %d has joined already: each process must have its own rank", rank);
        refuse_joiner(a, j, sentence);
        a->rank_of_second = rank;
    } else {
        admit_joiner(a, j);
    }
}

/* Sends rank 0's hello in reply to the joiner's hello, then checks the joiner's hello. Returns
 * false if the joiner is refused or the reply cannot be sent. */
static bool answer_hello(acceptor *a, joiner *j)
{
    char sentence[FRAME_SENTENCE + 1];
    const bool has_secret = a->secret->text != NULL;
    time_limit at_once = time_limit_begin(0, a->limit);
    if (!epic_frame_make_hello(&j->ours, 0, a->tcp->num_ranks, has_secret, a->limit) ||
        epic_frame_send_bytes(j->link.socket, &j->ours, sizeof j->ours, &at_once) != FRAME_DONE)
        return false;
    if (!is_valid_hello(&j->theirs))
        snprintf(sentence, sizeof sentence,
                 "rank is %d and num_ranks is %d: this cannot join rank 0", j->theirs.rank,
                 j->theirs.num_ranks);
    else if (has_secret != (j->theirs.has_secret != 0))
        snprintf(
            sentence, sizeof sentence,
            "rank 0 has %s secret and rank %d has %s: set tcp.secret or EPIC_SECRET on all "
            "ranks or on none",
            has_secret ? "a" : "no", j->theirs.rank, has_secret ? "none" : "one");
    else
        return true;
    refuse_joiner(a, j, sentence);
    return false;
}

/* Returns true if the joiner's proof shows that it has the same secret as rank 0. If not,
 * refuses the joiner. */
static bool check_proof(acceptor *a, joiner *j)
{
    char sentence[FRAME_SENTENCE + 1];
    if (epic_secret_check(a->secret, ROLE_CONNECTOR, &j->ours, &j->theirs, j->proof))
        return true;
    snprintf(sentence, sizeof sentence,
             "the secret (tcp.secret or EPIC_SECRET) of rank %d is not that of rank 0",
             j->theirs.rank);
    refuse_joiner(a, j, sentence);
    return false;
}

/* Receives the bytes that a joiner has sent, and replies when its hello or proof is complete.
 * Returns false if the caller must remove the joiner from the list, because the joiner's rank
 * has joined or because the connection is refused or closed. */
static bool serve_joiner(acceptor *a, joiner *j)
{
    if (!j->is_proving) {
        const uint64_t magic = HELLO_MAGIC;
        const epic_frame_state state =
            epic_frame_receive(j->link.socket, &j->theirs, sizeof j->theirs, &j->done);
        const size_t seen = j->done < sizeof magic ? j->done : sizeof magic;
        if (memcmp(&j->theirs, &magic, seen) != 0) {
            note_refusal(a, "it did not send the hello of EPIC");
            return false;
        }
        if (state != FRAME_DONE) return state == FRAME_MORE;
        if (!answer_hello(a, j)) return false;
        j->is_proving = true;
        j->done = 0;
    }
    if (a->secret->text != NULL) {
        const epic_frame_state state =
            epic_frame_receive(j->link.socket, j->proof, sizeof j->proof, &j->done);
        if (state != FRAME_DONE) return state == FRAME_MORE;
        if (!check_proof(a, j)) return false;
    }
    handle_proved_joiner(a, j);
    return false;
}

/* Makes room for a new joiner: closes the oldest of the joiners that have sent no hello. If all
 * joiners have sent a hello, closes the oldest of all joiners. */
static void drop_oldest(acceptor *a)
{
    int oldest = -1;
    for (int i = 0; i < a->num_joiners; i++) {
        const joiner *j = &a->joiners[i];
        const joiner *o = oldest < 0 ? j : &a->joiners[oldest];
        if (oldest < 0 || j->is_proving < o->is_proving ||
            (j->is_proving == o->is_proving && j->limit.own.end_ns < o->limit.own.end_ns))
            oldest = i;
    }
    if (oldest >= 0) drop_joiner(a, oldest);
}

/* Called when accept() found no free descriptor. Closes a joiner to free a descriptor. If there
 * is no joiner, waits for another thread to close a descriptor. Fails the bootstrap after it
 * has waited FULL_MS since the last accepted connection. `wrong` is the errno of accept(). */
static void make_room(acceptor *a, int wrong)
{
    if (a->num_joiners > 0) {
        drop_oldest(a);
        return;
    }
    time_limit_nap(a->limit, FULL_NAP_MS);
    a->full_ms += FULL_NAP_MS;
    if (a->full_ms < FULL_MS || a->failed != EPIC_OK) return;
    fail_all_ranks(
        a,
        epic_fail(EPIC_EDEVICE,
                  "rank 0 has no descriptor for the connections of %d ranks: %s; raise "
                  "its limit on open files (ulimit -n)",
                  a->tcp->num_ranks - 1, strerror(wrong)),
        a->tcp->num_ranks - 1);
}

/* Accepts the pending connections of a listener, at most SPARE_JOINERS per call. */
static void accept_joiners(acceptor *a, int listener)
{
    for (int i = 0; i < SPARE_JOINERS; i++) {
        const int socket = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (socket < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (socket < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) {
            make_room(a, errno);
            return;
        }
        if (socket < 0) continue; /* the connection was closed before it was accepted */
        a->full_ms = 0;
        epic_frame_set_no_delay(socket);
        if (a->num_joiners == a->max_joiners) drop_oldest(a);
        joiner *j = &a->joiners[a->num_joiners++];
        *j = (joiner){.link.socket = socket, .limit = time_limit_begin(JOINER_MS, a->limit)};
        if (!serve_joiner(a, j)) drop_joiner(a, a->num_joiners - 1);
    }
}

static void fail_lost_rank(acceptor *a, int32_t rank)
{
    /* A rank that has joined sends nothing before it receives the begin frame. So an event on
     * the rank's socket means that the rank has closed the connection. */
    epic_link_close(&a->links[rank]);
    fail_all_ranks(a,
                   epic_fail(EPIC_EPEER,
                             "rank %d left before the bootstrap at %.64s, port %u was "
                             "complete",
                             rank, a->tcp->address, a->tcp->port),
                   a->tcp->num_ranks - 2);
}

static nfds_t fill_polls(acceptor *a)
{
    nfds_t n = 0;
    for (int i = 0; i < a->num_listeners; i++)
        a->polls[n++] = (struct pollfd){.fd = a->listeners[i], .events = POLLIN};
    for (int i = 0; i < a->num_joiners; i++)
        a->polls[n++] = (struct pollfd){.fd = a->joiners[i].link.socket, .events = POLLIN};
    for (int32_t r = 1; r < a->tcp->num_ranks; r++)
        if (a->links[r].socket >= 0)
            a->polls[n++] = (struct pollfd){.fd = a->links[r].socket, .events = POLLIN};
    /* the number of open sockets; `polls` has no entries for closed sockets, because poll()
     * limits the number of entries */
    return n;
}

static void poll_and_serve(acceptor *a, int ms)
{
    const nfds_t n = fill_polls(a);
    if (poll(a->polls, n, ms) < 0) return;

    const struct pollfd *joiners = a->polls + a->num_listeners;
    const struct pollfd *joined = joiners + a->num_joiners;
    for (int32_t r = 1; r < a->tcp->num_ranks; r++) {
        if (a->links[r].socket < 0 || (joined++)->revents == 0) continue;
        fail_lost_rank(a, r); /* sends the failure to all joined ranks and closes their links */
        break;
    }

    /* Iterate backwards: drop_joiner() moves the last joiner, which was already served, to the
     * free index. */
    for (int i = a->num_joiners - 1; i >= 0; i--) {
        const bool stays = joiners[i].revents == 0 || serve_joiner(a, &a->joiners[i]);
        const bool late = stays && time_limit_look(&a->joiners[i].limit) == 0;
        if (late) note_refusal(a, "it sent nothing for %d ms", JOINER_MS);
        if (!stays || late) drop_joiner(a, i);
    }
    for (int i = 0; i < a->num_listeners; i++)
        if (a->polls[i].revents != 0) accept_joiners(a, a->listeners[i]);
}

/* Sends the begin frame to all other ranks. If a send fails, fails the bootstrap on all
 * ranks. */
static void send_begin(acceptor *a)
{
    for (int32_t r = 1; r < a->tcp->num_ranks && a->failed == EPIC_OK; r++) {
        time_limit limit = time_limit_begin(SEND_MS, a->limit);
        const epic_frame frame = epic_link_make_frame(a->secret, EPIC_OK, 0, NULL, 0, &limit);
        epic_message message = epic_link_message(&a->links[r], &frame, NULL);
        if (epic_link_send_all(&a->links[r], &message, &limit) != FRAME_DONE)
            fail_lost_rank(a, r);
    }
}

/* Accepts ranks until all ranks have joined or, after a failure, until num_to_notify ranks are
 * notified. Returns in any case when the time limit has passed. */
static void accept_all_ranks(acceptor *a)
{
    const int num_peers = a->tcp->num_ranks - 1;
    while (a->failed == EPIC_OK ? a->num_joined < num_peers
                                : a->num_notified < a->num_to_notify) {
        const int ms = time_limit_look(a->limit);
        if (ms == 0) break;
        poll_and_serve(a, ms);
    }
    if (a->failed == EPIC_OK && a->num_joined < num_peers) fail_late(a);
    if (a->failed == EPIC_OK) send_begin(a);
}

static epic_result acceptor_open(acceptor *a)
{
    const size_t ranks = (size_t)a->tcp->num_ranks;
    a->max_joiners = (int)(ranks < MAX_JOINERS ? ranks : MAX_JOINERS) + SPARE_JOINERS;
    const size_t joiners = (size_t)a->max_joiners;
    a->joiners = calloc(joiners, sizeof *a->joiners);
    a->was_notified = calloc(ranks, sizeof *a->was_notified);
    a->polls = calloc(TCP_MAX_ENDPOINTS + joiners + ranks, sizeof *a->polls);
    if (a->joiners == NULL || a->was_notified == NULL || a->polls == NULL)
        return epic_fail(EPIC_ENOMEM, "no memory for a bootstrap of %zu ranks", ranks);
    return epic_tcp_listen(a->listeners, &a->num_listeners, a->tcp, a->limit);
}

static void acceptor_close(acceptor *a)
{
    while (a->num_joiners > 0) drop_joiner(a, a->num_joiners - 1);
    while (a->num_listeners > 0) close(a->listeners[--a->num_listeners]);
    free(a->joiners);
    free(a->was_notified);
    free(a->polls);
}

epic_result epic_tcp_accept(epic_link *links, const epic_tcp *tcp, const epic_secret *secret,
                            time_limit *limit)
{
    acceptor a = {.tcp = tcp, .secret = secret, .limit = limit, .links = links};
    for (int32_t r = 0; r < tcp->num_ranks; r++) links[r].socket = -1;
    epic_result result = acceptor_open(&a);
    if (result == EPIC_OK) {
        accept_all_ranks(&a);
        result = a.failed;
        if (result != EPIC_OK) epic_fail(result, "%s", a.sentence);
    }
    acceptor_close(&a);
    return result;
}
