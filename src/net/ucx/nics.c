/* SPDX-License-Identifier: Apache-2.0 */
/* Reads GPUs and NICs from sysfs, and chooses a NIC for each GPU (nics.h). */
#include "net/ucx/nics.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define VENDOR_NVIDIA 0x10de
#define CLASS_VGA 0x0300 /* class codes of PCI devices: display controllers */
#define CLASS_3D 0x0302

/* Reads the first line of a file of sysfs into `out`, or "" if the file cannot be read, for
 * example because `path` is truncated. */
static void read_line(char *out, size_t size, const char *path)
{
    FILE *file = fopen(path, "re");
    *out = 0;
    if (!file) return;
    if (!fgets(out, (int)size, file)) *out = 0;
    out[strcspn(out, "\n")] = 0;
    fclose(file);
}

/* Reads the integer (in C notation) in a file of a folder. Returns `otherwise` if the file
 * contains no integer or cannot be read. */
static long read_number(const char *folder, const char *file, long otherwise)
{
    char path[PATH_MAX + 64], text[64], *end;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    read_line(text, sizeof text, path);
    const long value = strtol(text, &end, 0);
    return end == text ? otherwise : value;
}

/* Fills in *out for the PCI device whose folder in sysfs is `folder`, which may be a link.
 * Returns false if there is no such device. */
static bool read_device(nics_device *out, const char *folder)
{
    char real[PATH_MAX];
    if (!realpath(folder, real)) return false;
    const char *name = strrchr(real, '/') + 1;
    const char *below = strstr(real, "/devices/");
    below = below ? below + strlen("/devices/") : real;
    if (strlen(name) >= sizeof out->address || strlen(below) >= sizeof out->path) return false;
    strcpy(out->address, name);
    strcpy(out->path, below);
    out->numa_node = (int)read_number(real, "numa_node", -1);
    return true;
}

static int compare_addresses(const void *a, const void *b)
{
    return strcmp(((const nics_device *)a)->address, ((const nics_device *)b)->address);
}

static int compare_ports(const void *a, const void *b)
{
    const nics_port *p = a, *q = b;
    const int order = strcmp(p->device.address, q->device.address);
    return order ? order : strcmp(p->name, q->name);
}

/* Adds the PCI device in a folder of sysfs if it is a GPU of NVIDIA. */
static void add_gpu(nics_host *out, const char *folder)
{
    const long kind = read_number(folder, "class", 0) >> 8;
    if (read_number(folder, "vendor", 0) != VENDOR_NVIDIA) return;
    if (kind != CLASS_VGA && kind != CLASS_3D) return;
    out->num_gpus += read_device(&out->gpus[out->num_gpus], folder);
}

static void add_port(nics_host *out, const char *sysfs, const char *nic, const char *number)
{
    nics_port *port = &out->ports[out->num_ports];
    char folder[PATH_MAX], path[PATH_MAX + 16], text[64];
    snprintf(folder, sizeof folder, "%s/class/infiniband/%s/device", sysfs, nic);
    if (strlen(nic) + strlen(number) + 2 > sizeof port->name) return;
    if (!read_device(&port->device, folder)) return;
    snprintf(port->name, sizeof port->name, "%s:%s", nic, number);
    snprintf(folder, sizeof folder, "%s/class/infiniband/%s/ports/%s", sysfs, nic, number);
    snprintf(path, sizeof path, "%s/link_layer", folder);
    read_line(port->link, sizeof port->link, path);
    snprintf(path, sizeof path, "%s/state", folder);
    read_line(text, sizeof text, path); /* for example "4: ACTIVE" */
    port->is_active = strstr(text, "ACTIVE") != NULL;
    port->gigabits = (int)read_number(folder, "rate", 0); /* "400 Gb/sec (4X NDR)" */
    out->num_ports++;
}

static DIR *open_folder(const char *sysfs, const char *below, const char *name, const char *end)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s%s%s", sysfs, below, name, end);
    return opendir(path);
}

static void add_ports_of_nic(nics_host *out, const char *sysfs, const char *nic)
{
    DIR *ports = open_folder(sysfs, "class/infiniband/", nic, "/ports");
    if (!ports) return;
    for (struct dirent *e; (e = readdir(ports)) && out->num_ports < NICS_MAX;)
        if (*e->d_name != '.') add_port(out, sysfs, nic, e->d_name);
    closedir(ports);
}

