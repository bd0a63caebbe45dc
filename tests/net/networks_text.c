/* SPDX-License-Identifier: Apache-2.0 */
/* Tests reading the text that UCX prints about an endpoint, which decides whether rows are sent
 * by remote writes. */
#include "net/ucx/networks_text.h"

#include "check.h"

#define HEAD "#\n# UCP endpoint\n#\n#               peer: <no debug data>\n"
#define RC \
    "#                 lane[0]:  5:rc_mlx5/mlx5_0:1.0 md[4]       -> md[4]/ib/sysdev[255] "
#define DC \
    "#                 lane[1]:  7:dc_mlx5/mlx5_1:1.0 md[5]       -> md[5]/ib/sysdev[255] "
#define TCP \
    "#                 lane[1]:  1:tcp/lo.0 md[1]                -> md[1]/tcp/sysdev[255] "
#define SRD                                                                                    \
    "#                 lane[0]:  2:srd/rdmap85s0:1.0 md[2]       -> md[2]/ib/sysdev[255] seg " \
    "8192 "
#define TAIL "#\n#                 am_send: 0..<egr/short>..8185..<rndv>..(inf)\n#\n"

static void check_names(void)
{
    char network[64];
    const char *at =
        networks_next(HEAD RC "rma_bw#0 am wireup\n" TCP "am\n" TAIL, network, sizeof network);
    CHECK(at && !strcmp(network, "rc_mlx5/mlx5_0:1"));
    CHECK((at = networks_next(at, network, sizeof network)) && !strcmp(network, "tcp/lo"));
    CHECK(!networks_next(at, network, sizeof network));
    CHECK(!networks_next(NULL, network, sizeof network));
    CHECK(networks_next("# lane[0]:  1:tcp/eth0.100.0 md[1] -> md[1]/tcp am\n", network,
                        sizeof network) &&
          !strcmp(network, "tcp/eth0.100")); /* a VLAN */
}

/* Access to GPU memory needs keys of the device that writes, on both sides. */
static void check_reach(void)
{
    const char *two = HEAD RC "am am_bw#0 wireup\n" DC "rma_bw#0\n" TAIL;
    CHECK(networks_reach(HEAD RC "rma_bw#0 am\n" TAIL, 1 << 4 | 1, 1 << 4));
    CHECK(!networks_reach(HEAD RC "rma_bw#0 am\n" TAIL, 1 << 4, 1 << 3 | 1 << 5));
    CHECK(!networks_reach(HEAD RC "rma_bw#0 am\n" TAIL, 1 << 3, 1 << 4));
    CHECK(!networks_reach(HEAD RC "am\n" TAIL, ~0ull, ~0ull)); /* no remote writes */
    CHECK(networks_reach(two, 1 << 5, 1 << 5) && !networks_reach(two, 1 << 4, 1 << 4));
    CHECK(networks_reach(HEAD "# lane[0]:  0:rc_mlx5/mlx5_0:1.0 md[2] -> md[63]/ib rma_bw#0\n",
                         4, 1ull << 63));
    CHECK(!networks_reach(HEAD "# lane[0]:  0:rc_mlx5/mlx5_0:1.0 md[2] -> md[64]/ib rma_bw#0\n",
                          4, 1)); /* no key has this number */
    CHECK(!networks_reach(HEAD TAIL, ~0ull, ~0ull) && !networks_reach(NULL, ~0ull, ~0ull));
}

int main(void)
{
    check_begin();
    check_names();
    check_reach();
    for (int honest = 0; honest < 2; honest++) {
        CHECK(networks_keep_words(HEAD RC " rma_bw#0 am am_bw#0 wireup\n" TAIL, honest));
        CHECK(networks_keep_words(HEAD RC " am wireup\n" DC " rma_bw#0\n" TAIL, honest));
        CHECK(!networks_keep_words(HEAD RC " rma_bw#0 am\n" TCP " am am_bw#0\n" TAIL, honest));
        CHECK(!networks_keep_words(HEAD TCP " rma_bw#0 am wireup\n" TAIL, honest));
        /* UCX would send messages instead */
        CHECK(!networks_keep_words(HEAD RC " am am_bw#0 wireup\n" TAIL, honest));
        CHECK(!networks_keep_words(HEAD SRD " am wireup\n" TAIL, honest));
        CHECK(!networks_keep_words(HEAD RC " am\n#   rma_bw#0 of no lane\n" TAIL, honest));
        CHECK(!networks_keep_words(HEAD TAIL, honest) && !networks_keep_words("", honest));
        CHECK(!networks_keep_words(NULL, honest));
        CHECK(networks_keep_words(HEAD SRD " rma_bw#0 am wireup\n" TAIL, honest) == honest);
    }
    return check_end();
}
