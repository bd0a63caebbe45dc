/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and writes arrays of integers in NumPy's .npy format. If a function fails, it prints an
 * error and ends the program. */
#ifndef EPIC_NPY_H
#define EPIC_NPY_H

#include <stdint.h>

typedef struct npy {
    int64_t shape[4];
    int dims;
    int64_t num;
    int64_t *values;
} npy;

/* Reads a file. The caller frees out->values. */
void npy_read(npy *out, const char *path);
/* Writes an int32 array of at most 4 dimensions. */
void npy_write(const char *path, const int32_t *values, const int64_t *shape, int dims);

#endif
