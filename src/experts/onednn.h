/* SPDX-License-Identifier: Apache-2.0 */
/* oneDNN's product of bfloat16 matrices, loaded at first use. blas.h is the interface for
 * other files. */
#ifndef EPIC_EXPERTS_ONEDNN_H
#define EPIC_EXPERTS_ONEDNN_H

#include <stdbool.h>

#include "experts/blas.h"

/* Is oneDNN loaded? Loads the library that the build found, if the processor has bfloat16
 * instructions. Without them oneDNN is no faster than OpenBLAS. */
bool onednn_is_ready(void);
/* Returns "oneDNN 3.1.0", or "" if it is not ready. */
const char *onednn_name(void);

/* Loads oneDNN from this file, on any processor. For tests, before any other call. */
bool onednn_load_file(const char *file);

/* Multiplies bfloat16 A and B into float32 C. Returns false if oneDNN refuses, for example
 * without memory; C is unchanged then. */
bool onednn_multiply(const gemm *g);

/* Between these, products of this thread use one OpenMP thread. They nest. */
void onednn_enter(void);
void onednn_leave(void);

#endif
