/* SPDX-License-Identifier: Apache-2.0 */
/* Structs that travel with their size. */
#include "core/sized.h"

#include <string.h>

epic_result epic_sized(void *ours, size_t our_size, const void *theirs, size_t size,
                       const char *name)
{
    const unsigned char *bytes = theirs;
    if (theirs == NULL) return epic_fail(EPIC_EINVAL, "%s is NULL: pass the struct", name);
    if (size == 0)
        return epic_fail(EPIC_EINVAL, "the size of %s is 0: pass sizeof the struct", name);
    for (size_t i = our_size; i < size; i++)
        if (bytes[i] != 0)
            return epic_fail(
                EPIC_EINVAL,
                "%s has %zu bytes, of which this library knows %zu, and byte %zu is "
                "not zero: it asks for something that needs a newer library",
                name, size, our_size, i);
    memset(ours, 0, our_size);
    memcpy(ours, theirs, size < our_size ? size : our_size);
    return EPIC_OK;
}
