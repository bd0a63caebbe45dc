/* SPDX-License-Identifier: Apache-2.0 */
/* XLA's side of a call: the functions that handlers call, and the frame. */
#include "frames_call.h"

#include <stdlib.h>
#include <string.h>

struct XLA_FFI_Error {
    int code;
    char text[1100];
};

int32_t ordinal = 3;
int stream_asked, failed;
char said[1100];
const int32_t unreadable = 1;

static XLA_FFI_Error *error_create(XLA_FFI_Error_Create_Args *args)
{
    XLA_FFI_Error *error = calloc(1, sizeof *error);
    error->code = (int)args->errc;
    snprintf(error->text, sizeof error->text, "%s", args->message);
    return error;
}

static XLA_FFI_Error *ordinal_get(XLA_FFI_DeviceOrdinal_Get_Args *args)
{
    args->device_ordinal = ordinal;
    return NULL;
}

/* NULL is a valid stream, and the only one that host contexts accept. */
static XLA_FFI_Error *stream_get(XLA_FFI_Stream_Get_Args *args)
{
    stream_asked++;
    args->stream = NULL;
    return NULL;
}

const XLA_FFI_Api api = {.XLA_FFI_Error_Create = error_create,
                         .XLA_FFI_DeviceOrdinal_Get = ordinal_get,
                         .XLA_FFI_Stream_Get = stream_get};

void add(call *c, int side, XLA_FFI_DataType type, const void *data, int64_t rows,
         int64_t columns)
{
    const int64_t i = c->sizes[side]++;
    c->dims[side][i][0] = rows;
    c->dims[side][i][1] = columns;
    c->buffers[side][i] = (XLA_FFI_Buffer){.dtype = type,
                                           .data = (void *)(uintptr_t)data,
                                           .rank = columns ? 2 : 1,
                                           .dims = c->dims[side][i]};
    c->at[side][i] = &c->buffers[side][i];
}

void add_none(call *c, int side)
{
    add(c, side, XLA_FFI_DataType_U8, &unreadable, 1, 0);
}

void add_number(call *c)
{
    add(c, ARG, XLA_FFI_DataType_S32, (const void *)(uintptr_t)unreadable, 1, 0);
    c->buffers[ARG][c->sizes[ARG] - 1].rank = 0;
}

void add_site(call *c)
{
    add_number(c);
    add_number(c);
}

static int64_t add_attr(call *c, const char *name, XLA_FFI_AttrType type)
{
    const int64_t i = c->num_attrs++;
    c->names[i] = (XLA_FFI_ByteSpan){name, strlen(name)};
    c->name_at[i] = &c->names[i];
    c->types[i] = type;
    return i;
}

void add_int(call *c, const char *name, int64_t value)
{
    const int64_t i = add_attr(c, name, XLA_FFI_AttrType_SCALAR);
    c->ints[i] = value;
    c->scalars[i] = (XLA_FFI_Scalar){XLA_FFI_DataType_S64, &c->ints[i]};
    c->attr_at[i] = &c->scalars[i];
}

void add_float(call *c, const char *name, double value)
{
    const int64_t i = add_attr(c, name, XLA_FFI_AttrType_SCALAR);
    c->floats[i] = value;
    c->scalars[i] = (XLA_FFI_Scalar){XLA_FFI_DataType_F64, &c->floats[i]};
    c->attr_at[i] = &c->scalars[i];
}

void add_text(call *c, const char *name, const char *text)
{
    const int64_t i = add_attr(c, name, XLA_FFI_AttrType_STRING);
    c->texts[i] = (XLA_FFI_ByteSpan){text, strlen(text)};
    c->attr_at[i] = &c->texts[i];
}

const char *devices = "devices [3]";

void add_group(call *c, const char *name)
{
    add_text(c, "group", name);
    add_text(c, "devices", devices);
}

int run(handler *function, call *c)
{
    XLA_FFI_CallFrame frame = {.api = &api, .stage = XLA_FFI_ExecutionStage_EXECUTE};
    frame.args = (XLA_FFI_Args){.size = c->sizes[ARG], .args = c->at[ARG]};
    frame.rets = (XLA_FFI_Rets){.size = c->sizes[RESULT], .rets = c->at[RESULT]};
    frame.attrs = (XLA_FFI_Attrs){
        .size = c->num_attrs, .types = c->types, .names = c->name_at, .attrs = c->attr_at};
    XLA_FFI_Error *error = function(&frame);
    CHECK(frame.future == NULL); /* the handler enqueued the work and did not wait */
    said[0] = '\0';
    if (error == NULL) return 0;
    const int code = error->code;
    snprintf(said, sizeof said, "%s", error->text);
    free(error);
    return code;
}
