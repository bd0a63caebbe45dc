/* SPDX-License-Identifier: Apache-2.0 */
/* Lines over loopback: who was killed is dead, who closed has closed, who is stopped is alive; who
 * does not come is named; strangers are hung up on. */
#include <dlfcn.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "check.h"
#include "net/lines_inner.h"
#include "net/suite_lines.h"
#include "net/suite_net.h"

#define STOPPED_MS 2500
#define STRANGERS 40

/* ------------------------------------------------------------ a machine that was away ---- */

#define AWAY 2 /* questions that the system answers before it has caught up */

static atomic_int away;

int getsockopt(int s, int level, int name, void *value, socklen_t *bytes)
{
    int (*real)(int, int, int, void *, socklen_t *);
    void *const found = dlsym(RTLD_NEXT, "getsockopt");
    memcpy(&real, &found, sizeof real);
    const int result = real(s, level, name, value, bytes);
    if (level != IPPROTO_TCP || name != TCP_INFO || atomic_load(&away) == 0) return result;
    struct tcp_info *info = value;
    if (atomic_load(&away) == AWAY) run_nap_us(1000000);
    info->tcpi_unacked = 1;
    info->tcpi_last_ack_recv = 1000;
    atomic_fetch_sub(&away, 1);
    return result;
}

/* For a second nothing ran, and so nothing was acknowledged: nobody has died. */
static void come_back(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    net_lines *l = suite_lines(bootstrap, NULL);
    if (!l) return;
    if (bootstrap->rank == 0) atomic_store(&away, AWAY);
    while (atomic_load(&away) > 0) run_nap_us(10000);
    run_nap_us(500000);
    CHECK_EQ(net_lines_look(l, 1 - bootstrap->rank), LINE_ALIVE);
    suite_gather(bootstrap);
    net_lines_close(l);
}

/* --------------------------------------------------------------- killed, closed, stopped ---- */

enum { WATCHER, STOPPED, CLOSER, KILLED, NUM_FATES };

typedef struct fates {
    atomic_int stopped_pid;
    atomic_bool over, seen;
} fates;

/* Stops itself for a while; another process wakes it. */
static void stop_and_go_on(fates *f, const net_lines *l)
{
    atomic_store(&f->stopped_pid, (int)getpid());
    raise(SIGSTOP);
    while (!atomic_load(&f->over)) run_nap_us(10000);
    CHECK_EQ(net_lines_look(l, WATCHER), LINE_ALIVE);
    CHECK_EQ(net_lines_look(l, CLOSER), LINE_CLOSED);
    CHECK_EQ(net_lines_look(l, KILLED), LINE_DEAD);
    atomic_store(&f->seen, true);
}

static void watch(fates *f, const net_lines *l)
{
    const uint64_t start = run_now_ns();
    suite_line_becomes(l, KILLED, LINE_DEAD);
    printf("killed: dead after %lld ms\n", (long long)(run_now_ns() - start) / 1000000);
    suite_line_becomes(l, CLOSER, LINE_CLOSED);
    while (atomic_load(&f->stopped_pid) == 0) run_nap_us(1000);
    const uint64_t end = run_now_ns() + STOPPED_MS * 1000000ull;
    while (run_now_ns() < end && CHECK(net_lines_look(l, STOPPED) == LINE_ALIVE))
        run_nap_us(50000);
    kill(atomic_load(&f->stopped_pid), SIGCONT);
    atomic_store(&f->over, true);
    CHECK_EQ(net_lines_look(l, STOPPED), LINE_ALIVE);
    CHECK_EQ(net_lines_look(l, CLOSER), LINE_CLOSED);
    while (!atomic_load(&f->seen)) run_nap_us(10000);
}

static void bootstrap_fate(const epic_bootstrap *bootstrap, void *self)
{
    fates *f = self;
    net_lines *l = suite_lines(bootstrap, NULL);
    if (!l) return;
    suite_gather(bootstrap);
    if (bootstrap->rank == KILLED) raise(SIGKILL);
    if (bootstrap->rank == WATCHER) watch(f, l);
    if (bootstrap->rank == STOPPED || bootstrap->rank == CLOSER)
        suite_line_becomes(l, KILLED, LINE_DEAD);
    if (bootstrap->rank == STOPPED) {
        suite_line_becomes(l, CLOSER, LINE_CLOSED);
        stop_and_go_on(f, l);
    }
    net_lines_close(l);
}

