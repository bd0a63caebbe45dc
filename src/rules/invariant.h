/* SPDX-License-Identifier: Apache-2.0 */
/* INVARIANT(condition) states a condition that is true for every input of callers and peers.
 * Debug builds and the emulator abort if it is false. Other builds do not check it. */
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
