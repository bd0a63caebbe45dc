/* SPDX-License-Identifier: Apache-2.0 */
/* Checks the alignment and overlap of the array arguments of a call. */
#ifndef EPIC_ARRAYS_H
#define EPIC_ARRAYS_H

#include <stdbool.h>

#include "base/error.h"

/* An array argument of a call. The checks use only the array's address and size and never its
 * contents, so the array may be in device memory. */
typedef struct call_array {
    const char *name;
    const void *data; /* address of the array; NULL: the caller has passed no array */
    int64_t bytes;    /* number of bytes of the array that the call uses */
    /* size of an element in bytes, a power of two; the address must be a multiple of this
     * size */
    size_t unit;
    bool out; /* true: the call writes the array */
} call_array;

static inline call_array call_array_of(const char *name, const void *data, int64_t count,
                                       size_t unit, bool out)
{
    return (call_array){name, data, count * (int64_t)unit, unit, out};
}

/* Describe the array in a field of a call's arguments. The array has `count` elements of `unit`
 * bytes. */
#define ARRAY_IN(args, field, count, unit) \
    call_array_of(#field, (args)->field, count, unit, false)
#define ARRAY_OUT(args, field, count, unit) \
    call_array_of(#field, (args)->field, count, unit, true)

/* Checks that every array is aligned to the size of its elements, and that no array overlaps
 * another array that the call writes. Returns EPIC_EINVAL with an error text that contains the
 * names of the arrays. */
epic_result check_arrays(const call_array *arrays, size_t count);

/* Calls check_arrays() for a variable of array type, whose length the compiler knows. */
#define CHECK_ARRAYS(arrays) check_arrays(arrays, sizeof(arrays) / sizeof *(arrays))

#endif