/* -------------------------------------------------------------------------- not coming ---- */

/* Four ranks a host; the one of host 1 gives its card, listens, and does nothing more. */
static void come_late(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    const net_lines_setup setup = {.host = bootstrap->rank,
                                   .num_hosts = 3,
                                   .rail = 2,
                                   .ranks_per_host = 4,
                                   .timeout_ms = 3000,
                                   .group_id = 7};
    unsigned char mine[NET_LINES_CARD_BYTES] = {0}, cards[3 * NET_LINES_CARD_BYTES];
    net_lines *l = NULL;
    if (!CHECK(net_lines_listen(&l, &setup, mine) == EPIC_OK)) return;
    CHECK(bootstrap->gather(bootstrap->self, mine, cards, sizeof mine) == EPIC_OK);
    if (bootstrap->rank != 1) {
        CHECK(net_lines_connect(l, cards) == EPIC_ETIMEOUT);
        CHECK_SAY(strstr(epic_sentence(), "with rank 6 within 3000 ms") != NULL, "%s",
                  epic_sentence());
    }
    suite_gather(bootstrap);
    net_lines_close(l);
}

/* ---------------------------------------------------------------------------- strangers ---- */

/* More than may be heard at once: silent ones, and some that speak of other things. */
static void bother(const line_card *card, int fds[STRANGERS])
{
    static const char words[200] = "epicline: I have no secret";
    const line_address loopback = {{[10] = 0xff, [11] = 0xff, 127, 0, 0, 1}};
    for (int i = 0; i < STRANGERS; i++) {
        fds[i] = line_call(&loopback, card->port);
        if (fds[i] < 0 || i % 2) continue;
        run_nap_us(1000);
        const ssize_t sent = write(fds[i], words, sizeof words);
        (void)sent;
    }
}

static void be_bothered(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    signal(SIGPIPE, SIG_IGN);
    int fds[STRANGERS];
    net_lines_setup setup = suite_lines_setup(bootstrap, NULL);
    unsigned char mine[NET_LINES_CARD_BYTES] = {0}, cards[2 * NET_LINES_CARD_BYTES];
    net_lines *l = NULL;
    if (!CHECK(net_lines_listen(&l, &setup, mine) == EPIC_OK)) return;
    CHECK(bootstrap->gather(bootstrap->self, mine, cards, sizeof mine) == EPIC_OK);
    line_card host0;
    memcpy(&host0, cards, sizeof host0);
    for (int i = 0; i < STRANGERS; i++) fds[i] = -1;
    if (bootstrap->rank == 1) bother(&host0, fds);
    if (bootstrap->rank == 1)
        cards[0] ^= 1; /* another secret: not one that was at the bootstrap */
    if (bootstrap->rank == 1) {
        net_lines *other = NULL;
        unsigned char card[NET_LINES_CARD_BYTES] = {0};
        setup.timeout_ms = 500;
        CHECK(net_lines_listen(&other, &setup, card) == EPIC_OK);
        CHECK(net_lines_connect(other, cards) == EPIC_ETIMEOUT);
        net_lines_close(other);
        cards[0] ^= 1;
    }
    CHECK_SAY(net_lines_connect(l, cards) == EPIC_OK, "%s", epic_sentence());
    run_nap_us(300000);
    CHECK_EQ(net_lines_look(l, 1 - bootstrap->rank), LINE_ALIVE);
    suite_gather(bootstrap);
    net_lines_close(l);
    for (int i = 0; i < STRANGERS; i++) line_hang_up(&fds[i]);
}

static void no_interface(void)
{
    const net_lines_setup setup = {.num_hosts = 2, .ranks_per_host = 1, .interface = "none7"};
    unsigned char card[NET_LINES_CARD_BYTES] = {0};
    net_lines *l = NULL;
    CHECK(net_lines_listen(&l, &setup, card) == EPIC_EDEVICE);
    CHECK(strstr(epic_sentence(), "no interface none7") != NULL && l == NULL);
}

int main(void)
{
    check_begin();
    run_alarm(200);
    fates *f = run_share(sizeof *f);
    net_run(NUM_FATES, bootstrap_fate, f, 1u << KILLED, 60);
    net_run(2, come_back, NULL, 0, 60);
    net_run(3, come_late, NULL, 0, 60);
    net_run(2, be_bothered, NULL, 0, 60);
    no_interface();
    return check_end();
}
