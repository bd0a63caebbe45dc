/* SPDX-License-Identifier: Apache-2.0 */
/* NVTX ranges. Each public call that launches kernels records a time range of the CPU thread
 * with the name of the call, so that tools such as Nsight Systems show which call launched a
 * kernel. NVTX is a header of the CUDA toolkit. If no such tool runs, a range costs a load and
 * a branch. */
#ifndef EPIC_P2P_RANGES_H
#define EPIC_P2P_RANGES_H

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

static inline int p2p_range_begin(const char *name)
{
    return nvtxRangePushA(name);
}

static inline void p2p_range_end(const int *depth)
{
    (void)depth;
    nvtxRangePop();
}

/* Begins a range that ends when the enclosing block ends. */
#define P2P_RANGE(name) \
    __attribute__((cleanup(p2p_range_end), unused)) const int range = p2p_range_begin(name)
#else
#define P2P_RANGE(name) (void)0
#endif

#endif
