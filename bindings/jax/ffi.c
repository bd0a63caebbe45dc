/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the call frames of XLA. This library does not link with XLA: it calls every function of
 * XLA through the table frame->api. It uses only names that are the same in jax 0.10 to 0.12,
 * so one library works with all these versions. */
#include "ffi.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "../dtypes.h"
#include "translate.h"

/* API version that the handlers report. XLA refuses a handler that reports a newer minor
 * version than XLA's own. So the handlers do not report the version of the header, but the
 * oldest version that has everything that they use (futures and the device ordinal). */
enum { USED_MAJOR = 0, USED_MINOR = 3 };
_Static_assert(XLA_FFI_API_MAJOR == 0 && XLA_FFI_API_MINOR >= USED_MINOR, "header too old");

static char no_elements[16]; /* address of arrays without elements, for which XLA passes NULL */

bool ffi_is_query(ffi_frame *frame, XLA_FFI_Handler_Traits traits)
{
    XLA_FFI_Metadata_Extension *query = (XLA_FFI_Metadata_Extension *)frame->extension_start;
    if (query == NULL || query->extension_base.type != XLA_FFI_Extension_Metadata) return false;
    query->metadata->api_version.major_version = USED_MAJOR;
    query->metadata->api_version.minor_version = USED_MINOR;
    query->metadata->traits = traits;
    return true;
}

/* ---------------------------------------------------------------------------- errors ---- */

/* Returns the XLA error code that is closest in meaning to `result`. */
static XLA_FFI_Error_Code xla_code_of(epic_result result)
{
    switch (result) {
    case EPIC_OK:
        return XLA_FFI_Error_Code_OK;
    case EPIC_EINVAL:
        return XLA_FFI_Error_Code_INVALID_ARGUMENT;
    case EPIC_ENOMEM:
    case EPIC_EOVERFLOW:
        return XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
    case EPIC_ENOTSUP:
        return XLA_FFI_Error_Code_UNIMPLEMENTED;
    case EPIC_ETIMEOUT:
        return XLA_FFI_Error_Code_DEADLINE_EXCEEDED;
    case EPIC_EMISMATCH:
    case EPIC_ECLOSED:
    case EPIC_EEVICTED:
        return XLA_FFI_Error_Code_FAILED_PRECONDITION;
    case EPIC_EPEER:
        return XLA_FFI_Error_Code_UNAVAILABLE;
    case EPIC_EDEVICE:
        break;
    }
    return XLA_FFI_Error_Code_INTERNAL;
}

ffi_error *ffi_error_new(const XLA_FFI_Api *api, epic_result result, const char *text)
{
    char whole[1600];
    snprintf(whole, sizeof whole, "%.1560s [%s]", text, epic_result_name(result));
    XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, whole,
                                      xla_code_of(result)};
    return api->XLA_FFI_Error_Create(&args); /* XLA copies the text */
}

ffi_error *ffi_fail(const ffi_frame *frame, epic_result result, const char *format, ...)
{
    char text[1400];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    return ffi_error_new(frame->api, result, text);
}

ffi_error *ffi_error_of_core(const ffi_frame *frame, const char *what, epic_result result)
{
    if (result == EPIC_OK) return NULL;
    char sentence[1280];
    translate_sentence(epic_error(NULL), sentence, sizeof sentence);
    return ffi_fail(frame, result, "epic.jax.%s: %s", what, sentence);
}

/* ---------------------------------------------------------------------------- arrays ---- */

ffi_reader ffi_reader_of(const ffi_frame *frame, bool on_device)
{
    return (ffi_reader){.frame = frame, .on_device = on_device};
}

/* Returns the epic_type of an XLA type, FFI_U8, or FFI_OTHER. */
static uint32_t epic_type_of(XLA_FFI_DataType type)
{
    switch ((int)type) {
    case XLA_FFI_DataType_F32:
        return EPIC_F32;
    case XLA_FFI_DataType_BF16:
        return EPIC_BF16;
    case XLA_FFI_DataType_F16:
        return EPIC_F16;
    case XLA_FFI_DataType_F64:
        return EPIC_F64;
    case XLA_FFI_DataType_F8E4M3FN:
        return EPIC_E4M3;
    case XLA_FFI_DataType_S32:
        return EPIC_I32;
    case XLA_FFI_DataType_S64:
        return EPIC_I64;
    case XLA_FFI_DataType_U8:
        return FFI_U8;
    default:
        return FFI_OTHER;
    }
}

