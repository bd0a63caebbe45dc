/* SPDX-License-Identifier: Apache-2.0 */
/* NVTX's ranges, as far as EPIC uses them, into the emulator (ranges.c). */
#ifndef EPIC_EMULATED_NVTX_H
#define EPIC_EMULATED_NVTX_H

int nvtxRangePushA(const char *name);
int nvtxRangePop(void);

#endif
