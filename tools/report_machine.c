/* SPDX-License-Identifier: Apache-2.0 */
/* Prints the machine and the limits of this process, for a report. Leaves out everything that
 * cannot be read. */
#include <dirent.h>
#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "info.h"
#include "net/ucx/nics.h"
#include "report.h"

/* Reads the first line of a file, without its line break. Returns false if there is none. */
static bool read_first_line(char *out, size_t size, const char *path)
{
    FILE *in = fopen(path, "re");
    const bool good = in && fgets(out, (int)size, in);
    if (in) fclose(in);
    if (good) out[strcspn(out, "\n")] = 0;
    return good;
}

/* Prints the first line of a file after a label. */
static void print_first_line(FILE *to, const char *label, const char *path)
{
    char line[256];
    if (!read_first_line(line, sizeof line, path)) return;
    fprintf(to, "%-14s", label);
    info_text(to, line);
    fprintf(to, "\n");
}

/* Prints the first line of a file that begins with `begin`. */
static void print_line_of(FILE *to, const char *label, const char *path, const char *begin)
{
    char line[512];
    FILE *in = fopen(path, "re");
    while (in && fgets(line, sizeof line, in)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, begin, strlen(begin)) != 0 || !colon) continue;
        line[strcspn(line, "\n")] = 0;
        fprintf(to, "%-14s", label);
        info_text(to, colon + 1 + strspn(colon + 1, " \t"));
        fprintf(to, "\n");
        break;
    }
    if (in) fclose(in);
}

/* -------------------------------------------------------------------------- versions ---- */

/* Returns the text that a function of a library reports, or NULL. `handle` may be the plugin
 * that uses the library. */
static const char *read_mpi_version(void *handle)
{
    static char text[8192]; /* larger than MPI_MAX_LIBRARY_VERSION_STRING of any MPI */
    int length = 0;
    int (*version)(char *, int *) = NULL;
    *(void **)&version = dlsym(handle, "MPI_Get_library_version");
    if (!version || version(text, &length) != 0) return NULL;
    text[strcspn(text, "\n")] = 0;
    return text;
}

static const char *read_ucx_version(void *handle)
{
    const char *(*version)(void) = NULL;
    *(void **)&version = dlsym(handle, "ucp_get_version_string");
    return version ? version() : NULL;
}

/* Prints the version of the library that a plugin uses. */
static void print_library(FILE *to, const char *label, const char *plugin,
                          const char *(*read)(void *handle))
{
    char path[INFO_PATH];
    void *handle = info_open_plugin(path, plugin);
    const char *text = handle ? read(handle) : NULL;
    fprintf(to, "%-14s", label);
    info_text(to, text ? text : "not found");
    fprintf(to, "\n");
    if (handle) dlclose(handle);
}

static void print_versions(FILE *to)
{
    struct utsname system;
    fprintf(to, "build         " EPIC_BUILD "\n");
    fprintf(to, "libc          glibc %s\n", gnu_get_libc_version());
    if (uname(&system) == 0)
        fprintf(to, "kernel        %s %s %s\n", system.sysname, system.release, system.machine);
    print_first_line(to, "NVIDIA driver", "/proc/driver/nvidia/version");
    print_library(to, "MPI", "libepic_mpi.so", read_mpi_version);
    print_library(to, "UCX", "libepic_ucx.so", read_ucx_version);
}

/* -------------------------------------------------------------------- CPUs and memory ---- */

static int count_usable_cores(void)
{
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 0;
}

static void print_host(FILE *to)
{
    char host[256] = "", path[96], label[32];
    gethostname(host, sizeof host - 1);
    fprintf(to, "host          ");
    info_text(to, host);
    fprintf(to, "\n");
    print_line_of(to, "processor", "/proc/cpuinfo", "model name");
    fprintf(to, "cores         %ld, of which this process may use %d\n",
            sysconf(_SC_NPROCESSORS_ONLN), count_usable_cores());
    print_first_line(to, "limit of CPU", "/sys/fs/cgroup/cpu.max");
    for (int node = 0; node < 64; node++) {
        snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", node);
        snprintf(label, sizeof label, "NUMA node %d", node);
        print_first_line(to, label, path);
    }
    print_line_of(to, "memory", "/proc/meminfo", "MemTotal");
    print_line_of(to, "available", "/proc/meminfo", "MemAvailable");
    print_first_line(to, "limit", "/sys/fs/cgroup/memory.max");
}

