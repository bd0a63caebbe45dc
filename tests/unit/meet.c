/* SPDX-License-Identifier: Apache-2.0 */
/* Meetings over TCP: processes meet and gather at 1, 2, 3 and 8 ranks; strangers on the port
 * are refused; whatever goes wrong becomes an error that names the rank, on every rank. */
#include <dirent.h>
#include <dlfcn.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
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

#include "meet/link.h"

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

/* libcrypto is looked for through this, so that a test can hide it. */
static bool hide_libcrypto;

void *dlopen(const char *name, int flags)
{
    void *(*real)(const char *, int);
    void *const found = dlsym(RTLD_NEXT, "dlopen");
    memcpy(&real, &found, sizeof real);
    return hide_libcrypto ? NULL : real(name, flags);
}

/* ------------------------------------------------------------------------- the harness ---- */

/* What a rank of a trial found, in memory shared with the parent. */
typedef struct report {
    epic_result result;
    char sentence[512];
    int64_t ms;
    bool wrong_bytes;
} report;

typedef struct trial {
    const char *name;
    int num_ranks;
    /* Runs in a process of its own, for one rank. */
    void (*rank)(const struct trial *trial, epic_tcp *tcp, report *out);
    /* Runs in another, if there is one, while they meet. */
    void (*stranger)(const struct trial *trial, uint32_t port);
    const char *address;
    const char *secret;
    const char *other_secret; /* of the odd rank */
    uint32_t timeout_ms;
    int odd; /* the rank that does something else */
    size_t bytes;
    int num_gathers;
} trial;

static report *reports;
static int statuses[MOST + 1];

/* A port of loopback that stays ours while *holder is open: bound without SO_REUSEADDR, so to
 * us alone, and then with it, so that rank 0 may listen there too. */
static uint32_t hold_port(int *holder)
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

static void nap(int ms)
{
    poll(NULL, 0, ms);
}

static void run_rank(const trial *t, int rank, uint32_t port)
{
    report *out = &reports[rank];
    const int64_t begin = epic_meet_now();
    epic_tcp tcp = {
        .address = t->address,
        .secret = rank == t->odd && t->other_secret ? t->other_secret : t->secret,
        .rank = rank,
        .num_ranks = t->num_ranks,
        .port = port,
        .timeout_ms = t->timeout_ms,
    };
    alarm(30);
    t->rank(t, &tcp, out);
    snprintf(out->sentence, sizeof out->sentence, "%s",
             out->result == EPIC_OK ? "" : epic_error(NULL));
    out->ms = epic_meet_now() - begin;
}

static pid_t spawn(const trial *t, int rank, uint32_t port)
{
    fflush(stdout);
    const pid_t child = fork();
    if (child != 0) return child;
    if (rank == t->num_ranks)
        t->stranger(t, port);
    else
        run_rank(t, rank, port);
    _exit(0);
}

static void run_once(const trial *t)
{
    pid_t children[MOST + 1];
    int holder;
    const uint32_t port = hold_port(&holder);
    const int num_children = t->num_ranks + (t->stranger != NULL);
    memset(reports, 0, sizeof *reports * (MOST + 1));
    /* the stranger first, if any; rank 0 last, so that the others have to knock again */
    for (int i = num_children - 1; i >= 0; i--) children[i] = spawn(t, i, port);
    for (int i = 0; i < t->num_ranks; i++) waitpid(children[i], &statuses[i], 0);
    close(holder);
    if (t->stranger == NULL) return;
    kill(children[t->num_ranks], SIGKILL);
    waitpid(children[t->num_ranks], &statuses[t->num_ranks], 0);
}

/* Runs a trial; again if somebody else got the port first. */
static void run(const trial *t)
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

/* Expects a result of a rank, and words in its sentence. */
static void expect(const trial *t, int rank, epic_result result, const char *word,
                   const char *other)
{
    const report *got = &reports[rank];
    CHECK(got->result == result, "%s: rank %d: %s, not %s: %s", t->name, rank,
          epic_result_name(got->result), epic_result_name(result), got->sentence);
    CHECK(word == NULL || strstr(got->sentence, word), "%s: rank %d: no \"%s\" in: %s", t->name,
          rank, word, got->sentence);
    CHECK(other == NULL || strstr(got->sentence, other), "%s: rank %d: no \"%s\" in: %s",
          t->name, rank, other, got->sentence);
    if (getenv("MEET_VERBOSE") != NULL)
        printf("%s: rank %d: %s after %lld ms: %s\n", t->name, rank,
               epic_result_name(got->result), (long long)got->ms, got->sentence);
}

