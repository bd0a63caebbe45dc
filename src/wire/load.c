/* SPDX-License-Identifier: Apache-2.0 */
/* Engines live in libraries of their own: epic needs none of what they stand on. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "base/library.h"
#include "wire/wire.h"

const wire_engine *wire_find(const char *name, char *why)
{
    if (strcmp(name, "ucx") != 0) {
        snprintf(why, WIRE_WHY, "there is no wire \"%.40s\": there is ucx", name);
        return NULL;
    }
    void *handle = library_open((const void *)(uintptr_t)&wire_find, "libepic_ucx.so");
    const wire_engine *engine = handle ? dlsym(handle, "epic_wire_ucx") : NULL;
    if (engine) return engine; /* it stays loaded */
    const char *error = dlerror();
    snprintf(why, WIRE_WHY,
             "wire \"ucx\": libepic_ucx.so cannot be loaded; install UCX (Debian, Ubuntu: "
             "libucx-dev) and build again (%.120s)",
             error ? error : "no symbol of that name");
    if (handle) dlclose(handle);
    return NULL;
}
