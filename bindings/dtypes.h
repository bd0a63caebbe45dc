/* SPDX-License-Identifier: Apache-2.0 */
/* Names of element types in PyTorch and JAX.
 *
 * Both bindings include this header, so that their error texts name a type in the same way. The
 * core's function epic_type_name() is not used, because it returns the name of the C constant,
 * such as "EPIC_F32". */
#ifndef EPIC_BINDINGS_DTYPES_H
#define EPIC_BINDINGS_DTYPES_H

#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"

/* Returns the Python name of an epic_type, such as "bfloat16", or NULL for any other value. */
static inline const char *dtype_name(uint32_t type)
{
    switch (type) {
    case EPIC_F32:
        return "float32";
    case EPIC_BF16:
        return "bfloat16";
    case EPIC_F16:
        return "float16";
    case EPIC_F64:
        return "float64";
    case EPIC_E4M3:
        return "float8_e4m3fn";
    case EPIC_I32:
        return "int32";
    case EPIC_I64:
        return "int64";
    default:
        return NULL;
    }
}

/* Returns the size in bytes of one element of an epic_type, or 1 for any other value. */
static inline int64_t dtype_bytes(uint32_t type)
{
    switch (type) {
    case EPIC_F64:
    case EPIC_I64:
        return 8;
    case EPIC_F32:
    case EPIC_I32:
        return 4;
    case EPIC_BF16:
    case EPIC_F16:
        return 2;
    default:
        return 1;
    }
}

#endif
