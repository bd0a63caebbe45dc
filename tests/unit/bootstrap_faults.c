/* SPDX-License-Identifier: Apache-2.0 */
/* Tests bootstraps over TCP that fail. If ranks differ, die, leave or come late, every rank
 * gets an error that names the rank. */
#include "bootstrap.h"

/* ------------------------------------------------------------------------- differences ---- */

static void odd_num_ranks(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == t->odd) tcp->num_ranks = 3;
    if (tcp->rank == 1) nap(200); /* connects after the failure, and must get the same error */
    bootstrap_and_gather(t, tcp, out);
}

/* A rank of another version. Its own error is not checked. */
static void odd_version(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank != t->odd) {
        bootstrap_and_gather(t, tcp, out);
        return;
    }
    epic_hello hello;
    char answer[1024];
    time_limit limit = time_limit_begin(5000, NULL);
    const int s = knock_until_open(tcp->port);
    epic_frame_make_hello(&hello, tcp->rank, tcp->num_ranks, false, &limit);
    hello.version = 99;
    (void)epic_frame_send_bytes(s, &hello, sizeof hello, &limit);
    (void)epic_frame_receive_all(s, answer, sizeof answer, &limit);
    close(s);
}

static void zero_of_version(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == 0)
        play_zero(tcp, 99, false);
    else
        bootstrap_and_gather(t, tcp, out);
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
        expect(&counts, r, EPIC_EMISMATCH, "num_ranks is 4 on rank 0", "3 on rank 2");

    const trial version = {
        .name = "version", .num_ranks = 3, .rank = odd_version, .odd = 2, .timeout_ms = 10000};
    run(&version);
    for (int r = 0; r < 2; r++)
        expect(&version, r, EPIC_EMISMATCH, "rank 2 has bootstrap protocol version 99",
               "rank 0 has 2");

    const trial zero = {
        .name = "version of 0", .num_ranks = 2, .rank = zero_of_version, .timeout_ms = 10000};
    run(&zero);
    expect(&zero, 1, EPIC_EMISMATCH, "version 2", "rank 0 has 99");
}

/* ---------------------------------------------------------- lost, late, different ---- */

/* Gathers twice; the odd rank dies between the gathers. */
static void killed(const trial *t, epic_tcp *tcp, report *out)
{
    epic_bootstrap bootstrap;
    out->result = epic_bootstrap_tcp(&bootstrap, tcp);
    if (out->result == EPIC_OK) out->result = gather(&bootstrap, 0, t->bytes, out);
    if (out->result == EPIC_OK && tcp->rank == t->odd) kill(getpid(), SIGKILL);
    if (out->result == EPIC_OK) out->result = gather(&bootstrap, 1, t->bytes, out);
    if (out->result != EPIC_OK && gather(&bootstrap, 2, t->bytes, out) != out->result)
        out->wrong_bytes = true; /* after a failure every gather must fail */
    epic_bootstrap_close(&bootstrap);
}

/* Sends a hello like a rank, and leaves before the other ranks have connected. */
static void goes_early(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank == t->odd) {
        epic_hello hello;
        time_limit limit = time_limit_begin(5000, NULL);
        const int s = knock_until_open(tcp->port);
        epic_frame_make_hello(&hello, tcp->rank, tcp->num_ranks, false, &limit);
        (void)epic_frame_send_bytes(s, &hello, sizeof hello, &limit);
        (void)epic_frame_receive_all(s, &hello, sizeof hello, &limit);
        close(s);
        return;
    }
    if (tcp->rank == 1) nap(200);
    bootstrap_and_gather(t, tcp, out);
}

static void absent(const trial *t, epic_tcp *tcp, report *out)
{
    if (tcp->rank != t->odd) bootstrap_and_gather(t, tcp, out);
}

/* The odd rank connects, but comes too late to the gather. */
static void late(const trial *t, epic_tcp *tcp, report *out)
{
    epic_bootstrap bootstrap;
    out->result = epic_bootstrap_tcp(&bootstrap, tcp);
    if (tcp->rank == t->odd) nap((int)t->timeout_ms + 400);
    if (out->result == EPIC_OK) out->result = gather(&bootstrap, 0, t->bytes, out);
    /* The other ranks keep their sockets open for a while, like ranks with more to clean up. */
    if (out->result == EPIC_ETIMEOUT) snprintf(out->sentence, 512, "%s", epic_error(NULL));
    if (tcp->rank != t->odd) nap(300);
    epic_bootstrap_close(&bootstrap);
}

/* The odd rank does not come to the gather. Rank 0 gets no CPU time until the other ranks have
 * given up and left. */
static void held(const trial *t, epic_tcp *tcp, report *out)
{
    epic_bootstrap bootstrap;
    out->result = epic_bootstrap_tcp(&bootstrap, tcp);
    const pid_t zero = getpid(), helper = tcp->rank == 0 ? fork() : 0;
    if (tcp->rank == 0 && helper == 0) {
        nap(300);
        kill(zero, SIGSTOP);
        nap((int)t->timeout_ms + 400);
        kill(zero, SIGCONT);
        _exit(0);
    }
    if (tcp->rank == t->odd) nap((int)t->timeout_ms + 1500);
    if (out->result == EPIC_OK) out->result = gather(&bootstrap, 0, t->bytes, out);
    if (tcp->rank == 0) waitpid(helper, NULL, 0);
    epic_bootstrap_close(&bootstrap);
}

