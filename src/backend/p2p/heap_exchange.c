/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/p2p/heap_exchange.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

#include "backend/p2p/chunk_socket.h"
#include "base/deadline.h"
#include "base/error.h"
#include "base/process.h"

#define POLL_NAP_NS 100000

typedef struct exchange {
    const p2p_heap_handle *handles;
    /* [r]: true while this rank must still send its descriptor to rank r, and true while it
     * must still receive the descriptor of rank r */
    bool is_unsent[DEVICE_MAX_RANKS], is_unreceived[DEVICE_MAX_RANKS];
    /* The first error and its text. After an error this rank receives nothing more, but it
     * still sends its descriptor, so that the other ranks do not wait for it. */
    epic_result result;
    char why[256];
} exchange;

/* Keeps the first error of the exchange, and its text. */
static void keep_error(exchange *x, epic_result result)
{
    if (result == EPIC_OK || x->result != EPIC_OK) return;
    x->result = result;
    epic_fit_text(x->why, sizeof x->why, epic_sentence());
}

static epic_result fail_to_send(int to)
{
    char why[256];
    epic_fit_text(why, sizeof why, epic_sentence());
    return epic_fail(EPIC_EPEER, "rank %d may have closed its socket: %s", to, why);
}

/* Sends this rank's descriptor to each rank to which it has not been sent yet. Skips a rank if
 * the queue of its socket is full. If sending to one rank fails, the others still get it. */
static void send_descriptor(const epic_group *g, exchange *x)
{
    const p2p_heap_memory *m = g->heap_memory;
    const p2p_chunk_header header = {.group_id = g->self.group_id, .rank = g->rank};
    for (int q = 0; q < g->num_ranks; q++) {
        bool is_sent = true;
        char name[8];
        if (!x->is_unsent[q]) continue;
        memcpy(name, x->handles[q].handle, sizeof name);
        if (p2p_chunk_send(m->socket, q, name, &header, &m->exported, &is_sent) != EPIC_OK) {
            keep_error(x, fail_to_send(q));
            is_sent = true; /* there is nothing more to do for this rank */
        }
        x->is_unsent[q] = !is_sent;
    }
}

/* Returns whether the message contains the heap of a peer of this group. This must be checked,
 * because any process of the host may send to the socket. */
static bool is_expected(const epic_group *g, const exchange *x, const p2p_chunk_header *header,
                        const p2p_exported_chunks *its, int64_t pid)
{
    const int q = header->rank;
    return q >= 0 && q < g->num_ranks && x->is_unreceived[q] && pid == g->peers[q].pid &&
           header->group_id == g->self.group_id && !header->sequence && its->num == 1 &&
           its->chunks[0].type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
           its->chunks[0].bytes == x->handles[q].bytes;
}

/* Receives all descriptors that have arrived, and maps their heaps. */
static epic_result receive_descriptors(epic_group *g, exchange *x)
{
    for (;;) {
        p2p_chunk_header header;
        p2p_exported_chunks its;
        int64_t pid;
        epic_result result = EPIC_OK;
        TRY(p2p_chunk_receive(g->heap_memory->socket, &header, &its, &pid));
        if (!pid) {
            p2p_chunks_close(&its); /* of a sender whose PID namespace is not visible here */
            return EPIC_OK;
        }
        if (is_expected(g, x, &header, &its, pid)) {
            x->is_unreceived[header.rank] = false;
            result = p2p_heap_map(g, header.rank, &x->handles[header.rank], &its);
        }
        p2p_chunks_close(&its);
        TRY(result);
    }
}

/* Returns the lowest rank to which this rank must still send or from which it must still
 * receive, or -1 if there is none. */
static int find_missing(const epic_group *g, const exchange *x)
{
    for (int q = 0; q < g->num_ranks; q++)
        if (x->is_unsent[q] || (x->is_unreceived[q] && x->result == EPIC_OK)) return q;
    return -1;
}

static bool has_ended(int64_t pid)
{
    const int fd = process_watch(pid);
    const bool ended = process_ended(fd, pid);
    if (fd >= 0) close(fd);
    return ended;
}

static epic_result check_missing(const epic_group *g, int missing, deadline *end)
{
    if (has_ended(g->peers[missing].pid))
        return epic_fail(EPIC_EPEER, "rank %d has ended before its heap was mapped", missing);
    if (!deadline_before_nap(end, POLL_NAP_NS)) return EPIC_OK;
    return epic_fail(EPIC_ETIMEOUT,
                     "rank %d did not send or receive the descriptor of a heap within %u ms",
                     missing, g->config.timeout_ms);
}

epic_result p2p_heap_exchange(epic_group *g, const p2p_heap_handle *handles)
{
    exchange x = {.handles = handles};
    deadline end = deadline_begin_ms(g->config.timeout_ms);
    for (int q = 0; q < g->num_ranks; q++)
        x.is_unsent[q] = x.is_unreceived[q] = p2p_is_near(g, q) && p2p_is_elsewhere(g, q);
    for (int missing; (missing = find_missing(g, &x)) >= 0;) {
        send_descriptor(g, &x);
        if (x.result == EPIC_OK) keep_error(&x, receive_descriptors(g, &x));
        missing = find_missing(g, &x);
        if (missing < 0) break;
        const epic_result late = check_missing(g, missing, &end);
        keep_error(&x, late);
        if (late != EPIC_OK) break;
        nanosleep(&(struct timespec){.tv_nsec = POLL_NAP_NS}, NULL);
    }
    p2p_heap_close_sockets(g);
    return x.result == EPIC_OK ? EPIC_OK : epic_fail(x.result, "%s", x.why);
}
