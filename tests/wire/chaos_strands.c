/* SPDX-License-Identifier: Apache-2.0 */
#include "wire/chaos_strands.h"

#include "wire/chaos.h"

const wire_engine *const strands_of = &epic_wire_chaos;

bool strands_gain(const wire *strand)
{
    (void)strand;
    return true;
}

static bool can(char *why)
{
    return epic_wire_chaos.can(why);
}

static bool reaches_gpu(void)
{
    return epic_wire_chaos.reaches_gpu();
}

const wire_engine epic_wire_strands = {.name = "strands",
                                       .best_bytes = 2 << 10,
                                       .can = can,
                                       .reaches_gpu = reaches_gpu,
                                       STRANDS_CALLS};
