/* SPDX-License-Identifier: Apache-2.0 */
/* Making lines, and waiting for what becomes of them. */
#include "net/suite_lines.h"

#include "base/error.h"
#include "check.h"

#define PATIENCE_NS 10000000000ull /* for a busy machine: the aim is a second */

net_lines_setup suite_lines_setup(const epic_bootstrap *bootstrap, const char *interface)
{
    return (net_lines_setup){.host = bootstrap->rank,
                             .num_hosts = bootstrap->num_ranks,
                             .ranks_per_host = 1,
                             .timeout_ms = 30000,
                             .group_id = 7,
                             .interface = interface};
}

net_lines *suite_lines(const epic_bootstrap *bootstrap, const char *interface)
{
    const net_lines_setup setup = suite_lines_setup(bootstrap, interface);
    return suite_lines_of(bootstrap, &setup);
}

net_lines *suite_lines_of(const epic_bootstrap *bootstrap, const net_lines_setup *setup)
{
    unsigned char mine[NET_LINES_CARD_BYTES] = {0};
    unsigned char cards[NET_MAX_HOSTS * NET_LINES_CARD_BYTES];
    net_lines *l = NULL;
    const bool good = net_lines_listen(&l, setup, mine) == EPIC_OK;
    const bool met = bootstrap->gather(bootstrap->self, mine, cards, sizeof mine) == EPIC_OK;
    if (CHECK_SAY(good && met && net_lines_connect(l, cards) == EPIC_OK, "%s", epic_sentence()))
        return l;
    net_lines_close(l);
    return NULL;
}

void suite_line_becomes(const net_lines *l, int host, net_line wanted)
{
    const uint64_t end = run_now_ns() + PATIENCE_NS;
    net_line seen;
    while ((seen = net_lines_look(l, host)) == LINE_ALIVE && run_now_ns() < end)
        run_nap_us(1000);
    CHECK_SAY(seen == wanted, "the line to host %d: %d, not %d", host, (int)seen, (int)wanted);
}

void suite_gather(const epic_bootstrap *bootstrap)
{
    unsigned char all[RUN_MAX_RANKS], mine = 1;
    CHECK(bootstrap->gather(bootstrap->self, &mine, all, 1) == EPIC_OK);
}
