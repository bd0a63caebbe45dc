/* SPDX-License-Identifier: Apache-2.0 */
/* Tests bootstraps over TCP with strangers, that is, connections that do not belong to the
 * group: garbage and silence on the port, a rank that connects twice, and secrets that differ
 * or cannot be verified. */
#include <dlfcn.h>

#include "bootstrap.h"

/* -------------------------------------------------------------------------- strangers ---- */

static void say(uint32_t port, const void *bytes, size_t length, bool hold)
{
    const int s = knock(port);
    if (s < 0) return;
    (void)!send(s, bytes, length, MSG_NOSIGNAL);
    if (!hold) close(s);
}

/* Sends all kinds of garbage repeatedly, and keeps every other connection open. */
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
        const time_limit limit = time_limit_begin(60000, NULL);
        epic_frame_make_hello(&hello, 2, t->num_ranks, t->secret != NULL, &limit);
        say(port, &hello, (size_t)(rand() % 63), hold); /* an incomplete hello */
        hello.rank = t->num_ranks;                      /* a rank that does not exist */
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

/* Opens more silent connections than rank 0 keeps. */
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
    bootstrap_and_gather(t, tcp, out);
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

static void talk_nonsense(int listener)
{
    char nonsense[100];
    memset(nonsense, 'x', sizeof nonsense);
    const int s = accept(listener, NULL, NULL);
    (void)!send(s, nonsense, sizeof nonsense, MSG_NOSIGNAL);
    nap(50);
    close(s);
}

/* Rank 0 starts after another program, which listened on its port and sent garbage. */
static void zero_after_stranger(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == 0) {
        const int listener = listen_at(tcp->port);
        talk_nonsense(listener);
        close(listener);
    }
    bootstrap_and_gather(t, tcp, out);
}

/* The other program keeps the connections open and sends nothing more. */
static void zero_never(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank != 0) {
        bootstrap_and_gather(t, tcp, out);
        return;
    }
    const int listener = listen_at(tcp->port);
    talk_nonsense(listener);
    for (struct pollfd at = {listener, POLLIN, 0}; poll(&at, 1, (int)t->timeout_ms) > 0;)
        close(accept(listener, NULL, NULL));
    close(listener);
}

static void test_stranger_before(void)
{
    const trial t = {
        "nonsense first", 3, zero_after_stranger, NULL, NULL, NULL, NULL, 10000, -1, 40, 5};
    run(&t);
    for (int r = 0; r < 3; r++) expect(&t, r, EPIC_OK, NULL, NULL);

    const trial never = {
        "nonsense, then nothing", 2, zero_never, NULL, NULL, NULL, NULL, 1000, -1, 8, 1};
    run(&never);
    expect(&never, 1, EPIC_ETIMEOUT, "rank 0 did not accept", "is not rank 0 of EPIC");
}

/* The odd rank is one process too many, and sends that it is rank 1. */
static void rank_twice(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == t->odd) {
        nap(100);
        tcp->rank = 1;
    }
    if (tcp->rank == 2) nap(300);
    tcp->num_ranks--;
    bootstrap_and_gather(t, tcp, out);
}

static void test_duplicate(void)
{
    const trial t = {"rank 1 twice", 4, rank_twice, NULL, NULL, NULL, NULL, 10000, 3, 40, 5};
    run(&t);
    for (int r = 0; r < 3; r++) expect(&t, r, EPIC_OK, NULL, NULL);
    expect(&t, 3, EPIC_EINVAL, "rank 1 has joined already", NULL);
}

/* The odd rank takes the place of rank 1. Then strangers send garbage. */
static void rank_of_another(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == t->odd) {
        nap(200);
        tcp->rank = 1;
    }
    bootstrap_and_gather(t, tcp, out);
}

static void make_noise_later(const trial *t, uint32_t port)
{
    (void)t;
    nap(600);
    for (int i = 0; i < 3; i++) say(port, "GET / HTTP/1.1\r\n\r\n", 18, false);
    nap(20000);
}

/* Tests that ranks that wait for a rank whose place was taken get an error that explains this.
 */
static void test_taken(void)
{
    const char *cause = "another process connected as rank 1, which had joined already";
    const trial t = {"no rank 2, rank 1 twice",
                     3,
                     rank_of_another,
                     make_noise_later,
                     NULL,
                     NULL,
                     NULL,
                     1500,
                     2,
                     8,
                     1};
    run(&t);
    for (int r = 0; r < 2; r++)
        expect(&t, r, EPIC_ETIMEOUT, "rank 2 did not connect to rank 0", cause);
    expect(&t, 2, EPIC_EINVAL, "rank 1 has joined already", NULL);
}

