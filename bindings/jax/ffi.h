/* SPDX-License-Identifier: Apache-2.0 */
/* XLA's call frames for people: errors, arrays and attributes, read in order.
 *
 * A reader keeps its first error and gives harmless values from then on, so a handler reads
 * everything and looks at reader.error once. */
#ifndef EPIC_JAX_FFI_H
#define EPIC_JAX_FFI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"
#include "xla/ffi/api/c_api.h"

#define FFI_EXPORT __attribute__((visibility("default")))

/* Types that arrays have in addition to those of epic_type. */
#define FFI_U8 \
    30u /* bytes: of plans, memory, 8-bit rows, and the stand-in for an absent array */
#define FFI_OTHER 31u /* a type that no handler accepts */

/* Sets of types, which say what a handler accepts for an array. */
#define FFI_SET(type) (1u << (type))
#define FFI_SET_F32 FFI_SET(EPIC_F32)
#define FFI_SET_I32 FFI_SET(EPIC_I32)
#define FFI_SET_U8 FFI_SET(FFI_U8)
#define FFI_SET_FLOATS \
    (FFI_SET_F32 | FFI_SET(EPIC_BF16) | FFI_SET(EPIC_F16) | FFI_SET(EPIC_F64))
#define FFI_SET_INDICES (FFI_SET_I32 | FFI_SET(EPIC_I64))

/* Returns the set of one type, which may come from an attribute; of an unknown one the empty set. */
static inline uint32_t ffi_set_of(uint32_t type)
{
    return type < FFI_OTHER ? FFI_SET(type) : 0;
}

#define FFI_ANY_COUNT (-1) /* instead of a number of elements: the caller checks it */

typedef XLA_FFI_CallFrame ffi_frame;
typedef XLA_FFI_Error ffi_error; /* NULL is success; XLA frees the others */

typedef struct ffi_reader {
    const ffi_frame *frame;
    bool on_device; /* the arrays lie on a GPU: their numbers cannot be read here */
    ffi_error *error;
    int64_t num_args, num_results; /* read so far */
} ffi_reader;

typedef struct ffi_array {
    void *data; /* NULL: the array is absent; never NULL for one that is there */
    int64_t rows;
    int64_t columns; /* of the last dimension; 1 for rank 0 and 1 */
    int64_t count;
    int64_t bytes;
    uint32_t type; /* an epic_type, or FFI_U8 */
} ffi_array;

/* Does XLA ask what the handler was compiled for, and its traits?  Then it has been told. */
bool ffi_is_query(ffi_frame *frame, XLA_FFI_Handler_Traits traits);

/* Makes an error of XLA.  Its text ends with the name of the result, as [EPIC_EINVAL]: XLA may give
 * the text another code on its way to the caller. */
ffi_error *ffi_fail(const ffi_frame *frame, epic_result result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
ffi_error *ffi_error_new(const XLA_FFI_Api *api, epic_result result, const char *text);

/* The core's last failure on this thread, as XLA's error; NULL for EPIC_OK. */
ffi_error *ffi_error_of_core(const ffi_frame *frame, const char *what, epic_result result);

ffi_reader ffi_reader_of(const ffi_frame *frame, bool on_device);

/* Returns the product of three sizes that are 0 or more; INT64_MAX if it is larger. */
int64_t ffi_multiply_sizes(int64_t a, int64_t b, int64_t c);

/* What a handler requires of an array.  Every array of every handler goes through one check of
 * these, so that no handler reads or writes past an array or misreads its elements. */
typedef struct ffi_requirement {
    const char *name;
    uint32_t types; /* a set of FFI_SET bits */
    int64_t count;  /* number of elements, or FFI_ANY_COUNT */
    bool result;    /* else an argument */
    bool optional;  /* may be absent: then a single byte, FFI_U8, stands in its place */
} ffi_requirement;

/* Returns the next argument or result of the call. */
ffi_array ffi_read_array(ffi_reader *reader, const ffi_requirement *need);

/* The check of ffi_read_array() for an array whose number of elements is known only after it was read. */
void ffi_check_count(ffi_reader *reader, const char *name, ffi_array array, int64_t count);

/* Shorthands for ffi_read_array(). */
ffi_array ffi_read_arg(ffi_reader *reader, const char *name, uint32_t types, int64_t count);
ffi_array ffi_read_arg_or_none(ffi_reader *reader, const char *name, uint32_t types,
                               int64_t count);
ffi_array ffi_read_result(ffi_reader *reader, const char *name, uint32_t types, int64_t count);
ffi_array ffi_read_result_or_none(ffi_reader *reader, const char *name, uint32_t types,
                                  int64_t count);
int32_t ffi_read_arg_int(ffi_reader *reader, const char *name); /* 0 for one on a GPU */

/* Attributes by name. */
int64_t ffi_read_int(ffi_reader *reader, const char *name);
uint32_t ffi_read_uint(ffi_reader *reader, const char *name);
double ffi_read_float(ffi_reader *reader, const char *name);
void ffi_read_text(ffi_reader *reader, const char *name, char *out, size_t size);

/* Which device of its platform in this process, and the stream to order work on. */
int32_t ffi_get_ordinal(ffi_reader *reader);
epic_stream ffi_get_stream(ffi_reader *reader);

/* Seen as rows for the core. */
epic_rows ffi_rows_of(ffi_array array);

#endif
