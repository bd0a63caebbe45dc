/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that `epic-info --report` opens no net with more ranks than a net supports. The net of
 * the test stands in for ucx. It sends nothing, and checks how many ranks it gets. */
#include <dlfcn.h>
#include <string.h>

#include "check.h"
#include "info.h"
#include "net/net.h"
#include "report.h"

static int num_opened;

static epic_result open_net(net **out, const net_setup *setup, void *handle, char *why)
{
    (void)handle, (void)why;
    CHECK(setup->num_hosts <= NET_MAX_HOSTS);
    *out = (net *)&num_opened;
    num_opened++;
    return EPIC_OK;
}

static epic_result connect_net(net *n, const void *handles, char *why)
{
    (void)n, (void)handles, (void)why;
    return EPIC_OK;
}

static int progress_net(net *n)
{
    (void)n;
    return 0;
}

static void close_net(net *n)
{
    (void)n;
}

/* The name under which epic-info looks up the net. */
__attribute__((visibility("default"))) extern const net_engine epic_net_ucx;
const net_engine epic_net_ucx = {.name = "test",
                                 .open = open_net,
                                 .connect = connect_net,
                                 .progress = progress_net,
                                 .close = close_net};

/* Takes the place of the function that loads libepic_ucx.so. */
void *info_open_plugin(char path[INFO_PATH], const char *library)
{
    (void)path, (void)library;
    return dlopen(NULL, RTLD_NOW);
}

/* All ranks gather the same bytes. */
static epic_result gather(void *self, const void *mine, void *all, int64_t bytes)
{
    const epic_bootstrap *b = self;
    for (int r = 0; r < b->num_ranks; r++)
        memcpy((char *)all + (size_t)r * (size_t)bytes, mine, (size_t)bytes);
    return EPIC_OK;
}

int main(void)
{
    epic_bootstrap b = {.num_ranks = NET_MAX_HOSTS, .gather = gather, .self = &b};
    char why[REPORT_WHY] = "";
    void *way;
    check_begin();
    CHECK(report_way_net.open(&way, &b, 0, 4096, why));
    CHECK_EQ(num_opened, 1);
    if (way) report_way_net.close(way);
    b.num_ranks = NET_MAX_HOSTS + 1;
    CHECK(!report_way_net.open(&way, &b, 0, 4096, why));
    CHECK_EQ(num_opened, 1);
    CHECK_SAY(strstr(why, "group has 257 ranks: must be at most 256"), "the reason: %s", why);
    return check_end();
}
