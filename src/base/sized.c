/* SPDX-License-Identifier: Apache-2.0 */
#include "base/sized.h"

#include <string.h>

/* maximum size of a struct: all structs of epic.h are smaller, so a larger size is invalid */
#define MOST_BYTES 65536u

#define SIZED_ROW(type, last) \
    {#type, sizeof(type), offsetof(type, last) + sizeof(((type *)0)->last)},
const sized_type sized_types[NUM_SIZED] = {SIZED_STRUCTS(SIZED_ROW)};

static epic_result check_size(const void *theirs, const sized_type *type, size_t size,
                              const char *name)
{
    if (theirs == NULL)
        return epic_fail(EPIC_EINVAL, "%s is NULL: pass an %s", name, type->name);
    if (size < type->first)
        return epic_fail(EPIC_EINVAL,
                         "the size of %s is %zu%s: an %s never had less than %zu bytes; pass "
                         "sizeof(%s)",
                         name, size, size == sizeof(void *) ? ", sizeof of a pointer?" : "",
                         type->name, type->first, type->name);
    if (size > MOST_BYTES)
        return epic_fail(EPIC_EINVAL,
                         "the size of %s is %zu: an %s has %zu bytes; pass sizeof(%s)", name,
                         size, type->name, type->bytes, type->name);
    return EPIC_OK;
}

epic_result sized_read(void *ours, const sized_type *type, const void *theirs, size_t size,
                       const char *name)
{
    const unsigned char *bytes = theirs;
    TRY(check_size(theirs, type, size, name));
    for (size_t i = type->bytes; i < size; i++)
        if (bytes[i] != 0)
            return epic_fail(
                EPIC_EINVAL,
                "%s has %zu bytes, of which this library knows %zu, and byte %zu is "
                "not zero: it requests a feature of a newer library; update EPIC",
                name, size, type->bytes, i);
    const size_t copied = size < type->bytes ? size : type->bytes;
    memcpy(ours, theirs, copied);
    if (copied < type->bytes) memset((unsigned char *)ours + copied, 0, type->bytes - copied);
    return EPIC_OK;
}

epic_result sized_place(const void *out, const sized_type *type, size_t size, const char *name)
{
    return check_size(out, type, size, name);
}

void sized_write(void *out, const void *ours, const sized_type *type, size_t size)
{
    memset(out, 0, size);
    memcpy(out, ours, size < type->bytes ? size : type->bytes);
}
