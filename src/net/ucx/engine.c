/* SPDX-License-Identifier: Apache-2.0 */
/* The network engine (net.h) in libepic_ucx.so. Its nets are striped nets (striped.h), and
 * ucx.c implements one stripe. This file has the functions that need no open net. */
#include <stdio.h>

#include "net/striped/striped.h"
#include "net/ucx/networks.h"

/* Preferred size of a put in bytes: large enough for 16 rows of 14 KB, and less than one
 * segment of UCX over TCP (256 KB, networks.c). */
#define PREFERRED_BYTES (224 << 10)

/* Implements net_engine.is_available by opening a temporary UCX context. */
static bool ucx_is_available(char *why)
{
    ucp_context_h context;
    const ucs_status_t status = ucx_create_context(&context, NULL, false, "");
    if (status == UCS_OK)
        ucp_cleanup(context);
    else
        snprintf(why, NET_WHY_BYTES, "net \"ucx\": ucp_init: %s", ucs_status_string(status));
    return status == UCS_OK;
}

/* Implements net_engine.can_reach_gpu by opening a temporary UCX context. */
static bool ucx_can_reach_gpu(void)
{
    ucp_context_h context;
    if (ucx_create_context(&context, NULL, false, "") != UCS_OK) return false;
    const bool may = ucx_can_reach_gpus(context);
    ucp_cleanup(context);
    return may;
}

extern EPIC_API const net_engine epic_net_ucx;
const net_engine epic_net_ucx = {.name = "ucx",
                                 .preferred_bytes = PREFERRED_BYTES,
                                 .is_available = ucx_is_available,
                                 .can_reach_gpu = ucx_can_reach_gpu,
                                 STRIPED_CALLS};
