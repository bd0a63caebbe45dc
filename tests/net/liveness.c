/* SPDX-License-Identifier: Apache-2.0 */
/* Tests liveness connections over loopback. A killed process is dead, a closed one is closed,
 * and a stopped one is alive. If a rank does not connect, the error names it. Connections of
 * strangers are closed. */
#include <dlfcn.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "check.h"
#include "net/liveness_inner.h"
#include "net/suite_liveness.h"
#include "net/suite_net.h"

#define STOPPED_MS 2500
#define STRANGERS 40

/* ------------------------------------------------------------ a machine that was away ---- */

#define AWAY 2 /* how many queries the system answers as if the machine had been away */

static atomic_int away;

/* Replaces the function of the C library, to answer like a machine that was away. */
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

/* The machine did not run for a second, so no byte was acknowledged. No host may be reported as
 * dead. */
static void come_back(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    net_liveness *l = suite_liveness(bootstrap, NULL);
    if (!l) return;
    if (bootstrap->rank == 0) atomic_store(&away, AWAY);
    while (atomic_load(&away) > 0) run_nap_us(10000);
    run_nap_us(500000);
    CHECK_EQ(net_liveness_state(l, 1 - bootstrap->rank), NET_PEER_ALIVE);
    suite_wait_for_ranks(bootstrap);
    net_liveness_close(l);
}

/* ------------------------------------------------------------- killed, closed, stopped ---- */

enum { WATCHER, STOPPED, CLOSER, KILLED, NUM_FATES };

typedef struct fates {
    atomic_int stopped_pid;
    atomic_bool over, seen;
} fates;

/* Stops this process until another one continues it. */
static void stop_and_go_on(fates *f, const net_liveness *l)
{
    atomic_store(&f->stopped_pid, (int)getpid());
    raise(SIGSTOP);
    while (!atomic_load(&f->over)) run_nap_us(10000);
    CHECK_EQ(net_liveness_state(l, WATCHER), NET_PEER_ALIVE);
    CHECK_EQ(net_liveness_state(l, CLOSER), NET_PEER_CLOSED);
    CHECK_EQ(net_liveness_state(l, KILLED), NET_PEER_DEAD);
    atomic_store(&f->seen, true);
}

static void watch(fates *f, const net_liveness *l)
{
    const uint64_t start = run_now_ns();
    suite_check_becomes(l, KILLED, NET_PEER_DEAD);
    printf("killed: dead after %lld ms\n", (long long)(run_now_ns() - start) / 1000000);
    suite_check_becomes(l, CLOSER, NET_PEER_CLOSED);
    while (atomic_load(&f->stopped_pid) == 0) run_nap_us(1000);
    const uint64_t end = run_now_ns() + STOPPED_MS * 1000000ull;
    while (run_now_ns() < end && CHECK(net_liveness_state(l, STOPPED) == NET_PEER_ALIVE))
        run_nap_us(50000);
    kill(atomic_load(&f->stopped_pid), SIGCONT);
    atomic_store(&f->over, true);
    CHECK_EQ(net_liveness_state(l, STOPPED), NET_PEER_ALIVE);
    CHECK_EQ(net_liveness_state(l, CLOSER), NET_PEER_CLOSED);
    while (!atomic_load(&f->seen)) run_nap_us(10000);
}

static void bootstrap_fate(const epic_bootstrap *bootstrap, void *self)
{
    fates *f = self;
    net_liveness *l = suite_liveness(bootstrap, NULL);
    if (!l) return;
    suite_wait_for_ranks(bootstrap);
    if (bootstrap->rank == KILLED) raise(SIGKILL);
    if (bootstrap->rank == WATCHER) watch(f, l);
    if (bootstrap->rank == STOPPED || bootstrap->rank == CLOSER)
        suite_check_becomes(l, KILLED, NET_PEER_DEAD);
    if (bootstrap->rank == STOPPED) {
        suite_check_becomes(l, CLOSER, NET_PEER_CLOSED);
        stop_and_go_on(f, l);
    }
    net_liveness_close(l);
}

/* -------------------------------------------------------------------------- not coming ---- */

/* Four ranks per host. The one of host 1 publishes its handle and listens, but never connects.
 */
static void come_late(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    const net_liveness_setup setup = {.host = bootstrap->rank,
                                      .num_hosts = 3,
                                      .rail = 2,
                                      .ranks_per_host = 4,
                                      .timeout_ms = 3000,
                                      .group_id = 7};
    unsigned char mine[NET_LIVENESS_HANDLE_BYTES] = {0}, handles[3 * NET_LIVENESS_HANDLE_BYTES];
    net_liveness *l = NULL;
    if (!CHECK(net_liveness_listen(&l, &setup, mine) == EPIC_OK)) return;
    CHECK(bootstrap->gather(bootstrap->self, mine, handles, sizeof mine) == EPIC_OK);
    if (bootstrap->rank != 1) {
        CHECK(net_liveness_connect(l, handles) == EPIC_ETIMEOUT);
        CHECK_SAY(strstr(epic_sentence(), "with rank 6 within 3000 ms") != NULL, "%s",
                  epic_sentence());
    }
    suite_wait_for_ranks(bootstrap);
    net_liveness_close(l);
}

/* --------------------------------------------------------------------------- strangers ---- */