static unsigned char byte_of(int rank, int number, size_t i)
{
    return (unsigned char)(rank * 131 + number * 31 + (int)(i % 251) + (int)(i / 1021));
}

/* One gather with bytes that everybody can predict. */
static epic_result gather(epic_meet *meet, int number, size_t bytes, report *out)
{
    const size_t ranks = (size_t)meet->num_ranks;
    unsigned char *mine = calloc(bytes + 1, 1);
    unsigned char *all = malloc(ranks * bytes + 1);
    for (size_t i = 0; i < bytes; i++) mine[i] = byte_of(meet->rank, number, i);
    memset(all, 0xee, ranks * bytes + 1);
    const epic_result result = meet->gather(meet->self, mine, all, bytes);
    for (size_t r = 0; r < ranks && result == EPIC_OK; r++)
        for (size_t i = 0; i < bytes; i++)
            if (all[r * bytes + i] != byte_of((int)r, number, i)) out->wrong_bytes = true;
    if (all[ranks * bytes] != 0xee) out->wrong_bytes = true;
    free(mine);
    free(all);
    return result;
}

static void meet_and_gather(const trial *t, epic_tcp *tcp, report *out)
{
    epic_meet meet;
    out->result = epic_meet_tcp(&meet, tcp);
    for (int i = 0; i < t->num_gathers && out->result == EPIC_OK; i++)
        out->result = gather(&meet, i, t->bytes, out);
    epic_meet_close(&meet);
    epic_meet_close(&meet);
}

/* ------------------------------------------------------------------------- what works ---- */

static void rank_of_sizes(const trial *t, epic_tcp *tcp, report *out)
{
    static const size_t sizes[] = {8, 0, 1, 7, 4096, 1000003, 0, 64};
    epic_meet meet;
    (void)t;
    out->result = epic_meet_tcp(&meet, tcp);
    if (out->result == EPIC_OK && (meet.rank != tcp->rank || meet.num_ranks != tcp->num_ranks))
        out->wrong_bytes = true;
    for (int i = 0; i < 8 && out->result == EPIC_OK; i++)
        out->result = gather(&meet, i, sizes[i], out);
    epic_meet_close(&meet);
}

static void test_gathers(void)
{
    static const int counts[] = {1, 2, 3, 8};
    for (int i = 0; i < 4; i++) {
        const trial t = {.name = "sizes",
                         .num_ranks = counts[i],
                         .rank = rank_of_sizes,
                         .timeout_ms = 15000,
                         .odd = -1};
        run(&t);
        for (int r = 0; r < t.num_ranks; r++) expect(&t, r, EPIC_OK, NULL, NULL);
    }
    const trial more[] = {
        {"hundred gathers", 3, meet_and_gather, NULL, NULL, NULL, NULL, 15000, -1, 40, 100},
        {"4 MiB each", 4, meet_and_gather, NULL, NULL, NULL, NULL, 15000, -1, 4 << 20, 2},
        {"localhost", 3, meet_and_gather, NULL, "localhost", NULL, NULL, 15000, -1, 40, 2},
        {"a secret", 3, meet_and_gather, NULL, NULL, "hush", NULL, 15000, -1, 40, 2},
    };
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
        run(&more[i]);
        for (int r = 0; r < more[i].num_ranks; r++) expect(&more[i], r, EPIC_OK, NULL, NULL);
    }
}

static void test_ipv6(void)
{
    const trial t = {"::1", 3, meet_and_gather, NULL, "::1", NULL, NULL, 15000, -1, 40, 2};
    struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    const int s = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool there = s >= 0 && bind(s, (struct sockaddr *)&at, sizeof at) == 0;
    if (s >= 0) close(s);
    if (!there) {
        printf("no IPv6 here: \"::1\" is not tested\n");
        return;
    }
    run(&t);
    for (int r = 0; r < t.num_ranks; r++) expect(&t, r, EPIC_OK, NULL, NULL);
}

