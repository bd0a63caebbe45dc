/* SPDX-License-Identifier: Apache-2.0 */
/* Checks that CUDA still works: multiplies matrices with cuBLAS and compares the product with
 * plain loops. */
#ifndef EPIC_TEST_PRODUCT_H
#define EPIC_TEST_PRODUCT_H

#include <stdbool.h>

/* Uses the current device. Prints to stderr what is wrong. */
bool product_is_right(void);

#endif
