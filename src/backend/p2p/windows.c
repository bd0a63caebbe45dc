/* SPDX-License-Identifier: Apache-2.0 */
/* Windows of backend p2p: device memory of a rank into which the kernels of its peers store
 * rows (docs/internals/windows.md). window_memory.c makes the memory of a rank accessible to
 * its peers.
 *
 * When a group is open, its ranks cannot use the bootstrap any more. So the host threads
 * exchange messages through the heaps: each rank copies its message into the heap of every
 * rank, and then polls its own heap. These copies use the stream `side`, so they also work
 * while kernels run. To add a window, the ranks exchange messages twice:
 *
 * - The first message of a rank describes its memory, or contains its error. After that, each
 *   rank maps the memory of its peers, and enters the addresses in a table in device memory.
 *   Kernels read this table.
 * - The second message of a rank reports that it has mapped all memory, or contains its error.
 *
 * If the memory was allocated by cuMemCreate, its file descriptors are sent over sockets
 * between the two messages (chunk_socket.h).
 *
 * The memory for messages has two halves, for even and odd exchanges. A rank sends its message
 * of exchange n only after it has received the messages of exchange n - 1 from all ranks. Each
 * rank sends its message of n - 1 only after it has read all messages of n - 2. So the messages
 * of n - 2 have been read, and exchange n may overwrite them. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "backend/p2p/window_memory.h"
#include "base/deadline.h"
#include "base/error.h"

#define POLL_NAP_NS 100000

_Static_assert(sizeof(p2p_window_message) == 512, "messages have 512 bytes");

typedef struct p2p_window { /* One window of this rank and of its peers. */
    uint8_t *data;          /* memory of this rank; NULL if its size is 0 */
    int64_t bytes;
    bool is_allocated;      /* true: EPIC has allocated the memory, and must free it */
    _Atomic bool is_usable; /* true: peers may store into this rank's outputs in the window */
    p2p_mapping mappings[DEVICE_MAX_RANKS]; /* memory of ranks of other processes */
} p2p_window;

struct p2p_windows {
    pthread_mutex_t mutex; /* held by the thread that adds a window */
    uint64_t sequence;     /* number of exchanges so far; guarded by mutex */
    /* device memory that kernels read, [P2P_MAX_WINDOWS][DEVICE_MAX_RANKS]: for each window,
     * the memory of each rank */
    p2p_mapped_window *table;
    _Atomic int num;
    p2p_window windows[P2P_MAX_WINDOWS];
};

/* ------------------------------------------------------------------------ the exchange ---- */

static int64_t message_at(const epic_group *g, uint64_t sequence, int rank)
{
    return p2p_window_area_at(&g->self.at) + (int64_t)offsetof(p2p_window_area, messages) +
           ((int64_t)(sequence & 1) * DEVICE_MAX_RANKS + rank) *
               (int64_t)sizeof(p2p_window_message);
}

/* Copies from this rank's heap to `all` [num_ranks] the messages that ranks have sent in
 * exchange `sequence`. */
static epic_result read_messages(const epic_group *g, uint64_t sequence,
                                 p2p_window_message *all)
{
    const size_t bytes = (size_t)g->num_ranks * sizeof *all;
    TRY(p2p_cuda(cudaMemcpyAsync(all, g->self.heap[g->rank] + message_at(g, sequence, 0), bytes,
                                 cudaMemcpyDefault, g->side),
                 "messages of the ranks"));
    return p2p_cuda(cudaStreamSynchronize(g->side), "messages of the ranks");
}

/* Returns a bit mask of the ranks whose messages of exchange `sequence` are not in `all`. */
static uint32_t find_missing(const epic_group *g, uint64_t sequence,
                             const p2p_window_message *all)
{
    uint32_t missing = 0;
    for (int q = 0; q < g->num_ranks; q++)
        if (all[q].sequence != sequence) missing |= p2p_culprit_word(q);
    return missing;
}

/* Breaks the group, because messages of the ranks in `missing` (bit mask) have not arrived.
 * Returns the error. If are_gone is true, the missing ranks have closed or died. In this case
 * the function sends no report to the other ranks, because each of them notices the same by
 * itself. */
static epic_result report_missing(epic_group *g, uint32_t missing, bool are_gone,
                                  uint64_t timeout_ms)
{
    p2p_status *s = g->status;
    s->operation = EPIC_OP_WINDOW;
    s->epoch = p2p_epoch(g);
    s->phase = P2P_PHASE_ARRIVE;
    s->reporter = (uint32_t)g->rank;
    s->culprits = missing;
    s->deadline_ms = (uint32_t)timeout_ms;
    if (!are_gone) p2p_abort(g, 0, "not all ranks took part in adding a window");
    __atomic_store_n(&s->result, (uint32_t)(are_gone ? EPIC_EPEER : EPIC_ETIMEOUT),
                     __ATOMIC_RELEASE);
    return p2p_check_group(g);
}

