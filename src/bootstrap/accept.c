/* SPDX-License-Identifier: Apache-2.0 */
/* Rank 0's side of the beginning of a TCP bootstrap.
 *
 * Whoever connects is a guest until its hello, and its proof if there is a secret, are right;
 * then its rank has joined.  Guests are served side by side, each with a limit of its own, so a
 * silent stranger holds up nobody.  What no rank of EPIC would send is refused and the bootstrap
 * goes on: with a secret, nothing that comes before its proof has any other effect.  What a rank
 * sends and cannot be met with (another number of ranks, another version) fails the bootstrap on
 * every rank: for a moment rank 0 goes on accepting, to tell those that come late. */
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bootstrap/tcp.h"

#define GUEST_MS 10000 /* for hello and proof */
#define LINGER_MS 2000 /* after a failure, for ranks that have yet to come */
#define TELL_MS 1000   /* to send a few bytes */
#define FULL_MS 1000   /* without a descriptor for who knocks, before giving up */
#define FULL_NAP_MS 10
#define MOST_GUESTS 1024
#define SPARE_GUESTS 64

typedef struct guest {
    epic_link link;
    time_limit limit;
    bool proving; /* hellos are exchanged; its proof comes next */
    size_t done;  /* bytes of what comes next */
    epic_hello theirs;
    epic_hello ours;
    uint8_t proof[SECRET_PROOF];
} guest;

typedef struct door {
    const epic_tcp *tcp;
    const epic_secret *secret;
    time_limit *limit; /* of the whole bootstrap; after a failure, of telling the ranks */

    int listeners[TCP_MAX_PLACES];
    int num_listeners;
    int num_guests;
    int max_guests;
    int num_joined;
    guest *guests;        /* [max_guests] */
    epic_link *links;     /* [num_ranks]; socket -1: that rank has not joined */
    struct pollfd *polls; /* listeners, guests, ranks that joined */

    epic_result failed; /* EPIC_OK, or what the bootstrap came to, and its sentence */
    char sentence[FRAME_SENTENCE + 1];
    bool *told; /* [num_ranks] */
    int num_told;
    int num_to_tell;

    int full_ms; /* naps since there was a descriptor */
    int num_refused;
    char refusal[160];      /* the last */
    int32_t rank_of_second; /* that a second process came as, the last one; 0: there was none */
} door;

void epic_tcp_answer_earlier(time_limit *limit, uint32_t left_ms)
{
    const uint32_t travel = left_ms / 4 < 250 ? left_ms / 4 : 250;
    time_limit_shorten(limit, left_ms - travel);
}

/* ----------------------------------------------------------------------- saying no ---- */

static void drop_guest(door *d, int i)
{
    epic_link_close(&d->guests[i].link);
    d->guests[i] = d->guests[--d->num_guests];
}

static void note_refusal(door *d, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(d->refusal, sizeof d->refusal, format, list);
    va_end(list);
    d->num_refused++;
}

/* Tells a guest, politely, what it did wrong. */
static void refuse(door *d, guest *g, const char *sentence)
{
    note_refusal(d, "%s", sentence);
    time_limit limit = time_limit_begin(TELL_MS, d->limit);
    epic_link_tell(&g->link, EPIC_EINVAL, sentence, &limit);
}

static void tell(door *d, int32_t rank, epic_link *link)
{
    time_limit limit = time_limit_begin(TELL_MS, d->limit);
    epic_link_tell(link, d->failed, d->sentence, &limit);
    if (rank < d->tcp->num_ranks) d->told[rank] = true;
    d->num_told++;
}

/* A rank that was told comes again: that is for the next bootstrap on this port, not this one. */
static bool comes_again(door *d, int32_t rank)
{
    if (rank < 0 || rank >= d->tcp->num_ranks || !d->told[rank]) return false;
    d->num_told = d->num_to_tell;
    return true;
}

/* The bootstrap fails with the sentence that epic_fail just got: those that joined are told. */
static void fail_bootstrap(door *d, epic_result result, int num_to_tell)
{
    d->failed = result;
    d->num_to_tell = num_to_tell;
    snprintf(d->sentence, sizeof d->sentence, "%s", epic_sentence());
    time_limit_shorten(d->limit, LINGER_MS);
    for (int32_t r = 1; r < d->tcp->num_ranks; r++) {
        if (d->links[r].socket < 0) continue;
        tell(d, r, &d->links[r]);
        epic_link_close(&d->links[r]);
    }
}

/* Adds what rank 0 has seen of connections that did not join.  A rank whose process has the number
 * of another is the likeliest reason for one that is missing, so strangers do not hide it. */
