/* SPDX-License-Identifier: Apache-2.0 */
/* Local calls (router, losses, experts), which wait for no other rank.  On the CPU they run on
 * XLA's thread, on a GPU on XLA's stream. */
#ifndef EPIC_JAX_LOCAL_H
#define EPIC_JAX_LOCAL_H

#include "ffi.h"
#include "members.h"

/* Context and stream of a local call on a GPU; all zero on the CPU. */
typedef struct local_call {
    member_use use;
    epic_stream stream;
} local_call;

/* Returns whether XLA queries the handler's traits; see ffi_is_query(). */
bool local_is_query(ffi_frame *frame, bool on_device);

/* Begins a call.  Returns a reader, whose error is set if no group is open on the GPU. */
ffi_reader local_begin(const ffi_frame *frame, bool on_device, local_call *local);

/* Ends a call.  Returns the reader's error, else the core's error, else NULL. */
ffi_error *local_end(ffi_reader *reader, local_call *local, const char *what,
                     epic_result result);

/* Defines the exported handlers of both platforms.  `handler` is an expression of `frame` and
 * `on_device`. */
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