/* An address of this host that is not loopback, if it has one. */
static void test_own_address(void)
{
    char address[64] = "";
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) != 0) return;
    for (const struct ifaddrs *at = all; at != NULL && address[0] == '\0'; at = at->ifa_next)
        if (at->ifa_addr != NULL && at->ifa_addr->sa_family == AF_INET &&
            (at->ifa_flags & IFF_LOOPBACK) == 0 && (at->ifa_flags & IFF_UP) != 0)
            getnameinfo(at->ifa_addr, sizeof(struct sockaddr_in), address, sizeof address, NULL,
                        0, NI_NUMERICHOST);
    freeifaddrs(all);
    if (address[0] == '\0') {
        printf("no address but loopback: another is not tested\n");
        return;
    }
    const trial t = {address, 3, meet_and_gather, NULL, address, NULL, NULL, 15000, -1, 40, 2};
    run(&t);
    for (int r = 0; r < t.num_ranks; r++) expect(&t, r, EPIC_OK, NULL, NULL);
}

/* -------------------------------------------------------------------------- strangers ---- */

static int knock(uint32_t port)
{
    const struct sockaddr_in at = {.sin_family = AF_INET,
                                   .sin_port = htons((uint16_t)port),
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(s, (const struct sockaddr *)&at, sizeof at) == 0) return s;
    close(s);
    return -1;
}

static int listen_at(uint32_t port)
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

static int knock_until_open(uint32_t port)
{
    for (;;) {
        const int s = knock(port);
        if (s >= 0) return s;
        nap(5);
    }
}

static void say(uint32_t port, const void *bytes, size_t length, bool hold)
{
    const int s = knock(port);
    if (s < 0) return;
    (void)!send(s, bytes, length, MSG_NOSIGNAL);
    if (!hold) close(s);
}

/* All kinds of garbage, again and again; every other connection is kept open. */
static void babble(const trial *t, uint32_t port)
{
    static const char http[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    unsigned char noise[200];
    epic_hello hello;
    srand(7);
    for (int i = 0;; i++) {
        const bool hold = i % 2 == 0 && i < 600;
        for (size_t b = 0; b < sizeof noise; b++) noise[b] = (unsigned char)rand();
        say(port, noise, (size_t)(rand() % 200), hold);
        say(port, NULL, 0, hold);
        say(port, http, sizeof http - 1, hold);
        epic_wire_hello(&hello, 2, t->num_ranks, t->secret != NULL, epic_meet_now() + 60000);
        say(port, &hello, (size_t)(rand() % 63), hold); /* half of a hello */
        hello.rank = t->num_ranks;                      /* a rank that is not */
        say(port, &hello, sizeof hello, hold);
        hello.rank = 0;
        say(port, &hello, sizeof hello, hold);
        hello.rank = -5;
        say(port, &hello, sizeof hello, hold);
        hello.rank = 1;
        hello.num_ranks = -1;
        say(port, &hello, sizeof hello, hold);
        if (i % 10 == 0) nap(1);
    }
}

/* More silent connections than rank 0 keeps. */
static void be_silent(const trial *t, uint32_t port)
{
    (void)t;
    (void)knock_until_open(port);
    for (int i = 0; i < 300; i++) (void)knock(port);
    nap(20000);
}

static void odd_rank_late(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == t->odd) nap(200);
    meet_and_gather(t, tcp, out);
}

static void test_strangers(void)
{
    const trial trials[] = {
        {"garbage", 3, odd_rank_late, babble, NULL, NULL, NULL, 10000, 2, 40, 20},
        {"garbage, a secret", 3, odd_rank_late, babble, NULL, "hush", NULL, 10000, 2, 40, 20},
        {"silence", 3, odd_rank_late, be_silent, NULL, NULL, NULL, 10000, 2, 40, 20},
    };
    for (size_t i = 0; i < sizeof trials / sizeof *trials; i++) {
        run(&trials[i]);
        for (int r = 0; r < 3; r++) {
            expect(&trials[i], r, EPIC_OK, NULL, NULL);
            CHECK(reports[r].ms < 5000, "%s: rank %d needed %lld ms", trials[i].name, r,
                  (long long)reports[r].ms);
        }
    }
}

/* Rank 0 comes after another program, which listened on its port and talked nonsense. */
static void zero_after_stranger(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == 0) {
        char nonsense[100];
        memset(nonsense, 'x', sizeof nonsense);
        const int listener = listen_at(tcp->port);
        const int s = accept(listener, NULL, NULL);
        (void)!send(s, nonsense, sizeof nonsense, MSG_NOSIGNAL);
        nap(50);
        close(s);
        close(listener);
    }
    meet_and_gather(t, tcp, out);
}

