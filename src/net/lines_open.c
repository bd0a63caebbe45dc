/* SPDX-License-Identifier: Apache-2.0 */
/* Making lines.  Each rank listens and calls the hosts below its own, one address after another.  A
 * caller begins with the secret of the rank that it calls, the answer is the caller's secret: both
 * have been at the bootstrap.  An address may lead elsewhere, as one of a container's bridge does, and
 * whoever finds the port may call: such are hung up on. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

#include "base/deadline.h"
#include "base/error.h"
#include "bootstrap/bootstrap.h"
#include "net/lines_inner.h"

#define MOST_GUESTS 32 /* callers that may be heard at once; then the first is hung up on */
#define TRY_MS 1000    /* for one address */
#define PAUSE_MS 50    /* before the next one, when it refused */
#define LOOK_MS 50
#define MAGIC 0x656e696c63697065ull /* "epicline" in memory */

typedef struct greeting {
    uint64_t magic, group_id;
    uint64_t secret[2]; /* of the one who is spoken to */
    int32_t host, num_hosts;
} greeting;

/* A connection that is not a line yet. */
typedef struct talk {
    int fd; /* -1: none */
    bool spoken;
    int next;         /* calls: the address to try next */
    int64_t until_ms; /* calls: when to try it */
    size_t heard;     /* bytes of what the other says */
    greeting theirs;
} talk;

typedef struct opening {
    net_lines *lines;
    const unsigned char *cards;
    talk calls[NET_MAX_HOSTS];
    talk guests[MOST_GUESTS];
    int next_guest;
} opening;

static epic_result refused(const char *what)
{
    const int error = errno;
    return epic_fail(EPIC_EDEVICE, "lines: %s: %s%s", what, strerror(error),
                     epic_way_out(error));
}

epic_result net_lines_listen(net_lines **out, const net_lines_setup *setup, void *card)
{
    net_lines *l = calloc(1, sizeof *l);
    if (!l) return epic_fail(EPIC_ENOMEM, "no host memory for lines");
    l->setup = *setup;
    if (!l->setup.silence_ms) l->setup.silence_ms = 800;
    l->end = -1;
    for (int h = 0; h < NET_MAX_HOSTS; h++) l->sockets[h] = -1;
    l->listener = line_listen(&l->card.port);
    l->card.num_addresses = (uint32_t)line_addresses(l->card.addresses, setup->interface);
    epic_result result = EPIC_OK;
    if (l->listener < 0)
        result = refused("listening");
    else if (getrandom(l->card.secret, sizeof l->card.secret, 0) != sizeof l->card.secret)
        result = refused("getrandom");
    else if (l->card.num_addresses == 0)
        result =
            epic_fail(EPIC_EDEVICE, "lines: no interface%s%.40s of this host has an address",
                      setup->interface ? " " : "", setup->interface ? setup->interface : "");
    if (result == EPIC_OK) {
        memcpy(card, &l->card, sizeof l->card);
        *out = l;
    } else
        net_lines_forget(l);
    return result;
}

static line_card card_of(const opening *o, int host)
{
    line_card card;
    memcpy(&card, o->cards + (size_t)host * NET_LINES_CARD_BYTES, sizeof card);
    if (card.num_addresses > LINE_ADDRESSES) card.num_addresses = LINE_ADDRESSES;
    return card;
}

/* --------------------------------------------------------------------------- talking ---- */

static bool speak(const opening *o, int fd, int to)
{
    const line_card card = card_of(o, to);
    const net_lines_setup *s = &o->lines->setup;
    const greeting mine = {
        MAGIC, s->group_id, {card.secret[0], card.secret[1]}, s->host, s->num_hosts};
    return send(fd, &mine, sizeof mine, MSG_NOSIGNAL) == (ssize_t)sizeof mine;
}

/* Hears what has come.  False: the other hung up. */
static bool hear(talk *t)
{
    const size_t left = sizeof t->theirs - t->heard;
    const ssize_t count = recv(t->fd, (char *)&t->theirs + t->heard, left, 0);
    if (count > 0) t->heard += (size_t)count;
    return count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
}

/* The host that speaks, or -1: not one of us. */
static int who(const opening *o, const talk *t)
{
    const net_lines *l = o->lines;
    const greeting *g = &t->theirs;
    const bool ours = t->heard == sizeof *g && g->magic == MAGIC &&
                      g->group_id == l->setup.group_id &&
                      !memcmp(g->secret, l->card.secret, sizeof g->secret) &&
                      g->num_hosts == l->setup.num_hosts;
    return ours && g->host >= 0 && g->host < l->setup.num_hosts ? g->host : -1;
}

/* The connection is a line now. */
static void take_over(opening *o, talk *t, int host)
{
    o->lines->sockets[host] = t->fd;
    t->fd = -1;
}

/* ------------------------------------------------------------------ calling and called ---- */

