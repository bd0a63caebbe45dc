/* SPDX-License-Identifier: Apache-2.0 */
/* Tests a network that delays and loses packets (relay.h). No host is reported as dead, and
 * over UCX every word arrives whole and once.
 *
 *   lossy [HOSTS]   each host is a process in a network namespace of its own */
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "net/suite.h"
#include "net/suite_liveness.h"
#include "net/suite_net.h"
#include "relay.h"

#define FEW_HOSTS 3
/* With more than FEW_HOSTS hosts, each pair exchanges less, so that the time does not grow with
 * the square of their number. */
#define FEW_BYTES (128 << 10)
#define MANY_BYTES 4096
#define FAR_US 150000 /* like a satellite connection, on which each loss takes long to detect */
#define DELAY_US 5000
#define LOSSES 10000 /* per million packets */

static int hosts = FEW_HOSTS;
static unsigned seconds = 60; /* for a part of the test */

static void watch(const epic_bootstrap *bootstrap, void *self)
{
    net_liveness *l = suite_liveness(bootstrap, RELAY_INTERFACE);
    (void)self;
    for (int i = 0; l && i < 20; i++) {
        for (int h = 0; h < hosts; h++) CHECK_EQ(net_liveness_state(l, h), NET_PEER_ALIVE);
        run_nap_us(100000);
    }
    suite_wait_for_ranks(bootstrap);
    net_liveness_close(l);
}

static void exchange(const net_engine *ucx)
{
    suite_verdict *v = run_share(sizeof *v);
    suite_case c = {.engine = ucx,
                    .seed = run_seed(),
                    .bytes = hosts > FEW_HOSTS ? MANY_BYTES : FEW_BYTES,
                    .most_bytes = hosts > FEW_HOSTS ? MANY_BYTES : 57344,
                    .rounds = 2,
                    .patience_ms = seconds * 1000,
                    .wanted = "tcp/" RELAY_INTERFACE,
                    .verdict = v};
    net_run(hosts, suite_exchange, &c, 0, seconds + seconds / 2);
    CHECK(suite_is_clean(v));
    printf("%ld words\n", v->words);
    run_unshare(v, sizeof *v);
}

int main(int argc, char **argv)
{
    char why[NET_WHY_BYTES];
    check_begin();
    if (argc > 1) hosts = atoi(argv[1]);
    if (hosts > FEW_HOSTS) seconds = 300;
    run_alarm(hosts > FEW_HOSTS ? 900 : 200);
    if (!net_open_lossy(hosts, FAR_US, 0)) return check_skip("there is no such network");
    net_run(hosts, watch, NULL, 0, seconds);
    net_close();
    setenv("UCX_TLS", "tcp", 1);
    setenv("UCX_NET_DEVICES", RELAY_INTERFACE, 1);
    if (!CHECK(net_open_lossy(hosts, DELAY_US, LOSSES))) return check_end();
    net_run(hosts, watch, NULL, 0, seconds);
    const net_engine *ucx = net_find_engine("ucx", why);
    if (ucx)
        exchange(ucx);
    else
        printf("left out: the same over UCX: %s\n", why);
    const relay_count counted = relay_counted();
    printf("%llu packets, %llu lost\n", (unsigned long long)counted.passed,
           (unsigned long long)counted.lost);
    CHECK(counted.passed > 100 && relay_did_lose(counted, LOSSES));
    net_close();
    return check_end();
}
