/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that epic-trace and epic-place share: errors, memory, files and numbers. */
#include "tool.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "info.h"

_Noreturn void tool_fail(const char *format, ...)
{
    char sentence[8192];
    va_list more;
    va_start(more, format);
    vsnprintf(sentence, sizeof sentence, format, more);
    va_end(more);
    fprintf(stderr, "%s: ", program_invocation_short_name);
    info_text(stderr, sentence);
    fprintf(stderr, "\n");
    exit(1);
}

FILE *tool_open_file(const char *path)
{
    struct stat kind;
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &kind)) tool_fail("%s: %s", path, strerror(errno));
    if (!S_ISREG(kind.st_mode)) tool_fail("%s: not a regular file", path);
    FILE *in = fdopen(fd, "rb");
    if (!in) tool_fail("%s: %s", path, strerror(errno));
    return in;
}

void *tool_alloc(size_t bytes)
{
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory) tool_fail("no memory for %zu bytes", bytes);
    return memory;
}

int64_t tool_parse_number(const char *option, const char *text, int64_t least, int64_t most)
{
    char *end;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < least || value > most)
        tool_fail("%s is \"%.80s\": it must be %" PRId64 " to %" PRId64, option, text, least,
                  most);
    return value;
}