static void test_stranger_before(void)
{
    const trial t = {
        "nonsense first", 3, zero_after_stranger, NULL, NULL, NULL, NULL, 10000, -1, 40, 5};
    run(&t);
    for (int r = 0; r < 3; r++) expect(&t, r, EPIC_OK, NULL, NULL);
}

/* The odd rank is a process too many, which says that it is rank 1. */
static void rank_twice(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == t->odd) {
        nap(100);
        tcp->rank = 1;
    }
    if (tcp->rank == 2) nap(300);
    tcp->num_ranks--;
    meet_and_gather(t, tcp, out);
}

static void test_duplicate(void)
{
    const trial t = {"rank 1 twice", 4, rank_twice, NULL, NULL, NULL, NULL, 10000, 3, 40, 5};
    run(&t);
    for (int r = 0; r < 3; r++) expect(&t, r, EPIC_OK, NULL, NULL);
    expect(&t, 3, EPIC_EINVAL, "rank 1 is already in the meeting", NULL);
}

/* ------------------------------------------------------------------------- differences ---- */

static void odd_num_ranks(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == t->odd) tcp->num_ranks = 3;
    if (tcp->rank == 1) nap(200); /* comes after the failure, and is told too */
    meet_and_gather(t, tcp, out);
}

/* A rank of another version: its own sentence is its business. */
static void odd_version(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank != t->odd) {
        meet_and_gather(t, tcp, out);
        return;
    }
    epic_hello hello;
    char answer[1024];
    const int64_t end = epic_meet_now() + 5000;
    const int s = knock_until_open(tcp->port);
    epic_wire_hello(&hello, tcp->rank, tcp->num_ranks, false, end);
    hello.version = 99;
    (void)epic_wire_send_bytes(s, &hello, sizeof hello, end);
    (void)epic_wire_receive_all(s, answer, sizeof answer, end);
    close(s);
}

/* Plays rank 0 for one visitor: hellos of that version, then an entry. */
static void play_zero(const epic_tcp *tcp, uint32_t version, bool has_secret)
{
    const int64_t end = epic_meet_now() + 5000;
    epic_hello theirs, ours;
    char rest[256];
    const int listener = listen_at(tcp->port);
    const int s = accept(listener, NULL, NULL);
    epic_wire_hello(&ours, 0, tcp->num_ranks, has_secret, end);
    ours.version = version;
    (void)epic_wire_receive_all(s, &theirs, sizeof theirs, end);
    (void)epic_wire_send_bytes(s, &ours, sizeof ours, end);
    epic_link link = {.socket = s};
    const epic_frame frame = epic_link_frame(NULL, EPIC_OK, 0, NULL, 0, end);
    epic_letter entry = epic_link_letter(&link, &frame, NULL);
    (void)epic_link_send_all(&link, &entry, end);
    (void)epic_wire_receive_all(s, rest, sizeof rest, end);
    close(s);
    close(listener);
}

static void zero_of_version(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == 0)
        play_zero(tcp, 99, false);
    else
        meet_and_gather(t, tcp, out);
}

static void zero_without_secret(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == 0)
        play_zero(tcp, WIRE_VERSION, true);
    else
        meet_and_gather(t, tcp, out);
}

static void test_differences(void)
{
    const trial counts = {.name = "num_ranks",
                          .num_ranks = 4,
                          .rank = odd_num_ranks,
                          .odd = 2,
                          .timeout_ms = 10000};
    run(&counts);
    for (int r = 0; r < 4; r++)
        expect(&counts, r, EPIC_EMISMATCH, "rank 2 says that there are 3 ranks",
               "rank 0 says 4");

    const trial version = {
        .name = "version", .num_ranks = 3, .rank = odd_version, .odd = 2, .timeout_ms = 10000};
    run(&version);
    for (int r = 0; r < 2; r++)
        expect(&version, r, EPIC_EMISMATCH, "rank 2 meets with protocol version 99",
               "rank 0 with 2");

    const trial zero = {
        .name = "version of 0", .num_ranks = 2, .rank = zero_of_version, .timeout_ms = 10000};
    run(&zero);
    expect(&zero, 1, EPIC_EMISMATCH, "version 2", "rank 0 with 99");
}

/* --------------------------------------------------------------------- the secret ---- */

static void without_secret(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == t->odd) tcp->secret = NULL;
    meet_and_gather(t, tcp, out);
}

