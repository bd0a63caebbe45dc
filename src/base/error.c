/* SPDX-License-Identifier: Apache-2.0 */
/* Stores the error text of each thread. The next failure on the same thread overwrites it. */
#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"

static _Thread_local char sentence[512];

epic_result epic_fail(epic_result result, const char *format, ...)
{
    char whole[4 * sizeof sentence];
    va_list list;
    va_start(list, format);
    vsnprintf(whole, sizeof whole, format, list);
    va_end(list);
    text_clean(whole); /* the text may contain parts from the environment or from peers */
    epic_fit_text(sentence, sizeof sentence, whole);
    return result;
}

/* Returns true if the byte at `at` is a continuation byte of a UTF-8 character. */
static bool is_inside_char(const char *at)
{
    return ((unsigned char)*at & 0xc0) == 0x80;
}

void epic_fit_text(char *out, size_t size, const char *whole)
{
    static const char gap[] = " ... ";
    const size_t length = strlen(whole), room = size - sizeof gap;
    if (length < size) {
        memcpy(out, whole, length + 1);
        return;
    }
    size_t tail = room * 3 / 5, head = room - tail;
    while (head > 0 && is_inside_char(whole + head)) head--;
    while (tail > 0 && is_inside_char(whole + length - tail)) tail--;
    memcpy(out, whole, head);
    memcpy(out + head, gap, sizeof gap - 1);
    memcpy(out + head + sizeof gap - 1, whole + length - tail, tail + 1);
}

const char *epic_remedy(int error)
{
    switch (error) {
    case EMFILE:
        return "; raise the limit on open files (ulimit -n)";
    case ENFILE:
        return "; the whole system has no open file left (fs.file-max)";
    case EFBIG:
        return "; raise the limit on the size of files (ulimit -f)";
    default:
        return "";
    }
}

const char *epic_sentence(void)
{
    return sentence;
}

const char *epic_error(const epic_context *ctx)
{
    (void)ctx;
    return sentence;
}

const char *epic_result_name(epic_result result)
{
    static const char *const names[] = {
        "EPIC_OK",       "EPIC_EINVAL",  "EPIC_ENOMEM",    "EPIC_ENOTSUP",
        "EPIC_ETIMEOUT", "EPIC_EDEVICE", "EPIC_EOVERFLOW", "EPIC_EMISMATCH",
        "EPIC_EPEER",    "EPIC_ECLOSED", "EPIC_EEVICTED",
    };
    _Static_assert(sizeof names / sizeof *names == EPIC_EEVICTED + 1, "a name for each result");
    return epic_is_result((int)result) ? names[result] : "unknown epic_result";
}

uint32_t epic_version(void)
{
    return EPIC_VERSION;
}
