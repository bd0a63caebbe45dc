/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces names of the C interface in error sentences of the core by names of the Python
 * interface. */
#ifndef EPIC_JAX_TRANSLATE_H
#define EPIC_JAX_TRANSLATE_H

#include <stddef.h>

/* Sets the table of names and copies its strings. `words` has `count` strings: pairs of a C
 * name and its replacement. A name that ends with '.' or '_' is a prefix of other names.
 * epic/jax/library.py calls this once, before any handler runs. Returns 0, or 1 without
 * memory. */
int epic_jax_set_words(const char *const *words, int count);

/* Copies a sentence to `out` and replaces its C names. Writes at most `size` bytes, with the
 * final zero byte. Any thread may call it. */
void translate_sentence(const char *sentence, char *out, size_t size);

#endif