static void only_secret(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == t->odd) tcp->secret = "hush";
    meet_and_gather(t, tcp, out);
}

static void without_libcrypto(const trial *t, epic_tcp *tcp, report *out)
{
    hide_libcrypto = true;
    meet_and_gather(t, tcp, out);
}

static void test_secret(void)
{
    const trial wrong = {
        "wrong secret", 3, meet_and_gather, NULL, NULL, "hush", "husk", 400, 2, 8, 1};
    run(&wrong);
    expect(&wrong, 0, EPIC_ETIMEOUT, "rank 2 did not come", "rank 2 is not that of rank 0");
    expect(&wrong, 1, EPIC_ETIMEOUT, "rank 2 did not come", NULL);
    expect(&wrong, 2, EPIC_ETIMEOUT, "of rank 2 is not that of rank 0", "EPIC_SECRET");

    const trial none = {"no secret", 3, without_secret, NULL, NULL, "hush", NULL, 400, 2, 8, 1};
    run(&none);
    expect(&none, 0, EPIC_ETIMEOUT, "rank 2 did not come", "rank 2 has none");
    expect(&none, 1, EPIC_ETIMEOUT, "rank 2 did not come", NULL);
    expect(&none, 2, EPIC_EINVAL, "rank 0 has a secret and rank 2 has none", NULL);

    const trial only = {"one secret", 3, only_secret, NULL, NULL, NULL, NULL, 400, 2, 8, 1};
    run(&only);
    expect(&only, 1, EPIC_ETIMEOUT, "rank 2 did not come", NULL);
    expect(&only, 2, EPIC_ETIMEOUT, "rank 0 has no secret and rank 2 has one", NULL);

    const trial fake = {
        "false rank 0", 2, zero_without_secret, NULL, NULL, "hush", NULL, 600, 0, 8, 1};
    run(&fake);
    expect(&fake, 1, EPIC_ETIMEOUT, "rank 0 did not come", NULL);

    const trial bare = {
        "no libcrypto", 2, without_libcrypto, NULL, NULL, "hush", NULL, 3000, 0, 8, 1};
    run(&bare);
    for (int r = 0; r < 2; r++) expect(&bare, r, EPIC_ENOTSUP, "libcrypto.so.3", NULL);
}

/* A proof holds for its role, its secret and its hellos alone; one is checked against the value
 * that Python's hmac gives. */
static void test_proofs(void)
{
    static const uint8_t known[] = {0xb3, 0xfb, 0x55, 0x77, 0x01, 0xba, 0x8e, 0xc3,
                                    0x96, 0x04, 0x2d, 0xa2, 0x64, 0x56, 0xdd, 0x55,
                                    0x2d, 0x84, 0x72, 0x32, 0x15, 0x2b, 0xab, 0xba,
                                    0xa2, 0x66, 0x57, 0xbb, 0x04, 0x5c, 0x91, 0xff};
    epic_secret secret, other;
    uint8_t proof[SECRET_PROOF];
    epic_hello zero = {.magic = WIRE_HELLO, .version = 2, .num_ranks = 4, .has_secret = 1};
    epic_hello one = zero;
    one.rank = 1;
    memset(zero.nonce, 0xa5, sizeof zero.nonce);
    memset(one.nonce, 0x5a, sizeof one.nonce);
    CHECK(epic_secret_open(&secret, "hush") == EPIC_OK, "%s", epic_error(NULL));
    CHECK(epic_secret_open(&other, "husk") == EPIC_OK, "%s", epic_error(NULL));
    CHECK(epic_secret_prove(&secret, ROLE_SESSION, &zero, &one, proof), "no proof");
    CHECK(memcmp(proof, known, sizeof known) == 0, "not the HMAC of Python");
    CHECK(epic_secret_check(&secret, ROLE_SESSION, &zero, &one, proof), "refused");
    CHECK(!epic_secret_check(&secret, ROLE_CONNECTOR, &zero, &one, proof), "the other role");
    CHECK(!epic_secret_check(&other, ROLE_SESSION, &zero, &one, proof), "another secret");
    one.rank = 2;
    CHECK(!epic_secret_check(&secret, ROLE_SESSION, &zero, &one, proof), "another rank");
    one.rank = 1;
    zero.nonce[31] ^= 1;
    CHECK(!epic_secret_check(&secret, ROLE_SESSION, &zero, &one, proof), "another nonce");
    epic_secret_close(&secret);
    epic_secret_close(&other);
}

