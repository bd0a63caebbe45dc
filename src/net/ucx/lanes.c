/* SPDX-License-Identifier: Apache-2.0 */
/* Opens contexts of UCX, and finds out which networks a context and its endpoints use. No
 * function of UCX returns the networks, but UCX can print them. So this file reads the printed
 * text. */
#include "net/ucx/lanes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "net/ucx/lanes_text.h"

/* The size of a segment: the largest message that UCX sends over TCP in one part. The default
 * of UCX is 64 KB. */
#define SEGMENT "256K"

/* Returns the text that UCX prints about the context, or about the endpoint if context is NULL.
 * Returns NULL if memory is short. The caller frees the text. */
static char *print_info(ucp_context_h context, ucp_ep_h endpoint)
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

/* Returns true if the text about the context contains one of the names `networks` [count]. UCX
 * prints one line per network, such as "# resource 0 : md 0 ... -- tcp/lo". */
static bool has_one_of(ucp_context_h context, const char *const *networks, int count)
{
    char *text = print_info(context, NULL);
    bool has = false;
    for (int i = 0; text && i < count; i++) has |= strstr(text, networks[i]) != NULL;
    free(text);
    return has;
}

/* Returns true if the context has TCP. */
static bool has_tcp(ucp_context_h context)
{
    return has_one_of(context, (const char *const[]){" tcp/"}, 1);
}

bool ucx_has_rdma(ucp_context_h context)
{
    static const char *const networks[] = {"-- rc_", "-- dc_", "-- ud_", "-- srd"};
    return has_one_of(context, networks, sizeof networks / sizeof *networks);
}

bool ucx_can_reach_gpus(ucp_context_h context)
{
    ucp_context_attr_t have = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    return ucx_has_rdma(context) && ucp_context_query(context, &have) == UCS_OK &&
           have.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA);
}

/* Returns the name of UCX's setting for the segment size. Before version 1.17 that name has no
 * prefix "TCP_". */
static const char *segment_name(void)
{
    unsigned major, minor, release;
    ucp_get_version(&major, &minor, &release);
    return major == 1 && minor < 17 ? "RX_SEG_SIZE" : "TCP_RX_SEG_SIZE";
}

/* Returns true if this version of UCX can refuse remote writes on networks that do not support
 * them. Older versions emulate such a write: they send a message, which the peer stores with
 * memcpy. They also warn about the setting that disables this. */
static bool can_disable_emulation(void)
{
    unsigned major, minor, release;
    ucp_get_version(&major, &minor, &release);
    return major > 1 || minor >= 22;
}

/* Opens a context. Its TCP segments have the size `segment`, such as "256K"; NULL: UCX's
 * default. ucx_create_context() explains no_emulation. */
static ucs_status_t init_context(ucp_context_h *out, const char *segment, bool no_emulation)
{
    const ucp_params_t wanted = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                 .features = UCP_FEATURE_AM | UCP_FEATURE_RMA};
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK) return status;
    if (segment) ucp_config_modify(config, segment_name(), segment);
    if (no_emulation && can_disable_emulation())
        ucp_config_modify(config, "PROTO_EMULATION_ENABLE", "n");
    status = ucp_init(&wanted, config, out);
    ucp_config_release(config);
    return status;
}

/* Opens a UCX context (lanes.h). First opens a context without a segment size, to find out
 * whether it has TCP. Only if it has, opens a second one with the segment size, because UCX
 * warns about TCP settings in a context without TCP. */
ucs_status_t ucx_create_context(ucp_context_h *out, const char **segment, bool no_emulation)
{
    const char *theirs = getenv("UCX_TCP_RX_SEG_SIZE");
    const ucs_status_t status = init_context(out, NULL, no_emulation);
    if (status != UCS_OK || !segment) return status;
    *segment = !has_tcp(*out) ? "" : theirs ? theirs : SEGMENT;
    if (!**segment || theirs) return UCS_OK;
    ucp_cleanup(*out);
    *out = NULL;
    return init_context(out, SEGMENT, no_emulation);
}

bool ucx_keeps_words(ucp_ep_h endpoint)
{
    char *text = print_info(NULL, endpoint);
    const bool keeps = lanes_keep_words(text, can_disable_emulation());
    free(text);
    return keeps;
}

bool ucx_can_reach(ucp_ep_h endpoint, uint64_t own, uint64_t theirs)
{
    char *text = print_info(NULL, endpoint);
    const bool reaches = lanes_reach(text, own, theirs);
    free(text);
    return reaches;
}

/* Reads the bit mask of memory domains with which a packed key begins in every version of UCX.
 * No function of UCX returns this mask. */
uint64_t ucx_domains(const void *key, size_t bytes)
{
    uint64_t domains = 0;
    if (bytes > sizeof domains) memcpy(&domains, key, sizeof domains);
    return domains;
}

int ucx_describe_lanes(ucp_ep_h endpoint, char *to, size_t size, const char *method)
{
    char lane[64], *text = print_info(NULL, endpoint);
    const char *before = ", ";
    int used = 0;
    for (const char *at = text; (at = lanes_next(at, lane, sizeof lane)); before = " + ")
        if ((size_t)used < size)
            used += snprintf(to + used, size - (size_t)used, "%s%s", before, lane);
    if (text && (size_t)used < size)
        used += snprintf(to + used, size - (size_t)used, " by %s", method);
    free(text);
    return used;
}
