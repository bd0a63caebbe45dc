/* SPDX-License-Identifier: Apache-2.0 */
/* Trials of bootstraps over TCP. Each rank is a process. A trial may also have a stranger, a
 * process that is no rank of the group. */
#ifndef BOOTSTRAP_H
#define BOOTSTRAP_H

#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bootstrap/link.h"
#include "run.h"

#define MOST 8

static int failures;

#define CHECK(what, ...)                                      \
    do {                                                      \
        if (!(what)) {                                        \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #what); \
            printf(__VA_ARGS__);                              \
            printf("\n");                                     \
            failures++;                                       \
        }                                                     \
    } while (0)

/* Results of one rank of a trial, in memory shared with the parent. */
typedef struct report {
    epic_result result;
    char sentence[512];
    int64_t ms;
    bool wrong_bytes;
} report;

typedef struct trial {
    const char *name;
    int num_ranks;
    /* runs in a process of its own, for each rank */
    void (*rank)(const struct trial *trial, epic_tcp *tcp, report *out);
    /* runs in a further process while the ranks connect; NULL: no stranger */
    void (*stranger)(const struct trial *trial, uint32_t port);
    const char *address;
    const char *secret;
    const char *other_secret; /* the secret of the odd rank */
    uint32_t timeout_ms;
    int odd; /* the rank that behaves differently */
    size_t bytes;
    int num_gathers;
} trial;

static report *reports;
static int statuses[MOST + 1];

/* Returns a port of loopback that no other program can use while *holder is open. The socket is
 * first bound without SO_REUSEADDR, so that the port is exclusive. Then the option is set, so
 * that rank 0 can listen there too. */
static inline uint32_t hold_port(int *holder)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    const int one = 1;
    *holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bind(*holder, (struct sockaddr *)&at, sizeof at);
    getsockname(*holder, (struct sockaddr *)&at, &bytes);
    setsockopt(*holder, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    return ntohs(at.sin_port);
}

static inline void nap(int ms)
{
    poll(NULL, 0, ms);
}

static inline void run_rank(const trial *t, int rank, uint32_t port)
{
    report *out = &reports[rank];
    const int64_t begin = epic_bootstrap_now_ms();
    epic_tcp tcp = {
        .address = t->address,
        .secret = rank == t->odd && t->other_secret ? t->other_secret : t->secret,
        .rank = rank,
        .num_ranks = t->num_ranks,
        .port = port,
        .timeout_ms = t->timeout_ms,
    };
    alarm(90);
    t->rank(t, &tcp, out);
    snprintf(out->sentence, sizeof out->sentence, "%s",
             out->result == EPIC_OK ? "" : epic_error(NULL));
    out->ms = epic_bootstrap_now_ms() - begin;
}

static inline pid_t spawn(const trial *t, int rank, uint32_t port)
{
    fflush(stdout);
    const pid_t child = run_fork();
    if (child != 0) return child;
    if (rank == t->num_ranks)
        t->stranger(t, port);
    else
        run_rank(t, rank, port);
    _exit(0);
}

static inline void run_once(const trial *t)
{
    pid_t children[MOST + 1];
    int holder;
    const uint32_t port = hold_port(&holder);
    const int num_children = t->num_ranks + (t->stranger != NULL);
    memset(reports, 0, sizeof *reports * (MOST + 1));
    /* Start the stranger first, if there is one, and rank 0 last, so that the other ranks must
     * retry. */
    for (int i = num_children - 1; i >= 0; i--) children[i] = spawn(t, i, port);
    for (int i = 0; i < t->num_ranks; i++) waitpid(children[i], &statuses[i], 0);
    close(holder);
    if (t->stranger == NULL) return;
    kill(children[t->num_ranks], SIGKILL);
    waitpid(children[t->num_ranks], &statuses[t->num_ranks], 0);
}

/* Runs a trial. Repeats it if another program took the port first. */
static inline void run(const trial *t)
{
    for (int i = 0; i < 5; i++) {
        run_once(t);
        if (reports[0].result != EPIC_EDEVICE) break;
    }
    for (int r = 0; r < t->num_ranks; r++) {
        const bool killed = WIFSIGNALED(statuses[r]) && WTERMSIG(statuses[r]) == SIGKILL;
        CHECK(killed || statuses[r] == 0, "%s: rank %d ended with status %x", t->name, r,
              (unsigned)statuses[r]);
        CHECK(!reports[r].wrong_bytes, "%s: rank %d got wrong bytes", t->name, r);
    }
}