/* Returns the array of a buffer of XLA: its address, sizes and type. */
static ffi_array array_of_buffer(const XLA_FFI_Buffer *buffer)
{
    ffi_array array = {.data = buffer->data, .type = epic_type_of(buffer->dtype), .count = 1};
    for (int64_t d = 0; d < buffer->rank; d++) array.count *= buffer->dims[d];
    array.columns = buffer->rank > 1 ? buffer->dims[buffer->rank - 1] : 1;
    array.rows = 1;
    for (int64_t d = 0; d < buffer->rank - (buffer->rank > 1); d++)
        array.rows *= buffer->dims[d];
    array.bytes = array.count * dtype_bytes(array.type);
    if (array.data == NULL) array.data = no_elements;
    return array;
}

int64_t ffi_multiply_sizes(int64_t a, int64_t b, int64_t c)
{
    int64_t product;
    if (a == 0 || b == 0 || c == 0) return 0;
    if (__builtin_mul_overflow(a, b, &product) || __builtin_mul_overflow(product, c, &product))
        return INT64_MAX;
    return product;
}

/* Returns the Python name of a type for error texts. */
static const char *type_name(uint32_t type)
{
    if (type == FFI_U8) return "uint8";
    const char *name = dtype_name(type);
    return name != NULL ? name : "another dtype";
}

/* Writes the names of a set of types to `out`, such as "float32 or bfloat16". */
static void write_type_names(uint32_t types, char *out, size_t size)
{
    size_t at = 0;
    out[0] = '\0';
    for (uint32_t type = 0; type < FFI_OTHER; type++) {
        if (!(types & FFI_SET(type)) || at >= size) continue;
        const int length =
            snprintf(out + at, size - at, "%s%s", at > 0 ? " or " : "", type_name(type));
        at += (size_t)length;
    }
}

void ffi_check_count(ffi_reader *reader, const char *name, ffi_array array, int64_t count)
{
    if (reader->error == NULL && array.count != count)
        reader->error =
            ffi_fail(reader->frame, EPIC_EINVAL, "%s has %lld elements: must have %lld", name,
                     (long long)array.count, (long long)count);
}

/* Sets the error of the reader if the array does not meet the requirements. */
static void check_array(ffi_reader *reader, const ffi_requirement *need, const ffi_array *array)
{
    char wanted[128];
    write_type_names(need->types, wanted, sizeof wanted);
    if (array->type == FFI_OTHER || !(need->types & FFI_SET(array->type)))
        reader->error =
            ffi_fail(reader->frame, EPIC_EINVAL, "%s is an array of %s: must be of %s",
                     need->name, type_name(array->type), wanted);
    else if (need->count != FFI_ANY_COUNT)
        ffi_check_count(reader, need->name, *array, need->count);
}

ffi_array ffi_read_array(ffi_reader *reader, const ffi_requirement *need)
{
    const ffi_frame *frame = reader->frame;
    const ffi_array none = {0};
    const int64_t i = need->result ? reader->num_results++ : reader->num_args++;
    if (reader->error) return none;
    if (i >= (need->result ? frame->rets.size : frame->args.size)) {
        reader->error =
            ffi_fail(frame, EPIC_EINVAL, "%s: %s %lld of the call is missing", need->name,
                     need->result ? "result" : "argument", (long long)i);
        return none;
    }
    const ffi_array array =
        array_of_buffer(need->result ? frame->rets.rets[i] : frame->args.args[i]);
    if (need->optional && array.type == FFI_U8) return none;
    check_array(reader, need, &array);
    return reader->error ? none : array;
}

ffi_array ffi_read_arg(ffi_reader *reader, const char *name, uint32_t types, int64_t count)
{
    return ffi_read_array(reader, &(ffi_requirement){name, types, count, .result = false});
}

ffi_array ffi_read_arg_or_none(ffi_reader *reader, const char *name, uint32_t types,
                               int64_t count)
{
    return ffi_read_array(reader, &(ffi_requirement){name, types, count, .optional = true});
}

ffi_array ffi_read_result(ffi_reader *reader, const char *name, uint32_t types, int64_t count)
{
    return ffi_read_array(reader, &(ffi_requirement){name, types, count, .result = true});
}

