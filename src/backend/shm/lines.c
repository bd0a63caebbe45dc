/* SPDX-License-Identifier: Apache-2.0 */
/* Connecting every two ranks of one host.
 *
 * Each rank listens on an abstract UNIX address with a random name and tells it to the others,
 * with a secret, through the bootstrap.  It calls every lower rank and is called by every higher
 * one.  The caller's first message brings the secret of the rank that it calls, the answer
 * brings the caller's: both prove that they were at the bootstrap.  Calling never waits for the
 * other side, so there is no order in which the ranks could block one another. */
#include "backend/shm/lines.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "backend/shm/greeting.h"
#include "base/deadline.h"
#include "base/error.h"
#include "base/process.h"

#define NAME "epic."
#define NAME_LENGTH 31 /* of NAME and hexadecimal digits */
#define MORE_GUESTS 16 /* callers beside the ranks that may be heard at once */
#define LOOK_MS 200    /* how often a rank that is not called looks whether the others live */

/* What a rank tells the others through the bootstrap. */
typedef struct card {
    uint64_t ready;
    uint64_t secret[2];
    char name[NAME_LENGTH + 1];
} card;

typedef struct opening {
    shm_lines *lines;
    const epic_join *join;
    card *cards;          /* [num_ranks] */
    struct pollfd *polls; /* [num_polls] listener, guests, lines; and as many for poll() */
    int *guests;          /* [num_guests] sockets not yet known to be a rank's; -1: none */
    int num_guests;
    int num_polls;
    int listener;
    int missing; /* higher ranks that have not called yet */
    deadline deadline;
    int *memory;
} opening;

static void close_fd(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static struct sockaddr_un address_of(const card *c, socklen_t *length)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + 1, c->name, NAME_LENGTH); /* abstract: begins with a zero */
    *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + NAME_LENGTH);
    return address;
}

/* ------------------------------------------------------------------------ greetings ---- */

static epic_result say(const opening *o, int fd, int to, int memory)
{
    greeting hello = {.group_id = o->join->group_id, .rank = o->lines->rank};
    memcpy(hello.secret, o->cards[to].secret, sizeof hello.secret);
    return greeting_send(fd, &hello, to, memory);
}

/* The rank that speaks, or -1: not one of us. */
static int hear(const opening *o, int fd, int *memory)
{
    greeting hello;
    const card *mine = &o->cards[o->lines->rank];
    if (!greeting_receive(fd, &hello, memory) || hello.group_id != o->join->group_id ||
        memcmp(hello.secret, mine->secret, sizeof hello.secret) != 0 || hello.rank < 0 ||
        hello.rank >= o->lines->num_ranks)
        return -1;
    return (int)hello.rank;
}

/* -------------------------------------------------------------------------- waiting ---- */

/* poll() refuses more entries than there may be descriptors, also empty ones: those are left out. */
static int poll_open(opening *o, int ms)
{
    struct pollfd *some = o->polls + o->num_polls;
    nfds_t count = 0;
    for (int i = 0; i < o->num_polls; i++)
        if (o->polls[i].fd >= 0) some[count++] = o->polls[i];
    const int got = poll(some, count, ms);
    for (int i = 0; i < o->num_polls; i++)
        o->polls[i].revents = got > 0 && o->polls[i].fd >= 0 ? (some++)->revents : 0;
    return got;
}

/* EPIC_OK: something may have come, or it is time to look.  A line that hangs up ends the
 * opening. */
static epic_result await_polls(opening *o, const char *what)
{
    const uint64_t now = (uint64_t)clock_ns();
    if (deadline_look(&o->deadline, now))
        return epic_fail(EPIC_ETIMEOUT, "shm: %s did not come within %u ms", what,
                         o->join->config->timeout_ms);
    const uint64_t ms = deadline_sleep_ns(&o->deadline, now, LOOK_MS * 1000000ull) / 1000000;
    const int got = poll_open(o, (int)ms + 1);
    if (got < 0 && errno != EINTR) return greeting_refused("poll");
    const struct pollfd *lines = o->polls + 1 + o->num_guests;
    for (int r = 0; got > 0 && r < o->lines->num_ranks; r++)
        if (lines[r].revents & (POLLHUP | POLLERR | POLLNVAL) && !(lines[r].revents & POLLIN))
            return greeting_left(r);
    return EPIC_OK;
}

