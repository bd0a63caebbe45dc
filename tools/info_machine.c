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

static void print_kernels(void)
{
    const host_kernels *all[4];
    const int num_kernels = host_kernels_all(all);
    printf("host kernels  ");
    for (int i = 0; i < num_kernels; i++)
        printf("%s%s%s", i ? ", " : "", all[i]->name,
               all[i] == host_kernels_get() ? " (chosen)" : "");
    printf("\n");
}

static void print_backends(void)
{
    printf("backends      ");
    for (int i = 0; epic_backends[i]; i++)
        printf("%s%s", i ? ", " : "", epic_backends[i]->name);
    printf("\n");
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

static void describe_backend(const void *symbol)
{
    const epic_backend *backend = symbol;
    char text[1024];
    if (!backend || !backend->describe) return;
    backend->describe(text, sizeof text);
    printf("              %s\n", text);
}

/* If a net cannot be used on this machine, prints the reason. */
static void describe_net(const void *symbol)
{
    const net_engine *engine = symbol;
    char why[NET_WHY_BYTES];
    if (engine && !engine->is_available(why)) printf("              %s\n", why);
}

/* Loads a plugin, and prints what it reports about this machine. Searches the folder of
 * libepic.so (in a build or an installation) first. If the plugin is not there, searches where
 * the system's loader searches. */
static void print_plugin(const char *label, const char *library, const char *symbol,
                         void (*describe)(const void *symbol))
{
    static const char *const folders[] = {"../lib/", "../" EPIC_LIBDIR "/", ""};
    char own[4096], path[4352];
    find_own_folder(own, sizeof own);
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        snprintf(path, sizeof path, "%s%s%s", *folders[i] ? own : "", folders[i], library);
        if (*folders[i] && access(path, F_OK) != 0) continue;
        void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (handle) {
            printf("%s %s loads\n", label, path);
            describe(dlsym(handle, symbol));
            dlclose(handle);
            return;
        }
        const char *why = dlerror();
        if (*folders[i]) {
            printf("%s %s does not load: %s\n", label, path, why);
            return;
        }
    }
    printf("%s not built: no %s\n", label, library);
}

/* Prints the environment variables that the backend "hosts" reads, with their values in this
 * process. */
static void print_variables(void)
{
    static const char *const variables[][2] = {
        {"EPIC_HOST",
         "name of this host, %r stands for the rank; default: boot ID and PID namespace"},
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
        printf("              %s ", variables[i][0]);
        if (text) info_text(stdout, text);
        printf("%s (%s)\n", text && *text ? "" : "is not set", variables[i][1]);
    }
    printf("              what a group uses: epic-info --group NAME\n");
}

/* Prints for each GPU the NIC that the net ucx chooses for it. */
static void print_nics(const char *sysfs)
{
    static nics_host host;
    nics_read(&host, sysfs);
    printf("NICs          ");
    if (getenv("UCX_NET_DEVICES")) {
        printf("UCX_NET_DEVICES=");
        info_text(stdout, getenv("UCX_NET_DEVICES"));
        printf(" replaces EPIC's choice%s\n", host.num_gpus ? ":" : "");
    } else {
        printf(host.num_gpus ? "chosen for each GPU, by topology:\n" : "no GPU of NVIDIA\n");
    }
    for (int g = 0; g < host.num_gpus; g++) {
        const int chosen = nics_choose(&host, g);
        printf("              GPU %s: ", host.gpus[g].address);
        if (chosen < 0) {
            printf("no active RDMA NIC\n");
            continue;
        }
        const nics_port *port = &host.ports[chosen];
        info_text(stdout, port->name);
        printf(", %d Gb/s, ", port->gigabits);
        info_text(stdout, port->link);
        printf(", %s\n", nics_distance_name(nics_find_distance(&host.gpus[g], &port->device)));
    }
}

int info_machine(const char *sysfs)
{
    const uint32_t version = epic_version();
    printf("epic          %u.%u.%u\n", version / 10000, version / 100 % 100, version % 100);
    print_kernels();
    print_backends();
    print_plugin("backend mpi  ", "libepic_mpi.so", "epic_backend_mpi", describe_backend);
    print_plugin("backend p2p  ", "libepic_cuda.so", "epic_backend_p2p", describe_backend);
    print_plugin("backend hosts", "libepic_hosts.so", "epic_backend_hosts", describe_backend);
    print_plugin("net ucx     ", "libepic_ucx.so", "epic_net_ucx", describe_net);
    print_variables();
    print_nics(sysfs);
    printf("matrices      %s\n", epic_blas_name());
    printf("cores         %ld\n", sysconf(_SC_NPROCESSORS_ONLN));
    printf("page size     %ld bytes\n", sysconf(_SC_PAGESIZE));
    return 0;
}
