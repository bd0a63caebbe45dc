/* SPDX-License-Identifier: Apache-2.0 */
/* Lines: a TCP connection between every two ranks of a rail, made beside the wire, which may never
 * notice that a host or a network has gone.  Each end sends a byte ten times a second, and the
 * system at the other end acknowledges it, whatever the process does there: a rank that is stopped
 * or busy is never called dead, a process that has ended or a host that cannot be reached is,
 * within a second.  A process that was forked meanwhile holds its lines, too: it gives them back
 * with wire_lines_forget, and while it does not, the end of the first process goes unnoticed. */
#ifndef EPIC_WIRE_LINES_H
#define EPIC_WIRE_LINES_H

#include "wire/wire.h"

#define WIRE_LINES_CARD_BYTES 192

typedef struct wire_lines wire_lines;

typedef struct wire_lines_setup {
    int32_t host, num_hosts;
    int32_t rail, ranks_per_host; /* sentences name rank host * ranks_per_host + rail */
    uint32_t timeout_ms;          /* of connect */
    uint32_t silence_ms;          /* after which a host is gone; 0: 800 */
    uint64_t group_id;
    const char *interface; /* through which others reach this host; NULL: any that is up */
} wire_lines_setup;

/* Local.  What the others must know goes to `card` (WIRE_LINES_CARD_BYTES, zeroed). */
epic_result wire_lines_listen(wire_lines **out, const wire_lines_setup *setup, void *card);

/* Cards of all hosts.  Collective: EPIC_ETIMEOUT names the ranks that did not come. */
epic_result wire_lines_connect(wire_lines *lines, const void *cards);

typedef enum wire_line { LINE_ALIVE, LINE_CLOSED, LINE_DEAD } wire_line;

/* Of one's own host: LINE_ALIVE.  Any thread. */
wire_line wire_lines_look(const wire_lines *lines, int host);

/* NULL is allowed.  The others see LINE_CLOSED. */
void wire_lines_close(wire_lines *lines);

/* In a forked child: closes its copies, of which the others see nothing. */
void wire_lines_forget(wire_lines *lines);

#endif
