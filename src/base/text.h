/* SPDX-License-Identifier: Apache-2.0 */
/* Text that others have written and that may end on a terminal: sentences of peers, values of
 * environment variables, names of groups. */
#ifndef EPIC_TEXT_H
#define EPIC_TEXT_H

/* The bytes of the character at `at` if a terminal only shows it: ASCII without its controls, or
 * well-formed UTF-8 from U+00A0 on.  0: a control (U+0000 to U+001F, U+007F to U+009F) or a byte
 * that begins no character.  `at` points into a string that ends with a NUL. */
int text_char_bytes(const char *at);

/* Replaces every byte that begins no such character with '?', in place. */
void text_clean(char *text);

#endif