/* Expects this result of a rank, and these words in its sentence. */
static inline void expect(const trial *t, int rank, epic_result result, const char *word,
                          const char *other)
{
    const report *got = &reports[rank];
    CHECK(got->result == result, "%s: rank %d: %s, not %s: %s", t->name, rank,
          epic_result_name(got->result), epic_result_name(result), got->sentence);
    CHECK(word == NULL || strstr(got->sentence, word), "%s: rank %d: no \"%s\" in: %s", t->name,
          rank, word, got->sentence);
    CHECK(other == NULL || strstr(got->sentence, other), "%s: rank %d: no \"%s\" in: %s",
          t->name, rank, other, got->sentence);
    if (getenv("BOOTSTRAP_VERBOSE") != NULL)
        printf("%s: rank %d: %s after %lld ms: %s\n", t->name, rank,
               epic_result_name(got->result), (long long)got->ms, got->sentence);
}

static inline unsigned char byte_of(int rank, int number, size_t i)
{
    return (unsigned char)(rank * 131 + number * 31 + (int)(i % 251) + (int)(i / 1021));
}

/* Runs one gather whose bytes every rank can compute. */
static inline epic_result gather(epic_bootstrap *bootstrap, int number, size_t bytes,
                                 report *out)
{
    const size_t ranks = (size_t)bootstrap->num_ranks;
    unsigned char *mine = calloc(bytes + 1, 1);
    unsigned char *all = malloc(ranks * bytes + 1);
    for (size_t i = 0; i < bytes; i++) mine[i] = byte_of(bootstrap->rank, number, i);
    memset(all, 0xee, ranks * bytes + 1);
    const epic_result result = bootstrap->gather(bootstrap->self, mine, all, bytes);
    for (size_t r = 0; r < ranks && result == EPIC_OK; r++)
        for (size_t i = 0; i < bytes; i++)
            if (all[r * bytes + i] != byte_of((int)r, number, i)) out->wrong_bytes = true;
    if (all[ranks * bytes] != 0xee) out->wrong_bytes = true;
    free(mine);
    free(all);
    return result;
}

static inline void bootstrap_and_gather(const trial *t, epic_tcp *tcp, report *out)
{
    epic_bootstrap bootstrap;
    out->result = epic_bootstrap_tcp(&bootstrap, tcp);
    for (int i = 0; i < t->num_gathers && out->result == EPIC_OK; i++)
        out->result = gather(&bootstrap, i, t->bytes, out);
    epic_bootstrap_close(&bootstrap);
    epic_bootstrap_close(&bootstrap);
}

static inline void expect_soon(const trial *t, int64_t ms)
{
    for (int r = 0; r < t->num_ranks; r++)
        CHECK(reports[r].ms < ms, "%s: rank %d needed %lld ms", t->name, r,
              (long long)reports[r].ms);
}

/* -------------------------------------------------------------------- bare sockets ---- */

static inline int knock(uint32_t port)
{
    const struct sockaddr_in at = {.sin_family = AF_INET,
                                   .sin_port = htons((uint16_t)port),
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(s, (const struct sockaddr *)&at, sizeof at) == 0) return s;
    close(s);
    return -1;
}

static inline int listen_at(uint32_t port)
{
    const struct sockaddr_in at = {.sin_family = AF_INET,
                                   .sin_port = htons((uint16_t)port),
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int one = 1;
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    bind(listener, (const struct sockaddr *)&at, sizeof at);
    listen(listener, 5);
    return listener;
}

static inline int knock_until_open(uint32_t port)
{
    for (;;) {
        const int s = knock(port);
        if (s >= 0) return s;
        nap(5);
    }
}

/* Acts as rank 0 for one connection: sends a hello of that version, then an entry. */
static inline void play_zero(const epic_tcp *tcp, uint32_t version, bool has_secret)
{
    time_limit limit = time_limit_begin(5000, NULL);
    epic_hello theirs, ours;
    char rest[256];
    const int listener = listen_at(tcp->port);
    const int s = accept(listener, NULL, NULL);
    epic_frame_make_hello(&ours, 0, tcp->num_ranks, has_secret, &limit);
    ours.version = version;
    (void)epic_frame_receive_all(s, &theirs, sizeof theirs, &limit);
    (void)epic_frame_send_bytes(s, &ours, sizeof ours, &limit);
    epic_link link = {.socket = s};
    const epic_frame frame = epic_link_make_frame(NULL, EPIC_OK, 0, NULL, 0, &limit);
    epic_message entry = epic_link_message(&link, &frame, NULL);
    (void)epic_link_send_all(&link, &entry, &limit);
    (void)epic_frame_receive_all(s, rest, sizeof rest, &limit);
    close(s);
    close(listener);
}

/* Runs the tests one after the other, at the end of main(). */
static inline int run_tests(void (*const tests[])(void), size_t count)
{
    reports = mmap(NULL, sizeof *reports * (MOST + 1), PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < count; i++) {
        const int64_t begin = epic_bootstrap_now_ms();
        tests[i]();
        if (getenv("BOOTSTRAP_VERBOSE") != NULL)
            printf("-- test %zu: %lld ms\n", i, (long long)(epic_bootstrap_now_ms() - begin));
    }
    return failures == 0 ? 0 : 1;
}

#endif
