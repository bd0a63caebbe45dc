/* SPDX-License-Identifier: Apache-2.0 */
/* A copy of the parts of sysfs from which EPIC reads GPUs and NICs, for machines that tests
 * make up. */
#ifndef SYSFS_H
#define SYSFS_H

#include <stddef.h>

/* Creates an empty tree in a new temporary folder, and writes its path to `root`. */
void sysfs_begin(char *root, size_t size);

/* Adds a GPU of NVIDIA. `path` is its folder below "devices", for example
 * "pci0000:15/0000:15:01.0/0000:18:00.0". */
void sysfs_add_gpu(const char *root, const char *path, int numa_node);

/* Adds a PCI device of another kind. */
void sysfs_add_device(const char *root, const char *path, const char *vendor, const char *kind,
                      int numa_node);

/* Adds port `port` of the NIC `name` in the PCI device with this path. `state`, `link` and
 * `rate` are the contents of the port's files. */
void sysfs_add_port(const char *root, const char *path, int numa_node, const char *name,
                    int port, const char *state, const char *link, const char *rate);

/* Removes the tree. */
void sysfs_end(const char *root);

#endif