static void set_polls(opening *o, int awaited)
{
    bool listen = false;
    for (int i = 0; i < o->num_guests && o->missing > 0; i++) listen |= o->guests[i] < 0;
    struct pollfd *p = o->polls;
    *p++ = (struct pollfd){.fd = listen ? o->listener : -1, .events = POLLIN};
    for (int i = 0; i < o->num_guests; i++)
        *p++ = (struct pollfd){.fd = o->guests[i], .events = POLLIN};
    for (int r = 0; r < o->lines->num_ranks; r++)
        *p++ = (struct pollfd){.fd = o->lines->sockets[r],
                               .events = (short)(r == awaited ? POLLIN : 0)};
}

/* ------------------------------------------------------------------ calling and called ---- */

static epic_result open_listener(opening *o, card *mine)
{
    unsigned char random[(NAME_LENGTH - 5) / 2];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random ||
        getrandom(mine->secret, sizeof mine->secret, 0) != (ssize_t)sizeof mine->secret)
        return greeting_refused("getrandom");
    memcpy(mine->name, NAME, 5);
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(mine->name + 5 + 2 * i, 3, "%02x", random[i]);
    o->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (o->listener < 0) return greeting_refused("socket");
    socklen_t length;
    const struct sockaddr_un address = address_of(mine, &length);
    if (bind(o->listener, (const struct sockaddr *)&address, length) != 0)
        return greeting_refused("bind");
    if (listen(o->listener, o->lines->num_ranks + MORE_GUESTS) != 0)
        return greeting_refused("listen");
    return EPIC_OK;
}

