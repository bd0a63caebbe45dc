/* SPDX-License-Identifier: Apache-2.0 */
/* Makes text safe for a terminal. */
#include "base/text.h"

#include <stdbool.h>

/* Returns true if the `num` bytes after the first one are continuation bytes of UTF-8. A NUL is
 * not a continuation byte, so the loop never reads beyond the end of a string. */
static bool has_continuations(const unsigned char *c, int num)
{
    for (int i = 1; i <= num; i++)
        if ((c[i] & 0xc0) != 0x80) return false;
    return true;
}

int text_char_bytes(const char *at)
{
    const unsigned char *c = (const unsigned char *)at;
    if (c[0] < 0x80) return c[0] >= 0x20 && c[0] != 0x7f;
    if (c[0] >= 0xc2 && c[0] <= 0xdf && has_continuations(c, 1))
        return c[0] > 0xc2 || c[1] >= 0xa0 ? 2 : 0;
    if (c[0] >= 0xe0 && c[0] <= 0xef && has_continuations(c, 2))
        return (c[0] == 0xe0 && c[1] < 0xa0) || (c[0] == 0xed && c[1] > 0x9f) ? 0 : 3;
    if (c[0] >= 0xf0 && c[0] <= 0xf4 && has_continuations(c, 3))
        return (c[0] == 0xf0 && c[1] < 0x90) || (c[0] == 0xf4 && c[1] > 0x8f) ? 0 : 4;
    return 0;
}

void text_clean(char *text)
{
    while (*text) {
        const int bytes = text_char_bytes(text);
        if (!bytes) *text = '?';
        text += bytes ? bytes : 1;
    }
}
