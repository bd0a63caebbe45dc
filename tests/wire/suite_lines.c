/* SPDX-License-Identifier: Apache-2.0 */
/* Making lines, and waiting for what becomes of them. */
#include "wire/suite_lines.h"

#include "base/error.h"
#include "check.h"

#define PATIENCE_NS 10000000000ull /* for a busy machine: the aim is a second */

wire_lines_setup suite_lines_setup(const epic_meet *meet, const char *interface)
{
    return (wire_lines_setup){.host = meet->rank,
                              .num_hosts = meet->num_ranks,
                              .ranks_per_host = 1,
                              .timeout_ms = 30000,
                              .group_id = 7,
                              .interface = interface};
}

wire_lines *suite_lines(const epic_meet *meet, const char *interface)
{
    const wire_lines_setup setup = suite_lines_setup(meet, interface);
    return suite_lines_of(meet, &setup);
}

wire_lines *suite_lines_of(const epic_meet *meet, const wire_lines_setup *setup)
{
    unsigned char mine[WIRE_LINES_CARD_BYTES] = {0};
    unsigned char cards[WIRE_MAX_HOSTS * WIRE_LINES_CARD_BYTES];
    wire_lines *l = NULL;
    const bool good = wire_lines_listen(&l, setup, mine) == EPIC_OK;
    const bool met = meet->gather(meet->self, mine, cards, sizeof mine) == EPIC_OK;
    if (CHECK_SAY(good && met && wire_lines_connect(l, cards) == EPIC_OK, "%s",
                  epic_sentence()))
        return l;
    wire_lines_close(l);
    return NULL;
}

void suite_line_becomes(const wire_lines *l, int host, wire_line wanted)
{
    const uint64_t end = run_now_ns() + PATIENCE_NS;
    wire_line seen;
    while ((seen = wire_lines_look(l, host)) == LINE_ALIVE && run_now_ns() < end)
        run_nap_us(1000);
    CHECK_SAY(seen == wanted, "the line to host %d: %d, not %d", host, (int)seen, (int)wanted);
}

void suite_gather(const epic_meet *meet)
{
    unsigned char all[RUN_MAX_RANKS], mine = 1;
    CHECK(meet->gather(meet->self, &mine, all, 1) == EPIC_OK);
}
