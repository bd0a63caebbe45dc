/* SPDX-License-Identifier: Apache-2.0 */
/* Writes folders, files and links in the form of sysfs (sysfs.h). */
#include "sysfs.h"

#include <errno.h>
#include <ftw.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Ends the test if a tree cannot be written. Some tests count no checks, so this file does not
 * use check.h. */
static void need_success(bool success, const char *path)
{
    if (success) return;
    fprintf(stderr, "%s: %s\n", path, strerror(errno));
    exit(1);
}

/* Formats the path of a file below `root`, and makes the folders above the file. */
static void make_path(char path[PATH_MAX], const char *root, const char *format, va_list list)
{
    const int length = snprintf(path, PATH_MAX, "%s/", root);
    vsnprintf(path + length, (size_t)(PATH_MAX - length), format, list);
    for (char *slash = path + length; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        need_success(mkdir(path, 0755) == 0 || errno == EEXIST, path);
        *slash = '/';
    }
}

static void write_file(const char *root, const char *text, const char *format, ...)
{
    char path[PATH_MAX];
    va_list list;
    va_start(list, format);
    make_path(path, root, format, list);
    va_end(list);
    FILE *file = fopen(path, "w");
    need_success(file != NULL, path);
    fprintf(file, "%s\n", text);
    fclose(file);
}

/* Makes a link to the folder devices/`to`, unless it exists already. */
static void make_link(const char *root, const char *to, const char *format, ...)
{
    char path[PATH_MAX], target[PATH_MAX];
    va_list list;
    va_start(list, format);
    make_path(path, root, format, list);
    va_end(list);
    snprintf(target, sizeof target, "%s/devices/%s", root, to);
    need_success(symlink(target, path) == 0 || errno == EEXIST, path);
}

void sysfs_begin(char *root, size_t size)
{
    char here[] = "/tmp/epic-sysfs.XXXXXX", real[PATH_MAX];
    need_success(mkdtemp(here) && realpath(here, real), here);
    snprintf(root, size, "%s", real);
}

void sysfs_add_device(const char *root, const char *path, const char *vendor, const char *kind,
                      int numa_node)
{
    char text[16];
    snprintf(text, sizeof text, "%d", numa_node);
    write_file(root, vendor, "devices/%s/vendor", path);
    write_file(root, kind, "devices/%s/class", path);
    write_file(root, text, "devices/%s/numa_node", path);
    make_link(root, path, "bus/pci/devices/%s", strrchr(path, '/') + 1);
}

void sysfs_add_gpu(const char *root, const char *path, int numa_node)
{
    sysfs_add_device(root, path, "0x10de", "0x030200", numa_node);
}

void sysfs_add_port(const char *root, const char *path, int numa_node, const char *name,
                    int port, const char *state, const char *link, const char *rate)
{
    sysfs_add_device(root, path, "0x15b3", "0x020700", numa_node);
    make_link(root, path, "class/infiniband/%s/device", name);
    write_file(root, state, "class/infiniband/%s/ports/%d/state", name, port);
    write_file(root, link, "class/infiniband/%s/ports/%d/link_layer", name, port);
    write_file(root, rate, "class/infiniband/%s/ports/%d/rate", name, port);
}

static int remove_entry(const char *path, const struct stat *about, int kind, struct FTW *where)
{
    (void)about, (void)kind, (void)where;
    return remove(path);
}

void sysfs_end(const char *root)
{
    need_success(nftw(root, remove_entry, 16, FTW_DEPTH | FTW_PHYS) == 0, root);
}