/* --------------------------------------------------------------- words for a terminal ---- */

/* One joiner has sent its hello, but not its proof, when more silent connections come than rank
 * 0 keeps. Rank 0 must drop silent connections first, so that it still reads the proof. */
static void prove_among_silent(const trial *t, uint32_t port)
{
    time_limit limit = time_limit_begin(5000, NULL);
    const uint8_t proof[SECRET_PROOF] = {0};
    epic_hello ours, theirs;
    epic_frame answer;
    const int s = knock_until_open(port);
    epic_frame_make_hello(&ours, 1, t->num_ranks, true, &limit);
    (void)epic_frame_send_bytes(s, &ours, sizeof ours, &limit);
    (void)epic_frame_receive_all(s, &theirs, sizeof theirs, &limit);
    for (int i = 0; i < 300; i++) (void)knock(port);
    nap(300);
    (void)epic_frame_send_bytes(s, proof, sizeof proof, &limit);
    reports[MOST].ms = epic_frame_receive_all(s, &answer, sizeof answer, &limit) == FRAME_DONE;
    nap(20000);
}

static void very_late(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == t->odd) nap(1500);
    bootstrap_and_gather(t, tcp, out);
}

static void test_queue(void)
{
    const trial t = {"a proof among silence",
                     2,
                     very_late,
                     prove_among_silent,
                     NULL,
                     "hush",
                     NULL,
                     10000,
                     1,
                     8,
                     1};
    run(&t);
    CHECK(reports[MOST].ms == 1, "the joiner that was proving itself was dropped");
    for (int r = 0; r < 2; r++) expect(&t, r, EPIC_OK, NULL, NULL);
}

/* A program that is not rank 0 refuses the rank with a text full of control codes: the bell,
 * ESC, CSI as U+009B and as a single byte, DEL, and incomplete characters. */
#define EVIL                           \
    "bell\x07 esc\x1b[31m csi\xc2\x9b" \
    "31m \x9b"                         \
    "31m del\x7f half\xc3 tail\x80 na\xc3\xafve"
#define TAME "bell? esc?[31m csi??31m ?31m del? half? tail? na\xc3\xafve"

static void refuse_with(const trial *t, const epic_tcp *tcp, const char *sentence)
{
    time_limit limit = time_limit_begin(5000, NULL);
    epic_hello theirs, ours;
    char rest[256];
    const int listener = listen_at(tcp->port);
    for (struct pollfd at = {listener, POLLIN, 0}; poll(&at, 1, (int)t->timeout_ms) > 0;) {
        epic_link link = {.socket = accept(listener, NULL, NULL)};
        epic_frame_make_hello(&ours, 0, tcp->num_ranks, t->secret != NULL, &limit);
        (void)epic_frame_receive_all(link.socket, &theirs, sizeof theirs, &limit);
        (void)epic_frame_send_bytes(link.socket, &ours, sizeof ours, &limit);
        epic_link_send_failure(&link, EPIC_EINVAL, sentence, &limit);
        (void)epic_frame_receive_all(link.socket, rest, sizeof rest, &limit);
        close(link.socket);
    }
    close(listener);
}

static void zero_with_words(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == 0)
        refuse_with(t, tcp, EVIL);
    else
        bootstrap_and_gather(t, tcp, out);
}

/* Sends U+00E9 many times, so that any cut of the text falls between two of them or inside one.
 */
static void zero_with_long_words(const trial *t, epic_tcp *tcp, report *out)
{
    char words[1 + 2 * 200 + 1] = "x";
    for (int i = 0; i < 200; i++) memcpy(words + 1 + 2 * i, "\xc3\xa9", 3);
    if (tcp->rank == 0)
        refuse_with(t, tcp, words);
    else
        bootstrap_and_gather(t, tcp, out);
}

static void test_words(void)
{
    const trial trials[] = {
        {"words", 2, zero_with_words, NULL, NULL, NULL, NULL, 800, 0, 8, 1},
        {"words, a secret", 2, zero_with_words, NULL, NULL, "hush", NULL, 800, 0, 8, 1}};
    for (size_t i = 0; i < sizeof trials / sizeof *trials; i++) {
        run(&trials[i]);
        expect(&trials[i], 1, i == 0 ? EPIC_EINVAL : EPIC_ETIMEOUT, TAME, NULL);
    }
    const trial cut = {
        "words that are cut", 2, zero_with_long_words, NULL, NULL, "hush", NULL, 800, 0, 8, 1};
    run(&cut);
    expect(&cut, 1, EPIC_ETIMEOUT, "what listens there refused: x\xc3\xa9", " ... ");
    CHECK(strchr(reports[1].sentence, '?') == NULL, "cut: %s", reports[1].sentence);
}

