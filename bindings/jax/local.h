/* SPDX-License-Identifier: Apache-2.0 */
/* Local calls: the router, the losses and the experts. They do not wait for other ranks. On the
 * CPU they run on XLA's thread, and on a GPU on XLA's stream. */
#ifndef EPIC_JAX_LOCAL_H
#define EPIC_JAX_LOCAL_H

#include "ffi.h"
#include "members.h"

/* Context and stream of a local call on a GPU. Both are zero on the CPU. */
typedef struct local_call {
    member_use use;
    epic_stream stream;
} local_call;

/* Returns true if XLA only queries the traits of the handler (ffi_is_query()). */
bool local_is_query(ffi_frame *frame, bool on_device);

/* Begins a local call and returns its reader. On a GPU, the reader has an error if no group is
 * open on this GPU. */
ffi_reader local_begin(const ffi_frame *frame, bool on_device, local_call *local);

/* Ends a local call. Returns the error of the reader or, if there is none, the error for the
 * core's `result`, or NULL if `result` is EPIC_OK. */
ffi_error *local_end(ffi_reader *reader, local_call *local, const char *what,
                     epic_result result);

/* Defines the exported handlers for the CPU and for CUDA. `handler` is an expression that uses
 * `frame` and `on_device`. */
#define LOCAL_EXPORTS(name, handler)                             \
    FFI_EXPORT ffi_error *epic_jax_##name(ffi_frame *frame)      \
    {                                                            \
        const bool on_device = false;                            \
        return handler;                                          \
    }                                                            \
    FFI_EXPORT ffi_error *epic_jax_cuda_##name(ffi_frame *frame) \
    {                                                            \
        const bool on_device = true;                             \
        return handler;                                          \
    }

#endif
