/* SPDX-License-Identifier: Apache-2.0 */
/* Any context of the GPU that a local call runs on. */
#include "place.h"

static void find_place(ffi_reader *reader, place *out)
{
    if (!reader->on_device) return;
    const member_device device = {true, ffi_ordinal(reader)};
    out->stream = ffi_stream(reader);
    if (reader->error == NULL && member_borrow(&out->use, device) != MEMBER_OK)
        reader->error =
            ffi_fail(reader->frame, EPIC_ECLOSED,
                     "no group is open on CUDA device %d of this process, and the "
                     "router and the experts work with one: call epic.jax.open before "
                     "the program runs",
                     device.ordinal);
}

ffi_reader place_begin(const ffi_frame *frame, bool on_device, place *out)
{
    ffi_reader reader = ffi_read(frame, on_device);
    find_place(&reader, out);
    return reader;
}

ffi_error *place_end(ffi_reader *reader, place *place, const char *what, epic_result result)
{
    if (reader->error == NULL) reader->error = ffi_error_of(reader->frame, what, result);
    if (place->use.ctx != NULL) member_leave(&place->use);
    return reader->error;
}

bool place_is_query(ffi_frame *frame, bool on_device)
{
    return ffi_is_query(frame,
                        on_device ? XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE : 0);
}

/* Does nothing: a call with a side effect that keeps another one in a program, whose result it
 * takes. */
static ffi_error *keep_call(ffi_frame *frame, bool on_device)
{
    (void)place_is_query(frame, on_device); /* answers XLA's question, if it is one */
    return NULL;
}

PLACE_HANDLERS(keep, keep_call(frame, on_device))
