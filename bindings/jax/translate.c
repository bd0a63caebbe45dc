/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces C names in the core's error texts by the names of the Python interface.
 * epic/words.py has the table of names. */
#include "translate.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ffi.h"

static char **table; /* pairs: a C name, then the Python name */
static int table_length;

FFI_EXPORT int epic_jax_set_words(const char *const *words, int count)
{
    char **copies = calloc((size_t)count, sizeof *copies);
    if (copies == NULL) return 1;
    for (int i = 0; i < count; i++) {
        copies[i] = strdup(words[i]);
        if (copies[i] == NULL) return 1;
    }
    table = copies;
    table_length = count;
    return 0;
}

/* Returns true if the character can be part of a name. */
static bool is_in_name(char c)
{
    return isalnum((unsigned char)c) || c == '_';
}

/* Returns true if the text begins with the name. If the name ends with '.' or '_', it is a
 * prefix, and a character of a name must follow it. If not, no such character may follow it. */
static bool begins_with(const char *text, const char *name, size_t length)
{
    if (strncmp(text, name, length) != 0) return false;
    const char last = name[length - 1];
    const bool is_prefix = last == '.' || last == '_';
    return is_in_name(text[length]) == is_prefix;
}

/* Replaces "layer.flags 0, rank 1 <verb> 8" by a text with the Python argument that differs.
 * Returns the number of bytes that it replaces, or 0 if the text is something else. */
static int translate_flags(const char *at, char *out, size_t size)
{
    unsigned mine, other;
    int rank, length = 0;
    char verb[16];
    if (sscanf(at, "layer.flags %u, rank %d %15[a-z] %u%n", &mine, &rank, verb, &other,
               &length) != 4)
        return 0;
    static const char *const values[] = {"False", "True"};
    const bool is_distinct = ((mine ^ other) & EPIC_DISTINCT) != 0;
    const unsigned flag = is_distinct ? EPIC_DISTINCT : EPIC_DROP_ABSENT;
    const char *why = is_distinct
                          ? " (a layer passes distinct=True unless it has forced or table: "
                            "pass these on every rank or on none)"
                          : "";
    snprintf(out, size, "%s=%s, rank %d %s %s%s", is_distinct ? "distinct" : "drop_absent",
             values[(mine & flag) != 0], rank, verb, values[(other & flag) != 0], why);
    return length;
}

/* If the text begins with a C name of the table, writes its replacement. Returns the length of
 * the C name, or 0 if the text does not begin with one. */
static int translate_name(const char *at, char *out, size_t size)
{
    const int length = translate_flags(at, out, size);
    if (length > 0) return length;
    for (int i = 0; i + 1 < table_length; i += 2) {
        const size_t bytes = strlen(table[i]);
        if (!begins_with(at, table[i], bytes)) continue;
        snprintf(out, size, "%s", table[i + 1]);
        return (int)bytes;
    }
    return 0;
}

void translate_sentence(const char *sentence, char *out, size_t size)
{
    size_t used = 0;
    char before = ' ';
    while (*sentence != '\0' && used + 1 < size) {
        const bool is_start = !is_in_name(before) && !strchr("./\"'", before);
        char word[192];
        const int length = is_start ? translate_name(sentence, word, sizeof word) : 0;
        if (length > 0) {
            const int written = snprintf(out + used, size - used, "%s", word);
            used = used + (size_t)written < size ? used + (size_t)written : size - 1;
            before = sentence[length - 1] == '.' || sentence[length - 1] == '_'
                         ? ' ' /* the prefix was removed, so a name may begin here */
                         : sentence[length - 1];
            sentence += length;
        } else {
            before = out[used++] = *sentence++;
        }
    }
    out[used] = '\0';
}
