/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that epic-trace and epic-place share. Each ends the program with a sentence and exit
 * status 1 if it cannot do its work. */
#ifndef EPIC_TOOL_H
#define EPIC_TOOL_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Prints "epic-trace: " and the sentence to stderr, with unprintable bytes escaped, and exits. */
_Noreturn void tool_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Opens a regular file for reading. Refuses a pipe, because opening one may block forever. */
FILE *tool_open_file(const char *path);

/* Returns zeroed memory. */
void *tool_alloc(size_t bytes);

/* Returns the integer in `text`, which must be least to most. option: its name, for the error. */
int64_t tool_parse_number(const char *option, const char *text, int64_t least, int64_t most);

#endif
