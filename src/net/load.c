/* SPDX-License-Identifier: Apache-2.0 */
/* Loads the library of a network engine (net.h). Each engine is in a library of its own, so
 * that libepic.so does not depend on network libraries such as UCX. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "base/library.h"
#include "net/net.h"

/* Returns true if the name consists of 1 to 16 lowercase letters. Other characters are not
 * allowed, because the name becomes a part of a file name. */
static bool is_name(const char *name)
{
    const size_t length = strlen(name);
    return length > 0 && length <= 16 && strspn(name, "abcdefghijklmnopqrstuvwxyz") == length;
}

/* Returns the remedy for a library that could not be loaded. `error` is the text of dlerror(),
 * which begins with the name of the file that is missing or broken. */
static const char *load_remedy(const char *name, const char *library, const char *error)
{
    if (strcmp(name, "ucx") != 0) return "only ucx is supported";
    return error && strncmp(error, library, strlen(library)) == 0
               ? "install UCX (Debian, Ubuntu: libucx-dev) and build libepic again"
               : "install the UCX that it was built for (Debian, Ubuntu: libucx0)";
}

const net_engine *net_find_engine(const char *name, char *why)
{
    char library[32], symbol[32];
    if (!is_name(name)) {
        snprintf(why, NET_WHY_BYTES, "there is no net \"%.40s\": there is ucx", name);
        return NULL;
    }
    snprintf(library, sizeof library, "libepic_%s.so", name);
    snprintf(symbol, sizeof symbol, "epic_net_%s", name);
    void *handle = library_open((const void *)(uintptr_t)&net_find_engine, library);
    const net_engine *engine = handle ? dlsym(handle, symbol) : NULL;
    /* a loaded library stays loaded until the process exits */
    if (engine) return engine;
    const char *error = dlerror();
    snprintf(why, NET_WHY_BYTES, "net \"%s\": %s cannot be loaded; %s (%.120s)", name, library,
             load_remedy(name, library, error), error ? error : "no symbol of that name");
    if (handle) dlclose(handle);
    return NULL;
}
