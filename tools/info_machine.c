/* SPDX-License-Identifier: Apache-2.0 */
/* Prints what this build and this machine can do: kernels, backends, plugins and the
 * environment. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/backend.h"
#include "epic/epic.h"
#include "info.h"
#include "kernels/kernels.h"
#include "net/net.h"
#include "net/ucx/nics.h"

static void print_kernels(FILE *to)
{
    const host_kernels *all[4];
    const int num_kernels = host_kernels_all(all);
    fprintf(to, "host kernels  ");
    for (int i = 0; i < num_kernels; i++)
        fprintf(to, "%s%s%s", i ? ", " : "", all[i]->name,
                all[i] == host_kernels_get() ? " (chosen)" : "");
    fprintf(to, "\n");
}

static void print_backends(FILE *to)
{
    fprintf(to, "backends      ");
    for (int i = 0; epic_backends[i]; i++)
        fprintf(to, "%s%s", i ? ", " : "", epic_backends[i]->name);
    fprintf(to, "\n");
}

/* Writes the folder of this program to `out`, with a slash at the end, or "" if it is
 * unknown. */
static void find_own_folder(char *out, size_t size)
{
    const ssize_t length = readlink("/proc/self/exe", out, size - 1);
    out[length < 0 ? 0 : length] = 0;
    char *slash = strrchr(out, '/');
    if (slash) slash[1] = 0;
}

static void describe_backend(FILE *to, const void *symbol)
{
    const epic_backend *backend = symbol;
    char text[1024];
    if (!backend || !backend->describe) return;
    backend->describe(text, sizeof text);
    fprintf(to, "              %s\n", text);
}

/* If a net cannot be used on this machine, prints the reason. */
static void describe_net(FILE *to, const void *symbol)
{
    const net_engine *engine = symbol;
    char why[NET_WHY_BYTES];
    if (engine && !engine->is_available(why)) fprintf(to, "              %s\n", why);
}

void *info_open_plugin(char path[INFO_PATH], const char *library)
{
    static const char *const folders[] = {"../lib/", "../" EPIC_LIBDIR "/", ""};
    char own[4096];
    find_own_folder(own, sizeof own);
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        snprintf(path, INFO_PATH, "%s%s%s", *folders[i] ? own : "", folders[i], library);
        if (*folders[i] && access(path, F_OK) != 0) continue;
        void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (handle || *folders[i]) return handle;
    }
    *path = 0;
    return NULL;
}

/* Prints whether a library loads. `describe` may be NULL. Returns whether it is there. */
static bool print_plugin(FILE *to, const char *label, const char *library, const char *symbol,
                         void (*describe)(FILE *to, const void *symbol))
{
    char path[INFO_PATH];
    void *handle = info_open_plugin(path, library);
    if (handle) {
        fprintf(to, "%s %s loads\n", label, path);
        if (describe) describe(to, dlsym(handle, symbol));
        dlclose(handle);
    } else if (*path) {
        const char *why = dlerror();
        fprintf(to, "%s %s does not load: %s\n", label, path, why);
    } else {
        fprintf(to, "%s not built: no %s\n", label, library);
    }
    return *path;
}

/* Prints the libraries of the backends for GPUs. Some groups need another library than most
 * groups (src/api/plugins.c). */
static void print_gpu_backends(FILE *to)
{
    static const char regroup[] = "              groups with EPIC_CAN_REGROUP (can_shrink):",
                      many[] = "              groups of more than 32 GPUs:",
                      symbol_p2p[] = "epic_backend_p2p", symbol_hosts[] = "epic_backend_hosts";
    if (print_plugin(to, "backend p2p  ", "libepic_cuda.so", symbol_p2p, describe_backend)) {
        print_plugin(to, regroup, "libepic_cuda_regroup.so", symbol_p2p, NULL);
        print_plugin(to, many, "libepic_cuda_many.so", symbol_p2p, NULL);
    }
    if (print_plugin(to, "backend hosts", "libepic_hosts.so", symbol_hosts, describe_backend))
        print_plugin(to, many, "libepic_hosts_many.so", symbol_hosts, NULL);
}