void nics_read(nics_host *out, const char *sysfs)
{
    char folder[PATH_MAX];
    memset(out, 0, sizeof *out);
    DIR *devices = open_folder(sysfs, "bus/pci/devices", "", "");
    for (struct dirent *e; devices && (e = readdir(devices)) && out->num_gpus < NICS_MAX;) {
        if (*e->d_name == '.') continue;
        snprintf(folder, sizeof folder, "%s/bus/pci/devices/%s", sysfs, e->d_name);
        add_gpu(out, folder);
    }
    if (devices) closedir(devices);
    DIR *nics = open_folder(sysfs, "class/infiniband", "", "");
    for (struct dirent *e; nics && (e = readdir(nics));)
        if (*e->d_name != '.') add_ports_of_nic(out, sysfs, e->d_name);
    if (nics) closedir(nics);
    qsort(out->gpus, (size_t)out->num_gpus, sizeof *out->gpus, compare_addresses);
    qsort(out->ports, (size_t)out->num_ports, sizeof *out->ports, compare_ports);
}

/* Returns the number of leading folders that two paths have in common. The first folder is that
 * of the PCIe root complex, such as "pci0000:15". */
static int count_common_folders(const char *a, const char *b)
{
    int common = 0;
    size_t at = 0;
    bool is_pci = false;
    for (;;) {
        const size_t length = strcspn(a + at, "/");
        if (length != strcspn(b + at, "/") || strncmp(a + at, b + at, length)) return common;
        is_pci |= !strncmp(a + at, "pci", 3);
        common += is_pci;
        if (!a[at + length]) return common;
        at += length + 1;
    }
}

nics_distance nics_find_distance(const nics_device *gpu, const nics_device *port)
{
    const int common = count_common_folders(gpu->path, port->path);
    if (common > 1) return NICS_SAME_SWITCH;
    if (common == 1) return NICS_SAME_ROOT;
    return gpu->numa_node >= 0 && gpu->numa_node == port->numa_node ? NICS_SAME_NODE : NICS_FAR;
}

const char *nics_distance_name(nics_distance distance)
{
    static const char *const names[] = {"same PCIe switch", "same PCIe root complex",
                                        "same NUMA node", "other NUMA node"};
    return names[distance];
}

/* Returns a bit mask of the ports that a GPU may use (nics_choose()). */
static uint64_t find_usable_ports(const nics_host *host)
{
    bool any_infiniband = false;
    int fastest = 0;
    uint64_t usable = 0;
    for (int p = 0; p < host->num_ports; p++)
        any_infiniband |=
            host->ports[p].is_active && !strcmp(host->ports[p].link, "InfiniBand");
    for (int p = 0; p < host->num_ports; p++) {
        const nics_port *port = &host->ports[p];
        if (!port->is_active || (any_infiniband && strcmp(port->link, "InfiniBand"))) continue;
        usable |= 1ull << p;
        if (port->gigabits > fastest) fastest = port->gigabits;
    }
    for (int p = 0; p < host->num_ports; p++)
        if (host->ports[p].gigabits * 4ll < fastest) usable &= ~(1ull << p);
    return usable;
}

/* Returns a bit mask of the best ports for the GPU: the fastest of the nearest ones. */
static uint64_t find_best_ports(const nics_host *host, uint64_t usable, const nics_device *gpu)
{
    uint64_t best = 0;
    nics_distance nearest = NICS_FAR;
    int fastest = 0;
    for (int p = 0; p < host->num_ports; p++) {
        const nics_port *port = &host->ports[p];
        if (!(usable >> p & 1)) continue;
        const nics_distance distance = nics_find_distance(gpu, &port->device);
        if (!best || distance < nearest || (distance == nearest && port->gigabits > fastest)) {
            best = 0;
            nearest = distance;
            fastest = port->gigabits;
        } else if (distance > nearest || port->gigabits < fastest) {
            continue;
        }
        best |= 1ull << p;
    }
    return best;
}

int nics_choose(const nics_host *host, int gpu)
{
    const uint64_t usable = find_usable_ports(host);
    uint64_t best = find_best_ports(host, usable, &host->gpus[gpu]);
    if (!best) return -1;
    int turn = 0;
    for (int other = 0; other < gpu; other++)
        turn += find_best_ports(host, usable, &host->gpus[other]) == best;
    for (turn %= __builtin_popcountll(best); turn > 0; turn--) best &= best - 1;
    return __builtin_ctzll(best);
}

int nics_find_gpu(const nics_host *host, const char *address)
{
    for (int i = 0; i < host->num_gpus; i++)
        if (!strcasecmp(host->gpus[i].address, address)) return i;
    return -1;
}