ffi_array ffi_read_result_or_none(ffi_reader *reader, const char *name, uint32_t types,
                                  int64_t count)
{
    return ffi_read_array(
        reader, &(ffi_requirement){name, types, count, .result = true, .optional = true});
}

int32_t ffi_read_arg_int(ffi_reader *reader, const char *name)
{
    const ffi_array array = ffi_read_arg(reader, name, FFI_SET_I32, 1);
    int32_t value = 0;
    if (reader->error == NULL && !reader->on_device) memcpy(&value, array.data, sizeof value);
    return value;
}

int32_t ffi_get_ordinal(ffi_reader *reader)
{
    XLA_FFI_DeviceOrdinal_Get_Args args = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, NULL,
                                           reader->frame->ctx, -1};
    if (reader->error == NULL)
        reader->error = reader->frame->api->XLA_FFI_DeviceOrdinal_Get(&args);
    return args.device_ordinal;
}

epic_stream ffi_get_stream(ffi_reader *reader)
{
    XLA_FFI_Stream_Get_Args args = {XLA_FFI_Stream_Get_Args_STRUCT_SIZE, NULL,
                                    reader->frame->ctx, NULL};
    if (reader->error == NULL) reader->error = reader->frame->api->XLA_FFI_Stream_Get(&args);
    return args.stream;
}

epic_rows ffi_rows_of(ffi_array array)
{
    if (array.data == NULL) return (epic_rows){0};
    return (epic_rows){array.data, array.rows, array.columns * dtype_bytes(array.type)};
}

/* ------------------------------------------------------------------------ attributes ---- */

/* Returns the value of the attribute `name`. Returns NULL if the frame has no such attribute,
 * or if it has another type. The names in XLA's frame do not end with a zero byte. */
static const void *find_attribute(const ffi_reader *reader, const char *name,
                                  XLA_FFI_AttrType type)
{
    const XLA_FFI_Attrs *attrs = &reader->frame->attrs;
    for (int64_t i = 0; i < attrs->size; i++) {
        const XLA_FFI_ByteSpan *span = attrs->names[i];
        if (span->len == strlen(name) && memcmp(span->ptr, name, span->len) == 0)
            return attrs->types[i] == type ? attrs->attrs[i] : NULL;
    }
    return NULL;
}

/* Copies a scalar attribute of 8 bytes to *out. XLA passes a Python int as S64, and a float as
 * F64. */
static void read_scalar(ffi_reader *reader, const char *name, XLA_FFI_DataType type, void *out)
{
    if (reader->error) return;
    const XLA_FFI_Scalar *found = find_attribute(reader, name, XLA_FFI_AttrType_SCALAR);
    if (found == NULL || found->dtype != type)
        reader->error =
            ffi_fail(reader->frame, EPIC_EINVAL, "attribute %s is missing: must be %s", name,
                     type == XLA_FFI_DataType_S64 ? "an int" : "a float");
    else
        memcpy(out, found->value, 8);
}

int64_t ffi_read_int(ffi_reader *reader, const char *name)
{
    int64_t value = 0;
    read_scalar(reader, name, XLA_FFI_DataType_S64, &value);
    return value;
}

uint32_t ffi_read_uint(ffi_reader *reader, const char *name)
{
    const int64_t value = ffi_read_int(reader, name);
    if (reader->error == NULL && (value < 0 || value > UINT32_MAX))
        reader->error = ffi_fail(reader->frame, EPIC_EINVAL, "%s is %lld: must be 0 to %u",
                                 name, (long long)value, UINT32_MAX);
    return (uint32_t)value;
}

double ffi_read_float(ffi_reader *reader, const char *name)
{
    double value = 0;
    read_scalar(reader, name, XLA_FFI_DataType_F64, &value);
    return value;
}

void ffi_read_text(ffi_reader *reader, const char *name, char *out, size_t size)
{
    out[0] = '\0';
    if (reader->error) return;
    const XLA_FFI_ByteSpan *span = find_attribute(reader, name, XLA_FFI_AttrType_STRING);
    if (span == NULL || span->len >= size) {
        reader->error = ffi_fail(
            reader->frame, EPIC_EINVAL,
            "attribute %s is missing or too long: must be a str of less than %zu bytes", name,
            size);
        return;
    }
    memcpy(out, span->ptr, span->len);
    out[span->len] = '\0';
}