static void leaves(const trial *t, epic_tcp *tcp, report *out)
{
    epic_bootstrap bootstrap;
    out->result = epic_bootstrap_tcp(&bootstrap, tcp);
    if (out->result == EPIC_OK && tcp->rank != t->odd)
        out->result = gather(&bootstrap, 0, t->bytes, out);
    epic_bootstrap_close(&bootstrap);
}

static void other_bytes(const trial *t, epic_tcp *tcp, report *out)
{
    epic_bootstrap bootstrap;
    out->result = epic_bootstrap_tcp(&bootstrap, tcp);
    if (out->result == EPIC_OK)
        out->result = gather(&bootstrap, 0, t->bytes + 8 * (tcp->rank == t->odd), out);
    epic_bootstrap_close(&bootstrap);
}

static void test_lost(void)
{
    const trial one = {"rank 2 dies", 4, killed, NULL, NULL, NULL, NULL, 20000, 2, 40, 0};
    run(&one);
    for (int r = 0; r < 4; r++)
        if (r != 2) expect(&one, r, EPIC_EPEER, "rank 2 closed", "died");
    expect_soon(&one, 10000);

    const trial big = {
        "rank 2 dies, 4 MiB", 4, killed, NULL, NULL, NULL, NULL, 20000, 2, 4 << 20, 0};
    run(&big);
    for (int r = 0; r < 4; r++)
        if (r != 2) expect(&big, r, EPIC_EPEER, "rank 2 closed", NULL);

    const trial zero = {"rank 0 dies", 4, killed, NULL, NULL, NULL, NULL, 20000, 0, 40, 0};
    run(&zero);
    for (int r = 1; r < 4; r++) expect(&zero, r, EPIC_EPEER, "rank 0 closed", NULL);
    expect_soon(&zero, 10000);

    const trial early = {
        "rank 2 goes early", 3, goes_early, NULL, NULL, NULL, NULL, 20000, 2, 40, 0};
    run(&early);
    for (int r = 0; r < 2; r++) expect(&early, r, EPIC_EPEER, "rank 2 left before", NULL);
    expect_soon(&early, 10000);

    const trial closed = {"rank 1 leaves", 3, leaves, NULL, NULL, NULL, NULL, 20000, 1, 40, 0};
    run(&closed);
    expect(&closed, 0, EPIC_EPEER, "rank 1 closed", NULL);
    expect(&closed, 2, EPIC_EPEER, "rank 1 closed", NULL);
}

static void test_late(void)
{
    const trial away = {"rank 2 absent", 4, absent, NULL, NULL, NULL, NULL, 4000, 2, 40, 1};
    run(&away);
    for (int r = 0; r < 4; r++)
        if (r != 2) expect(&away, r, EPIC_ETIMEOUT, "rank 2 did not connect", "4000 ms");
    expect_soon(&away, 7500);

    const trial zero = {"rank 0 absent", 3, absent, NULL, NULL, NULL, NULL, 400, 0, 40, 1};
    run(&zero);
    for (int r = 1; r < 3; r++)
        expect(&zero, r, EPIC_ETIMEOUT, "rank 0 did not accept", "400 ms");

    const trial slow = {"rank 2 late", 4, late, NULL, NULL, NULL, NULL, 4000, 2, 40, 1};
    run(&slow);
    for (int r = 0; r < 4; r++)
        expect(&slow, r, EPIC_ETIMEOUT, "rank 2 did not join", "gather 1");

    const trial kept = {"rank 0 held", 4, held, NULL, NULL, NULL, NULL, 4000, 2, 40, 1};
    run(&kept);
    expect(&kept, 0, EPIC_ETIMEOUT, "rank 2 did not join", "gather 1");
    for (int r = 1; r < 4; r += 2)
        expect(&kept, r, EPIC_ETIMEOUT, "rank 0 did not answer", "a rank that it waits for");
}

static void test_lengths(void)
{
    const trial small = {"lengths", 4, other_bytes, NULL, NULL, NULL, NULL, 10000, 2, 16, 0};
    run(&small);
    for (int r = 0; r < 4; r++)
        expect(&small, r, EPIC_EMISMATCH, "24 on rank 2", "16 on rank 0");

    const trial big = {"lengths, 4 MiB", 4, other_bytes, NULL, NULL, NULL, NULL, 10000, 2,
                       4 << 20,          0};
    run(&big);
    for (int r = 0; r < 4; r++) expect(&big, r, EPIC_EMISMATCH, "4194312", "4194304");

    const trial zero = {"lengths of 0", 3,     other_bytes, NULL, NULL, NULL,
                        NULL,           10000, 0,           16,   0};
    run(&zero);
    for (int r = 0; r < 3; r++)
        expect(&zero, r, EPIC_EMISMATCH, "bytes is 16 on rank", "24 on rank 0");
}

int main(void)
{
    static void (*const tests[])(void) = {
        test_differences,
        test_lost,
        test_late,
        test_lengths,
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
