/* SPDX-License-Identifier: Apache-2.0 */
#include "net/chaos_strands.h"

#include "net/chaos.h"

static bool gains(const net *strand)
{
    (void)strand;
    return true;
}

const strand_engine strands_of = {.net = &epic_net_chaos, .gains = gains};

static bool can(char *why)
{
    return epic_net_chaos.can(why);
}

static bool reaches_gpu(void)
{
    return epic_net_chaos.reaches_gpu();
}

const net_engine epic_net_strands = {.name = "strands",
                                     .best_bytes = 2 << 10,
                                     .can = can,
                                     .reaches_gpu = reaches_gpu,
                                     STRANDS_CALLS};
