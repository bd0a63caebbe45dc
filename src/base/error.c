/* SPDX-License-Identifier: Apache-2.0 */
/* The sentence of a thread's last failure. */
#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char sentence[512];

epic_result epic_fail(epic_result result, const char *format, ...)
{
    char whole[4 * sizeof sentence];
    va_list list;
    va_start(list, format);
    vsnprintf(whole, sizeof whole, format, list);
    va_end(list);
    epic_fit(sentence, sizeof sentence, whole);
    return result;
}

void epic_fit(char *out, size_t size, const char *whole)
{
    static const char gap[] = " ... ";
    const size_t length = strlen(whole), room = size - sizeof gap, tail = room * 3 / 5;
    if (length < size) {
        memcpy(out, whole, length + 1);
        return;
    }
    memcpy(out, whole, room - tail);
    memcpy(out + room - tail, gap, sizeof gap - 1);
    memcpy(out + size - 1 - tail, whole + length - tail, tail + 1);
}

const char *epic_way_out(int error)
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
        "EPIC_OK",      "EPIC_EINVAL",    "EPIC_ENOMEM",    "EPIC_ENOTSUP", "EPIC_ETIMEOUT",
        "EPIC_EDEVICE", "EPIC_EOVERFLOW", "EPIC_EMISMATCH", "EPIC_EPEER",   "EPIC_ECLOSED",
    };
    const unsigned i = (unsigned)result;
    return i < sizeof names / sizeof *names ? names[i] : "unknown epic_result";
}

uint32_t epic_version(void)
{
    return EPIC_VERSION;
}