/* ---------------------------------------------------------- lost, late, different ---- */

/* Gathers twice; the odd rank dies in between. */
static void killed(const trial *t, epic_tcp *tcp, report *out)
{
    epic_meet meet;
    out->result = epic_meet_tcp(&meet, tcp);
    if (out->result == EPIC_OK) out->result = gather(&meet, 0, t->bytes, out);
    if (out->result == EPIC_OK && tcp->rank == t->odd) kill(getpid(), SIGKILL);
    if (out->result == EPIC_OK) out->result = gather(&meet, 1, t->bytes, out);
    if (out->result != EPIC_OK && gather(&meet, 2, t->bytes, out) != out->result)
        out->wrong_bytes = true; /* a broken meeting stays broken */
    epic_meet_close(&meet);
}

/* Says hello as a rank does, and goes before the others have come. */
static void goes_early(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == t->odd) {
        epic_hello hello;
        const int64_t end = epic_meet_now() + 5000;
        const int s = knock_until_open(tcp->port);
        epic_wire_hello(&hello, tcp->rank, tcp->num_ranks, false, end);
        (void)epic_wire_send_bytes(s, &hello, sizeof hello, end);
        (void)epic_wire_receive_all(s, &hello, sizeof hello, end);
        close(s);
        return;
    }
    if (tcp->rank == 1) nap(200);
    meet_and_gather(t, tcp, out);
}

static void absent(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank != t->odd) meet_and_gather(t, tcp, out);
}

/* The odd rank meets, and comes too late to the gather. */
static void late(const trial *t, epic_tcp *tcp, report *out)
{
    epic_meet meet;
    out->result = epic_meet_tcp(&meet, tcp);
    if (tcp->rank == t->odd) nap((int)t->timeout_ms + 400);
    if (out->result == EPIC_OK) out->result = gather(&meet, 0, t->bytes, out);
    /* the others stay, as ranks do that have more to tidy up */
    if (out->result == EPIC_ETIMEOUT) snprintf(out->sentence, 512, "%s", epic_error(NULL));
    if (tcp->rank != t->odd) nap(300);
    epic_meet_close(&meet);
}

static void leaves(const trial *t, epic_tcp *tcp, report *out)
{
    epic_meet meet;
    out->result = epic_meet_tcp(&meet, tcp);
    if (out->result == EPIC_OK && tcp->rank != t->odd)
        out->result = gather(&meet, 0, t->bytes, out);
    epic_meet_close(&meet);
}

static void other_bytes(const trial *t, epic_tcp *tcp, report *out)
{
    epic_meet meet;
    out->result = epic_meet_tcp(&meet, tcp);
    if (out->result == EPIC_OK)
        out->result = gather(&meet, 0, t->bytes + 8 * (tcp->rank == t->odd), out);
    epic_meet_close(&meet);
}

static void expect_soon(const trial *t, int64_t ms)
{
    for (int r = 0; r < t->num_ranks; r++)
        CHECK(reports[r].ms < ms, "%s: rank %d needed %lld ms", t->name, r,
              (long long)reports[r].ms);
}

static void test_lost(void)
{
    const trial one = {"rank 2 dies", 4, killed, NULL, NULL, NULL, NULL, 20000, 2, 40, 0};
    run(&one);
    for (int r = 0; r < 4; r++)
        if (r != 2) expect(&one, r, EPIC_EPEER, "rank 2 closed", "died");
    expect_soon(&one, 3000);

    const trial big = {
        "rank 2 dies, 4 MiB", 4, killed, NULL, NULL, NULL, NULL, 20000, 2, 4 << 20, 0};
    run(&big);
    for (int r = 0; r < 4; r++)
        if (r != 2) expect(&big, r, EPIC_EPEER, "rank 2 closed", NULL);

    const trial zero = {"rank 0 dies", 4, killed, NULL, NULL, NULL, NULL, 20000, 0, 40, 0};
    run(&zero);
    for (int r = 1; r < 4; r++) expect(&zero, r, EPIC_EPEER, "rank 0 closed", NULL);
    expect_soon(&zero, 3000);

    const trial early = {
        "rank 2 goes early", 3, goes_early, NULL, NULL, NULL, NULL, 20000, 2, 40, 0};
    run(&early);
    for (int r = 0; r < 2; r++) expect(&early, r, EPIC_EPEER, "rank 2 left before", NULL);
    expect_soon(&early, 3500);

    const trial closed = {"rank 1 leaves", 3, leaves, NULL, NULL, NULL, NULL, 20000, 1, 40, 0};
    run(&closed);
    expect(&closed, 0, EPIC_EPEER, "rank 1 closed", NULL);
    expect(&closed, 2, EPIC_EPEER, "rank 1 closed", NULL);
}

