/* SPDX-License-Identifier: Apache-2.0 */
/* The link of a host is cut: it is dead to the others and they to it, and to nobody else. */
#include <pthread.h>
#include <stdio.h>

#include "check.h"
#include "wire/suite_lines.h"
#include "wire/suite_net.h"

#define HOSTS 3
#define CUT 2

static void watch(const epic_meet *meet, void *self)
{
    (void)self;
    wire_lines *l = suite_lines(meet, "wire");
    if (!l) return;
    for (int i = 0; i < 5; i++) {
        for (int h = 0; h < HOSTS; h++) CHECK_EQ(wire_lines_look(l, h), LINE_ALIVE);
        run_nap_us(100000);
    }
    suite_gather(meet);
    if (meet->rank == 0) net_cut(CUT);
    const uint64_t start = run_now_ns();
    for (int h = 0; h < HOSTS; h++)
        if ((h == CUT) != (meet->rank == CUT)) suite_line_becomes(l, h, LINE_DEAD);
    printf("rank %d: dead after %lld ms\n", meet->rank,
           (long long)(run_now_ns() - start) / 1000000);
    run_nap_us(1500000);
    for (int h = 0; h < HOSTS; h++)
        if ((h == CUT) == (meet->rank == CUT)) CHECK_EQ(wire_lines_look(l, h), LINE_ALIVE);
    suite_gather(meet);
    wire_lines_close(l);
}

int main(void)
{
    check_begin();
    run_alarm(100);
    if (!net_open(HOSTS)) return check_skip("a link can be cut in a network namespace alone");
    net_run(HOSTS, watch, NULL, 0, 60);
    net_close();
    return check_end();
}
