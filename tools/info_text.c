/* SPDX-License-Identifier: Apache-2.0 */
/* Prints text that other processes wrote. The text may come from the memory of any process of
 * this user, so control characters in it must not reach the terminal. */
#include <stdbool.h>

#include "base/text.h"
#include "info.h"

/* Prints text. Prints an unprintable byte as `before` and two hexadecimal digits. */
static void print_escaped(FILE *to, const char *text, bool quoted, const char *before)
{
    if (quoted) fputc('"', to);
    for (const char *c = text; *c;) {
        const int bytes = text_char_bytes(c);
        if (quoted && (*c == '"' || *c == '\\')) fputc('\\', to);
        if (bytes)
            fwrite(c, 1, (size_t)bytes, to);
        else
            fprintf(to, "%s%02x", before, (unsigned char)*c);
        c += bytes ? bytes : 1;
    }
    if (quoted) fputc('"', to);
}

void info_text(FILE *to, const char *text)
{
    print_escaped(to, text, false, "\\x");
}

void info_json(FILE *to, const char *text)
{
    print_escaped(to, text, true, "\\u00");
}

void info_label(FILE *to, const char *text)
{
    print_escaped(to, text, true, "\\\\x");
}

const char *info_duration(int64_t ns, char out[32])
{
    if (ns < 1000000)
        snprintf(out, 32, "%.1f us", (double)ns / 1e3);
    else if (ns < 1000000000)
        snprintf(out, 32, "%.1f ms", (double)ns / 1e6);
    else
        snprintf(out, 32, "%.1f s", (double)ns / 1e9);
    return out;
}

const char *info_operation(uint32_t number)
{
    static const char *const names[] = {
        "none", "open",  "plan", "dispatch", "combine", "dispatch_backward", "combine_backward",
        "sum",  "window"};
    return number < sizeof names / sizeof *names ? names[number] : "unknown";
}
