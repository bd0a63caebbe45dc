/* SPDX-License-Identifier: Apache-2.0 */
/* Cleans text that other programs have written, so that a terminal can show it safely: error
 * texts of peers, values of environment variables and names of groups. */
#ifndef EPIC_TEXT_H
#define EPIC_TEXT_H

/* Returns the length in bytes of the character at `at` if it is safe to print: printable ASCII,
 * or valid UTF-8 from U+00A0 on. Returns 0 for a control character (U+0000 to U+001F, U+007F to
 * U+009F) and for a byte that begins no character. `at` points into a string that ends with a
 * NUL. */
int text_char_bytes(const char *at);

/* Replaces every byte for which text_char_bytes() returns 0 with '?', in place. */
void text_clean(char *text);

#endif
