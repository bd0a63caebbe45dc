/* SPDX-License-Identifier: Apache-2.0 */
/* INVARIANT(condition): what this library alone keeps true, whatever callers and peers bring.
 * Debug builds and the emulator's end the program where it does not hold; others do not
 * look. */
#ifndef EPIC_INVARIANT_H
#define EPIC_INVARIANT_H

#if defined EPIC_INVARIANTS && !defined __CUDA_ARCH__
#undef NDEBUG
#include <assert.h>
#define INVARIANT(condition) assert(condition)
#else
#define INVARIANT(condition) ((void)0)
#endif

#endif
