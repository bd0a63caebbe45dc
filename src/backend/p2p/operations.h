/* SPDX-License-Identifier: Apache-2.0 */
/* Declares the functions that all operations use (jobs.c), and the operations of combine.c that
 * the table in operations.c contains. A *job* is the struct of arguments of a kernel. */
#ifndef EPIC_P2P_OPERATIONS_H
#define EPIC_P2P_OPERATIONS_H

#include "backend/p2p/layers.h"

#define P2P_MOST_ROWS 0x7ffffff0 /* maximum number of rows; slots (row indices) are int32 */

/* Fills in `self`, the first member of every job: the operation, its signature and its time
 * limit. In the backend `hosts`, also wakes the proxy thread. */
void p2p_fill_self(p2p_self *self, const epic_group *group, const epic_call *call,
                   epic_operation operation, signature a);

static inline int p2p_sms_of(const epic_group *g, const epic_call *call)
{
    return call->max_sms && (int)call->max_sms < g->num_sms ? (int)call->max_sms : g->num_sms;
}

static inline cudaStream_t p2p_stream_of(const epic_call *call)
{
    return (cudaStream_t)call->stream;
}

/* Limits a row count to P2P_MOST_ROWS, so that it fits into int32. */
static inline int32_t p2p_clamp_rows(int64_t num_rows)
{
    return num_rows > P2P_MOST_ROWS ? P2P_MOST_ROWS : (int32_t)num_rows;
}

/* Returns whether all rows can be read as 16-byte vectors. */
static inline bool p2p_is_aligned(epic_const_rows rows)
{
    return (uintptr_t)rows.data % 16 == 0 && rows.row_bytes % 16 == 0;
}

/* Checks that a row fits into this group's staging memory (the memory into which peers send
 * rows). The error text calls the rows `name`. Errors: EPIC_EINVAL. */
epic_result p2p_check_row(const epic_group *group, const char *name, int64_t row_bytes);

/* Returns whether the rows of all tokens fit into the staging memory at once. If not, an
 * operation that uses staging sends them in several rounds. */
bool p2p_fits_staging(const epic_group *group, int64_t row_bytes);

/* Returns whether this group may use low-latency kernels. The libraries for many ranks have no
 * such kernels. In the backend `hosts`, max_tokens must be small, because these kernels send
 * the expert ids to every rank. In that backend, relays (ranks that forward rows to other ranks
 * of their host) must be off, too. */
bool p2p_can_use_lowlat(const epic_group *group);

/* Returns whether an operation with num_tokens tokens on this rank uses a low-latency kernel.
 * The kernel supports at most `most` tokens. Some ranks may use such a kernel and others not,
 * because all kernels send and receive rows in the same format. */
bool p2p_fits_lowlat(const epic_group *group, const epic_layer *layer, int32_t num_tokens,
                     int32_t most, int64_t row_bytes);

/* Implement the members of epic_ops with these names (combine.c). */
epic_result p2p_combine(epic_group *group, const epic_combine_args *args);
epic_result p2p_dispatch_backward(epic_group *group, const epic_dispatch_backward_args *args);
epic_result p2p_combine_backward(epic_group *group, const epic_combine_backward_args *args);

#endif
