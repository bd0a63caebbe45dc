/* SPDX-License-Identifier: Apache-2.0 */
/* Calls that wait for nobody: they run on XLA's thread, on a GPU on its stream. */
#ifndef EPIC_JAX_LOCAL_H
#define EPIC_JAX_LOCAL_H

#include "ffi.h"
#include "members.h"

/* Where the arrays are: on a GPU any of its contexts, and XLA's stream; else all zero. */
typedef struct local_call {
    member_use use;
    epic_stream stream;
} local_call;

bool local_is_query(ffi_frame *frame, bool on_device);

/* A reader whose error is set where no group is open on the GPU. */
ffi_reader local_begin(const ffi_frame *frame, bool on_device, local_call *local);

/* What the handler returns: the reader's error, else the core's. */
ffi_error *local_end(ffi_reader *reader, local_call *local, const char *what,
                     epic_result result);

/* The handlers of both platforms: an expression of `frame` and `on_device`. */
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
