/* SPDX-License-Identifier: Apache-2.0 */
#include "wire/ucx/lanes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Writes the next of an endpoint's lanes, as in "#  lane[0]:  4:tcp/eth0.0 md[1] ...", and returns
 * what follows; NULL: there is none.  UCX 1.13 tells its lanes in no other way. */
static const char *next_lane(const char *text, char *to, size_t size)
{
    text = text ? strstr(text, " lane[") : NULL;
    text = text ? strstr(text, "]:") : NULL;
    if (!text) return NULL;
    text += strcspn(text + 2, ":\n") + 3;
    const int length = (int)strcspn(text, ". \n");
    snprintf(to, size, "%.*s", length, text);
    return text + length;
}

static char *print_lanes(ucp_ep_h endpoint)
{
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    if (!file) return NULL;
    ucp_ep_print_info(endpoint, file);
    fclose(file);
    return text;
}

static bool is_rdma(const char *lane)
{
    return !strncmp(lane, "rc_", 3) || !strncmp(lane, "dc_", 3) || !strncmp(lane, "srd", 3);
}

bool ucx_keeps_words(ucp_ep_h endpoint)
{
    char lane[64], *text = print_lanes(endpoint);
    int lanes = 0, others = 0;
    for (const char *at = text; (at = next_lane(at, lane, sizeof lane)); lanes++)
        others += !is_rdma(lane);
    free(text);
    return lanes > 0 && others == 0;
}

int ucx_say_lanes(ucp_ep_h endpoint, char *to, size_t size, const char *way)
{
    char lane[64], *text = print_lanes(endpoint);
    const char *before = ", ";
    int used = 0;
    for (const char *at = text; (at = next_lane(at, lane, sizeof lane)); before = " + ")
        if ((size_t)used < size)
            used += snprintf(to + used, size - (size_t)used, "%s%s", before, lane);
    if (text && (size_t)used < size)
        used += snprintf(to + used, size - (size_t)used, " by %s", way);
    free(text);
    return used;
}
