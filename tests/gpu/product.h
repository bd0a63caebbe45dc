/* SPDX-License-Identifier: Apache-2.0 */
/* Does CUDA still work?  A matrix product by cuBLAS, compared with plain loops. */
#ifndef EPIC_TEST_PRODUCT_H
#define EPIC_TEST_PRODUCT_H

#include <stdbool.h>

/* On the current device; says on stderr what is wrong. */
bool product_is_right(void);

#endif
