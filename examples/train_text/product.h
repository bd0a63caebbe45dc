/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix product of the dense part: OpenBLAS where it can be loaded, else plain loops. */
#ifndef TRAIN_PRODUCT_H
#define TRAIN_PRODUCT_H

#include <stdbool.h>
#include <stdint.h>

/* c [m, n] = a [m, k] b [k, n]; a transposed lies as [k, m], b transposed as [n, k]. */
typedef struct product {
    int64_t m, n, k;
    const float *a, *b;
    float *c;
    bool transpose_a, transpose_b;
} product;

/* Before the first product, on one thread. */
void product_start(void);
void multiply(const product *p);

#endif
