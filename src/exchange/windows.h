/* SPDX-License-Identifier: Apache-2.0 */
/* Windows on host contexts: the table of a context's windows, and direct stores into windows of
 * peers. docs/internals/windows.md explains the protocol. */
#ifndef EPIC_WINDOWS_H
#define EPIC_WINDOWS_H

#include "exchange/exchange.h"

#define MAX_WINDOWS 256

/* Releases the windows of a context, before the backend leaves the group. If `ours` is true,
 * first waits until no peer stores into the windows. If a peer still stores into a window at
 * the deadline, does not free the window's memory. If `ours` is false (in a forked child),
 * releases only this process's mappings. */
void windows_close(epic_context *ctx, bool ours);

/* Adds a window to the context and writes its address and size to *out. Collective. If
 * args->data is NULL, EPIC allocates the memory. */
epic_result windows_add(epic_context *ctx, const epic_window_args *args, epic_window_info *out);

/* Returns the *place* of the bytes [data, data + bytes): the index of a window of this rank and
 * an offset in it, packed into one integer. This rank sends the integer to its peers in an op
 * header. Returns 0 if the bytes are not in one window, or if peers cannot store into the
 * window. */
int64_t window_place(epic_context *ctx, const void *data, int64_t bytes);

static inline void op_header_set_window(epic_op_header *header, epic_context *ctx,
                                        enum window_output which, const void *data,
                                        int64_t bytes)
{
    header->local[LOCAL_WINDOWS + which] = window_place(ctx, data, bytes);
}

/* Called before a flow that may store into windows of peers. Writes to x->targets the addresses
 * of the peers' outputs that are in windows. Returns false if no output of a peer is in a
 * window. If it returns true, the caller must call windows_end_stores() after the flow. */
bool windows_begin_stores(exchange *x);
void windows_end_stores(exchange *x);

/* Returns true if output `which` of a rank is in a window, so that the rank's peers store into
 * the output. */
static inline bool window_is_direct(const exchange *x, int rank, enum window_output which)
{
    return exchange_local_field(x, rank, LOCAL_WINDOWS + which) != 0;
}

/* Returns the address of the bytes [at, at + bytes) of output `which` of a peer. Returns NULL
 * if the peer has closed its context, or if the bytes are outside of the peer's window, which
 * happens only with a damaged plan or op header. */
static inline unsigned char *window_address(const exchange *x, int peer,
                                            enum window_output which, int64_t at, int64_t bytes)
{
    const window_target *target = &x->targets[peer * NUM_WINDOW_OUTPUTS + which];
    if (!target->base || at < 0 || bytes > target->bytes || at > target->bytes - bytes)
        return NULL;
    return target->base + at;
}

#endif