static void test_late(void)
{
    const trial away = {"rank 2 absent", 4, absent, NULL, NULL, NULL, NULL, 1000, 2, 40, 1};
    run(&away);
    for (int r = 0; r < 4; r++)
        if (r != 2) expect(&away, r, EPIC_ETIMEOUT, "rank 2 did not come", "1000 ms");
    expect_soon(&away, 2500);

    const trial zero = {"rank 0 absent", 3, absent, NULL, NULL, NULL, NULL, 400, 0, 40, 1};
    run(&zero);
    for (int r = 1; r < 3; r++)
        expect(&zero, r, EPIC_ETIMEOUT, "rank 0 did not come", "400 ms");

    const trial slow = {"rank 2 late", 4, late, NULL, NULL, NULL, NULL, 1000, 2, 40, 1};
    run(&slow);
    for (int r = 0; r < 4; r++)
        expect(&slow, r, EPIC_ETIMEOUT, "rank 2 did not come", "gather 1");
}

static void test_lengths(void)
{
    const trial small = {"lengths", 4, other_bytes, NULL, NULL, NULL, NULL, 10000, 2, 16, 0};
    run(&small);
    for (int r = 0; r < 4; r++)
        expect(&small, r, EPIC_EMISMATCH, "rank 2 brings 24 bytes", "rank 0 brings 16");

    const trial big = {"lengths, 4 MiB", 4, other_bytes, NULL, NULL, NULL, NULL, 10000, 2,
                       4 << 20,          0};
    run(&big);
    for (int r = 0; r < 4; r++) expect(&big, r, EPIC_EMISMATCH, "4194312", "4194304");

    const trial zero = {"lengths of 0", 3,     other_bytes, NULL, NULL, NULL,
                        NULL,           10000, 0,           16,   0};
    run(&zero);
    for (int r = 0; r < 3; r++)
        expect(&zero, r, EPIC_EMISMATCH, "brings 16", "rank 0 brings 24");
}

/* --------------------------------------------------------- arguments, descriptors ---- */

static void refuse(const epic_tcp *tcp, size_t size, const char *word)
{
    epic_meet meet;
    const epic_result result = epic_meet_tcp_v1(&meet, tcp, size);
    CHECK(result == EPIC_EINVAL, "%s, not EPIC_EINVAL (%s)", epic_result_name(result), word);
    CHECK(strstr(epic_error(NULL), word), "no \"%s\" in: %s", word, epic_error(NULL));
    epic_meet_close(&meet);
    CHECK(strstr(epic_error(NULL), word), "close changed the sentence to: %s",
          epic_error(NULL));
}

static void test_arguments(void)
{
    const epic_tcp good = {.num_ranks = 2, .port = 29999, .timeout_ms = 200};
    epic_tcp bad = good;
    struct {
        epic_tcp tcp;
        uint64_t more;
    } longer = {good, 0};

    refuse(NULL, sizeof good, "epic_tcp is NULL");
    refuse(&good, 0, "size of epic_tcp is 0");
    bad.num_ranks = 0;
    refuse(&bad, sizeof bad, "tcp.num_ranks is 0");
    bad = good, bad.rank = 2;
    refuse(&bad, sizeof bad, "tcp.rank is 2");
    bad = good, bad.rank = -1;
    refuse(&bad, sizeof bad, "tcp.rank is -1");
    bad = good, bad.port = 0;
    refuse(&bad, sizeof bad, "tcp.port is 0");
    bad = good, bad.port = 65536;
    refuse(&bad, sizeof bad, "tcp.port is 65536");
    bad = good, bad.secret = "";
    refuse(&bad, sizeof bad, "secret (tcp.secret or EPIC_SECRET) is empty");
    bad = good, bad.address = "203.0.113.77"; /* set aside for documents: nobody's */
    refuse(&bad, sizeof bad, "\"203.0.113.77\" (tcp.address or MASTER_ADDR) is not one of");
    longer.more = 1;
    refuse(&longer.tcp, sizeof longer, "not zero");

    epic_meet meet;
    longer.more = 0;
    longer.tcp.num_ranks = 1;
    CHECK(epic_meet_tcp(&meet, &longer.tcp) == EPIC_OK, "%s", epic_error(NULL));
    epic_meet_close(&meet);
    CHECK(epic_meet_tcp(NULL, &good) == EPIC_EINVAL, "out NULL");
    epic_meet_close(NULL);
}

