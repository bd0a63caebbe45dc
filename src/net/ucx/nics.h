/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the GPUs and NICs of this host in sysfs, and chooses one NIC for each GPU. All ranks of
 * a host make the same choice without communication, because it depends only on sysfs. Only
 * NICs under class/infiniband (InfiniBand, RoCE, EFA) are considered. */
#ifndef EPIC_NET_UCX_NICS_H
#define EPIC_NET_UCX_NICS_H

#include <stdbool.h>
#include <stdint.h>

#define NICS_MAX 64 /* maximum number of GPUs, and of ports of NICs, that are considered */
#define NICS_NAME_BYTES 64
#define NICS_ADDRESS_BYTES 16

/* How near a GPU and a NIC are to each other, from near to far. */
typedef enum nics_distance {
    /* their path does not leave one port of the CPU: only PCIe switches are between them */
    NICS_SAME_SWITCH,
    NICS_SAME_ROOT, /* they are below different ports of the same PCIe root complex */
    NICS_SAME_NODE, /* they are on the same NUMA node */
    NICS_FAR        /* different NUMA nodes, or unknown */
} nics_distance;

/* A PCI device, and its position in the PCI topology. */
typedef struct nics_device {
    char address[NICS_ADDRESS_BYTES]; /* PCI address, such as "0000:18:00.0" */
    char path[256];                   /* the device's folder below "devices" in sysfs */
    int numa_node;                    /* -1: unknown */
} nics_device;

typedef struct nics_port {
    nics_device device;
    char name[NICS_NAME_BYTES]; /* UCX's name of the port, such as "mlx5_0:1" */
    char link[32];              /* link layer: "InfiniBand", "Ethernet", or another text */
    bool is_active;
    int gigabits; /* speed of the link in Gb/s; 0: unknown */
} nics_port;

typedef struct nics_host {
    int num_gpus, num_ports;
    nics_device gpus[NICS_MAX]; /* ordered by PCI address */
    nics_port ports[NICS_MAX];  /* ordered by PCI address, then by name */
} nics_host;

/* Reads the GPUs of NVIDIA and the ports of the NICs of this host. `sysfs` is the folder of
 * sysfs: "/sys", except in tests. Entries that cannot be read are left out. */
void nics_read(nics_host *out, const char *sysfs);

nics_distance nics_find_distance(const nics_device *gpu, const nics_device *port);

/* Returns the name of a distance, such as "same PCIe switch". */
const char *nics_distance_name(nics_distance distance);

/* Returns the index of the port that the GPU should use, or -1 if no port is usable.
 *
 * Only active ports are considered. If an active port is InfiniBand, only InfiniBand ports are
 * considered, so that all GPUs of a cluster use the same kind of network. Ports with less than
 * a quarter of the speed of the fastest port are left out. Of the remaining ports, the GPU uses
 * the nearest, and of several nearest ports the fastest. If several ports are equally near and
 * fast, the GPUs for which these ports are best use them round-robin. */
int nics_choose(const nics_host *host, int gpu);

/* Returns the index of the GPU with this PCI address, or -1. Ignores case. */
int nics_find_gpu(const nics_host *host, const char *address);

#endif
