/* SPDX-License-Identifier: Apache-2.0 */
/* Sentences of the core in the words of its Python callers. */
#ifndef EPIC_JAX_TRANSLATE_H
#define EPIC_JAX_TRANSLATE_H

#include <stddef.h>

/* For Python: sets the pairs of a name of C and what stands for it in Python, `count` strings in
 * all.  They are copied.  A name that ends with '.' or '_' is a prefix of others.  Call it once,
 * before any handler runs.  Returns 0, or 1 without memory. */
int epic_jax_set_words(const char *const *words, int count);

/* Copies a sentence into `out`, at most `size` bytes with the final zero, and replaces the names
 * of C in it. */
void translate_sentence(const char *sentence, char *out, size_t size);

#endif
