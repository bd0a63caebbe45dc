/* SPDX-License-Identifier: Apache-2.0 */
/* Opens contexts of UCX, and finds out which networks a context and its endpoints use. UCX has
 * no function that returns the networks, but UCX can print them, so this file reads the printed
 * text. */
#include "net/ucx/networks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "net/ucx/networks_text.h"

/* Segment size: the largest message that UCX sends over TCP in one part. UCX's default is 64
 * KB. */
#define SEGMENT "256K"

/* Returns the text that UCX prints about the context, or about the endpoint if context is NULL.
 * Returns NULL if out of memory. The caller frees the text. */
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

/* Returns true if the text about the context contains any of the `count` names in `networks`.
 * UCX prints one line per network, such as "# resource 0 : md 0 ... -- tcp/lo". */
static bool has_one_of(ucp_context_h context, const char *const *networks, int count)
{
    char *text = print_info(context, NULL);
    bool has = false;
    for (int i = 0; text && i < count; i++) has |= strstr(text, networks[i]) != NULL;
    free(text);
    return has;
}

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

/* Returns UCX's name of the setting for the segment size. Before UCX 1.17 the name has no
 * prefix "TCP_". */
static const char *segment_name(void)
{
    unsigned major, minor, release;
    ucp_get_version(&major, &minor, &release);
    return major == 1 && minor < 17 ? "RX_SEG_SIZE" : "TCP_RX_SEG_SIZE";
}

/* Returns true if this version of UCX has a setting that refuses remote writes on networks that
 * do not support them. Older versions print a warning about this setting, and emulate such a
 * write with a message, which the peer stores with memcpy. */
static bool can_disable_emulation(void)
{
    unsigned major, minor, release;
    ucp_get_version(&major, &minor, &release);
    return major > 1 || minor >= 22;
}

typedef struct settings {
    const char *segment; /* size of TCP segments, such as "256K"; NULL: UCX's default */
    bool no_emulation;   /* the argument no_emulation of ucx_create_context() */
    char devices[512];   /* the network devices that the context may use; "": UCX's default */
} settings;

static ucs_status_t init_context(ucp_context_h *out, const settings *s)
{
    const ucp_params_t wanted = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                 .features = UCP_FEATURE_AM | UCP_FEATURE_RMA};
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK) return status;
    if (s->segment) ucp_config_modify(config, segment_name(), s->segment);
    if (s->no_emulation && can_disable_emulation())
        ucp_config_modify(config, "PROTO_EMULATION_ENABLE", "n");
    if (*s->devices) ucp_config_modify(config, "NET_DEVICES", s->devices);
    status = ucp_init(&wanted, config, out);
    ucp_config_release(config);
    return status;
}

/* Returns true if the user has chosen the network devices, in the environment or in a
 * configuration file of UCX. */
static bool has_user_devices(void)
{
    char *text = NULL;
    size_t size;
    ucp_config_t *config;
    if (getenv("UCX_NET_DEVICES")) return true;
    FILE *file = open_memstream(&text, &size);
    if (!file) return false;
    const ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status == UCS_OK) {
        ucp_config_print(config, file, NULL, UCS_CONFIG_PRINT_CONFIG);
        ucp_config_release(config);
    }
    fclose(file);
    const bool is_default = networks_have_setting(text, "UCX_NET_DEVICES=all");
    free(text);
    return status == UCS_OK && !is_default;
}

/* Sets `devices` to the list of network devices for a context that should use `port` (see
 * ucx_create_context()), or to "" if UCX should choose the devices. */
static void choose_devices(ucp_context_h context, const char *port, char *devices, size_t size)
{
    *devices = 0;
    if (!*port || has_user_devices()) return;
    char *text = print_info(context, NULL);
    if (!networks_have_port(text, port) || !networks_list_devices(text, port, devices, size))
        *devices = 0;
    free(text);
}

/* Opens a UCX context (networks.h). First opens a context with UCX's own settings, to find out
 * which devices it has, and whether it has TCP. If other settings are needed, closes this
 * context and opens another one with these settings. Does not open the first context with these
 * settings, because UCX prints warnings about TCP settings if it has no TCP, and about devices
 * that do not exist. */
ucs_status_t ucx_create_context(ucp_context_h *out, const char **segment, bool no_emulation,
                                const char *port)
{
    const char *theirs = getenv("UCX_TCP_RX_SEG_SIZE");
    settings s = {.no_emulation = no_emulation};
    const ucs_status_t status = init_context(out, &s);
    if (status != UCS_OK || !segment) return status;
    *segment = !has_tcp(*out) ? "" : theirs ? theirs : SEGMENT;
    if (**segment && !theirs) s.segment = SEGMENT;
    choose_devices(*out, port, s.devices, sizeof s.devices);
    if (!s.segment && !*s.devices) return UCS_OK;
    ucp_cleanup(*out);
    *out = NULL;
    return init_context(out, &s);
}

bool ucx_keeps_words(ucp_ep_h endpoint)
{
    char *text = print_info(NULL, endpoint);
    const bool keeps = networks_keep_words(text, can_disable_emulation());
    free(text);
    return keeps;
}

bool ucx_can_reach(ucp_ep_h endpoint, uint64_t own, uint64_t theirs)
{
    char *text = print_info(NULL, endpoint);
    const bool reaches = networks_reach(text, own, theirs);
    free(text);
    return reaches;
}

/* Reads the bit mask of memory domains from the beginning of a packed key, where every version
 * of UCX stores it. No function of UCX returns this mask. */
uint64_t ucx_domains(const void *key, size_t bytes)
{
    uint64_t domains = 0;
    if (bytes > sizeof domains) memcpy(&domains, key, sizeof domains);
    return domains;
}

int ucx_describe_networks(ucp_ep_h endpoint, char *to, size_t size, const char *method)
{
    char network[64], *text = print_info(NULL, endpoint);
    const char *before = ", ";
    int used = 0;
    for (const char *at = text; (at = networks_next(at, network, sizeof network));
         before = " + ")
        if ((size_t)used < size)
            used += snprintf(to + used, size - (size_t)used, "%s%s", before, network);
    if (text && (size_t)used < size)
        used += snprintf(to + used, size - (size_t)used, " by %s", method);
    free(text);
    return used;
}
