/* SPDX-License-Identifier: Apache-2.0 */
/* Tests liveness connections when the link of one host is cut. This host is dead for the
 * others, and they are dead for it, but not for each other. Then a link is cut and restored
 * while both of its hosts are stopped. Neither may report the other as dead. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "net/suite_liveness.h"
#include "net/suite_net.h"

#define HOSTS 3
#define CUT 2

static void watch(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    net_liveness *l = suite_liveness(bootstrap, "net");
    if (!l) return;
    for (int i = 0; i < 5; i++) {
        for (int h = 0; h < HOSTS; h++) CHECK_EQ(net_liveness_state(l, h), NET_PEER_ALIVE);
        run_nap_us(100000);
    }
    suite_wait_for_ranks(bootstrap);
    if (bootstrap->rank == 0) net_cut(CUT);
    const uint64_t start = run_now_ns();
    for (int h = 0; h < HOSTS; h++)
        if ((h == CUT) != (bootstrap->rank == CUT)) suite_check_becomes(l, h, NET_PEER_DEAD);
    printf("rank %d: dead after %lld ms\n", bootstrap->rank,
           (long long)(run_now_ns() - start) / 1000000);
    run_nap_us(1500000);
    for (int h = 0; h < HOSTS; h++)
        if ((h == CUT) == (bootstrap->rank == CUT))
            CHECK_EQ(net_liveness_state(l, h), NET_PEER_ALIVE);
    suite_wait_for_ranks(bootstrap);
    net_liveness_close(l);
}

/* TCP repeats a segment 0.2, 0.6, 1.4, 3 and 6.2 s after sending it. So when the hosts
 * continue, bytes from before the stop have been unacknowledged for longer than `silence_ms`,
 * and stay so until 6.2 s. */
#define SILENCE_MS 4000
#define BEFORE_MS 300
#define STILL_MS 4100
#define LATE_MS 6000

typedef struct standstill { /* shared by the processes */
    atomic_int pids[2], go;
    atomic_bool too_late;
} standstill;

static void stand_still(const epic_bootstrap *bootstrap, void *self)
{
    standstill *s = self;
    net_liveness_setup setup = suite_liveness_setup(bootstrap, "net");
    setup.silence_ms = SILENCE_MS;
    net_liveness *l = suite_liveness_with(bootstrap, &setup);
    if (!l) return;
    atomic_store(&s->pids[bootstrap->rank], (int)getpid());
    while (!atomic_load(&s->go)) run_nap_us(1000);
    const uint64_t end = run_now_ns() + SILENCE_MS * 1000000ull;
    while (run_now_ns() < end && !atomic_load(&s->too_late)) {
        if (!CHECK_EQ(net_liveness_state(l, 1 - bootstrap->rank), NET_PEER_ALIVE)) break;
        run_nap_us(10000);
    }
    suite_wait_for_ranks(bootstrap);
    net_liveness_close(l);
}

/* Runs in a process of its own. */
static void disturb(standstill *s)
{
    for (int h = 0; h < 2; h++)
        while (!atomic_load(&s->pids[h])) run_nap_us(1000);
    run_nap_us(300000);
    const uint64_t start = run_now_ns();
    net_cut(0);
    run_nap_us(BEFORE_MS * 1000);
    for (int h = 0; h < 2; h++) kill(atomic_load(&s->pids[h]), SIGSTOP);
    atomic_store(&s->go, 1);
    run_nap_us(STILL_MS * 1000);
    net_mend(0);
    atomic_store(&s->too_late, run_now_ns() - start > LATE_MS * 1000000ull);
    for (int h = 0; h < 2; h++) kill(atomic_load(&s->pids[h]), SIGCONT);
}

static void test_standstill(void)
{
    standstill *s = run_share(sizeof *s);
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        disturb(s);
        _exit(0);
    }
    net_run(2, stand_still, s, 0, 60);
    if (atomic_load(&s->too_late)) printf("not seen: this machine was too slow\n");
    waitpid(pid, NULL, 0);
}

int main(void)
{
    check_begin();
    run_alarm(100);
    if (!net_open(HOSTS)) return check_skip("a link can be cut in a network namespace alone");
    test_standstill();
    net_run(HOSTS, watch, NULL, 0, 60);
    net_close();
    return check_end();
}