static void call_next(opening *o, int host, int64_t now)
{
    talk *t = &o->calls[host];
    const line_card card = card_of(o, host);
    line_hang_up(&t->fd);
    *t = (talk){.fd = -1, .next = t->next + 1, .until_ms = now + PAUSE_MS};
    if (card.num_addresses == 0) return;
    t->fd = line_call(&card.addresses[(uint32_t)(t->next - 1) % card.num_addresses], card.port);
    if (t->fd >= 0) t->until_ms = now + TRY_MS;
}

/* Once it is connected a call waits for its answer as long as there is time: who is called may be
 * late. */
static void go_on_calling(opening *o, int host, short events, int64_t now)
{
    talk *t = &o->calls[host];
    if (t->fd >= 0 && !t->spoken && events) t->spoken = speak(o, t->fd, host);
    const bool lost = t->fd >= 0 && events && (!t->spoken || !hear(t));
    if (lost) {
        line_hang_up(&t->fd);
        *t = (talk){.fd = -1, .next = t->next, .until_ms = now + PAUSE_MS};
    }
    const bool answered = t->heard == sizeof t->theirs;
    if (answered && who(o, t) == host)
        take_over(o, t, host);
    else if (answered || (!t->spoken && now >= t->until_ms))
        call_next(o, host, now);
}

static void welcome(opening *o)
{
    const int fd = accept4(o->lines->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    talk *t = &o->guests[o->next_guest++ % MOST_GUESTS];
    line_hang_up(&t->fd);
    *t = (talk){.fd = fd};
}

static void go_on_listening(opening *o, talk *t)
{
    const bool there = hear(t);
    if (there && t->heard < sizeof t->theirs) return;
    const int host = who(o, t);
    const bool wanted = host > o->lines->setup.host && o->lines->sockets[host] < 0;
    if (wanted && speak(o, t->fd, host))
        take_over(o, t, host);
    else
        line_hang_up(&t->fd);
}

/* ---------------------------------------------------------------------------- waiting ---- */

static int missing(const net_lines *l, bool *which)
{
    int count = 0;
    for (int h = 0; h < l->setup.num_hosts; h++)
        if (h != l->setup.host && l->sockets[h] < 0) {
            which[line_rank(l, h)] = true;
            count++;
        }
    return count;
}

static bool is_called(const net_lines *l, int host)
{
    return host < l->setup.host && l->sockets[host] < 0;
}

/* Waits for a moment and does what there is to do. */
static epic_result go_on(opening *o)
{
    net_lines *l = o->lines;
    struct pollfd polls[1 + NET_MAX_HOSTS + MOST_GUESTS], *p = polls;
    *p++ = (struct pollfd){.fd = l->listener, .events = POLLIN};
    for (int h = 0; h < NET_MAX_HOSTS; h++)
        *p++ = (struct pollfd){.fd = o->calls[h].fd,
                               .events = o->calls[h].spoken ? POLLIN : POLLOUT};
    for (int g = 0; g < MOST_GUESTS; g++)
        *p++ = (struct pollfd){.fd = o->guests[g].fd, .events = POLLIN};
    if (poll(polls, (nfds_t)(p - polls), LOOK_MS) < 0 && errno != EINTR) return refused("poll");
    const int64_t now = epic_bootstrap_now();
    for (int h = 0; h < l->setup.num_hosts; h++)
        if (is_called(l, h)) go_on_calling(o, h, polls[1 + h].revents, now);
    for (int g = 0; g < MOST_GUESTS; g++)
        if (polls[1 + NET_MAX_HOSTS + g].revents) go_on_listening(o, &o->guests[g]);
    if (polls[0].revents) welcome(o);
    return EPIC_OK;
}

static epic_result tell_missing(const net_lines *l, const bool *which)
{
    char names[256];
    const int num_ranks = l->setup.num_hosts * l->setup.ranks_per_host;
    epic_bootstrap_names(names, sizeof names, which, num_ranks);
    return epic_fail(
        EPIC_ETIMEOUT,
        "lines: no TCP connection with %s within %u ms: it did not come, or this host "
        "cannot reach it; see to firewalls, and to the interface%s%.40s",
        names, l->setup.timeout_ms, l->setup.interface ? " " : "",
        l->setup.interface ? l->setup.interface : "");
}

epic_result net_lines_connect(net_lines *l, const void *cards)
{
    opening o = {.lines = l, .cards = cards};
    deadline end = deadline_begin_ms(l->setup.timeout_ms);
    for (int h = 0; h < NET_MAX_HOSTS; h++) o.calls[h].fd = -1;
    for (int g = 0; g < MOST_GUESTS; g++) o.guests[g].fd = -1;
    epic_result result = EPIC_OK;
    for (;;) {
        bool which[NET_MAX_HOSTS * 64] = {false};
        if (result != EPIC_OK || missing(l, which) == 0) break;
        const bool late = deadline_before_nap(&end, LOOK_MS * 1000000ull);
        result = late ? tell_missing(l, which) : go_on(&o);
    }
    for (int h = 0; h < NET_MAX_HOSTS; h++) line_hang_up(&o.calls[h].fd);
    for (int g = 0; g < MOST_GUESTS; g++) line_hang_up(&o.guests[g].fd);
    line_hang_up(&l->listener);
    return result == EPIC_OK ? line_start(l) : result;
}