static void test_gather_arguments(void)
{
    const epic_tcp alone = {.num_ranks = 1, .port = 29999};
    epic_meet meet;
    int mine = 7, all = 0;
    CHECK(epic_meet_tcp(&meet, &alone) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(meet.gather(meet.self, &mine, &all, sizeof all) == EPIC_OK && all == 7, "%d", all);
    CHECK(meet.gather(meet.self, NULL, NULL, 0) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(meet.gather(meet.self, NULL, &all, 4) == EPIC_EINVAL, "mine NULL");
    CHECK(meet.gather(meet.self, &mine, &all, (16u << 20) + 1) == EPIC_EINVAL, "too long");
    epic_meet_close(&meet);
}

static void test_taken_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    epic_meet meet;
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bind(s, (struct sockaddr *)&at, sizeof at);
    listen(s, 1);
    getsockname(s, (struct sockaddr *)&at, &bytes);
    const epic_tcp tcp = {.num_ranks = 2, .port = ntohs(at.sin_port), .timeout_ms = 200};
    CHECK(epic_meet_tcp(&meet, &tcp) == EPIC_EDEVICE, "%s", epic_error(NULL));
    CHECK(strstr(epic_error(NULL), "another program does"), "%s", epic_error(NULL));
    close(s);
}

static int num_descriptors(void)
{
    int n = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (readdir(dir) != NULL) n++;
    closedir(dir);
    return n;
}

/* Meets often on one port, and counts descriptors before and after. */
static void meet_often(const trial *t, epic_tcp *tcp, report *out)
{
    const int before = num_descriptors();
    for (int i = 0; i < t->num_gathers && out->result == EPIC_OK; i++) {
        epic_meet meet;
        out->result = epic_meet_tcp(&meet, tcp);
        if (out->result == EPIC_OK) out->result = gather(&meet, i, t->bytes, out);
        epic_meet_close(&meet);
    }
    if (num_descriptors() != before) out->wrong_bytes = true;
}

/* A meeting that the odd rank makes fail, and then one on the same port that works. */
static void meet_again(const trial *t, epic_tcp *tcp, report *out)
{
    epic_meet meet;
    epic_tcp wrong = *tcp;
    const int before = num_descriptors();
    if (tcp->rank == t->odd) wrong.num_ranks++;
    if (epic_meet_tcp(&meet, &wrong) != EPIC_EMISMATCH) out->wrong_bytes = true;
    epic_meet_close(&meet);
    if (num_descriptors() != before) out->wrong_bytes = true;
    nap(300);
    meet_and_gather(t, tcp, out);
    if (num_descriptors() != before) out->wrong_bytes = true;
}

static void test_often(void)
{
    const trial often = {"often", 3, meet_often, NULL, NULL, "hush", NULL, 10000, -1, 40, 10};
    run(&often);
    for (int r = 0; r < 3; r++) expect(&often, r, EPIC_OK, NULL, NULL);

    const trial again = {"again", 3, meet_again, NULL, NULL, NULL, NULL, 10000, 2, 40, 2};
    run(&again);
    for (int r = 0; r < 3; r++) expect(&again, r, EPIC_OK, NULL, NULL);
    expect_soon(&again, 1500);
}

int main(void)
{
    reports = mmap(NULL, sizeof *reports * (MOST + 1), PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    static void (*const tests[])(void) = {
        test_arguments, test_gather_arguments, test_proofs,     test_gathers,
        test_ipv6,      test_own_address,      test_strangers,  test_stranger_before,
        test_duplicate, test_differences,      test_secret,     test_lost,
        test_late,      test_lengths,          test_taken_port, test_often,
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        const int64_t begin = epic_meet_now();
        tests[i]();
        if (getenv("MEET_VERBOSE") != NULL)
            printf("-- test %zu: %lld ms\n", i, (long long)(epic_meet_now() - begin));
    }
    return failures == 0 ? 0 : 1;
}
