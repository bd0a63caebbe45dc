/* SPDX-License-Identifier: Apache-2.0 */
#include "base/library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

void *library_open(const void *self, const char *library)
{
    Dl_info info;
    char path[4096];
    if (dladdr(self, &info) && info.dli_fname) {
        const char *slash = strrchr(info.dli_fname, '/');
        const int folder = slash ? (int)(slash - info.dli_fname) + 1 : 0;
        const int length =
            snprintf(path, sizeof path, "%.*s%s", folder, info.dli_fname, library);
        if (length < (int)sizeof path && access(path, F_OK) == 0)
            return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    return dlopen(library, RTLD_NOW | RTLD_LOCAL);
}
