/* SPDX-License-Identifier: Apache-2.0 */
/* Prints how long ranks have waited for each other. */
#include "info_waits.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "info.h"

#define MOST_SHOWN 3 /* number of peers to show */

typedef struct awaited {
    int32_t peer;
    epic_wait_info wait;
} awaited;

/* Adds the waiting times of one rank for `peer`, over all operations. */
static void add_waits(const recording *s, int32_t peer, epic_wait_info *out)
{
    for (uint32_t i = 0; i < RECORDER_OPERATIONS; i++)
        recorder_read_wait(s->page, s->num_ranks, i, peer, out);
}

/* Comparison for qsort(): the peer for which the ranks waited longest comes first. */
static int compare_alone(const void *a, const void *b)
{
    const awaited *p = a, *q = b;
    if (p->wait.alone_ns != q->wait.alone_ns)
        return p->wait.alone_ns > q->wait.alone_ns ? -1 : 1;
    return (p->peer > q->peer) - (p->peer < q->peer);
}

/* Prints `before` and the peers for which the `num` ranks in the list have waited longest. */
static void print_longest(const recording *list, int num, const char *before)
{
    const int32_t num_ranks = list[0].num_ranks;
    awaited *peers = calloc((size_t)num_ranks, sizeof *peers);
    if (!peers) return;
    for (int32_t peer = 0; peer < num_ranks; peer++) {
        peers[peer].peer = peer;
        for (int i = 0; i < num; i++)
            if (list[i].num_ranks == num_ranks) add_waits(&list[i], peer, &peers[peer].wait);
    }
    qsort(peers, (size_t)num_ranks, sizeof *peers, compare_alone);
    for (int i = 0; i < num_ranks && i < MOST_SHOWN && peers[i].wait.alone_ns; i++) {
        char text[32];
        printf("%s%s for rank %d", i ? ", " : before,
               info_duration((int64_t)peers[i].wait.alone_ns, text), peers[i].peer);
    }
    if (peers[0].wait.alone_ns) printf("\n");
    free(peers);
}

void waits_print(const recording *s)
{
    print_longest(s, 1, "  waited ");
}

void waits_print_group(const recording *list, int num)
{
    if (num > 1) print_longest(list, num, "all ranks together waited ");
}

void waits_print_json(const recording *s)
{
    const char *separator = "\n";
    printf(",\n      \"waits\": [");
    for (uint32_t i = 0; i < RECORDER_OPERATIONS; i++)
        for (int32_t peer = 0; peer < s->num_ranks; peer++) {
            epic_wait_info wait = {0};
            recorder_read_wait(s->page, s->num_ranks, i, peer, &wait);
            if (!wait.wait_ns) continue;
            printf(
                "%s        {\"operation\": \"%s\", \"peer\": %d, \"num_operations\": %" PRIu64
                ", \"wait_ns\": %" PRIu64 ", \"alone_ns\": %" PRIu64 "}",
                separator, info_operation(i), peer, wait.num_operations, wait.wait_ns,
                wait.alone_ns);
            separator = ",\n";
        }
    putchar(']');
}
