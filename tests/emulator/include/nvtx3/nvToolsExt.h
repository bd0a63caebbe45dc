/* SPDX-License-Identifier: Apache-2.0 */
/* The part of NVTX that EPIC uses; the emulator records the ranges (ranges.c). */
#ifndef EPIC_EMULATED_NVTX_H
#define EPIC_EMULATED_NVTX_H

int nvtxRangePushA(const char *name);
int nvtxRangePop(void);

#endif