static void describe_refused(const door *d, char *note, size_t size)
{
    int used = 0;
    note[0] = '\0';
    if (d->rank_of_second != 0)
        used = snprintf(note, size,
                        "; another process came as rank %d, which was there already: does each "
                        "process have a rank of its own",
                        d->rank_of_second);
    if (d->num_refused > 0)
        snprintf(note + used, size - (size_t)used, "; connections refused: %d, the last: %s",
                 d->num_refused, d->refusal);
}

static void fail_late(door *d)
{
    char names[200];
    char note[sizeof d->refusal + 192];
    const char *where =
        d->tcp->secret == NULL ? " (without a secret it listens on loopback alone)" : "";
    bool *missing = calloc((size_t)d->tcp->num_ranks, sizeof *missing);
    if (missing != NULL)
        for (int32_t r = 1; r < d->tcp->num_ranks; r++) missing[r] = d->links[r].socket < 0;
    if (missing != NULL) epic_bootstrap_names(names, sizeof names, missing, d->tcp->num_ranks);
    describe_refused(d, note, sizeof note);
    fail_bootstrap(d,
                   epic_fail(EPIC_ETIMEOUT,
                             "%s did not come to rank 0 at %.64s, port %u within "
                             "%u ms%s%s",
                             missing != NULL ? names : "some ranks", d->tcp->address,
                             d->tcp->port, d->tcp->timeout_ms, where, note),
                   0);
    free(missing);
}

/* -------------------------------------------------------------------- letting ranks in ---- */

/* Would some epic_bootstrap_tcp have sent this? */
static bool sane(const epic_hello *hello)
{
    return hello->num_ranks > 1 && hello->num_ranks <= BOOTSTRAP_MAX_RANKS && hello->rank > 0 &&
           hello->rank < hello->num_ranks;
}

static bool differs(door *d, const epic_hello *theirs)
{
    const int32_t num_ranks = d->tcp->num_ranks;
    const int most = theirs->num_ranks > num_ranks ? theirs->num_ranks : num_ranks;
    if (theirs->version != FRAME_VERSION)
        fail_bootstrap(
            d,
            epic_fail(EPIC_EMISMATCH,
                      "rank %d meets with protocol version %u and rank 0 with %u: use "
                      "the same EPIC everywhere",
                      theirs->rank, theirs->version, FRAME_VERSION),
            most - 1);
    else if (theirs->num_ranks != num_ranks)
        fail_bootstrap(d,
                       epic_fail(EPIC_EMISMATCH,
                                 "rank %d says that there are %d ranks and rank 0 says %d: "
                                 "num_ranks is equal on all ranks",
                                 theirs->rank, theirs->num_ranks, num_ranks),
                       most - 1);
    return d->failed != EPIC_OK;
}

/* Lets a guest in: the tag of the frame proves ourselves.  Takes its link. */
static void let_in(door *d, guest *g)
{
    time_limit limit = time_limit_begin(TELL_MS, d->limit);
    const epic_frame frame = epic_link_frame(d->secret, EPIC_OK, 0, NULL, 0, &limit);
    epic_letter entry = epic_link_letter(&g->link, &frame, NULL);
    if (epic_link_send_all(&g->link, &entry, &limit) != FRAME_DONE)
        return; /* it knocks again */
    epic_tcp_answer_earlier(d->limit, g->theirs.left_ms);
    d->links[g->theirs.rank] = g->link;
    d->num_joined++;
    g->link.socket = -1;
}

/* The guest is who it says it is. */
static void admit(door *d, guest *g)
{
    char sentence[FRAME_SENTENCE + 1];
    const int32_t rank = g->theirs.rank;
    if (comes_again(d, rank)) return;
    if (!epic_link_secure(&g->link, d->secret, true, &g->ours, &g->theirs)) {
        refuse(d, g, "rank 0's libcrypto refused to compute an HMAC");
    } else if (d->failed != EPIC_OK || differs(d, &g->theirs)) {
        tell(d, rank, &g->link);
    } else if (d->links[rank].socket >= 0) {
        snprintf(sentence, sizeof sentence,
                 "rank %d is already in the bootstrap: each rank comes once", rank);
        refuse(d, g, sentence);
        d->rank_of_second = rank;
    } else {
        let_in(d, g);
    }
}