/* Returns a limit of this process. All ones mean unlimited. */
static unsigned long long read_limit(int resource)
{
    struct rlimit limit;
    if (getrlimit((__rlimit_resource_t)resource, &limit) != 0) return 0;
    return limit.rlim_cur == RLIM_INFINITY ? ~0ull : limit.rlim_cur;
}

static void print_limit(FILE *to, const char *label, int resource)
{
    const unsigned long long limit = read_limit(resource);
    if (limit == ~0ull)
        fprintf(to, "%-14sunlimited\n", label);
    else
        fprintf(to, "%-14s%llu\n", label, limit);
}

static unsigned long long count_free_shm(unsigned long long *size)
{
    struct statvfs shm;
    *size = 0;
    if (statvfs("/dev/shm", &shm) != 0) return 0;
    *size = (unsigned long long)shm.f_blocks * shm.f_frsize;
    return (unsigned long long)shm.f_bavail * shm.f_frsize;
}

static void print_limits(FILE *to)
{
    unsigned long long size;
    const unsigned long long free_bytes = count_free_shm(&size);
    print_limit(to, "locked memory", RLIMIT_MEMLOCK);
    print_limit(to, "open files", RLIMIT_NOFILE);
    print_limit(to, "processes", RLIMIT_NPROC);
    print_limit(to, "address space", RLIMIT_AS);
    print_limit(to, "stack", RLIMIT_STACK);
    fprintf(to, "/dev/shm      %llu MiB, of which %llu MiB are free\n", size >> 20,
            free_bytes >> 20);
}

/* --------------------------------------------------------------------- GPUs and links ---- */

/* Functions of the CUDA driver, which is loaded only if it is installed. */
typedef struct cuda_driver {
    int (*init)(unsigned flags);
    int (*version)(int *out);
    int (*count)(int *out);
    int (*name)(char *out, int size, int device);
    int (*address)(char *out, int size, int device);
    int (*link)(int *out, int attribute, int from, int to);
} cuda_driver;

enum { LINK_ACCESS = 2, LINK_ATOMICS = 3 }; /* CU_DEVICE_P2P_ATTRIBUTE_... of cuda.h */

static bool load_driver(cuda_driver *out, void *handle)
{
    const struct {
        const char *name;
        void *at;
    } list[] = {{"cuInit", &out->init},
                {"cuDriverGetVersion", &out->version},
                {"cuDeviceGetCount", &out->count},
                {"cuDeviceGetName", &out->name},
                {"cuDeviceGetPCIBusId", &out->address},
                {"cuDeviceGetP2PAttribute", &out->link}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        void *symbol = handle ? dlsym(handle, list[i].name) : NULL;
        if (!symbol) return false;
        memcpy(list[i].at, &symbol, sizeof symbol);
    }
    return true;
}

/* Prints how each GPU reaches each of the others. */
static void print_links(FILE *to, const cuda_driver *driver, int count)
{
    if (count < 2) return;
    fprintf(to,
            "links         from the GPU of the row to the GPU of the column; N: peer access "
            "with atomics,\n              as over NVLink; P: peer access; -: none\n");
    for (int from = 0; from < count; from++) {
        fprintf(to, "  GPU %-2d    ", from);
        for (int peer = 0; peer < count; peer++) {
            int access = 0, atomics = 0;
            if (peer != from) {
                driver->link(&access, LINK_ACCESS, from, peer);
                driver->link(&atomics, LINK_ATOMICS, from, peer);
            }
            fprintf(to, "  %c", peer == from ? '.' : !access ? '-' : atomics ? 'N' : 'P');
        }
        fprintf(to, "\n");
    }
}

