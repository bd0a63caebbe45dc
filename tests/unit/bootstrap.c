/* SPDX-License-Identifier: Apache-2.0 */
/* Tests bootstraps over TCP: processes connect and gather with 1, 2, 3 and 8 ranks, on any
 * address of this host, and repeatedly on one port. Also tests invalid arguments. */
#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>

#include "bootstrap.h"

/* ------------------------------------------------------------------------- what works ---- */

static void rank_of_sizes(const trial *t, epic_tcp *tcp, report *out)
{
    static const size_t sizes[] = {8, 0, 1, 7, 4096, 1000003, 0, 64};
    epic_bootstrap bootstrap;
    (void)t;
    out->result = epic_bootstrap_tcp(&bootstrap, tcp);
    if (out->result == EPIC_OK &&
        (bootstrap.rank != tcp->rank || bootstrap.num_ranks != tcp->num_ranks))
        out->wrong_bytes = true;
    for (int i = 0; i < 8 && out->result == EPIC_OK; i++)
        out->result = gather(&bootstrap, i, sizes[i], out);
    epic_bootstrap_close(&bootstrap);
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
        {"hundred gathers", 3, bootstrap_and_gather, NULL, NULL, NULL, NULL, 15000, -1, 40,
         100},
        {"4 MiB each", 4, bootstrap_and_gather, NULL, NULL, NULL, NULL, 15000, -1, 4 << 20, 2},
        {"localhost", 3, bootstrap_and_gather, NULL, "localhost", NULL, NULL, 15000, -1, 40, 2},
        {"a secret", 3, bootstrap_and_gather, NULL, NULL, "hush", NULL, 15000, -1, 40, 2},
    };
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
        run(&more[i]);
        for (int r = 0; r < more[i].num_ranks; r++) expect(&more[i], r, EPIC_OK, NULL, NULL);
    }
}

static void test_ipv6(void)
{
    const trial trials[] = {
        {"::1", 3, bootstrap_and_gather, NULL, "::1", NULL, NULL, 15000, -1, 40, 2},
        {"[::1]", 3, bootstrap_and_gather, NULL, "[::1]", NULL, NULL, 15000, -1, 40, 2},
    };
    struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    const int s = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool there = s >= 0 && bind(s, (struct sockaddr *)&at, sizeof at) == 0;
    if (s >= 0) close(s);
    if (!there) {
        printf("no IPv6 here: \"::1\" is not tested\n");
        return;
    }
    for (int i = 0; i < 2; i++) {
        run(&trials[i]);
        for (int r = 0; r < trials[i].num_ranks; r++)
            expect(&trials[i], r, EPIC_OK, NULL, NULL);
    }
}

/* Uses an address of this host that is not loopback, if it has one. */
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
    const trial t = {address, 3, bootstrap_and_gather, NULL, address, NULL, NULL, 15000, -1,
                     40,      2};
    run(&t);
    for (int r = 0; r < t.num_ranks; r++) expect(&t, r, EPIC_OK, NULL, NULL);
}

/* --------------------------------------------------------- arguments, descriptors ---- */

static void refuse(const epic_tcp *tcp, size_t size, const char *word)
{
    epic_bootstrap bootstrap;
    const epic_result result = epic_bootstrap_tcp_v1(&bootstrap, tcp, size);
    CHECK(result == EPIC_EINVAL, "%s, not EPIC_EINVAL (%s)", epic_result_name(result), word);
    CHECK(strstr(epic_error(NULL), word), "no \"%s\" in: %s", word, epic_error(NULL));
    epic_bootstrap_close(&bootstrap);
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
    /* reserved for documentation, so no host has this address */
    bad = good, bad.address = "203.0.113.77";
    refuse(&bad, sizeof bad, "\"203.0.113.77\" (tcp.address or MASTER_ADDR) is not one of");
    longer.more = 1;
    refuse(&longer.tcp, sizeof longer, "not zero");

    epic_bootstrap bootstrap;
    longer.more = 0;
    longer.tcp.num_ranks = 1;
    CHECK(epic_bootstrap_tcp(&bootstrap, &longer.tcp) == EPIC_OK, "%s", epic_error(NULL));
    epic_bootstrap_close(&bootstrap);
    CHECK(epic_bootstrap_tcp(NULL, &good) == EPIC_EINVAL, "out NULL");
    epic_bootstrap_close(NULL);
}