/* Its hello has come: sends ours.  False: it is refused. */
static bool greet(door *d, guest *g)
{
    char sentence[FRAME_SENTENCE + 1];
    const bool has_secret = d->secret->text != NULL;
    time_limit at_once = time_limit_begin(0, d->limit);
    if (!epic_frame_hello(&g->ours, 0, d->tcp->num_ranks, has_secret, d->limit) ||
        epic_frame_send_bytes(g->link.socket, &g->ours, sizeof g->ours, &at_once) != FRAME_DONE)
        return false;
    if (!sane(&g->theirs))
        snprintf(sentence, sizeof sentence, "there is no rank %d of %d to connect to rank 0",
                 g->theirs.rank, g->theirs.num_ranks);
    else if (has_secret != (g->theirs.has_secret != 0))
        snprintf(
            sentence, sizeof sentence,
            "rank 0 has %s secret and rank %d has %s: set tcp.secret or EPIC_SECRET on all "
            "ranks or on none",
            has_secret ? "a" : "no", g->theirs.rank, has_secret ? "none" : "one");
    else
        return true;
    refuse(d, g, sentence);
    return false;
}

static bool proved(door *d, guest *g)
{
    char sentence[FRAME_SENTENCE + 1];
    if (epic_secret_check(d->secret, ROLE_CONNECTOR, &g->ours, &g->theirs, g->proof))
        return true;
    snprintf(sentence, sizeof sentence,
             "the secret (tcp.secret or EPIC_SECRET) of rank %d is not that of rank 0",
             g->theirs.rank);
    refuse(d, g, sentence);
    return false;
}

/* Takes what a guest has sent.  False: it has joined, or left, or must. */
static bool serve(door *d, guest *g)
{
    if (!g->proving) {
        const uint64_t magic = HELLO_MAGIC;
        const epic_frame_state state =
            epic_frame_receive(g->link.socket, &g->theirs, sizeof g->theirs, &g->done);
        const size_t seen = g->done < sizeof magic ? g->done : sizeof magic;
        if (memcmp(&g->theirs, &magic, seen) != 0) {
            note_refusal(d, "a stranger, which does not speak as EPIC does");
            return false;
        }
        if (state != FRAME_DONE) return state == FRAME_MORE;
        if (!greet(d, g)) return false;
        g->proving = true;
        g->done = 0;
    }
    if (d->secret->text != NULL) {
        const epic_frame_state state =
            epic_frame_receive(g->link.socket, g->proof, sizeof g->proof, &g->done);
        if (state != FRAME_DONE) return state == FRAME_MORE;
        if (!proved(d, g)) return false;
    }
    admit(d, g);
    return false;
}

/* ---------------------------------------------------------------------- the waiting ---- */

/* Makes room for a guest: the one who has been here longest goes, of those that said nothing
 * if there are any. */
static void drop_oldest(door *d)
{
    int oldest = -1;
    for (int i = 0; i < d->num_guests; i++) {
        const guest *g = &d->guests[i];
        const guest *o = oldest < 0 ? g : &d->guests[oldest];
        if (oldest < 0 || g->proving < o->proving ||
            (g->proving == o->proving && g->limit.own.end_ns < o->limit.own.end_ns))
            oldest = i;
    }
    if (oldest >= 0) drop_guest(d, oldest);
}

/* No descriptor for who knocks: a guest goes.  Where there is none, the ranks themselves are too
 * many; another thread may yet close something, but not for ever. */
static void make_room(door *d, int wrong)
{
    if (d->num_guests > 0) {
        drop_oldest(d);
        return;
    }
    time_limit_nap(d->limit, FULL_NAP_MS);
    d->full_ms += FULL_NAP_MS;
    if (d->full_ms < FULL_MS || d->failed != EPIC_OK) return;
    fail_bootstrap(
        d,
        epic_fail(EPIC_EDEVICE,
                  "rank 0 has no descriptor for the connections of %d ranks: %s; raise "
                  "its limit on open files (ulimit -n)",
                  d->tcp->num_ranks - 1, strerror(wrong)),
        d->tcp->num_ranks - 1);
}