/* Returns a bit mask of the peers that have closed their context or died. */
static uint32_t find_gone(epic_group *g)
{
    const uint64_t *gone = p2p_gone(g);
    uint32_t ranks = 0;
    for (int q = 0; gone && q < g->num_ranks; q++)
        if (q != g->rank && (gone[q] || p2p_is_dead(g, q))) ranks |= p2p_culprit_word(q);
    return ranks;
}

/* Sends `mine` to all ranks, waits for the messages of all ranks, and stores them in `all`.
 * Errors: EPIC_ETIMEOUT, EPIC_EPEER, EPIC_EDEVICE. */
static epic_result exchange_messages(epic_group *g, struct p2p_windows *w,
                                     p2p_window_message *mine, p2p_window_message *all,
                                     uint64_t timeout_ms)
{
    const uint64_t sequence = ++w->sequence;
    const size_t body = offsetof(p2p_window_message, sequence);
    const int64_t at = message_at(g, sequence, g->rank);
    deadline end = deadline_begin_ms(timeout_ms);
    seat_set ranks = {0};
    seat_set_add_all(&ranks, g->num_ranks);
    mine->sequence = sequence;
    g->hooks->write(g, &ranks, at, mine, body);
    g->hooks->write(g, &ranks, at + (int64_t)body, &mine->sequence, sizeof mine->sequence);
    for (;;) {
        TRY(p2p_check_group(g));
        TRY(read_messages(g, sequence, all));
        const uint32_t missing = find_missing(g, sequence, all);
        /* Read the messages again: the copy that found a message's sequence number may have
         * read the other fields before they arrived. */
        if (!missing) return read_messages(g, sequence, all);
        const uint32_t gone = missing & find_gone(g);
        if (gone) return report_missing(g, gone, true, timeout_ms);
        if (deadline_before_nap(&end, POLL_NAP_NS))
            return report_missing(g, missing, false, timeout_ms);
        nanosleep(&(struct timespec){.tv_nsec = POLL_NAP_NS}, NULL);
    }
}

/* Writes the result code of this rank and, if it is an error, the error text into a message. */
static void set_result(p2p_window_message *message, epic_result result)
{
    message->result = (uint32_t)result;
    if (result != EPIC_OK)
        epic_fit_text(message->sentence, sizeof message->sentence, epic_sentence());
}

static epic_result first_error(const epic_group *g, const p2p_window_message *all)
{
    for (int q = 0; q < g->num_ranks; q++)
        if (all[q].result != EPIC_OK)
            return epic_fail((epic_result)all[q].result, "rank %d: %.399s", q, all[q].sentence);
    return EPIC_OK;
}

/* ------------------------------------------------------------------------------ chunks ---- */

/* The chunks (chunks.h) that this rank sends and receives when a window is added. */
typedef struct chunk_exchange {
    p2p_exported_chunks mine;
    int socket;          /* -1: no socket is open */
    int socket_error;    /* errno, if the socket could not be opened */
    uint32_t unsent;     /* bit mask of the ranks to which this rank must send */
    uint32_t unreceived; /* bit mask of the ranks from which this rank must receive */
} chunk_exchange;

/* If there are other processes, opens the socket of this rank and writes the name of the socket
 * to the message *mine. */
static void open_socket(const epic_group *g, chunk_exchange *x, p2p_window_message *mine)
{
    x->socket = -1;
    for (int q = 0; q < g->num_ranks && x->socket < 0; q++)
        if (p2p_is_elsewhere(g, q)) x->socket = p2p_chunk_socket(mine->socket);
    x->socket_error = errno;
}

static void close_socket(chunk_exchange *x)
{
    p2p_chunks_close(&x->mine);
    if (x->socket >= 0) close(x->socket);
}

/* Adds the number of the peer to the error text. Returns `result`. */
static epic_result fail_with_peer(epic_result result, int peer)
{
    char why[400];
    epic_fit_text(why, sizeof why, epic_sentence());
    return epic_fail(result, "the window of rank %d cannot be mapped here: %s", peer, why);
}

/* Sends the chunks of this rank to the ranks in x->unsent, as far as the queues of their
 * sockets have room. Skips a peer that could not open a socket, because that peer itself
 * reports the error. */
