/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that a context of UCX uses only the NIC that EPIC chose for it, and that a choice of
 * the user is kept. No RDMA NIC is needed: TCP's device "lo" takes the place of the NIC. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "net/ucx/networks.h"
#include "net/ucx/networks_text.h"

static char devices[512]; /* the last value of UCX's setting NET_DEVICES; "": not set */

ucs_status_t __real_ucp_config_modify(ucp_config_t *config, const char *name,
                                      const char *value);

/* The linker makes the library's calls of ucp_config_modify() call this function. */
ucs_status_t __wrap_ucp_config_modify(ucp_config_t *config, const char *name, const char *value)
{
    if (!strcmp(name, "NET_DEVICES")) snprintf(devices, sizeof devices, "%s", value);
    return __real_ucp_config_modify(config, name, value);
}

/* Opens a context that should use `port`. Returns true if its setting NET_DEVICES begins with
 * `start`; if `start` is "": if the setting was not changed. */
static bool sets_devices(const char *port, const char *start)
{
    const char *segment;
    ucp_context_h context;
    *devices = 0;
    if (!CHECK(ucx_create_context(&context, &segment, false, port) == UCS_OK)) return false;
    ucp_cleanup(context);
    return CHECK_SAY(*start ? !strncmp(devices, start, strlen(start)) : !*devices,
                     "port %s: NET_DEVICES is \"%s\"", port, devices);
}

int main(void)
{
    static const char nics[] =
        "#      resource 1  :  md 1  dev 1  flags -- tcp/eth0\n"
        "#      resource 2  :  md 1  dev 2  flags -- tcp/ib0\n"
        "#      resource 3  :  md 2  dev 3  flags -- rc_mlx5/mlx5_0:1\n"
        "#      resource 4  :  md 3  dev 4  flags -- rc_mlx5/mlx5_10:1\n";
    char list[64], small[16];
    check_begin();
    CHECK(networks_have_port(nics, "mlx5_0:1") && networks_have_port(nics, "mlx5_10:1"));
    CHECK(!networks_have_port(nics, "mlx5_1:1") && !networks_have_port(nics, "mlx5_10:11"));
    CHECK(!networks_have_port(nics, "mlx5_0") && !networks_have_port(nics, ""));
    CHECK(!networks_have_port(NULL, "mlx5_0:1"));
    CHECK(networks_list_devices(nics, "mlx5_0:1", list, sizeof list));
    CHECK_SAY(!strcmp(list, "mlx5_0:1,eth0,ib0"), "%s", list);
    CHECK(!networks_list_devices(nics, "mlx5_0:1", small, sizeof small));
    CHECK(networks_have_setting("A=all\nB=all\n", "B=all") &&
          !networks_have_setting("AB=all", "B=all"));
    CHECK(!networks_have_setting("B=all,x\n", "B=all") &&
          !networks_have_setting(NULL, "B=all"));

    setenv("UCX_LOG_LEVEL", "error", 1);
    unsetenv("UCX_NET_DEVICES");
    unsetenv("UCX_TLS");
    sets_devices("", "");
    sets_devices("mlx5_77:1", ""); /* UCX does not have this port */
    sets_devices("lo", "lo,");
    setenv("UCX_NET_DEVICES", "all", 1);
    sets_devices("lo", "");
    unsetenv("UCX_NET_DEVICES");
    return check_end();
}
