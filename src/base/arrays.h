/* SPDX-License-Identifier: Apache-2.0 */
/* Where the arrays of a call lie. */
#ifndef EPIC_ARRAYS_H
#define EPIC_ARRAYS_H

#include <stdbool.h>

#include "base/error.h"

/* An array of a call, on the host or on a device: it is not read here. */
typedef struct call_array {
    const char *name;
    const void *data; /* NULL: not there */
    int64_t bytes;    /* that it has at least; 0: not there */
    size_t unit;      /* a power of two: bytes of an element, which divide its address */
    bool out;         /* written by the call */
} call_array;

static inline call_array call_array_of(const char *name, const void *data, int64_t count,
                                       size_t unit, bool out)
{
    return (call_array){name, data, count * (int64_t)unit, unit, out};
}

/* A field of a call's arguments, with so many elements of `unit` bytes. */
#define ARRAY_IN(args, field, count, unit) \
    call_array_of(#field, (args)->field, count, unit, false)
#define ARRAY_OUT(args, field, count, unit) \
    call_array_of(#field, (args)->field, count, unit, true)

/* Does every array begin where its elements may, and does none share bytes with one that is
 * written?  EPIC_EINVAL. */
epic_result check_arrays(const call_array *arrays, size_t count);

#define CHECK_ARRAYS(arrays) check_arrays(arrays, sizeof(arrays) / sizeof *(arrays))

#endif