/* Never waits for the peer, only, where the system keeps few callers, for a place in its queue. */
static epic_result call_rank(opening *o, int peer)
{
    int *line = &o->lines->sockets[peer];
    *line = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (*line < 0) return greeting_refused("socket");
    socklen_t length;
    const struct sockaddr_un address = address_of(&o->cards[peer], &length);
    while (connect(*line, (const struct sockaddr *)&address, length) != 0) {
        if (errno == ECONNREFUSED) return greeting_left(peer);
        if (errno != EAGAIN && errno != EINTR) return greeting_refused("connect");
        if (deadline_before_nap(&o->deadline, 1000000))
            return epic_fail(EPIC_ETIMEOUT, "shm: rank %d did not answer within %u ms", peer,
                             o->join->config->timeout_ms);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    if (!greeting_is_of_same_user(*line))
        return epic_fail(EPIC_EDEVICE, "shm: rank %d belongs to another user", peer);
    return say(o, *line, peer, -1);
}

static bool out_of_room(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS;
}

/* A caller for whom there is no room would wait for an answer until the deadline. */
static epic_result admit_guests(opening *o)
{
    for (int i = 0; i < o->num_guests; i++) {
        if (o->guests[i] >= 0) continue;
        o->guests[i] = accept4(o->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (o->guests[i] < 0) return out_of_room(errno) ? greeting_refused("accept") : EPIC_OK;
        if (!greeting_is_of_same_user(o->guests[i])) close_fd(&o->guests[i]);
    }
    return EPIC_OK;
}

/* A guest has spoken: a higher rank that has not called yet becomes a line, others go. */
static epic_result receive_guest(opening *o, int *guest)
{
    shm_lines *lines = o->lines;
    const int rank = hear(o, *guest, NULL);
    if (rank <= lines->rank || lines->sockets[rank] >= 0) {
        close_fd(guest);
        return EPIC_OK;
    }
    lines->sockets[rank] = *guest;
    *guest = -1;
    o->missing--;
    return say(o, lines->sockets[rank], rank, lines->rank == 0 ? *o->memory : -1);
}

static int first_missing(const opening *o)
{
    int r = o->lines->rank + 1;
    while (r < o->lines->num_ranks && o->lines->sockets[r] >= 0) r++;
    return r;
}

/* Who does not listen any more has called us, or never will. */
static bool is_listening(const opening *o, int peer)
{
    socklen_t length;
    const struct sockaddr_un address = address_of(&o->cards[peer], &length);
    int probe = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0) return true; /* nobody knows */
    const bool refused =
        connect(probe, (const struct sockaddr *)&address, length) != 0 && errno == ECONNREFUSED;
    close_fd(&probe);
    return !refused;
}

/* A missing rank that is gone, or -1. */
static int find_gone(const opening *o)
{
    for (int r = o->lines->rank + 1; r < o->lines->num_ranks; r++)
        if (o->lines->sockets[r] < 0 && !is_listening(o, r)) return r;
    return -1;
}

static bool take_calls(opening *o, epic_result *result)
{
    bool any = o->polls[0].revents != 0;
    for (int i = 0; i < o->num_guests && *result == EPIC_OK; i++) {
        if (o->guests[i] < 0 || !o->polls[1 + i].revents) continue;
        *result = receive_guest(o, &o->guests[i]);
        any = true;
    }
    if (*result == EPIC_OK && o->polls[0].revents) *result = admit_guests(o);
    return any;
}

/* A rank that died before it called leaves no line that could hang up: it is seen gone, and what
 * it did before is looked for once more. */
static epic_result answer_calls(opening *o)
{
    int gone = -1;
    while (o->missing > 0) {
        epic_result result = EPIC_OK;
        char who[32];
        snprintf(who, sizeof who, "rank %d", first_missing(o));
        set_polls(o, -1);
        TRY(await_polls(o, who));
        const bool called = take_calls(o, &result);
        TRY(result);
        if (called) {
            gone = -1;
            continue;
        }
        if (gone >= 0) return greeting_left(gone);
        gone = find_gone(o);
    }
    return EPIC_OK;
}

static epic_result hear_answer(opening *o, int peer)
{
    const int *line = &o->lines->sockets[peer];
    const struct pollfd *polled = &o->polls[1 + o->num_guests + peer];
    char who[48];
    snprintf(who, sizeof who, "the answer of rank %d", peer);
    do {
        set_polls(o, peer);
        TRY(await_polls(o, who));
    } while (!polled->revents);
    const int who_spoke = hear(o, *line, peer == 0 ? o->memory : NULL);
    if (*o->memory == GREETING_NO_ROOM) {
        *o->memory = -1;
        errno = EMFILE;
        return greeting_refused("receiving the shared memory");
    }
    if (who_spoke != peer) return greeting_left(peer);
    if (*o->memory < 0 && peer == 0)
        return epic_fail(EPIC_EDEVICE, "shm: rank 0 sent no memory");
    return EPIC_OK;
}

static epic_result connect_all(opening *o)
{
    const int rank = o->lines->rank;
    for (int r = 0; r < rank; r++) TRY(call_rank(o, r));
    TRY(answer_calls(o));
    for (int r = 0; r < rank; r++) TRY(hear_answer(o, r));
    return EPIC_OK;
}

/* Calls the lower ranks and hangs up, so that none of them waits for us.  The sentence stays. */
static epic_result call_off(opening *o, epic_result result)
{
    char sentence[512];
    snprintf(sentence, sizeof sentence, "%s", epic_sentence());
    close_fd(&o->listener);
    for (int r = 0; r < o->lines->num_ranks; r++) close_fd(&o->lines->sockets[r]);
    for (int r = 0; r < o->lines->rank; r++) {
        call_rank(o, r);
        close_fd(&o->lines->sockets[r]);
    }
    return epic_fail(result, "%s", sentence);
}

/* ------------------------------------------------------------------------- the whole ---- */

/* The kernel says who is at the other end, in our own numbering of processes.  A system without
 * pidfds is no failure. */
static epic_result watch_processes(shm_lines *lines)
{
    for (int r = 0; r < lines->num_ranks; r++) {
        struct ucred who;
        socklen_t length = sizeof who;
        if (lines->sockets[r] < 0 ||
            getsockopt(lines->sockets[r], SOL_SOCKET, SO_PEERCRED, &who, &length) != 0)
            continue;
        errno = 0;
        lines->processes[r] = process_watch(who.pid);
        if (lines->processes[r] < 0 && out_of_room(errno))
            return greeting_refused("pidfd_open");
    }
    return EPIC_OK;
}

/* `ready` false: this rank has failed before, and its sentence stays. */
static epic_result allocate(opening *o, bool ready)
{
    if (!ready) return EPIC_EDEVICE;
    const int n = o->lines->num_ranks;
    o->num_guests = n + MORE_GUESTS;
    o->num_polls = 1 + o->num_guests + n;
    o->missing = n - 1 - o->lines->rank;
    o->polls = calloc(2 * (size_t)o->num_polls, sizeof *o->polls);
    o->guests = malloc((size_t)o->num_guests * sizeof *o->guests);
    for (int i = 0; o->guests && i < o->num_guests; i++) o->guests[i] = -1;
    if (o->polls && o->guests) return EPIC_OK;
    return epic_fail(EPIC_ENOMEM, "shm: no memory to connect %d ranks", n);
}

static void release(opening *o)
{
    for (int i = 0; o->guests && i < o->num_guests; i++) close_fd(&o->guests[i]);
    close_fd(&o->listener);
    free(o->polls);
    free(o->guests);
}

/* A name that open_listener made: it is somebody else's word, and becomes an address. */
static bool is_name(const char name[NAME_LENGTH + 1])
{
    return name[NAME_LENGTH] == 0 && strncmp(name, NAME, 5) == 0 &&
           strspn(name + 5, "0123456789abcdef") == NAME_LENGTH - 5;
}

/* Every rank comes to the gathering, also one whose `result` is bad by now. */
static epic_result swap_cards(const epic_join *join, card *cards, epic_result result,
                              card *mine)
{
    char sentence[512];
    const epic_bootstrap *bootstrap = join->bootstrap;
    snprintf(sentence, sizeof sentence, "%s", epic_sentence());
    mine->ready = result == EPIC_OK;
    const epic_result met = bootstrap->gather(bootstrap->self, mine, cards, sizeof *mine);
    if (result != EPIC_OK) return epic_fail(result, "%s", sentence);
    TRY(met);
    for (int r = 0; r < bootstrap->num_ranks; r++) {
        if (cards[r].ready != 1) return epic_fail(EPIC_EPEER, "shm: rank %d could not join", r);
        if (!is_name(cards[r].name))
            return epic_fail(EPIC_EPEER,
                             "shm: what the bootstrap brought from rank %d is not an "
                             "address that EPIC made",
                             r);
    }
    return EPIC_OK;
}

epic_result lines_decline(const epic_join *join, epic_result result)
{
    card mine = {0}, cards[EPIC_MAX_RANKS];
    return swap_cards(join, cards, result, &mine);
}

epic_result lines_open(shm_lines *lines, const epic_join *join, bool ready, int *memory)
{
    card mine = {0}, cards[EPIC_MAX_RANKS]; /* not allocated: to fail, too, takes a gathering */
    opening o = {.lines = lines,
                 .join = join,
                 .cards = cards,
                 .listener = -1,
                 .memory = memory,
                 .deadline = deadline_begin_ms(join->config->timeout_ms)};
    epic_result result = allocate(&o, ready);
    if (result == EPIC_OK) result = open_listener(&o, &mine);
    result = swap_cards(join, cards, result, &mine);
    if (result == EPIC_OK) {
        result = connect_all(&o);
        if (result != EPIC_OK) result = call_off(&o, result);
    }
    if (result == EPIC_OK) result = watch_processes(lines);
    release(&o);
    return result;
}

epic_result lines_alloc(shm_lines *lines, int rank, int num_ranks)
{
    *lines = (shm_lines){.rank = rank, .num_ranks = num_ranks};
    lines->sockets = malloc((size_t)num_ranks * sizeof *lines->sockets);
    lines->processes = malloc((size_t)num_ranks * sizeof *lines->processes);
    lines->dead = calloc((size_t)num_ranks, sizeof *lines->dead);
    for (int r = 0; lines->sockets && r < num_ranks; r++) lines->sockets[r] = -1;
    for (int r = 0; lines->processes && r < num_ranks; r++) lines->processes[r] = -1;
    if (lines->sockets && lines->processes && lines->dead) return EPIC_OK;
    return epic_fail(EPIC_ENOMEM, "shm: no memory for lines to %d ranks", num_ranks);
}

void lines_close(shm_lines *lines)
{
    for (int r = 0; lines->sockets && r < lines->num_ranks; r++) close_fd(&lines->sockets[r]);
    for (int r = 0; lines->processes && r < lines->num_ranks; r++)
        close_fd(&lines->processes[r]);
    free(lines->sockets);
    free(lines->processes);
    free(lines->dead);
    *lines = (shm_lines){0};
}

bool lines_is_dead(shm_lines *lines, int peer)
{
    if (peer == lines->rank) return false;
    if (load_relaxed(&lines->dead[peer])) return true;
    struct pollfd signs[] = {{.fd = lines->sockets[peer], .events = POLLRDHUP},
                             {.fd = lines->processes[peer], .events = POLLIN}};
    if (poll(signs, 2, 0) <= 0) return false;
    store_relaxed(&lines->dead[peer], true);
    return true;
}
