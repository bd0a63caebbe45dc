/* SPDX-License-Identifier: Apache-2.0 */
/* What libepic_ucx.so shows, and what is asked of it before a net is open. */
#include <stdio.h>

#include "net/strands/strands.h"
#include "net/ucx/lanes.h"

#define BEST_BYTES (224 << 10) /* what fits a segment of TCP (lanes.c), and 16 rows of 14 KB */

static bool can(char *why)
{
    ucp_context_h context;
    const ucs_status_t status = ucx_new_context(&context, NULL, false);
    if (status == UCS_OK)
        ucp_cleanup(context);
    else
        snprintf(why, NET_WHY, "net \"ucx\": ucp_init: %s", ucs_status_string(status));
    return status == UCS_OK;
}

static bool reaches_gpu(void)
{
    ucp_context_h context;
    if (ucx_new_context(&context, NULL, false) != UCS_OK) return false;
    const bool may = ucx_may_reach_gpus(context);
    ucp_cleanup(context);
    return may;
}

extern EPIC_API const net_engine epic_net_ucx;
const net_engine epic_net_ucx = {.name = "ucx",
                                 .best_bytes = BEST_BYTES,
                                 .can = can,
                                 .reaches_gpu = reaches_gpu,
                                 STRANDS_CALLS};
