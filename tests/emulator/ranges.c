/* SPDX-License-Identifier: Apache-2.0 */
/* NVTX ranges: the names of each thread are kept for tests. */
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <string.h>

#include "emulator.h"

static __thread char names[1024];
static __thread int depth;

int nvtxRangePushA(const char *name)
{
    const size_t length = strlen(names);
    snprintf(names + length, sizeof names - length, "%s ", name);
    return depth++;
}

int nvtxRangePop(void)
{
    return --depth;
}

const char *emulator_ranges(int *open)
{
    *open = depth;
    return names;
}
