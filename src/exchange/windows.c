/* SPDX-License-Identifier: Apache-2.0 */
/* Adds windows to a context, and finds outputs in windows.
 *
 * A window has memory on every rank, and peers store rows directly into this memory. Adding a
 * window takes two operations. In the first operation, each rank's op header reports whether
 * its own memory is ready. Then each rank maps the memory of its peers and enters the window in
 * its table. In the second operation, the op header reports whether the mapping succeeded.
 *
 * A rank uses the window for its own outputs only after it has received the headers of the
 * second operation from all ranks. So when a later header of this rank contains the window's
 * index, all peers have the window in their tables. */
#include "exchange/windows.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/error.h"

#define PLACE_BITS 48 /* number of bits of the offset in the result of window_place() */

/* One window: this rank's memory, and the memory of its peers. */
typedef struct window {
    unsigned char *data; /* this rank's memory; NULL if its size is 0 */
    int64_t bytes;
    bool is_allocated;      /* true: EPIC has allocated the memory, and must free it */
    _Atomic bool is_usable; /* true: peers may store into outputs of this rank in the window */
    /* [num_ranks]: address of each peer's memory in this process; NULL: not mapped */
    void **at;
    int64_t *bytes_of; /* [num_ranks] size of each rank's memory of the window */
} window;

struct window_table {
    pthread_mutex_t mutex; /* held by the thread that adds a window */
    _Atomic int num;
    window windows[MAX_WINDOWS];
};

/* Returns the table of a context, or NULL if out of memory. The first call allocates it. */
static struct window_table *windows_table(epic_context *ctx)
{
    struct window_table *table = atomic_load_explicit(&ctx->windows, memory_order_acquire);
    if (table) return table;
    struct window_table *fresh = calloc(1, sizeof *fresh);
    if (!fresh) return NULL;
    pthread_mutex_init(&fresh->mutex, NULL);
    if (atomic_compare_exchange_strong(&ctx->windows, &table, fresh)) return fresh;
    pthread_mutex_destroy(&fresh->mutex);
    free(fresh);
    return table;
}

static const epic_window_transport *window_transport(const epic_context *ctx)
{
    return ctx->num_ranks > 1 ? ctx->backend->transport->windows : NULL;
}

/* Unmaps the peers' memory of the window and frees the arrays of *w. If `frees` is true and
 * EPIC has allocated this rank's memory, also frees it. */
static void window_release(epic_context *ctx, window *w, bool frees)
{
    for (int r = 0; w->at && r < ctx->num_ranks; r++)
        if (w->at[r]) window_transport(ctx)->unmap(ctx->group, w->at[r], w->bytes_of[r]);
    if (w->is_allocated && w->data && frees) munmap(w->data, (size_t)w->bytes);
    free(w->at);
    free(w->bytes_of);
    *w = (window){0};
}

void windows_close(epic_context *ctx, bool ours)
{
    struct window_table *table = atomic_load(&ctx->windows);
    if (!table) return;
    const epic_window_transport *t = window_transport(ctx);
    const bool frees = !ours || !t || t->close(ctx->group);
    for (int i = 0; i < MAX_WINDOWS; i++) window_release(ctx, &table->windows[i], frees);
    pthread_mutex_destroy(&table->mutex);
    free(table);
    atomic_store(&ctx->windows, NULL);
}

/* Called if the transport does not support windows. Allocates this rank's memory of a window as
 * private memory, into which peers cannot store. */