static epic_result send_chunks(const epic_group *g, uint64_t sequence,
                               const p2p_window_message *all, chunk_exchange *x)
{
    const p2p_chunk_header header = {
        .group_id = g->self.group_id, .sequence = sequence, .rank = g->rank};
    for (int q = 0; q < g->num_ranks; q++) {
        bool is_sent = !memcmp(all[q].socket, (char[8]){0}, sizeof all[q].socket);
        if (!(x->unsent >> q & 1)) continue;
        if (!is_sent)
            TRY(p2p_chunk_send(x->socket, q, all[q].socket, &header, &x->mine, &is_sent));
        if (is_sent) x->unsent &= ~(1u << q);
    }
    return EPIC_OK;
}

/* Receives and maps all chunks that have arrived. Ignores a message if its header does not show
 * that a peer has sent it in this exchange. */
static epic_result receive_chunks(const epic_group *g, p2p_window *window, uint64_t sequence,
                                  const p2p_window_message *all, chunk_exchange *x)
{
    for (;;) {
        p2p_chunk_header header;
        p2p_exported_chunks its;
        int64_t pid;
        TRY(p2p_chunk_receive(x->socket, &header, &its, &pid));
        if (!pid) {
            p2p_chunks_close(&its); /* of a sender whose PID namespace is not visible here */
            return EPIC_OK;
        }
        const int q = header.rank;
        epic_result result = EPIC_OK;
        if (q >= 0 && q < g->num_ranks && x->unreceived >> q & 1 && pid == g->peers[q].pid &&
            header.group_id == g->self.group_id && header.sequence == sequence) {
            x->unreceived &= ~(1u << q);
            result = p2p_memory_map_chunks(g, &all[q], &its, &window->mappings[q]);
        }
        p2p_chunks_close(&its);
        if (result != EPIC_OK) return fail_with_peer(result, q);
    }
}

/* Returns whether a rank has already reported an error in exchange `sequence`. Such a rank
 * might never send its chunks. */
static bool has_error(const epic_group *g, uint64_t sequence)
{
    p2p_window_message all[DEVICE_MAX_RANKS];
    if (read_messages(g, sequence, all) != EPIC_OK) return false;
    for (int q = 0; q < g->num_ranks; q++)
        if (all[q].sequence == sequence && all[q].result != EPIC_OK) return true;
    return false;
}

/* Sends the chunks of this rank to all ranks of other processes, and maps their chunks. Sets
 * *is_complete to false if a peer has reported an error. In this case all ranks return that
 * error. */
static epic_result exchange_chunks(epic_group *g, struct p2p_windows *w, p2p_window *window,
                                   const p2p_window_message *all, chunk_exchange *x,
                                   uint64_t timeout_ms, bool *is_complete)
{
    const uint64_t sequence = w->sequence;
    deadline end = deadline_begin_ms(timeout_ms);
    for (int q = 0; q < g->num_ranks; q++) {
        if (!p2p_is_elsewhere(g, q)) continue;
        x->unsent |= (uint32_t)(all[g->rank].num_chunks != 0) << q;
        x->unreceived |= (uint32_t)(all[q].num_chunks != 0) << q;
    }
    if ((x->unsent || x->unreceived) && x->socket < 0)
        return epic_fail(EPIC_EDEVICE, "opening a socket for the descriptors of a window: %s%s",
                         strerror(x->socket_error), epic_remedy(x->socket_error));
    while (x->unsent || x->unreceived) {
        TRY(p2p_check_group(g));
        TRY(send_chunks(g, sequence, all, x));
        TRY(receive_chunks(g, window, sequence, all, x));
        const uint32_t missing = x->unsent | x->unreceived;
        if (!missing) break;
        *is_complete = !has_error(g, sequence + 1);
        if (!*is_complete) return EPIC_OK;
        const uint32_t gone = missing & find_gone(g);
        if (gone) return report_missing(g, gone, true, timeout_ms);
        if (deadline_before_nap(&end, POLL_NAP_NS))
            return report_missing(g, missing, false, timeout_ms);
        nanosleep(&(struct timespec){.tv_nsec = POLL_NAP_NS}, NULL);
    }
    return EPIC_OK;
}

/* ------------------------------------------------------------------------------ memory ---- */

/* Writes the addresses of all ranks' memory into row `number` of the table that kernels read.
 * If `mapped` is NULL, clears the row. */
