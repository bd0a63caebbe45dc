/* SPDX-License-Identifier: Apache-2.0 */
/* Implements what all kinds of bootstraps share: checks arguments, creates the bootstrap of a
 * single rank, and lists ranks in error texts. */
#include "bootstrap/bootstrap.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"

#define MAX_NAMES 16

epic_result epic_bootstrap_check(const void *mine, const void *all, size_t bytes)
{
    if (bytes > BOOTSTRAP_MAX_BYTES)
        return epic_fail(EPIC_EINVAL, "gather: bytes is %zu: must be at most %u", bytes,
                         BOOTSTRAP_MAX_BYTES);
    if (bytes > 0 && (mine == NULL || all == NULL))
        return epic_fail(EPIC_EINVAL, "gather: %s is NULL and bytes is %zu: must not be NULL",
                         mine == NULL ? "mine" : "all", bytes);
    return EPIC_OK;
}

static epic_result gather_alone(void *self, const void *mine, void *all, int64_t bytes)
{
    (void)self;
    TRY(epic_bootstrap_check(mine, all, bytes));
    if (bytes > 0) memmove(all, mine, bytes);
    return EPIC_OK;
}

void epic_bootstrap_of_one(epic_bootstrap *out)
{
    *out = (epic_bootstrap){.rank = 0, .num_ranks = 1, .gather = gather_alone};
}

void epic_bootstrap_close(epic_bootstrap *bootstrap)
{
    if (bootstrap == NULL) return;
    if (bootstrap->close != NULL) bootstrap->close(bootstrap->self);
    bootstrap->gather = NULL;
    bootstrap->close = NULL;
    bootstrap->self = NULL;
}

int64_t epic_bootstrap_now_ms(void)
{
    return clock_ms();
}

int epic_bootstrap_left_ms(int64_t end)
{
    const int64_t left = end - epic_bootstrap_now_ms();
    if (left <= 0) return 0;
    return left > INT32_MAX ? INT32_MAX : (int)left;
}

/* Appends formatted text to `out`, which has `size` bytes, of which `used` are filled. Returns
 * the new number of filled bytes. Cuts text that does not fit. */
static size_t append_text(char *out, size_t size, size_t used, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    const int more = vsnprintf(out + used, size - used, format, list);
    va_end(list);
    const size_t after = used + (more > 0 ? (size_t)more : 0);
    return after < size ? after : size - 1;
}

void epic_bootstrap_list_ranks(char *out, size_t size, const bool *which, int32_t num_ranks)
{
    int32_t total = 0;
    for (int32_t r = 0; r < num_ranks; r++) total += which[r];

    size_t used = append_text(out, size, 0, total == 1 ? "rank" : "ranks");
    const int32_t shown = total <= MAX_NAMES ? total : MAX_NAMES;
    for (int32_t r = 0, i = 0; r < num_ranks && i < shown; r++) {
        if (!which[r]) continue;
        const char *mark = i == 0 ? "" : i == total - 1 ? " and" : ",";
        used = append_text(out, size, used, "%s %d", mark, r);
        i++;
    }
    if (total > shown) append_text(out, size, used, " and %d more", total - shown);
}
