/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces C names in the core's error texts by the names of the Python interface. */
#ifndef EPIC_JAX_TRANSLATE_H
#define EPIC_JAX_TRANSLATE_H

#include <stddef.h>

/* Sets the table of names. Copies its strings. `words` has `count` strings, which are pairs of
 * a C name and its replacement. A name that ends with '.' or '_' is a prefix of other names.
 * epic/jax/library.py calls this function once, before any handler runs. Returns 0, or 1 if out
 * of memory. */
int epic_jax_set_words(const char *const *words, int count);

/* Copies an error text to `out` and replaces its C names. Writes at most `size` bytes,
 * including the final zero byte. Any thread may call it. */
void translate_sentence(const char *sentence, char *out, size_t size);

#endif
