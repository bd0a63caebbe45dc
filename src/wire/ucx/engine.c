/* SPDX-License-Identifier: Apache-2.0 */
/* What libepic_ucx.so shows, and what is asked of it before a wire is open. */
#include <stdio.h>

#include "wire/strands/strands.h"
#include "wire/ucx/lanes.h"

#define BEST_BYTES (224 << 10) /* what fits a segment of TCP (lanes.c), and 16 rows of 14 KB */

static bool can(char *why)
{
    ucp_context_h context;
    const ucs_status_t status = ucx_new_context(&context, NULL, false);
    if (status == UCS_OK)
        ucp_cleanup(context);
    else
        snprintf(why, WIRE_WHY, "wire \"ucx\": ucp_init: %s", ucs_status_string(status));
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

extern EPIC_API const wire_engine epic_wire_ucx;
const wire_engine epic_wire_ucx = {.name = "ucx",
                                   .best_bytes = BEST_BYTES,
                                   .can = can,
                                   .reaches_gpu = reaches_gpu,
                                   STRANDS_CALLS};
