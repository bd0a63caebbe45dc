/* SPDX-License-Identifier: Apache-2.0 */
/* Arrays of integers in NumPy's .npy format. */
#ifndef EPIC_NPY_H
#define EPIC_NPY_H

#include <stdint.h>

/* An array of integers. */
typedef struct npy {
    int64_t shape[4];
    int dims;
    int64_t num;
    int64_t *values;
} npy;

void npy_read(npy *out, const char *path);
void npy_write(const char *path, const int32_t *values, const int64_t *shape, int dims);

#endif
