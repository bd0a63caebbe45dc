/* SPDX-License-Identifier: Apache-2.0 */
/* Checks that CUDA still works: a matrix product by cuBLAS, compared with plain loops. */
#ifndef EPIC_TEST_PRODUCT_H
#define EPIC_TEST_PRODUCT_H

#include <stdbool.h>

/* Uses the current device; prints to stderr what is wrong. */
bool product_is_right(void);

#endif
