/* SPDX-License-Identifier: Apache-2.0 */
#include "net/chaos_striped.h"

#include "net/chaos.h"

static bool can_gain(const net *stripe)
{
    (void)stripe;
    return true;
}

const stripe_engine striped_over = {.engine = &epic_net_chaos, .can_gain = can_gain};

static bool is_available(char *why)
{
    return epic_net_chaos.is_available(why);
}

static bool can_reach_gpu(void)
{
    return epic_net_chaos.can_reach_gpu();
}

const net_engine epic_net_striped = {.name = "striped",
                                     .preferred_bytes = 2 << 10,
                                     .is_available = is_available,
                                     .can_reach_gpu = can_reach_gpu,
                                     STRIPED_CALLS};
