/* SPDX-License-Identifier: Apache-2.0 */
/* Tests a network that delays and loses packets (relay.h). No host is reported as dead, and
 * over UCX every word arrives whole and once. */
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "net/suite.h"
#include "net/suite_liveness.h"
#include "net/suite_net.h"
#include "relay.h"

#define HOSTS 3
#define FAR_US 150000 /* like a satellite connection, on which each loss takes long to detect */
#define DELAY_US 5000
#define LOSSES 10000 /* per million packets */

static void watch(const epic_bootstrap *bootstrap, void *self)
{
    net_liveness *l = suite_liveness(bootstrap, RELAY_INTERFACE);
    (void)self;
    for (int i = 0; l && i < 20; i++) {
        for (int h = 0; h < HOSTS; h++) CHECK_EQ(net_liveness_state(l, h), NET_PEER_ALIVE);
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
                    .bytes = 128 << 10,
                    .most_bytes = 57344,
                    .rounds = 2,
                    .patience_ms = 60000,
                    .wanted = "tcp/" RELAY_INTERFACE,
                    .verdict = v};
    net_run(HOSTS, suite_exchange, &c, 0, 90);
    CHECK(suite_is_clean(v));
    printf("%ld words\n", v->words);
    run_unshare(v, sizeof *v);
}

int main(void)
{
    char why[NET_WHY_BYTES];
    check_begin();
    run_alarm(200);
    if (!net_open_lossy(HOSTS, FAR_US, 0)) return check_skip("there is no such network");
    net_run(HOSTS, watch, NULL, 0, 60);
    net_close();
    setenv("UCX_TLS", "tcp", 1);
    setenv("UCX_NET_DEVICES", RELAY_INTERFACE, 1);
    if (!CHECK(net_open_lossy(HOSTS, DELAY_US, LOSSES))) return check_end();
    net_run(HOSTS, watch, NULL, 0, 60);
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