static epic_result fill_table(epic_group *g, struct p2p_windows *w, int number,
                              const p2p_mapped_window *mapped)
{
    p2p_mapped_window *row = w->table + (size_t)number * DEVICE_MAX_RANKS;
    const size_t bytes = DEVICE_MAX_RANKS * sizeof *row;
    TRY(p2p_cuda(mapped ? cudaMemcpyAsync(row, mapped, bytes, cudaMemcpyDefault, g->side)
                        : cudaMemsetAsync(row, 0, bytes, g->side),
                 "the table of windows"));
    return p2p_cuda(cudaStreamSynchronize(g->side), "the table of windows");
}

/* Sets this rank's memory of the window to args->data or, if args->data is NULL, to memory that
 * this function allocates. Describes the memory in the message *mine. */
static epic_result get_memory(epic_group *g, p2p_window *window, const epic_window_args *args,
                              p2p_window_message *mine, p2p_exported_chunks *chunks)
{
    mine->bytes = window->bytes = args->bytes;
    if (!args->bytes) return EPIC_OK;
    window->data = args->data;
    window->is_allocated = !args->data;
    if (!args->data) TRY(p2p_memory_allocate(g, args->bytes, &window->data));
    return p2p_memory_export(g, window->data, args->bytes, mine, chunks);
}

static epic_result map_peers(epic_group *g, struct p2p_windows *w, int number,
                             const p2p_window_message *all)
{
    p2p_mapped_window mapped[DEVICE_MAX_RANKS] = {{0}};
    for (int q = 0; q < g->num_ranks; q++) {
        if (q == g->rank || all[q].bytes <= 0) continue;
        mapped[q].bytes = all[q].bytes;
        const epic_result result =
            p2p_memory_map(g, q, &all[q], &w->windows[number].mappings[q], &mapped[q].at);
        if (result != EPIC_OK) return fail_with_peer(result, q);
    }
    return fill_table(g, w, number, mapped);
}

/* Unmaps the peers' memory of a window. Frees this rank's memory if EPIC has allocated it. */
static void release_window(epic_group *g, p2p_window *window)
{
    for (int q = 0; q < g->num_ranks; q++) p2p_memory_unmap(&window->mappings[q]);
    if (window->is_allocated && window->data) (void)cudaFree(window->data);
    (void)cudaGetLastError();
    memset(window, 0, sizeof *window);
}

/* ---------------------------------------------------------------------- adding windows ---- */

