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

#define FFI_U8 100u /* beside epic_type: bytes of plans, memory, and arrays that are absent */
#define FFI_OTHER 255u

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

ffi_error *ffi_fail(const ffi_frame *frame, XLA_FFI_Error_Code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
ffi_error *ffi_error_new(const XLA_FFI_Api *api, XLA_FFI_Error_Code code, const char *text);
XLA_FFI_Error_Code ffi_code(epic_result result);

/* The core's last failure on this thread, as XLA's error; NULL for EPIC_OK. */
ffi_error *ffi_error_of(const ffi_frame *frame, const char *what, epic_result result);

ffi_reader ffi_read(const ffi_frame *frame, bool on_device);

/* The next argument or result.  One of `type` is asked for, or with FFI_OTHER any that EPIC
 * has; optional ones may be absent: then a byte, FFI_U8, stands there. */
ffi_array ffi_arg(ffi_reader *reader, const char *name, uint32_t type);
ffi_array ffi_arg_or_none(ffi_reader *reader, const char *name, uint32_t type);
ffi_array ffi_result(ffi_reader *reader, const char *name, uint32_t type);
ffi_array ffi_result_or_none(ffi_reader *reader, const char *name, uint32_t type);
int32_t ffi_arg_int(ffi_reader *reader, const char *name); /* 0 for one on a GPU */

/* Attributes by name. */
int64_t ffi_int(ffi_reader *reader, const char *name);
uint32_t ffi_uint(ffi_reader *reader, const char *name);
double ffi_float(ffi_reader *reader, const char *name);
void ffi_text(ffi_reader *reader, const char *name, char *out, size_t size);

/* Which device of its platform in this process, and the stream to order work on. */
int32_t ffi_ordinal(ffi_reader *reader);
epic_stream ffi_stream(ffi_reader *reader);

/* Seen as rows for the core. */
epic_rows ffi_rows(ffi_array array);

#endif