/* --------------------------------------------------------------------- the secret ---- */

/* The code under test loads libcrypto through this function, so that a test can hide it. */
static bool hide_libcrypto;

void *dlopen(const char *name, int flags)
{
    void *(*real)(const char *, int);
    void *const found = dlsym(RTLD_NEXT, "dlopen");
    memcpy(&real, &found, sizeof real);
    return hide_libcrypto ? NULL : real(name, flags);
}

static void without_secret(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == t->odd) tcp->secret = NULL;
    bootstrap_and_gather(t, tcp, out);
}

static void only_secret(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == t->odd) tcp->secret = "hush";
    bootstrap_and_gather(t, tcp, out);
}

static void without_libcrypto(const trial *t, epic_tcp *tcp, report *out)
{
    hide_libcrypto = true;
    bootstrap_and_gather(t, tcp, out);
}

static void zero_without_secret(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == 0)
        play_zero(tcp, FRAME_VERSION, true);
    else
        bootstrap_and_gather(t, tcp, out);
}

static void test_secret(void)
{
    const trial wrong = {
        "wrong secret", 3, bootstrap_and_gather, NULL, NULL, "hush", "husk", 1500, 2, 8, 1};
    run(&wrong);
    expect(&wrong, 0, EPIC_ETIMEOUT, "rank 2 did not connect", "rank 2 is not that of rank 0");
    expect(&wrong, 1, EPIC_ETIMEOUT, "rank 2 did not connect", NULL);
    expect(&wrong, 2, EPIC_ETIMEOUT, "of rank 2 is not that of rank 0", "EPIC_SECRET");

    const trial none = {"no secret", 3, without_secret, NULL, NULL, "hush", NULL, 1500, 2,
                        8,           1};
    run(&none);
    expect(&none, 0, EPIC_ETIMEOUT, "rank 2 did not connect", "rank 2 has none");
    expect(&none, 1, EPIC_ETIMEOUT, "rank 2 did not connect", NULL);
    expect(&none, 2, EPIC_EINVAL, "rank 0 has a secret and rank 2 has none", NULL);

    const trial only = {"one secret", 3, only_secret, NULL, NULL, NULL, NULL, 1500, 2, 8, 1};
    run(&only);
    expect(&only, 1, EPIC_ETIMEOUT, "rank 2 did not connect", NULL);
    expect(&only, 2, EPIC_ETIMEOUT, "rank 0 has no secret and rank 2 has one", NULL);

    const trial fake = {
        "false rank 0", 2, zero_without_secret, NULL, NULL, "hush", NULL, 600, 0, 8, 1};
    run(&fake);
    expect(&fake, 1, EPIC_ETIMEOUT, "rank 0 did not accept", NULL);

    const trial bare = {
        "no libcrypto", 2, without_libcrypto, NULL, NULL, "hush", NULL, 3000, 0, 8, 1};
    run(&bare);
    for (int r = 0; r < 2; r++) expect(&bare, r, EPIC_ENOTSUP, "libcrypto.so.3", NULL);
}

/* Tests that a proof is valid only for its role, secret and hellos. One proof is compared with
 * the value of Python's hmac. */
static void test_proofs(void)
{
    static const uint8_t known[] = {0xb3, 0xfb, 0x55, 0x77, 0x01, 0xba, 0x8e, 0xc3,
                                    0x96, 0x04, 0x2d, 0xa2, 0x64, 0x56, 0xdd, 0x55,
                                    0x2d, 0x84, 0x72, 0x32, 0x15, 0x2b, 0xab, 0xba,
                                    0xa2, 0x66, 0x57, 0xbb, 0x04, 0x5c, 0x91, 0xff};
    epic_secret secret, other;
    uint8_t proof[SECRET_PROOF];
    epic_hello zero = {.magic = HELLO_MAGIC, .version = 2, .num_ranks = 4, .has_secret = 1};
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

int main(void)
{
    static void (*const tests[])(void) = {
        test_proofs, test_strangers, test_stranger_before, test_duplicate,
        test_taken,  test_queue,     test_words,           test_secret,
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
