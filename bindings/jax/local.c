/* SPDX-License-Identifier: Apache-2.0 */
/* Local calls. On a GPU they use the context of any group that is open on that GPU. */
#include "local.h"

/* Finds a context of the GPU and reads XLA's stream. Does nothing on the CPU. */
static void find_context(ffi_reader *reader, local_call *local)
{
    if (!reader->on_device) return;
    const member_device device = {true, ffi_get_ordinal(reader)};
    local->stream = ffi_get_stream(reader);
    if (reader->error == NULL && member_borrow(&local->use, device) != MEMBER_OK)
        reader->error =
            ffi_fail(reader->frame, EPIC_ECLOSED,
                     "no group is open on CUDA device %d of this process, and the "
                     "router and the experts work with one: call epic.jax.open before "
                     "the program runs",
                     device.ordinal);
}

ffi_reader local_begin(const ffi_frame *frame, bool on_device, local_call *local)
{
    ffi_reader reader = ffi_reader_of(frame, on_device);
    find_context(&reader, local);
    return reader;
}

ffi_error *local_end(ffi_reader *reader, local_call *local, const char *what,
                     epic_result result)
{
    if (reader->error == NULL) reader->error = ffi_error_of_core(reader->frame, what, result);
    if (local->use.ctx != NULL) member_leave(&local->use);
    return reader->error;
}

bool local_is_query(ffi_frame *frame, bool on_device)
{
    return ffi_is_query(frame,
                        on_device ? XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE : 0);
}

/* A handler that does nothing. It prevents XLA from removing another call whose result is not
 * used: this result becomes an argument of a call of this handler, which XLA keeps because it
 * has a side effect. */
static ffi_error *keep_call(ffi_frame *frame, bool on_device)
{
    /* if XLA queries the traits of the handler, answers the query */
    (void)local_is_query(frame, on_device);
    return NULL;
}

LOCAL_EXPORTS(keep, keep_call(frame, on_device))
