/* SPDX-License-Identifier: Apache-2.0 */
#include "wire/ucx/lanes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The most that UCX sends over TCP, and reads there, in one piece, and so need not assemble.  Its own
 * is 64 KB. */
#define SEGMENT "256K"

/* What UCX prints of one or the other; 1.13 tells which networks there are in no other way. */
static char *print(ucp_context_h context, ucp_ep_h endpoint)
{
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    if (!file) return NULL;
    if (context)
        ucp_context_print_info(context, file);
    else
        ucp_ep_print_info(endpoint, file);
    fclose(file);
    return text;
}

static bool has_tcp(ucp_context_h context)
{
    char *text = print(context, NULL);
    const bool has = text && strstr(text, " tcp/"); /* "#  resource 0 : md 0 ... -- tcp/lo" */
    free(text);
    return has;
}

/* Up to 1.16 UCX wants the name without that of the transport. */
static const char *segment_name(void)
{
    unsigned major, minor, release;
    ucp_get_version(&major, &minor, &release);
    return major == 1 && minor < 17 ? "RX_SEG_SIZE" : "TCP_RX_SEG_SIZE";
}

/* With segments of that size; NULL: of UCX's own. */
static ucs_status_t init(ucp_context_h *out, const char *segment)
{
    const ucp_params_t wanted = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                 .features = UCP_FEATURE_AM | UCP_FEATURE_RMA};
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK) return status;
    if (segment) ucp_config_modify(config, segment_name(), segment);
    status = ucp_init(&wanted, config, out);
    ucp_config_release(config);
    return status;
}

/* What a context without TCP is told of TCP it warns of. */
ucs_status_t ucx_new_context(ucp_context_h *out, const char **segment)
{
    const char *theirs = getenv("UCX_TCP_RX_SEG_SIZE");
    const ucs_status_t status = init(out, NULL);
    if (status != UCS_OK || !segment) return status;
    *segment = !has_tcp(*out) ? "" : theirs ? theirs : SEGMENT;
    if (!**segment || theirs) return UCS_OK;
    ucp_cleanup(*out);
    *out = NULL;
    return init(out, SEGMENT);
}

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

static bool is_rdma(const char *lane)
{
    return !strncmp(lane, "rc_", 3) || !strncmp(lane, "dc_", 3) || !strncmp(lane, "srd", 3);
}

bool ucx_keeps_words(ucp_ep_h endpoint)
{
    char lane[64], *text = print(NULL, endpoint);
    int lanes = 0, others = 0;
    for (const char *at = text; (at = next_lane(at, lane, sizeof lane)); lanes++)
        others += !is_rdma(lane);
    free(text);
    return lanes > 0 && others == 0;
}

int ucx_say_lanes(ucp_ep_h endpoint, char *to, size_t size, const char *way)
{
    char lane[64], *text = print(NULL, endpoint);
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
