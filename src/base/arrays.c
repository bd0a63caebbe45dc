/* SPDX-License-Identifier: Apache-2.0 */
#include "base/arrays.h"

static epic_result check_aligned(const call_array *a)
{
    if (((uintptr_t)a->data & (a->unit - 1)) == 0) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "%s is at %p: must be at a multiple of %zu bytes", a->name,
                     a->data, a->unit);
}

static bool is_given(const call_array *a)
{
    return a->data && a->bytes > 0;
}

static bool do_overlap(const call_array *a, const call_array *b)
{
    const uintptr_t at = (uintptr_t)a->data, other = (uintptr_t)b->data;
    return at < other + (uintptr_t)b->bytes && other < at + (uintptr_t)a->bytes;
}

static epic_result fail_shared(const call_array *out, const call_array *other)
{
    return epic_fail(EPIC_EINVAL,
                     "%s at %p and %s at %p share memory, and the call writes %s: must not "
                     "overlap; pass memory of its own",
                     out->name, out->data, other->name, other->data, out->name);
}

epic_result check_arrays(const call_array *arrays, size_t count)
{
    for (size_t i = 0; i < count; i++) TRY(check_aligned(&arrays[i]));
    for (size_t i = 1; i < count; i++) {
        const call_array *a = &arrays[i];
        if (!is_given(a)) continue;
        for (const call_array *b = arrays; b < a; b++)
            if ((a->out || b->out) && is_given(b) && do_overlap(a, b))
                return b->out ? fail_shared(b, a) : fail_shared(a, b);
    }
    return EPIC_OK;
}
