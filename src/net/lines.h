/* SPDX-License-Identifier: Apache-2.0 */
/* Lines: a TCP connection between every two ranks of a rail, made beside the net, which may never
 * notice that a host or a network has gone.  Each end sends a byte ten times a second, and the
 * system at the other end acknowledges it, whatever the process does there: a rank that is stopped
 * or busy is never called dead, a process that has ended or a host that cannot be reached is,
 * within a second.  A process that was forked meanwhile holds its lines, too: it gives them back
 * with net_lines_forget, and while it does not, the end of the first process goes unnoticed. */
#ifndef EPIC_NET_LINES_H
#define EPIC_NET_LINES_H

#include "net/net.h"

#define NET_LINES_CARD_BYTES 192

typedef struct net_lines net_lines;

typedef struct net_lines_setup {
    int32_t host, num_hosts;
    int32_t rail, ranks_per_host; /* sentences name rank host * ranks_per_host + rail */
    uint32_t timeout_ms;          /* of connect */
    uint32_t silence_ms;          /* after which a host is gone; 0: 800 */
    uint64_t group_id;
    const char *interface; /* through which others reach this host; NULL: any that is up */
} net_lines_setup;

/* Local.  What the others must know goes to `card` (NET_LINES_CARD_BYTES, zeroed). */
epic_result net_lines_listen(net_lines **out, const net_lines_setup *setup, void *card);

/* Cards of all hosts.  Collective: EPIC_ETIMEOUT names the ranks that did not come. */
epic_result net_lines_connect(net_lines *lines, const void *cards);

typedef enum net_line { LINE_ALIVE, LINE_CLOSED, LINE_DEAD } net_line;

/* Of one's own host: LINE_ALIVE.  Any thread. */
net_line net_lines_look(const net_lines *lines, int host);

/* NULL is allowed.  The others see LINE_CLOSED. */
void net_lines_close(net_lines *lines);

/* In a forked child: closes its copies, of which the others see nothing. */
void net_lines_forget(net_lines *lines);

#endif
