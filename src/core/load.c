/* SPDX-License-Identifier: Apache-2.0 */
/* Backends that live in libraries of their own, loaded when a context asks for one. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "core/config.h"
#include "core/error.h"

typedef struct plugin {
    const char *name; /* of the backend */
    const char *library;
    const char *symbol;
} plugin;

static const plugin plugins[] = {
    {"mpi", "libepic_mpi.so", "epic_backend_mpi"},
    {"p2p", "libepic_cuda.so", "epic_backend_p2p"},
};

/* Beside libepic.so first, then where the system looks. */
static void *open_library(const char *library)
{
    Dl_info info;
    char path[4096];
    if (dladdr((const void *)(uintptr_t)&backend_find, &info) && info.dli_fname) {
        const char *slash = strrchr(info.dli_fname, '/');
        const int folder = slash ? (int)(slash - info.dli_fname) + 1 : 0;
        if (snprintf(path, sizeof path, "%.*s%s", folder, info.dli_fname, library) <
            (int)sizeof path) {
            void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
            if (handle) return handle;
        }
    }
    return dlopen(library, RTLD_NOW | RTLD_LOCAL);
}

static epic_result load(const epic_backend **out, const plugin *p)
{
    void *handle = open_library(p->library);
    *out = handle ? dlsym(handle, p->symbol) : NULL;
    if (*out) return EPIC_OK; /* stays loaded: contexts use it */
    const char *why = dlerror();
    const epic_result result =
        epic_fail(EPIC_ENOTSUP, "backend \"%s\": %s cannot be loaded: %.300s", p->name,
                  p->library, why ? why : "unknown reason");
    if (handle) dlclose(handle);
    return result;
}

epic_result backend_find(const epic_backend **out, const char *name)
{
    for (int i = 0; epic_backends[i]; i++) {
        *out = epic_backends[i];
        if (!strcmp((*out)->name, name)) return EPIC_OK;
    }
    for (size_t i = 0; i < sizeof plugins / sizeof *plugins; i++)
        if (!strcmp(plugins[i].name, name)) return load(out, &plugins[i]);
    return epic_fail(EPIC_EINVAL,
                     "config.backend is \"%.40s\": there are self, threads, shm, mpi and p2p",
                     name);
}
