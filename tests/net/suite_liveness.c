/* SPDX-License-Identifier: Apache-2.0 */
/* Opening liveness connections, and waiting for the state of a host. */
#include "net/suite_liveness.h"

#include "base/error.h"
#include "check.h"

/* longest wait, for a busy machine; EPIC's goal is one second */
#define PATIENCE_NS 10000000000ull

net_liveness_setup suite_liveness_setup(const epic_bootstrap *bootstrap, const char *interface)
{
    return (net_liveness_setup){.host = bootstrap->rank,
                                .num_hosts = bootstrap->num_ranks,
                                .ranks_per_host = 1,
                                .timeout_ms = 30000,
                                .group_id = 7,
                                .interface = interface};
}

net_liveness *suite_liveness(const epic_bootstrap *bootstrap, const char *interface)
{
    const net_liveness_setup setup = suite_liveness_setup(bootstrap, interface);
    return suite_liveness_with(bootstrap, &setup);
}

net_liveness *suite_liveness_with(const epic_bootstrap *bootstrap,
                                  const net_liveness_setup *setup)
{
    unsigned char mine[NET_LIVENESS_HANDLE_BYTES] = {0};
    unsigned char handles[NET_MAX_HOSTS * NET_LIVENESS_HANDLE_BYTES];
    net_liveness *l = NULL;
    const bool good = net_liveness_listen(&l, setup, mine) == EPIC_OK;
    const bool met = bootstrap->gather(bootstrap->self, mine, handles, sizeof mine) == EPIC_OK;
    if (CHECK_SAY(good && met && net_liveness_connect(l, handles) == EPIC_OK, "%s",
                  epic_sentence()))
        return l;
    net_liveness_close(l);
    return NULL;
}

void suite_check_becomes(const net_liveness *l, int host, net_peer_state wanted)
{
    const uint64_t end = run_now_ns() + PATIENCE_NS;
    net_peer_state seen;
    while ((seen = net_liveness_state(l, host)) == NET_PEER_ALIVE && run_now_ns() < end)
        run_nap_us(1000);
    CHECK_SAY(seen == wanted, "the line to host %d: %d, not %d", host, (int)seen, (int)wanted);
}

void suite_wait_for_ranks(const epic_bootstrap *bootstrap)
{
    unsigned char all[RUN_MAX_RANKS], mine = 1;
    CHECK(bootstrap->gather(bootstrap->self, &mine, all, 1) == EPIC_OK);
}