/* Returns the group's windows. The first call allocates them. Returns NULL if out of memory. */
static struct p2p_windows *windows_of(epic_group *g)
{
    struct p2p_windows *w = __atomic_load_n(&g->windows, __ATOMIC_ACQUIRE);
    struct p2p_windows *none = NULL;
    const size_t bytes = (size_t)P2P_MAX_WINDOWS * DEVICE_MAX_RANKS * sizeof *w->table;
    if (w) return w;
    w = calloc(1, sizeof *w);
    if (w) w->table = p2p_allocate(g, bytes);
    if (!w || !w->table || cudaMemsetAsync(w->table, 0, bytes, g->side) != cudaSuccess ||
        cudaStreamSynchronize(g->side) != cudaSuccess) {
        if (w) (void)cudaFree(w->table);
        (void)cudaGetLastError();
        free(w);
        return NULL;
    }
    pthread_mutex_init(&w->mutex, NULL);
    if (__atomic_compare_exchange_n(&g->windows, &none, w, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
        return w;
    (void)cudaFree(w->table);
    free(w);
    return none;
}

/* Exchanges the two messages (see the top of this file) and maps the memory of all ranks. If
 * one rank has an error, all ranks return this error. */
static epic_result connect_window(epic_group *g, struct p2p_windows *w, int number,
                                  p2p_window_message *mine, chunk_exchange *chunks,
                                  uint64_t timeout_ms)
{
    p2p_window_message all[DEVICE_MAX_RANKS];
    bool is_complete = true;
    TRY(exchange_messages(g, w, mine, all, timeout_ms));
    TRY(first_error(g, all));
    epic_result mapped =
        exchange_chunks(g, w, &w->windows[number], all, chunks, timeout_ms, &is_complete);
    if (mapped == EPIC_OK && is_complete) mapped = map_peers(g, w, number, all);
    *mine = (p2p_window_message){0};
    set_result(mine, mapped);
    TRY(exchange_messages(g, w, mine, all, timeout_ms));
    return first_error(g, all);
}

/* Adds the window with index `number`. The caller must hold w->mutex. */
static epic_result add_locked(epic_group *g, struct p2p_windows *w, int number,
                              const epic_window_args *args)
{
    const uint64_t timeout_ms =
        args->call.timeout_ms ? args->call.timeout_ms : g->config.timeout_ms;
    p2p_window_message mine = {0};
    chunk_exchange chunks = {0};
    open_socket(g, &chunks, &mine);
    set_result(&mine, get_memory(g, &w->windows[number], args, &mine, &chunks.mine));
    const epic_result result = connect_window(g, w, number, &mine, &chunks, timeout_ms);
    close_socket(&chunks);
    return result;
}

static epic_result check_number(int number)
{
    if (number < P2P_MAX_WINDOWS) return EPIC_OK;
    return epic_fail(
        EPIC_EINVAL,
        "the context has %d windows: must be fewer to add one; put several outputs "
        "into one window",
        number);
}

epic_result p2p_add_window(epic_group *g, const epic_window_args *args, epic_window_info *out)
{
    int before = 0;
    if (HOSTS)
        return epic_fail(EPIC_ENOTSUP, "backend hosts has no windows: use backend p2p, on one "
                                       "host");
    if (!WITH_WINDOWS)
        return epic_fail(EPIC_ENOTSUP,
                         "num_ranks is %d: must be at most %d for windows of backend p2p",
                         g->num_ranks, DEVICE_FEW_RANKS);
    if (p2p_spans_hosts(g))
        return epic_fail(EPIC_ENOTSUP, "ctx has ranks on several hosts: windows of backend p2p "
                                       "must be on one host");
    if (g->vacant)
        return epic_fail(EPIC_ENOTSUP, "ctx: a group on GPUs that has lost ranks cannot have "
                                       "windows; open a new group");
    TRY(p2p_check_group(g));
    TRY(p2p_cuda(cudaGetDevice(&before), "the current device"));
    TRY(p2p_cuda(cudaSetDevice(g->device), "the device of the context"));
    struct p2p_windows *w = windows_of(g);
    if (!w) {
        (void)cudaSetDevice(before);
        return epic_fail(EPIC_ENOMEM, "no memory for the table of windows");
    }
    pthread_mutex_lock(&w->mutex);
    const int number = atomic_load(&w->num);
    epic_result result = check_number(number);
    if (result == EPIC_OK) {
        p2p_window *window = &w->windows[number];
        result = add_locked(g, w, number, args);
        if (result == EPIC_OK) {
            *out = (epic_window_info){
                .data = window->data, .bytes = window->bytes, .is_direct = 1};
            atomic_store(&window->is_usable, true);
            atomic_store(&w->num, number + 1);
        } else if (p2p_check_group(g) == EPIC_OK) {
            /* All ranks return this error, so no rank uses the window. */
            (void)fill_table(g, w, number, NULL);
            release_window(g, window);
        } else {
            /* From here on a peer may store into the window, so it stays mapped until the
             * context closes. */
            atomic_store(&w->num, number + 1);
        }
    }
    pthread_mutex_unlock(&w->mutex);
    (void)cudaSetDevice(before);
    return result;
}

void p2p_free_windows(epic_group *g)
{
    struct p2p_windows *w = __atomic_load_n(&g->windows, __ATOMIC_ACQUIRE);
    if (!w) return;
    (void)cudaDeviceSynchronize(); /* cuMemUnmap() does not wait for kernels */
    for (int i = 0; i < P2P_MAX_WINDOWS; i++) release_window(g, &w->windows[i]);
    (void)cudaFree(w->table);
    pthread_mutex_destroy(&w->mutex);
    free(w);
    __atomic_store_n(&g->windows, NULL, __ATOMIC_RELEASE);
}

/* ----------------------------------------------------------------------- using windows ---- */

const p2p_mapped_window *p2p_window_table(const epic_group *g)
{
    const struct p2p_windows *w = __atomic_load_n(&g->windows, __ATOMIC_ACQUIRE);
    return w && g->num_ranks > 1 && atomic_load(&w->num) ? w->table : NULL;
}

uint64_t p2p_window_place(const epic_group *g, epic_rows output)
{
    struct p2p_windows *w = __atomic_load_n(&g->windows, __ATOMIC_ACQUIRE);
    const uint64_t bytes = (uint64_t)(output.num_rows * output.row_bytes);
    if (!w || !output.data || !bytes) return 0;
    const int num = atomic_load(&w->num);
    for (int i = 0; i < num; i++) {
        const p2p_window *window = &w->windows[i];
        const uint64_t offset = (uint64_t)((uintptr_t)output.data - (uintptr_t)window->data);
        if (!atomic_load(&window->is_usable) || !window->data) continue;
        if (offset <= (uint64_t)window->bytes && bytes <= (uint64_t)window->bytes - offset)
            return (uint64_t)(i + 1) << P2P_WINDOW_PLACE_BITS | offset;
    }
    return 0;
}