/* Opens more connections than can be pending at once. Some stay silent, and some send other
 * bytes. */
static void bother(const liveness_handle *handle, int fds[STRANGERS])
{
    static const char words[200] = "epicline: I have no secret";
    const liveness_address loopback = {{[10] = 0xff, [11] = 0xff, 127, 0, 0, 1}};
    for (int i = 0; i < STRANGERS; i++) {
        fds[i] = liveness_begin_connect(&loopback, handle->port);
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
    net_liveness_setup setup = suite_liveness_setup(bootstrap, NULL);
    unsigned char mine[NET_LIVENESS_HANDLE_BYTES] = {0}, handles[2 * NET_LIVENESS_HANDLE_BYTES];
    net_liveness *l = NULL;
    if (!CHECK(net_liveness_listen(&l, &setup, mine) == EPIC_OK)) return;
    CHECK(bootstrap->gather(bootstrap->self, mine, handles, sizeof mine) == EPIC_OK);
    liveness_handle host0;
    memcpy(&host0, handles, sizeof host0);
    for (int i = 0; i < STRANGERS; i++) fds[i] = -1;
    if (bootstrap->rank == 1) bother(&host0, fds);
    if (bootstrap->rank == 1) handles[0] ^= 1; /* a wrong secret */
    if (bootstrap->rank == 1) {
        net_liveness *other = NULL;
        unsigned char handle[NET_LIVENESS_HANDLE_BYTES] = {0};
        setup.timeout_ms = 500;
        CHECK(net_liveness_listen(&other, &setup, handle) == EPIC_OK);
        CHECK(net_liveness_connect(other, handles) == EPIC_ETIMEOUT);
        net_liveness_close(other);
        handles[0] ^= 1;
    }
    CHECK_SAY(net_liveness_connect(l, handles) == EPIC_OK, "%s", epic_sentence());
    run_nap_us(300000);
    CHECK_EQ(net_liveness_state(l, 1 - bootstrap->rank), NET_PEER_ALIVE);
    suite_wait_for_ranks(bootstrap);
    net_liveness_close(l);
    for (int i = 0; i < STRANGERS; i++) liveness_close_socket(&fds[i]);
}

/* ------------------------------------------------------------------ few descriptors ---- */

typedef struct few {
    int poor; /* the rank with a limit on descriptors */
    int more; /* how many descriptors it can still open after listening */
} few;

/* Limits a rank to the descriptors that it has and `more`. A few are enough to connect. With
 * none, the error of the rank names the limit. */
static void connect_with_few(const epic_bootstrap *bootstrap, void *self)
{
    const few *f = self;
    net_liveness_setup setup = suite_liveness_setup(bootstrap, NULL);
    setup.timeout_ms = 2000;
    unsigned char mine[NET_LIVENESS_HANDLE_BYTES] = {0}, handles[2 * NET_LIVENESS_HANDLE_BYTES];
    net_liveness *l = NULL;
    if (!CHECK(net_liveness_listen(&l, &setup, mine) == EPIC_OK)) return;
    CHECK(bootstrap->gather(bootstrap->self, mine, handles, sizeof mine) == EPIC_OK);
    if (bootstrap->rank == f->poor) {
        const int next = dup(0);
        close(next);
        const struct rlimit limit = {(rlim_t)(next + f->more), (rlim_t)(next + f->more)};
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    }
    const epic_result result = net_liveness_connect(l, handles);
    if (f->more > 0)
        CHECK_SAY(result == EPIC_OK, "%s", epic_sentence());
    else if (bootstrap->rank == f->poor)
        CHECK_SAY(result == EPIC_EDEVICE && strstr(epic_sentence(), "ulimit -n"), "%s",
                  epic_sentence());
    suite_wait_for_ranks(bootstrap);
    net_liveness_close(l);
}

/* Lowers the limit on open files after connecting, as a sandbox may do, so that poll() fails.
 * The ranks still notice that a peer closes, and they can close. */
static void forbid_files(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    struct rlimit usual;
    net_liveness *l = suite_liveness(bootstrap, NULL);
    if (!l || !CHECK(getrlimit(RLIMIT_NOFILE, &usual) == 0)) return;
    const struct rlimit none = {0, usual.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    suite_wait_for_ranks(bootstrap);
    if (bootstrap->rank == 0) suite_check_becomes(l, 1, NET_PEER_CLOSED);
    net_liveness_close(l);
    CHECK(setrlimit(RLIMIT_NOFILE, &usual) == 0); /* the leak check at exit opens files */
}

static void no_interface(void)
{
    const net_liveness_setup setup = {
        .num_hosts = 2, .ranks_per_host = 1, .interface = "none7"};
    unsigned char handle[NET_LIVENESS_HANDLE_BYTES] = {0};
    net_liveness *l = NULL;
    CHECK(net_liveness_listen(&l, &setup, handle) == EPIC_EDEVICE);
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
    for (int poor = 0; poor < 2; poor++) {
        net_run(2, connect_with_few, &(few){.poor = poor, .more = 4}, 0, 60);
        net_run(2, connect_with_few, &(few){.poor = poor, .more = 0}, 0, 60);
    }
    net_run(2, forbid_files, NULL, 0, 20);
    no_interface();
    return check_end();
}
