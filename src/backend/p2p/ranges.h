/* SPDX-License-Identifier: Apache-2.0 */
/* NVTX: a range on the host for each call that launches kernels, by the call's name, so that tools
 * such as Nsight Systems show whose the kernels are.  NVTX is a header of the CUDA toolkit; it looks
 * for a tool at the first range of the process, and without one a range is a load and a branch. */
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

/* From here to the end of the block, however it ends. */
#define P2P_RANGE(name) \
    __attribute__((cleanup(p2p_range_end), unused)) const int range = p2p_range_begin(name)
#else
#define P2P_RANGE(name) (void)0
#endif

#endif
