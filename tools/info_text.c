/* SPDX-License-Identifier: Apache-2.0 */
/* Printing what others have written.  Names and sentences come out of the memory of any process
 * of this user: a terminal must not obey them. */
#include <stdbool.h>
#include <stdint.h>

#include "info.h"

static bool continues(const unsigned char *c, int num)
{
    for (int i = 1; i <= num; i++)
        if ((c[i] & 0xc0) != 0x80) return false;
    return true;
}

/* Bytes of the character at c if it can be printed: ASCII, or good UTF-8 from U+00A0 on; else 0.
 * Below that lie controls that some terminals know. */
static int printable(const unsigned char *c)
{
    if (c[0] < 0x80) return c[0] >= 0x20 && c[0] != 0x7f;
    if (c[0] >= 0xc2 && c[0] <= 0xdf && continues(c, 1))
        return c[0] > 0xc2 || c[1] >= 0xa0 ? 2 : 0;
    if (c[0] >= 0xe0 && c[0] <= 0xef && continues(c, 2))
        return (c[0] == 0xe0 && c[1] < 0xa0) || (c[0] == 0xed && c[1] > 0x9f) ? 0 : 3;
    if (c[0] >= 0xf0 && c[0] <= 0xf4 && continues(c, 3))
        return (c[0] == 0xf0 && c[1] < 0x90) || (c[0] == 0xf4 && c[1] > 0x8f) ? 0 : 4;
    return 0;
}

/* `before`: what stands before the two digits of a byte that cannot be printed. */
static void print(FILE *to, const char *text, bool quoted, const char *before)
{
    if (quoted) fputc('"', to);
    for (const unsigned char *c = (const unsigned char *)text; *c;) {
        const int bytes = printable(c);
        if (quoted && (*c == '"' || *c == '\\')) fputc('\\', to);
        if (bytes)
            fwrite(c, 1, (size_t)bytes, to);
        else
            fprintf(to, "%s%02x", before, *c);
        c += bytes ? bytes : 1;
    }
    if (quoted) fputc('"', to);
}

void info_text(FILE *to, const char *text)
{
    print(to, text, false, "\\x");
}

void info_json(FILE *to, const char *text)
{
    print(to, text, true, "\\u00");
}

void info_label(FILE *to, const char *text)
{
    print(to, text, true, "\\\\x");
}

const char *info_operation(uint32_t number)
{
    static const char *const names[] = {
        "none", "open", "plan", "dispatch", "combine", "dispatch_backward", "combine_backward",
        "sum"};
    return number < sizeof names / sizeof *names ? names[number] : "unknown";
}