static void test_gather_arguments(void)
{
    const epic_tcp alone = {.num_ranks = 1, .port = 29999};
    epic_bootstrap bootstrap;
    int mine = 7, all = 0;
    CHECK(epic_bootstrap_tcp(&bootstrap, &alone) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(bootstrap.gather(bootstrap.self, &mine, &all, sizeof all) == EPIC_OK && all == 7,
          "%d", all);
    CHECK(bootstrap.gather(bootstrap.self, NULL, NULL, 0) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(bootstrap.gather(bootstrap.self, NULL, &all, 4) == EPIC_EINVAL, "mine NULL");
    CHECK(bootstrap.gather(bootstrap.self, &mine, &all, (16u << 20) + 1) == EPIC_EINVAL,
          "too long");
    epic_bootstrap_close(&bootstrap);
}

static void test_taken_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    epic_bootstrap bootstrap;
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bind(s, (struct sockaddr *)&at, sizeof at);
    listen(s, 1);
    getsockname(s, (struct sockaddr *)&at, &bytes);
    const epic_tcp tcp = {.num_ranks = 2, .port = ntohs(at.sin_port), .timeout_ms = 200};
    CHECK(epic_bootstrap_tcp(&bootstrap, &tcp) == EPIC_EDEVICE, "%s", epic_error(NULL));
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

/* Opens many bootstraps on one port, and compares the number of descriptors before and after.
 */
static void bootstrap_often(const trial *t, epic_tcp *tcp, report *out)
{
    const int before = num_descriptors();
    for (int i = 0; i < t->num_gathers && out->result == EPIC_OK; i++) {
        epic_bootstrap bootstrap;
        out->result = epic_bootstrap_tcp(&bootstrap, tcp);
        if (out->result == EPIC_OK) out->result = gather(&bootstrap, i, t->bytes, out);
        epic_bootstrap_close(&bootstrap);
    }
    if (num_descriptors() != before) out->wrong_bytes = true;
}

/* Opens a bootstrap that the odd rank makes fail, then one on the same port that succeeds. */
static void bootstrap_again(const trial *t, epic_tcp *tcp, report *out)
{
    epic_bootstrap bootstrap;
    epic_tcp wrong = *tcp;
    const int before = num_descriptors();
    if (tcp->rank == t->odd) wrong.num_ranks++;
    if (epic_bootstrap_tcp(&bootstrap, &wrong) != EPIC_EMISMATCH) out->wrong_bytes = true;
    epic_bootstrap_close(&bootstrap);
    if (num_descriptors() != before) out->wrong_bytes = true;
    nap(300);
    bootstrap_and_gather(t, tcp, out);
    if (num_descriptors() != before) out->wrong_bytes = true;
}

static void test_often(void)
{
    const trial often = {"often", 3, bootstrap_often, NULL, NULL, "hush", NULL, 10000, -1,
                         40,      10};
    run(&often);
    for (int r = 0; r < 3; r++) expect(&often, r, EPIC_OK, NULL, NULL);

    const trial again = {"again", 3, bootstrap_again, NULL, NULL, NULL, NULL, 60000, 2, 40, 2};
    run(&again);
    for (int r = 0; r < 3; r++) expect(&again, r, EPIC_OK, NULL, NULL);
    expect_soon(&again, 30000); /* no rank waited for the deadline */
}

int main(void)
{
    static void (*const tests[])(void) = {
        test_arguments,   test_gather_arguments, test_gathers, test_ipv6,
        test_own_address, test_taken_port,       test_often,
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
