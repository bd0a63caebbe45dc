/* SPDX-License-Identifier: Apache-2.0 */
/* Computes GEMMs of bfloat16 matrices with oneDNN. Loads oneDNN at first use. Only blas.c uses
 * this file. */
#ifndef EPIC_EXPERTS_ONEDNN_H
#define EPIC_EXPERTS_ONEDNN_H

#include <stdbool.h>

#include "experts/blas.h"

/* Returns true if oneDNN is loaded. The first call loads the library that the build found, if
 * the processor has bfloat16 instructions. Without these instructions oneDNN is not faster than
 * OpenBLAS. */
bool onednn_is_ready(void);
/* Returns the name and version, for example "oneDNN 3.1.0", or "" if oneDNN is not loaded. */
const char *onednn_name(void);

/* For tests: loads oneDNN from `file`, even if the processor has no bfloat16 instructions.
 * Returns false if the file cannot be used. Must be called before the first call of any other
 * function of this file. */
bool onednn_load_file(const char *file);

/* Multiplies bfloat16 matrices A and B into a float32 matrix C. Returns false and leaves C
 * unchanged if oneDNN reports an error, for example if out of memory. Requires that
 * onednn_is_ready() has returned true. */
bool onednn_multiply(const gemm *g);

/* Between onednn_enter() and onednn_leave(), the GEMMs of the calling thread use one OpenMP
 * thread. Pairs of calls may be nested. */
void onednn_enter(void);
void onednn_leave(void);

#endif