static void print_gpus(FILE *to)
{
    cuda_driver driver;
    int version = 0, count = 0;
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!load_driver(&driver, handle)) {
        fprintf(to, "no CUDA driver\n");
        return;
    }
    driver.version(&version);
    fprintf(to, "CUDA driver   %d.%d\n", version / 1000, version % 1000 / 10);
    const int error = driver.init(0);
    if (error == 0) driver.count(&count);
    fprintf(to, "GPUs          %d (cuInit returned %d)\n", count, error);
    for (int i = 0; i < count; i++) {
        char name[256] = "", address[32] = "";
        driver.name(name, sizeof name, i);
        driver.address(address, sizeof address, i);
        fprintf(to, "  GPU %-2d      %s, %s\n", i, name, address);
    }
    print_links(to, &driver, count);
}

/* --------------------------------------------------------------------------- networks ---- */

/* Prints all ports of RDMA NICs, also those that no GPU uses. */
static void print_ports(FILE *to)
{
    static nics_host host;
    nics_read(&host, "/sys");
    for (int i = 0; i < host.num_ports; i++) {
        const nics_port *port = &host.ports[i];
        fprintf(to, "  port ");
        info_text(to, port->name);
        fprintf(to, ", %s, %d Gb/s, %s, ", port->is_active ? "active" : "not active",
                port->gigabits, port->device.address);
        info_text(to, port->link);
        fprintf(to, ", NUMA node %d\n", port->device.numa_node);
    }
    if (host.num_ports == 0) fprintf(to, "no RDMA NIC\n");
    fprintf(to, "nvidia-peermem %s\n",
            access("/sys/module/nvidia_peermem", F_OK) == 0 ? "is loaded" : "is not loaded");
}

/* Prints a file of a network interface as ", LABEL VALUE". */
static void print_interface_file(FILE *to, const char *name, const char *file,
                                 const char *label)
{
    char path[512], line[64];
    snprintf(path, sizeof path, "/sys/class/net/%.200s/%s", name, file);
    if (!read_first_line(line, sizeof line, path)) return;
    fprintf(to, ", %s ", label);
    info_text(to, line);
}

/* Prints the network interfaces, without their addresses. */
static void print_interfaces(FILE *to)
{
    DIR *folder = opendir("/sys/class/net");
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        if (*entry->d_name == '.') continue;
        fprintf(to, "  interface ");
        info_text(to, entry->d_name);
        print_interface_file(to, entry->d_name, "operstate", "state");
        print_interface_file(to, entry->d_name, "mtu", "MTU");
        print_interface_file(to, entry->d_name, "speed", "Mb/s");
        fprintf(to, "\n");
    }
    if (folder) closedir(folder);
}

/* ------------------------------------------------------------------------ all of them ---- */

void report_machine(FILE *to)
{
    char now[64];
    const time_t seconds = time(NULL);
    strftime(now, sizeof now, "%Y-%m-%d %H:%M:%S UTC", gmtime(&seconds));
    fprintf(to, "time          %s\n\n== EPIC, and the choice of NICs\n", now);
    info_machine(to, "/sys", false);
    fprintf(to, "\n== Versions\n");
    print_versions(to);
    fprintf(to, "\n== Host\n");
    print_host(to);
    fprintf(to, "\n== Limits\n");
    print_limits(to);
    fprintf(to, "\n== GPUs\n");
    print_gpus(to);
    fprintf(to, "\n== Networks\n");
    print_ports(to);
    print_interfaces(to);
}

void report_fill_rank(report_rank *out)
{
    char path[INFO_PATH];
    struct utsname system;
    unsigned long long size;
    *out = (report_rank){.version = epic_version(),
                         .cores = count_usable_cores(),
                         .memlock = read_limit(RLIMIT_MEMLOCK),
                         .shm = count_free_shm(&size)};
    gethostname(out->host, sizeof out->host - 1);
    if (uname(&system) == 0) snprintf(out->kernel, sizeof out->kernel, "%.63s", system.release);
    void *handle = info_open_plugin(path, "libepic_ucx.so");
    const char *ucx = handle ? read_ucx_version(handle) : NULL;
    snprintf(out->ucx, sizeof out->ucx, "%.63s", ucx ? ucx : "none");
}