/* Prints the environment variables that the backends "p2p" and "hosts" read, with their values
 * in this process. */
static void print_variables(FILE *to)
{
    static const char *const variables[][2] = {
        {"EPIC_HOST",
         "name of this host, %r stands for the rank; default: boot ID and PID namespace"},
        {"EPIC_HEAP",
         "ipc, descriptor, fabric: how processes map the heaps of p2p and hosts; default: "
         "ipc, or fabric in an NVLink domain of several hosts"},
        {"EPIC_EARLY_START",
         "0: a kernel starts only when the previous kernel has ended; default: earlier"},
        {"EPIC_NET", "net of backend hosts; default: ucx"},
        {"EPIC_NET_RDMA", "0: messages, 1: remote writes; default: by network"},
        {"EPIC_NET_MEMORY",
         "gpu, host: memory that the network reads; default: what all ranks support"},
        {"EPIC_NET_WINDOW", "largest number of tokens in flight; default: 8192"},
        {"EPIC_NET_THREADS",
         "additional threads of a rank's net, for networks that CPUs serve; "
         "default: by cores"},
        {"EPIC_NET_RELAY", "0: rows are sent to each rank; default: once to each host"},
    };
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        const char *text = getenv(variables[i][0]);
        fprintf(to, "              %s ", variables[i][0]);
        if (text) info_text(to, text);
        fprintf(to, "%s (%s)\n", text && *text ? "" : "is not set", variables[i][1]);
    }
    fprintf(to, "              what a group uses: epic-info --group NAME\n");
}

/* Prints for each GPU the NIC that the net ucx chooses for it. */
static void print_nics(FILE *to, const char *sysfs)
{
    static nics_host host;
    nics_read(&host, sysfs);
    fprintf(to, "NICs          ");
    if (getenv("UCX_NET_DEVICES")) {
        fprintf(to, "UCX_NET_DEVICES=");
        info_text(to, getenv("UCX_NET_DEVICES"));
        fprintf(to, " replaces EPIC's choice%s\n", host.num_gpus ? ":" : "");
    } else {
        fprintf(to,
                host.num_gpus ? "chosen for each GPU, by topology:\n" : "no GPU of NVIDIA\n");
    }
    for (int g = 0; g < host.num_gpus; g++) {
        const int chosen = nics_choose(&host, g);
        fprintf(to, "              GPU %s: ", host.gpus[g].address);
        if (chosen < 0) {
            fprintf(to, "no active RDMA NIC\n");
            continue;
        }
        const nics_port *port = &host.ports[chosen];
        info_text(to, port->name);
        fprintf(to, ", %d Gb/s, ", port->gigabits);
        info_text(to, port->link);
        fprintf(to, ", %s\n",
                nics_distance_name(nics_find_distance(&host.gpus[g], &port->device)));
    }
}

void info_machine(FILE *to, const char *sysfs, bool with_variables)
{
    const uint32_t version = epic_version();
    fprintf(to, "epic          %u.%u.%u\n", version / 10000, version / 100 % 100,
            version % 100);
    print_kernels(to);
    print_backends(to);
    print_plugin(to, "backend mpi  ", "libepic_mpi.so", "epic_backend_mpi", describe_backend);
    print_gpu_backends(to);
    print_plugin(to, "net ucx      ", "libepic_ucx.so", "epic_net_ucx", describe_net);
    if (with_variables) print_variables(to);
    print_nics(to, sysfs);
    fprintf(to, "matrices      %s\n", epic_blas_name());
    fprintf(to, "cores         %ld\n", sysconf(_SC_NPROCESSORS_ONLN));
    fprintf(to, "page size     %ld bytes\n", sysconf(_SC_PAGESIZE));
}
