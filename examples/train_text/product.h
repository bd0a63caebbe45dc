/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix product of the dense part: OpenBLAS if it can be loaded, else plain loops. */
#ifndef TRAIN_PRODUCT_H
#define TRAIN_PRODUCT_H

#include <stdbool.h>
#include <stdint.h>

/* c [m, n] = a [m, k] b [k, n]. A transposed a is stored as [k, m], a transposed b as [n,
 * k]. */
typedef struct product {
    int64_t m, n, k;
    const float *a, *b;
    float *c;
    bool transpose_a, transpose_b;
} product;

/* Must be called before the first product, on one thread. */
void product_start(void);
void multiply(const product *p);

#endif
