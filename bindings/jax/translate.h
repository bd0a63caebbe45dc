/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces names of C in the core's sentences by the names that Python callers know. */
#ifndef EPIC_JAX_TRANSLATE_H
#define EPIC_JAX_TRANSLATE_H

#include <stddef.h>

/* Sets the table of names: pairs of a name of C and its replacement, `count` strings in all,
 * which are copied.  A name that ends with '.' or '_' is a prefix of other names.
 * epic/jax/library.py calls it once, before any handler runs.  Returns 0, or 1 without
 * memory. */
int epic_jax_set_words(const char *const *words, int count);

/* Copies a sentence to `out`, at most `size` bytes with the final zero, and replaces the names
 * of C in it.  Any thread may call it. */
void translate_sentence(const char *sentence, char *out, size_t size);

#endif
