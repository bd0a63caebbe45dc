/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that epic-trace and epic-place share. If a function fails, it prints an error text
 * and ends the program with exit status 1. */
#ifndef EPIC_TOOL_H
#define EPIC_TOOL_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Prints the name of the program and the error text to stderr, with unprintable bytes escaped.
 * Then ends the program. */
_Noreturn void tool_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Opens a regular file for reading. Fails for a pipe, because opening a pipe may block
 * forever. */
FILE *tool_open_file(const char *path);

/* Returns zeroed memory. */
void *tool_alloc(size_t bytes);

/* Returns the integer in `text`, which must be `least` to `most`. The error text calls it
 * `option`. */
int64_t tool_parse_number(const char *option, const char *text, int64_t least, int64_t most);

#endif
