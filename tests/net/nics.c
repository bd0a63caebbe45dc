/* SPDX-License-Identifier: Apache-2.0 */
/* Tests which NIC is chosen for each GPU, on machines whose sysfs the test makes up. */
#include "net/ucx/nics.h"

#include <stdio.h>
#include <string.h>

#include "check.h"
#include "sysfs.h"

#define ACTIVE "4: ACTIVE"
#define NDR "400 Gb/sec (4X NDR)"

static char root[256];
static nics_host host;

/* Checks that the GPUs of the machine use these ports, separated by spaces; "-": none. Removes
 * the machine. */
static void expect_ports(const char *what, const char *ports)
{
    char chosen[512] = "";
    size_t used = 0;
    nics_read(&host, root);
    for (int g = 0; g < host.num_gpus; g++) {
        const int port = nics_choose(&host, g);
        used += (size_t)snprintf(chosen + used, sizeof chosen - used, "%s%s", g ? " " : "",
                                 port < 0 ? "-" : host.ports[port].name);
    }
    CHECK_SAY(!strcmp(chosen, ports), "%s: %s, expected: %s", what, chosen, ports);
    sysfs_end(root);
}

static void begin_machine(void)
{
    sysfs_begin(root, sizeof root);
}

/* Adds a GPU below bridge `bridge` of the root complex `complex`. */
static void add_gpu(int complex, int bridge, int at, int numa_node)
{
    char path[128];
    snprintf(path, sizeof path, "pci0000:%02x/0000:%02x:%02x.0/0000:%02x:00.0", complex,
             complex, bridge, at);
    sysfs_add_gpu(root, path, numa_node);
}

static void add_nic(int complex, int bridge, int at, int numa_node, const char *name,
                    const char *state, const char *link, const char *rate)
{
    char path[128];
    snprintf(path, sizeof path, "pci0000:%02x/0000:%02x:%02x.0/0000:%02x:00.0", complex,
             complex, bridge, at);
    sysfs_add_port(root, path, numa_node, name, 1, state, link, rate);
}

/* Eight GPUs, each below a switch with a NIC of its own. The NICs are named in another order.
 * Two more NICs are for storage. */
static void test_pairs(void)
{
    static const int names[] = {3, 2, 1, 0, 7, 6, 5, 4};
    char name[16];
    begin_machine();
    for (int i = 0; i < 8; i++) {
        snprintf(name, sizeof name, "mlx5_%d", names[i]);
        add_gpu(0x10 + 0x10 * i, 1, 0x18 + 0x10 * i, i / 4);
        add_nic(0x10 + 0x10 * i, 1, 0x11 + 0x10 * i, i / 4, name, ACTIVE, "InfiniBand", NDR);
    }
    add_nic(0xa0, 1, 0xa1, 0, "mlx5_8", ACTIVE, "Ethernet", NDR);
    add_nic(0xa0, 2, 0xa2, 1, "mlx5_9", ACTIVE, "InfiniBand", NDR);
    expect_ports("pairs", "mlx5_3:1 mlx5_2:1 mlx5_1:1 mlx5_0:1 mlx5_7:1 mlx5_6:1 mlx5_5:1 "
                          "mlx5_4:1");
}

/* Two GPUs per switch share one NIC, and two GPUs below one switch with two NICs take one each.
 * Capital letters of an address do not matter. */
static void test_sharing(void)
{
    begin_machine();
    for (int i = 0; i < 4; i++) add_gpu(0x10 * (i / 2 + 1), 1, 0x1a + i, 0);
    add_nic(0x10, 1, 0x15, 0, "mlx5_0", ACTIVE, "Ethernet", NDR);
    add_nic(0x20, 1, 0x25, 0, "mlx5_1", ACTIVE, "Ethernet", NDR);
    add_nic(0x20, 1, 0x26, 0, "mlx5_2", ACTIVE, "Ethernet", NDR);
    nics_read(&host, root);
    CHECK_EQ(nics_find_gpu(&host, "0000:1A:00.0"), 0);
    CHECK_EQ(nics_find_gpu(&host, "0000:1d:00.0"), 3);
    CHECK_EQ(nics_find_gpu(&host, "0000:15:00.0"), -1);
    CHECK_EQ(host.ports[0].gigabits, 400);
    expect_ports("sharing", "mlx5_0:1 mlx5_0:1 mlx5_1:1 mlx5_2:1");
}

/* Without a common switch the root complex decides, then the NUMA node, then nothing. */
static void test_distances(void)
{
    begin_machine();
    add_gpu(0x10, 1, 0x18, 0);
    add_gpu(0x30, 1, 0x38, 1);
    add_gpu(0x50, 1, 0x58, 2);
    add_nic(0x10, 2, 0x11, 0, "mlx5_0", ACTIVE, "InfiniBand", NDR);
    add_nic(0x20, 1, 0x21, 0, "mlx5_1", ACTIVE, "InfiniBand", NDR);
    add_nic(0x40, 1, 0x41, 1, "mlx5_2", ACTIVE, "InfiniBand", NDR);
    nics_read(&host, root);
    CHECK_EQ(nics_find_distance(&host.gpus[0], &host.ports[0].device), NICS_SAME_ROOT);
    CHECK_EQ(nics_find_distance(&host.gpus[0], &host.ports[1].device), NICS_SAME_NODE);
    CHECK_EQ(nics_find_distance(&host.gpus[0], &host.ports[2].device), NICS_FAR);
    CHECK(!strcmp(nics_distance_name(NICS_FAR), "other NUMA node"));
    expect_ports("distances", "mlx5_0:1 mlx5_2:1 mlx5_0:1");
}

/* NICs that are down, slow or of another network are not used, even if they are nearer. */
static void test_unusable(void)
{
    begin_machine();
    add_gpu(0x10, 1, 0x18, 0);
    add_nic(0x10, 1, 0x11, 0, "mlx5_0", "1: DOWN", "InfiniBand", NDR);
    add_nic(0x10, 1, 0x12, 0, "mlx5_1", ACTIVE, "InfiniBand", "10 Gb/sec (4X)");
    add_nic(0x10, 1, 0x13, 0, "mlx5_2", ACTIVE, "Ethernet", NDR);
    add_nic(0x20, 1, 0x21, 1, "mlx5_3", ACTIVE, "InfiniBand", "200 Gb/sec (4X HDR)");
    add_nic(0x20, 1, 0x22, 1, "mlx5_4", ACTIVE, "InfiniBand", NDR);
    expect_ports("unusable", "mlx5_4:1");
}

/* Without NICs there is no choice. Devices of other vendors and other devices of NVIDIA are not
 * GPUs. */
static void test_nothing(void)
{
    begin_machine();
    nics_read(&host, root);
    CHECK(host.num_gpus == 0 && host.num_ports == 0);
    add_gpu(0x10, 1, 0x18, -1);
    sysfs_add_device(root, "pci0000:10/0000:10:02.0/0000:19:00.0", "0x10de", "0x068000", 0);
    sysfs_add_device(root, "pci0000:10/0000:10:03.0/0000:1a:00.0", "0x1002", "0x030000", 0);
    expect_ports("no NIC", "-");
}

int main(void)
{
    check_begin();
    test_pairs();
    test_sharing();
    test_distances();
    test_unusable();
    test_nothing();
    return check_end();
}