static void receive_guests(door *d, int listener)
{
    for (int i = 0; i < SPARE_GUESTS; i++) {
        const int socket = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (socket < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (socket < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) {
            make_room(d, errno);
            return;
        }
        if (socket < 0) continue; /* a guest that is gone already */
        d->full_ms = 0;
        epic_frame_tune(socket);
        if (d->num_guests == d->max_guests) drop_oldest(d);
        guest *g = &d->guests[d->num_guests++];
        *g = (guest){.link.socket = socket, .limit = time_limit_begin(GUEST_MS, d->limit)};
        if (!serve(d, g)) drop_guest(d, d->num_guests - 1);
    }
}

static void lose_joined(door *d, int32_t rank)
{
    /* Nothing is due from it: this is its end. */
    epic_link_close(&d->links[rank]);
    fail_bootstrap(d,
                   epic_fail(EPIC_EPEER,
                             "rank %d left before the bootstrap at %.64s, port %u was "
                             "complete",
                             rank, d->tcp->address, d->tcp->port),
                   d->tcp->num_ranks - 2);
}

static nfds_t fill_polls(door *d)
{
    nfds_t n = 0;
    for (int i = 0; i < d->num_listeners; i++)
        d->polls[n++] = (struct pollfd){.fd = d->listeners[i], .events = POLLIN};
    for (int i = 0; i < d->num_guests; i++)
        d->polls[n++] = (struct pollfd){.fd = d->guests[i].link.socket, .events = POLLIN};
    for (int32_t r = 1; r < d->tcp->num_ranks; r++)
        if (d->links[r].socket >= 0)
            d->polls[n++] = (struct pollfd){.fd = d->links[r].socket, .events = POLLIN};
    return n; /* no more than descriptors: poll() refuses more than their limit */
}

/* Waits for at most `ms` milliseconds, and serves all who have something to say. */
static void attend(door *d, int ms)
{
    const nfds_t n = fill_polls(d);
    if (poll(d->polls, n, ms) < 0) return;

    const struct pollfd *guests = d->polls + d->num_listeners;
    const struct pollfd *joined = guests + d->num_guests;
    for (int32_t r = 1; r < d->tcp->num_ranks; r++) {
        if (d->links[r].socket < 0 || (joined++)->revents == 0) continue;
        lose_joined(d, r); /* which tells the others, and closes all */
        break;
    }

    /* downwards: whoever leaves is replaced by one that has been served */
    for (int i = d->num_guests - 1; i >= 0; i--) {
        const bool stays = guests[i].revents == 0 || serve(d, &d->guests[i]);
        const bool late = stays && time_limit_look(&d->guests[i].limit) == 0;
        if (late) note_refusal(d, "a stranger, which said nothing for %d ms", GUEST_MS);
        if (!stays || late) drop_guest(d, i);
    }
    for (int i = 0; i < d->num_listeners; i++)
        if (d->polls[i].revents != 0) receive_guests(d, d->listeners[i]);
}

static void begin(door *d)
{
    for (int32_t r = 1; r < d->tcp->num_ranks && d->failed == EPIC_OK; r++) {
        time_limit limit = time_limit_begin(TELL_MS, d->limit);
        const epic_frame frame = epic_link_frame(d->secret, EPIC_OK, 0, NULL, 0, &limit);
        epic_letter letter = epic_link_letter(&d->links[r], &frame, NULL);
        if (epic_link_send_all(&d->links[r], &letter, &limit) != FRAME_DONE) lose_joined(d, r);
    }
}

/* Until every rank has joined, or the bootstrap failed and all were told, or it is too late. */
static void bootstrap(door *d)
{
    const int num_peers = d->tcp->num_ranks - 1;
    while (d->failed == EPIC_OK ? d->num_joined < num_peers : d->num_told < d->num_to_tell) {
        const int ms = time_limit_look(d->limit);
        if (ms == 0) break;
        attend(d, ms);
    }
    if (d->failed == EPIC_OK && d->num_joined < num_peers) fail_late(d);
    if (d->failed == EPIC_OK) begin(d);
}

static epic_result open_door(door *d)
{
    const size_t ranks = (size_t)d->tcp->num_ranks;
    d->max_guests = (int)(ranks < MOST_GUESTS ? ranks : MOST_GUESTS) + SPARE_GUESTS;
    const size_t guests = (size_t)d->max_guests;
    d->guests = calloc(guests, sizeof *d->guests);
    d->told = calloc(ranks, sizeof *d->told);
    d->polls = calloc(TCP_MAX_PLACES + guests + ranks, sizeof *d->polls);
    if (d->guests == NULL || d->told == NULL || d->polls == NULL)
        return epic_fail(EPIC_ENOMEM, "no memory for a bootstrap of %zu ranks", ranks);
    return epic_tcp_listen(d->listeners, &d->num_listeners, d->tcp, d->limit);
}

static void close_door(door *d)
{
    while (d->num_guests > 0) drop_guest(d, d->num_guests - 1);
    while (d->num_listeners > 0) close(d->listeners[--d->num_listeners]);
    free(d->guests);
    free(d->told);
    free(d->polls);
}

epic_result epic_tcp_accept(epic_link *links, const epic_tcp *tcp, const epic_secret *secret,
                            time_limit *limit)
{
    door d = {.tcp = tcp, .secret = secret, .limit = limit, .links = links};
    for (int32_t r = 0; r < tcp->num_ranks; r++) links[r].socket = -1;
    epic_result result = open_door(&d);
    if (result == EPIC_OK) {
        bootstrap(&d);
        result = d.failed;
        if (result != EPIC_OK) epic_fail(result, "%s", d.sentence);
    }
    close_door(&d);
    return result;
}
