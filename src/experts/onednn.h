/* SPDX-License-Identifier: Apache-2.0 */
/* oneDNN's product of bfloat16 matrices, loaded at first use: see blas.h. */
#ifndef EPIC_EXPERTS_ONEDNN_H
#define EPIC_EXPERTS_ONEDNN_H

#include <stdbool.h>

#include "experts/blas.h"

/* The one that was found when the library was built, on a processor with instructions for
 * bfloat16: without those it is no faster than OpenBLAS. */
bool onednn_is_ready(void);
const char *onednn_name(void); /* "oneDNN 3.1.0"; "": not ready */

/* Takes that of a file, whatever the processor; for tests, before anything else here. */
bool onednn_load_file(const char *file);

/* false: oneDNN refuses, as without memory, and C is as it was. */
bool onednn_multiply(const gemm *g);

/* One thread for this thread's products, and back; they nest. */
void onednn_enter(void);
void onednn_leave(void);

#endif
