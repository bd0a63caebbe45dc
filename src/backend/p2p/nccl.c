/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/p2p/nccl.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The oldest supported NCCL, as ncclGetVersion() returns it. Since 2.14,
 * ncclCommGetAsyncError() returns ncclInProgress for non-blocking communicators. */
#define LEAST_VERSION 21400

/* The loaded files whose names begin with libnccl.so. */
typedef struct loaded_files {
    int count;
    char paths[2][256]; /* paths of the first two such files */
} loaded_files;

/* Callback of dl_iterate_phdr(), which calls it for each loaded file. Adds the file to the list
 * if it is NCCL. */
static int note_file(struct dl_phdr_info *file, size_t size, void *arguments)
{
    (void)size;
    loaded_files *files = arguments;
    const char *slash = strrchr(file->dlpi_name, '/');
    const char *name = slash ? slash + 1 : file->dlpi_name;
    if (strncmp(name, "libnccl.so", 10) != 0) return 0;
    if (files->count < 2)
        snprintf(files->paths[files->count], sizeof files->paths[0], "%s", file->dlpi_name);
    files->count++;
    return 0;
}

/* Finds NCCL among the libraries that this process has loaded. Sets *handle to the library, and
 * writes the library's path for error texts to `name` (256 bytes). */
static epic_result find_library(void **handle, char *name)
{
    loaded_files files = {0};
    const char *path = getenv("EPIC_NCCL");
    if (path && *path) {
        snprintf(name, 256, "%s", path);
        *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        if (*handle) return EPIC_OK;
        return epic_fail(EPIC_ENOTSUP,
                         "bootstrap over NCCL: EPIC_NCCL is \"%.250s\", which this process has "
                         "not loaded: must be the path of the libnccl that created the "
                         "communicator; unset it if there is only one",
                         path);
    }
    dl_iterate_phdr(note_file, &files);
    if (files.count > 1)
        return epic_fail(EPIC_ENOTSUP,
                         "bootstrap over NCCL: this process has loaded %d copies of NCCL "
                         "(%.150s and %.150s): set EPIC_NCCL to the path of the one that "
                         "created the communicator",
                         files.count, files.paths[0], files.paths[1]);
    snprintf(name, 256, "%s", files.count ? files.paths[0] : "this program");
    *handle = files.count ? dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) : RTLD_DEFAULT;
    if (dlsym(*handle, "ncclGetVersion")) return EPIC_OK;
    return epic_fail(EPIC_ENOTSUP,
                     "bootstrap over NCCL: this process has not loaded libnccl.so, and the "
                     "program does not export NCCL's functions; link the program with -lnccl, "
                     "or set EPIC_NCCL to the path of the loaded library if it has another "
                     "name");
}

/* Stores the address of the function `name` in the function pointer at `function`. Uses
 * memcpy() because ISO C has no cast from void * to a function pointer. */
static epic_result find_function(void *handle, const char *library, const char *name,
                                 void *function)
{
    void *address = dlsym(handle, name);
    if (!address)
        return epic_fail(EPIC_ENOTSUP,
                         "bootstrap over NCCL: %.250s has no function %s: must be NCCL 2.14 or "
                         "newer",
                         library, name);
    memcpy(function, &address, sizeof address);
    return EPIC_OK;
}

/* Checks the version. NCCL up to 2.8 encodes 2.8.4 as 2804, and later versions encode 2.9.6 as
 * 20906. */
static epic_result check_version(const nccl_functions *n, const char *library)
{
    int version = 0;
    if (n->get_version(&version) != NCCL_SUCCESS)
        return epic_fail(EPIC_ENOTSUP, "bootstrap over NCCL: ncclGetVersion of %.250s failed",
                         library);
    if (version >= LEAST_VERSION) return EPIC_OK;
    const int major = version < 10000 ? version / 1000 : version / 10000;
    const int rest = version - major * (version < 10000 ? 1000 : 10000);
    return epic_fail(EPIC_ENOTSUP,
                     "bootstrap over NCCL: %.250s is NCCL %d.%d.%d: must be 2.14 or newer; "
                     "install a newer NCCL, or use another bootstrap",
                     library, major, rest / 100, rest % 100);
}

epic_result nccl_find(nccl_functions *out)
{
    void *handle = NULL;
    char library[256];
    TRY(find_library(&handle, library));
    TRY(find_function(handle, library, "ncclGetVersion", &out->get_version));
    TRY(check_version(out, library));
    TRY(find_function(handle, library, "ncclGetErrorString", &out->get_error_string));
    TRY(find_function(handle, library, "ncclCommGetAsyncError", &out->comm_get_async_error));
    TRY(find_function(handle, library, "ncclCommCount", &out->comm_count));
    TRY(find_function(handle, library, "ncclCommUserRank", &out->comm_user_rank));
    TRY(find_function(handle, library, "ncclCommCuDevice", &out->comm_cu_device));
    return find_function(handle, library, "ncclAllGather", &out->all_gather);
}