static epic_result allocate_private(epic_window_memory *memory)
{
    void *data = mmap(NULL, (size_t)memory->bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return epic_fail(EPIC_ENOMEM, "bytes is %lld: %s%s; pass less",
                         (long long)memory->bytes, strerror(errno), epic_remedy(errno));
    memory->data = data;
    return EPIC_OK;
}

/* Sets w->data to this rank's memory of the window: the caller's memory or, if the caller has
 * passed no memory, new memory. If the transport has windows, also offers this memory to the
 * peers, and writes to `handle` the handle with which the peers map it. */
static epic_result window_get_memory(epic_context *ctx, window *w, const epic_window_args *args,
                                     unsigned char *handle)
{
    const epic_window_transport *t = window_transport(ctx);
    epic_window_memory memory = {.data = args->data,
                                 .bytes = args->bytes,
                                 .fd = args->fd > 0 ? args->fd : -1,
                                 .fd_offset = args->fd_offset};
    w->at = calloc((size_t)ctx->num_ranks, sizeof *w->at);
    w->bytes_of = calloc((size_t)ctx->num_ranks, sizeof *w->bytes_of);
    if (!w->at || !w->bytes_of)
        return epic_fail(EPIC_ENOMEM, "no memory for a window of %d ranks", ctx->num_ranks);
    w->bytes = args->bytes;
    if (!args->bytes) return EPIC_OK;
    if (t)
        TRY(t->offer(ctx->group, &memory, handle));
    else if (!memory.data)
        TRY(allocate_private(&memory));
    w->is_allocated = !args->data;
    w->data = memory.data;
    return EPIC_OK;
}

static epic_result window_map_peers(epic_context *ctx, window *w, exchange *x)
{
    const epic_window_transport *t = window_transport(ctx);
    for (int r = 0; r < ctx->num_ranks && t; r++) {
        w->bytes_of[r] = exchange_local_field(x, r, LOCAL_ROWS);
        if (r == ctx->rank || w->bytes_of[r] <= 0) continue;
        TRY(t->map(ctx->group, r, x->headers[r]->bytes, w->bytes_of[r], &w->at[r]));
    }
    return EPIC_OK;
}

/* Fills in the op header of an operation that adds a window. If `result` is an error, adds this
 * thread's error text. */
static void window_fill_header(epic_op_header *header, const struct window_table *table,
                               const epic_window_args *args, epic_result result)
{
    const data_fault fault = {DATA_WINDOW, {result}};
    header->common[COMMON_OPERATION] = EPIC_OP_WINDOW;
    header->common[COMMON_COUNT] = atomic_load(&table->num);
    header->local[LOCAL_ROWS] = args->bytes;
    if (result == EPIC_OK) return;
    op_header_set_fault(header, &fault);
    epic_fit_text((char *)header->bytes, sizeof header->bytes, epic_sentence());
}

/* Runs the first of the two operations that add a window: sets this rank's memory, then maps
 * the memory of the peers and stores the result of the mapping in *mapped. If a rank could not
 * get its memory, all ranks return the error of that rank. */
static epic_result window_exchange_memory(epic_context *ctx, struct window_table *table,
                                          window *w, const epic_window_args *args,
                                          epic_result *mapped)
{
    epic_op_header header = {0};
    exchange *x;
    const epic_result got = window_get_memory(ctx, w, args, header.bytes);
    window_fill_header(&header, table, args, got);
    const epic_result result =
        exchange_open(&x, ctx, EPIC_OP_WINDOW, &args->call, &header, (uint64_t)args->bytes);
    if (!x) return result;
    if (result == EPIC_OK) *mapped = window_map_peers(ctx, w, x);
    return exchange_close(x, result);
}

/* Runs the second of the two operations that add a window. If a rank could not map the memory
 * of its peers, all ranks return the error of that rank. */
static epic_result window_agree(epic_context *ctx, struct window_table *table,
                                const epic_window_args *args, epic_result mapped)
{
    epic_op_header header = {0};
    exchange *x;
    window_fill_header(&header, table, args, mapped);
    const epic_result result = exchange_open(&x, ctx, EPIC_OP_WINDOW, &args->call, &header, 0);
    return x ? exchange_close(x, result) : result;
}

static epic_result windows_add_locked(epic_context *ctx, struct window_table *table,
                                      const epic_window_args *args, epic_window_info *out)
{
    const int number = atomic_load(&table->num);
    if (number == MAX_WINDOWS)
        return epic_fail(EPIC_EINVAL,
                         "the context has %d windows: must be fewer to add one; put several "
                         "outputs into one window",
                         number);
    window *w = &table->windows[number];
    epic_result mapped = EPIC_OK;
    /* Checked before window_get_memory(), because the peers read the messages that it sends only
     * if all ranks make this call. */
    TRY(tags_check(&ctx->tags, args->call.tag));
    epic_result result = window_exchange_memory(ctx, table, w, args, &mapped);
    if (result != EPIC_OK) {
        window_release(ctx, w, true);
        return result;
    }
    atomic_store(&table->num, number + 1);
    result = window_agree(ctx, table, args, mapped);
    if (result != EPIC_OK) {
        /* If the group is not broken, all ranks return this error, so no rank uses the window,
         * and its index is never used again. If the group is broken, a peer may have succeeded
         * and use the window, so the window stays mapped until the context closes. */
        if (!atomic_load(&ctx->broken)) window_release(ctx, w, true);
        return result;
    }
    const bool is_direct = window_transport(ctx) != NULL;
    atomic_store(&w->is_usable, is_direct);
    *out = (epic_window_info){
        .data = w->data, .bytes = w->bytes, .is_direct = is_direct || ctx->num_ranks == 1};
    return EPIC_OK;
}

epic_result windows_add(epic_context *ctx, const epic_window_args *args, epic_window_info *out)
{
    if (context_on_device(ctx)) return CONTEXT_OP(ctx, add_window, args, out);
    struct window_table *table = windows_table(ctx);
    if (!table) return epic_fail(EPIC_ENOMEM, "no memory for the table of windows");
    pthread_mutex_lock(&table->mutex);
    const epic_result result = windows_add_locked(ctx, table, args, out);
    pthread_mutex_unlock(&table->mutex);
    return result;
}

int64_t window_place(epic_context *ctx, const void *data, int64_t bytes)
{
    struct window_table *table = atomic_load_explicit(&ctx->windows, memory_order_acquire);
    if (!table || !data || bytes <= 0) return 0;
    const int num = atomic_load_explicit(&table->num, memory_order_acquire);
    for (int i = 0; i < num; i++) {
        window *w = &table->windows[i];
        if (!atomic_load_explicit(&w->is_usable, memory_order_acquire) || !w->data) continue;
        const uintptr_t begin = (uintptr_t)w->data, at = (uintptr_t)data;
        if (at < begin || at - begin > (uint64_t)w->bytes) continue;
        const int64_t offset = (int64_t)(at - begin);
        if (bytes <= w->bytes - offset) return (int64_t)(i + 1) << PLACE_BITS | offset;
    }
    return 0;
}

/* Returns the address and size in this process of an output of rank `peer`. `place` is the
 * result of window_place() that the peer has sent for this output. If `place` is invalid, the
 * target is empty. */
static window_target find_target(epic_context *ctx, int peer, int64_t place)
{
    const window_target none = {0};
    struct window_table *table = atomic_load_explicit(&ctx->windows, memory_order_acquire);
    const int64_t number = (place >> PLACE_BITS) - 1;
    const int64_t offset = place & ((INT64_C(1) << PLACE_BITS) - 1);
    if (!table || number < 0 ||
        number >= atomic_load_explicit(&table->num, memory_order_acquire))
        return none;
    const window *w = &table->windows[number];
    if (!w->at || !w->at[peer] || offset > w->bytes_of[peer]) return none;
    return (window_target){(unsigned char *)w->at[peer] + offset, w->bytes_of[peer] - offset};
}

bool windows_begin_stores(exchange *x)
{
    const epic_window_transport *t = window_transport(x->ctx);
    bool any = false;
    for (int r = 0; r < x->num_ranks && t; r++)
        for (int which = 0; which < NUM_WINDOW_OUTPUTS; which++)
            any |= r != x->rank && window_is_direct(x, r, (enum window_output)which);
    x->has_targets = any;
    if (!any) return false;
    t->begin_stores(x->group);
    for (int r = 0; r < x->num_ranks; r++) {
        const bool may_store = r != x->rank && t->may_store(x->group, r);
        for (int which = 0; which < NUM_WINDOW_OUTPUTS; which++) {
            const int64_t place = exchange_local_field(x, r, LOCAL_WINDOWS + which);
            x->targets[r * NUM_WINDOW_OUTPUTS + which] =
                may_store && place ? find_target(x->ctx, r, place) : (window_target){0};
        }
    }
    return true;
}

void windows_end_stores(exchange *x)
{
    window_transport(x->ctx)->end_stores(x->group);
    x->has_targets = false;
}
