/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the call frames of XLA: arrays and attributes. Creates XLA errors.
 *
 * XLA passes one frame to a handler. The frame contains all arguments, results and attributes
 * of the call. An ffi_reader reads the arrays in their order, and the attributes by name. After
 * its first error it only returns zeros. So a handler can read everything first, and then check
 * reader.error once. */
#ifndef EPIC_JAX_FFI_H
#define EPIC_JAX_FFI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"
#include "xla/ffi/api/c_api.h"

#define FFI_EXPORT __attribute__((visibility("default")))

/* Types of arrays in addition to epic_type. */
/* bytes: plans, memory, 8-bit rows, and the one byte that stands for an absent array */
#define FFI_U8 30u
#define FFI_OTHER 31u /* a type that no handler accepts */

/* Sets of types that a handler accepts for an array. */
#define FFI_SET(type) (1u << (type))
#define FFI_SET_F32 FFI_SET(EPIC_F32)
#define FFI_SET_I32 FFI_SET(EPIC_I32)
#define FFI_SET_U8 FFI_SET(FFI_U8)
#define FFI_SET_FLOATS \
    (FFI_SET_F32 | FFI_SET(EPIC_BF16) | FFI_SET(EPIC_F16) | FFI_SET(EPIC_F64))
#define FFI_SET_INDICES (FFI_SET_I32 | FFI_SET(EPIC_I64))

/* Returns the set that contains only this type, or the empty set for an unknown type: a type
 * from an attribute can have any value. */
static inline uint32_t ffi_set_of(uint32_t type)
{
    return type < FFI_OTHER ? FFI_SET(type) : 0;
}

/* value of ffi_requirement.count: any number of elements is allowed */
#define FFI_ANY_COUNT (-1)

typedef XLA_FFI_CallFrame ffi_frame;
typedef XLA_FFI_Error ffi_error; /* NULL means success; XLA frees any other value */

/* State of reading one frame. */
typedef struct ffi_reader {
    const ffi_frame *frame;
    bool on_device; /* true: the arrays are on a GPU, so the host cannot read their elements */
    ffi_error *error; /* the first error; NULL: none */
    /* number of arguments and of results that were read so far */
    int64_t num_args, num_results;
} ffi_reader;

/* An array of the frame. `rows` is the product of all its dimensions except the last. */
typedef struct ffi_array {
    void *data; /* NULL only if the array is absent */
    int64_t rows;
    int64_t columns; /* size of the last dimension; 1 for arrays of rank 0 and 1 */
    int64_t count;   /* number of elements */
    int64_t bytes;
    uint32_t type; /* an epic_type, or FFI_U8 */
} ffi_array;

/* Before the first call, XLA queries the API version and traits of a handler. If this call is
 * such a query, writes the answer and returns true. The handler must then return at once. */
bool ffi_is_query(ffi_frame *frame, XLA_FFI_Handler_Traits traits);

/* Create an XLA error with the code of `result`. Its text ends with the name of the result,
 * such as "[EPIC_EINVAL]", because XLA may change the code before the error reaches the
 * caller. */
ffi_error *ffi_fail(const ffi_frame *frame, epic_result result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
ffi_error *ffi_error_new(const XLA_FFI_Api *api, epic_result result, const char *text);

/* If `result` is an error, returns the core's last error in this thread as an XLA error. If it
 * is EPIC_OK, returns NULL. `what` is the name of the function in epic.jax. */
ffi_error *ffi_error_of_core(const ffi_frame *frame, const char *what, epic_result result);

/* Returns a reader that is at the beginning of the frame. */
ffi_reader ffi_reader_of(const ffi_frame *frame, bool on_device);

/* Returns the product of three sizes, each at least 0. Returns INT64_MAX if it overflows. */
int64_t ffi_multiply_sizes(int64_t a, int64_t b, int64_t c);

/* Returns the number of blocks of 128 elements in `length` elements. The last block may be
 * shorter. */
static inline int64_t ffi_num_blocks(int64_t length)
{
    return (length + 127) / 128;
}

/* Requirements on an array. ffi_read_array() checks them for every array of every handler, so
 * that no handler accesses memory after the end of an array, or reads elements as a wrong
 * type. */
typedef struct ffi_requirement {
    const char *name;
    uint32_t types; /* a set of FFI_SET bits */
    int64_t count;  /* required number of elements, or FFI_ANY_COUNT */
    bool result;    /* true for a result, false for an argument */
    /* true: the array may be absent; the frame then has an array of one byte (FFI_U8) in its
     * place */
    bool optional;
} ffi_requirement;

/* Returns the next argument or result of the frame. If it does not meet the requirements,
 * returns an absent array and sets the error of the reader. */
ffi_array ffi_read_array(ffi_reader *reader, const ffi_requirement *need);

/* Checks the number of elements of an array that has been read. Sets the error of the reader if
 * it is wrong. */
void ffi_check_count(ffi_reader *reader, const char *name, ffi_array array, int64_t count);

/* Short forms of ffi_read_array(). In the functions whose name ends in _or_none, the array is
 * optional. */
ffi_array ffi_read_arg(ffi_reader *reader, const char *name, uint32_t types, int64_t count);
ffi_array ffi_read_arg_or_none(ffi_reader *reader, const char *name, uint32_t types,
                               int64_t count);
ffi_array ffi_read_result(ffi_reader *reader, const char *name, uint32_t types, int64_t count);
ffi_array ffi_read_result_or_none(ffi_reader *reader, const char *name, uint32_t types,
                                  int64_t count);
/* Reads the next argument, an array of one int32, and returns its value. Returns 0 if the array
 * is on a GPU. */
int32_t ffi_read_arg_int(ffi_reader *reader, const char *name);

/* Return the value of the attribute with this name. ffi_read_uint() sets an error if the value
 * is not a uint32. ffi_read_text() writes at most `size` bytes to `out`, including the final
 * zero byte. */
int64_t ffi_read_int(ffi_reader *reader, const char *name);
uint32_t ffi_read_uint(ffi_reader *reader, const char *name);
double ffi_read_float(ffi_reader *reader, const char *name);
void ffi_read_text(ffi_reader *reader, const char *name, char *out, size_t size);

/* ffi_get_ordinal() returns XLA's index of the device that runs the call. ffi_get_stream()
 * returns the CUDA stream of the call. */
int32_t ffi_get_ordinal(ffi_reader *reader);
epic_stream ffi_get_stream(ffi_reader *reader);

/* Returns the array as the core's epic_rows. */
epic_rows ffi_rows_of(ffi_array array);

#endif
