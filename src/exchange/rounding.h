/* SPDX-License-Identifier: Apache-2.0 */
/* Sets the floating-point mode of the calling thread for one operation: round to nearest even,
 * and compute with subnormal numbers. A framework may have set the thread to flush subnormal
 * numbers to zero, which would change results. rounding_leave() restores the mode that
 * rounding_enter() returned. On processors other than x86 and ARM64 the two functions do
 * nothing. */
#ifndef EPIC_ROUNDING_H
#define EPIC_ROUNDING_H

#include <stdint.h>

#if defined(__SSE2__)
#include <xmmintrin.h>

#define MXCSR_DEFAULT 0x1f80u

static inline uint64_t rounding_enter(void)
{
    const uint64_t before = _mm_getcsr();
    _mm_setcsr(MXCSR_DEFAULT);
    return before;
}

static inline void rounding_leave(uint64_t before)
{
    _mm_setcsr((unsigned)before);
}
#elif defined(__aarch64__)
static inline uint64_t rounding_enter(void)
{
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
    return before;
}

static inline void rounding_leave(uint64_t before)
{
    __asm__ volatile("msr fpcr, %0" ::"r"(before));
}
#else
static inline uint64_t rounding_enter(void)
{
    return 0;
}

static inline void rounding_leave(uint64_t before)
{
    (void)before;
}
#endif

#endif
