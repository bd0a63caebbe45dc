/* SPDX-License-Identifier: Apache-2.0 */
/* Finds backends by name. The backends mpi, p2p and hosts are plugins (libraries of their own),
 * which are loaded when a context first uses them. p2p and hosts each have one more plugin, for
 * groups of many ranks (rules/device_layout.h). p2p also has a plugin for groups that can
 * continue without a rank. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "api/config.h"
#include "backend/transport.h"
#include "base/error.h"
#include "base/library.h"
#include "rules/device_layout.h"

typedef struct plugin {
    int max_ranks;    /* maximum number of ranks of its groups */
    uint32_t flags;   /* epic_config.flags that its groups can have */
    const char *name; /* name of the backend, as in config.backend */
    const char *library;
    const char *symbol;
    /* Second half of the error text. when_absent is used if the library does not exist,
     * when_broken if it exists but cannot be loaded. */
    const char *when_absent, *when_broken;
} plugin;

#define NUM_PLUGINS 6
/* A backend may have several plugins. A group uses the first plugin of its backend that supports
 * the flags of the group and whose max_ranks is large enough. If no max_ranks is large enough,
 * the group uses the last plugin that supports the flags. This plugin returns an error. */
static const plugin plugins[NUM_PLUGINS] = {
    {EPIC_MAX_RANKS, 0, "mpi", "libepic_mpi.so", "epic_backend_mpi",
     "it is not next to libepic.so; a build has it where it finds an MPI (Debian, Ubuntu: "
     "libopenmpi-dev, openmpi-bin): build again",
     "install the MPI that it was built for (Debian, Ubuntu: openmpi-bin, or mpich)"},
    {DEVICE_FEW_RANKS, 0, "p2p", "libepic_cuda.so", "epic_backend_p2p",
     "it is not next to libepic.so; a build has it where it finds nvcc (CUDA's toolkit): build "
     "again",
     "install the CUDA runtime that it was built for"},
    {DEVICE_FEW_RANKS, 0, "hosts", "libepic_hosts.so", "epic_backend_hosts",
     "GPUs of several hosts need it: install CUDA's toolkit (nvcc) and UCX (Debian, Ubuntu: "
     "libucx-dev) and build libepic again",
     "install the CUDA runtime that it was built for"},
    {DEVICE_FEW_RANKS, EPIC_CAN_REGROUP, "p2p", "libepic_cuda_regroup.so", "epic_backend_p2p",
     "groups with EPIC_CAN_REGROUP need it: build libepic again with "
     "EPIC_GPU_REGROUP=ON",
     "install the CUDA runtime that it was built for"},
    {DEVICE_MOST_RANKS, 0, "p2p", "libepic_cuda_many.so", "epic_backend_p2p",
     "groups of more than 32 GPUs need it: build libepic again with EPIC_MANY=ON",
     "install the CUDA runtime that it was built for"},
    {DEVICE_MOST_RANKS, 0, "hosts", "libepic_hosts_many.so", "epic_backend_hosts",
     "groups of more than 32 GPUs need it: install UCX (Debian, Ubuntu: libucx-dev) and build "
     "libepic again with EPIC_MANY=ON",
     "install the CUDA runtime that it was built for"},
};
static const epic_backend *_Atomic loaded[NUM_PLUGINS]; /* NULL until loaded; a plugin is never
                                                         * unloaded */

/* Loads a plugin and sets *out to its struct epic_backend. If the plugin cannot be loaded, the
 * error text describes how to get the library. The release store publishes the struct to other
 * threads that call backend_fetch(). */
static epic_result load_plugin(const epic_backend **out, const plugin *p)
{
    void *handle = library_open((const void *)(uintptr_t)&backend_find, p->library);
    *out = handle ? dlsym(handle, p->symbol) : NULL;
    if (*out) {
        atomic_store_explicit(&loaded[p - plugins], *out, memory_order_release);
        return EPIC_OK;
    }
    const char *why =
        /* dlerror() begins with the name of the missing file: the plugin itself, or a library
         * that the plugin needs */
        dlerror();
    const bool absent = why && strncmp(why, p->library, strlen(p->library)) == 0;
    const epic_result result = epic_fail(
        EPIC_ENOTSUP, "backend \"%s\": %s cannot be loaded; %s (%.250s)", p->name, p->library,
        absent ? p->when_absent : p->when_broken, why ? why : "no symbol of that name");
    if (handle) dlclose(handle);
    return result;
}

const char *backend_resolve_name(const char *name, bool is_near)
{
    if (!name || strcmp(name, "gpu") != 0) return name;
    return is_near ? "p2p" : "hosts";
}

static epic_result fail_no_backend(const char *name)
{
    return epic_fail(
        EPIC_EINVAL,
        "config.backend is \"%.40s\": there are self, threads, shm, mpi, p2p "
        "and hosts, and gpu, which is p2p on one host or in one NVLink domain, else "
        "hosts",
        name);
}

epic_result backend_place(bool *on_device, const char *name)
{
    bool is_known = !name;
    *on_device =
        name && (!strcmp(name, "gpu") || !strcmp(name, "p2p") || !strcmp(name, "hosts"));
    for (int i = 0; name && epic_backends[i]; i++)
        is_known |= !strcmp(epic_backends[i]->name, name);
    for (int i = 0; name && i < NUM_PLUGINS; i++) is_known |= !strcmp(plugins[i].name, name);
    return is_known || *on_device ? EPIC_OK : fail_no_backend(name);
}

bool backend_supports(const epic_backend *backend, uint32_t flags)
{
    return !(flags & EPIC_CAN_REGROUP) || backend->transport->regroup;
}

/* Returns the error for a backend that does not support EPIC_CAN_REGROUP, the only flag. */
static epic_result fail_flags(const char *name)
{
    return epic_fail(EPIC_ENOTSUP,
                     "config.flags is EPIC_CAN_REGROUP: must be 0 with backend \"%s\", whose "
                     "groups cannot continue without a rank; the backends shm, threads and p2p "
                     "support it",
                     name);
}

epic_result backend_find(const epic_backend **out, const char *name, int num_ranks,
                         uint32_t flags)
{
    const plugin *found = NULL;
    for (int i = 0; epic_backends[i]; i++) {
        *out = epic_backends[i];
        if (strcmp((*out)->name, name) != 0) continue;
        return backend_supports(*out, flags) ? EPIC_OK : fail_flags(name);
    }
    for (int i = 0; i < NUM_PLUGINS; i++) {
        if (strcmp(plugins[i].name, name) != 0 || flags & ~plugins[i].flags) continue;
        found = &plugins[i];
        if (num_ranks <= found->max_ranks) break;
    }
    if (found) return load_plugin(out, found);
    bool on_device;
    TRY(backend_place(&on_device, name)); /* fails if no backend has that name */
    return fail_flags(name);
}

bool backend_fetch(void *to, const void *from, size_t bytes)
{
    for (int i = 0; i < NUM_PLUGINS; i++) {
        const epic_backend *b = atomic_load_explicit(&loaded[i], memory_order_acquire);
        bool good = true;
        if (b && b->fetch && b->fetch(to, from, bytes, &good)) return good;
    }
    memcpy(to, from, bytes);
    return true;
}
