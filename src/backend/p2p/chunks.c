/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/p2p/chunks.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"

/* ---------------------------------------------------------- functions of CUDA's driver ---- */

/* Functions of the CUDA driver that the runtime API does not have. libepic_cuda is not linked
 * with the driver, because it must load on machines that have no driver. So find_functions()
 * looks up the functions by name. */
static struct {
    __typeof__(&cuGetErrorString) get_error_string;
    __typeof__(&cuDeviceGetAttribute) get_device_attribute;
    __typeof__(&cuPointerGetAttribute) get_attribute;
    __typeof__(&cuMemGetAddressRange) get_address_range;
    __typeof__(&cuMemGetAllocationGranularity) get_granularity;
    __typeof__(&cuMemCreate) create;
    __typeof__(&cuMemRetainAllocationHandle) retain;
    __typeof__(&cuMemRelease) release;
    __typeof__(&cuMemGetAllocationPropertiesFromHandle) get_properties;
    __typeof__(&cuMemExportToShareableHandle) export_handle;
    __typeof__(&cuMemImportFromShareableHandle) import_handle;
    __typeof__(&cuMemAddressReserve) reserve;
    __typeof__(&cuMemAddressFree) free_address;
    __typeof__(&cuMemMap) map;
    __typeof__(&cuMemUnmap) unmap;
    __typeof__(&cuMemSetAccess) set_access;
} driver;

static const struct {
    const char *name;
    void *function; /* address of a function pointer */
} functions[] = {{"cuGetErrorString", &driver.get_error_string},
                 {"cuDeviceGetAttribute", &driver.get_device_attribute},
                 {"cuPointerGetAttribute", &driver.get_attribute},
                 {"cuMemGetAddressRange_v2", &driver.get_address_range},
                 {"cuMemGetAllocationGranularity", &driver.get_granularity},
                 {"cuMemCreate", &driver.create},
                 {"cuMemRetainAllocationHandle", &driver.retain},
                 {"cuMemRelease", &driver.release},
                 {"cuMemGetAllocationPropertiesFromHandle", &driver.get_properties},
                 {"cuMemExportToShareableHandle", &driver.export_handle},
                 {"cuMemImportFromShareableHandle", &driver.import_handle},
                 {"cuMemAddressReserve", &driver.reserve},
                 {"cuMemAddressFree", &driver.free_address},
                 {"cuMemMap", &driver.map},
                 {"cuMemUnmap", &driver.unmap},
                 {"cuMemSetAccess", &driver.set_access}};

static const char *missing; /* name of a function that was not found; NULL: none */

/* Looks up all functions. Never unloads the driver, because the CUDA runtime uses it too. */
static void find_functions(void)
{
    void *library = NULL;
    for (size_t i = 0; i < sizeof functions / sizeof *functions && !missing; i++) {
        void *found = dlsym(RTLD_DEFAULT, functions[i].name);
        if (!found && !library) library = dlopen("libcuda.so.1", RTLD_NOW);
        if (!found && library) found = dlsym(library, functions[i].name);
        if (!found) missing = functions[i].name;
        /* ISO C has no cast from void * to a function */
        memcpy(functions[i].function, &found, sizeof found);
    }
}

static epic_result need_driver(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_functions);
    if (!missing) return EPIC_OK;
    return epic_fail(
        EPIC_ENOTSUP,
        "CUDA's driver has no function %s, which windows and EPIC_HEAP need: update the "
        "driver",
        missing);
}

static const char *text_of(CUresult error)
{
    const char *text = NULL;
    (void)driver.get_error_string(error, &text);
    return text ? text : "unknown error";
}

/* ----------------------------------------------------------------- memory of this rank ---- */

epic_result p2p_find_range(const void *at, uint8_t **base, int64_t *size)
{
    CUdeviceptr begin = 0;
    size_t bytes = 0;
    TRY(need_driver());
    const CUresult error = driver.get_address_range(&begin, &bytes, (CUdeviceptr)(uintptr_t)at);
    if (error != CUDA_SUCCESS)
        return epic_fail(
            EPIC_ENOTSUP,
            "data is %p: must be memory of cudaMalloc, or memory of cuMemCreate that "
            "the GPU can access (cuMemSetAccess); CUDA finds no allocation (%s)",
            at, text_of(error));
    *base = (uint8_t *)(uintptr_t)begin;
    *size = (int64_t)bytes;
    return EPIC_OK;
}

bool p2p_is_of_pool(const void *at)
{
    CUmemoryPool pool = NULL;
    return need_driver() == EPIC_OK &&
           driver.get_attribute(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
                                (CUdeviceptr)(uintptr_t)at) == CUDA_SUCCESS &&
           pool;
}

static epic_result fail_with_end(int64_t bytes, int64_t available)
{
    return epic_fail(EPIC_ENOTSUP,
                     "bytes is %lld: must be at most %lld, because the memory of data ends "
                     "there",
                     (long long)bytes, (long long)available);
}

epic_result p2p_chunks_find(const uint8_t *data, int64_t bytes, p2p_chunks *out,
                            int64_t *offset)
{
    const uint8_t *end = data + bytes;
    uint8_t *at;
    int64_t size;
    out->num = 0;
    TRY(p2p_find_range(data, &at, &size));
    *offset = data - at;
    while (driver.retain(&out->handles[out->num], at) == CUDA_SUCCESS) {
        out->bytes[out->num++] = size;
        at += size;
        if (at >= end) return EPIC_OK;
        if (out->num == P2P_MAX_CHUNKS)
            return epic_fail(EPIC_ENOTSUP,
                             "bytes is %lld: must be at most %lld, which %d allocations of "
                             "cuMemCreate contain; make larger allocations",
                             (long long)bytes, (long long)(at - data), P2P_MAX_CHUNKS);
        if (p2p_find_range(at, &at, &size) != EPIC_OK) return fail_with_end(bytes, at - data);
    }
    /* There is no chunk at `at`. A window must not begin in chunks and continue in other
     * memory. */
    if (out->num) return fail_with_end(bytes, at - data);
    return at + size >= end ? EPIC_OK : fail_with_end(bytes, at + size - data);
}

void p2p_chunks_release(p2p_chunks *chunks)
{
    for (int i = 0; i < chunks->num; i++) (void)driver.release(chunks->handles[i]);
    chunks->num = 0;
}

/* `device` is a number of the CUDA runtime. The driver uses the same numbers. */
bool p2p_chunks_have_fabric(int device)
{
    int supported = 0;
    return need_driver() == EPIC_OK &&
           driver.get_device_attribute(&supported,
                                       CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
                                       device) == CUDA_SUCCESS &&
           supported;
}

/* Sets the error text for a failed cuMemCreate(), and returns the error. */
static epic_result fail_create(CUresult error, size_t bytes, int device,
                               CUmemAllocationHandleType type)
{
    const bool is_fabric = type == CU_MEM_HANDLE_TYPE_FABRIC;
    if (error == CUDA_ERROR_OUT_OF_MEMORY)
        return epic_fail(EPIC_ENOMEM, "allocating %zu bytes on device %d: CUDA reports \"%s\"",
                         bytes, device, text_of(error));
    const char *why = !is_fabric ? ""
                      : p2p_chunks_have_fabric(device)
                          ? ": the process must be able to open an IMEX channel "
                            "(/dev/nvidia-caps-imex-channels/channel0)"
                          : ": the GPU or its driver has no fabric handles";
    return epic_fail(EPIC_ENOTSUP, "device %d: CUDA cannot allocate memory with a %s (%s)%s",
                     device, is_fabric ? "fabric handle" : "file descriptor", text_of(error),
                     why);
}

epic_result p2p_chunks_create(int64_t bytes, int device, CUmemAllocationHandleType type,
                              p2p_chunks *out)
{
    const CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = type,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    size_t granule = 0, whole = (size_t)bytes;
    out->num = 0;
    TRY(need_driver());
    CUresult error =
        driver.get_granularity(&granule, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (error == CUDA_SUCCESS) {
        whole = ((size_t)bytes + granule - 1) / granule * granule;
        error = driver.create(&out->handles[0], whole, &properties, 0);
    }
    if (error != CUDA_SUCCESS) return fail_create(error, whole, device, type);
    out->bytes[out->num++] = (int64_t)whole;
    return EPIC_OK;
}

/* Returns whether the device of the current context can read and write the memory. */
static bool is_writable(const uint8_t *at)
{
    uint64_t flags = 0;
    return driver.get_attribute(&flags, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS,
                                (CUdeviceptr)(uintptr_t)at) == CUDA_SUCCESS &&
           (flags & CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE) ==
               CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE;
}

static epic_result get_properties(CUmemGenericAllocationHandle handle,
                                  CUmemAllocationProp *properties)
{
    const CUresult error = driver.get_properties(properties, handle);
    if (error == CUDA_SUCCESS) return EPIC_OK;
    return epic_fail(EPIC_EDEVICE, "the properties of an allocation: %s", text_of(error));
}

epic_result p2p_chunk_device(const void *at, int *device)
{
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp properties;
    TRY(need_driver());
    const CUresult error = driver.retain(&handle, (void *)(uintptr_t)at);
    if (error != CUDA_SUCCESS)
        return epic_fail(EPIC_EDEVICE, "CUDA finds no memory of cuMemCreate at %p (%s)", at,
                         text_of(error));
    const epic_result result = get_properties(handle, &properties);
    (void)driver.release(handle);
    if (result == EPIC_OK) *device = properties.location.id;
    return result;
}

epic_result p2p_chunks_check(const p2p_chunks *chunks, const uint8_t *data, int64_t offset,
                             int device)
{
    const uint8_t *at = data - offset;
    for (int i = 0; i < chunks->num; at += chunks->bytes[i++]) {
        CUmemAllocationProp properties;
        TRY(get_properties(chunks->handles[i], &properties));
        if (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
            properties.location.id != device)
            return epic_fail(EPIC_ENOTSUP,
                             "data is %p: all its allocations must be on device %d, which the "
                             "context uses",
                             (const void *)data, device);
        if (is_writable(at)) continue;
        return epic_fail(EPIC_ENOTSUP,
                         "data is %p: device %d must be able to read and write it; call "
                         "cuMemSetAccess",
                         (const void *)data, device);
    }
    return EPIC_OK;
}

/* --------------------------------------------------------------- memory of other ranks ---- */

/* Exports chunk i. If the chunk's type is a file descriptor, adds the descriptor to
 * out->descriptors. */
static CUresult export_chunk(CUmemGenericAllocationHandle handle,
                             CUmemAllocationHandleType type, int i, p2p_exported_chunks *out)
{
    int descriptor = -1;
    out->chunks[i].type = type;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC)
        return driver.export_handle(&out->chunks[i].fabric, handle, type, 0);
    const CUresult error = driver.export_handle(&descriptor, handle, type, 0);
    if (error != CUDA_SUCCESS) return error;
    (void)fcntl(descriptor, F_SETFD, FD_CLOEXEC);
    out->descriptors[out->num_descriptors++] = descriptor;
    return CUDA_SUCCESS;
}

epic_result p2p_chunks_export(const p2p_chunks *chunks, const uint8_t *data,
                              p2p_exported_chunks *out)
{
    memset(out, 0, sizeof *out);
    out->num = chunks->num;
    for (int i = 0; i < chunks->num; i++) {
        CUmemAllocationProp properties;
        TRY(get_properties(chunks->handles[i], &properties));
        out->chunks[i].bytes = chunks->bytes[i];
        const unsigned types = (unsigned)properties.requestedHandleTypes;
        const CUmemAllocationHandleType type =
            types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                : (CUmemAllocationHandleType)(types & CU_MEM_HANDLE_TYPE_FABRIC);
        if (!type)
            return epic_fail(
                EPIC_ENOTSUP,
                "data is %p: other processes must be able to map it, but it was allocated "
                "without a handle type that can be exported; call cuMemCreate with "
                "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
                (const void *)data);
        const CUresult error = export_chunk(chunks->handles[i], type, i, out);
        if (error != CUDA_SUCCESS)
            return epic_fail(EPIC_ENOTSUP, "CUDA cannot export the memory at %p (%s)",
                             (const void *)data, text_of(error));
    }
    return EPIC_OK;
}

void p2p_chunks_close(p2p_exported_chunks *exported)
{
    for (int i = 0; i < exported->num_descriptors; i++) close(exported->descriptors[i]);
    exported->num_descriptors = 0;
}

epic_result p2p_chunks_import(const p2p_exported_chunks *exported, p2p_chunks *out)
{
    out->num = 0;
    for (int i = 0, next = 0; i < exported->num; i++) {
        const CUmemAllocationHandleType type =
            (CUmemAllocationHandleType)exported->chunks[i].type;
        CUmemFabricHandle fabric = exported->chunks[i].fabric;
        void *handle = &fabric;
        if (type != CU_MEM_HANDLE_TYPE_FABRIC)
            handle = (void *)(uintptr_t)exported->descriptors[next++];
        const CUresult error = driver.import_handle(&out->handles[i], handle, type);
        if (error != CUDA_SUCCESS)
            return epic_fail(EPIC_ENOTSUP, "CUDA cannot import its memory (%s)",
                             text_of(error));
        out->bytes[out->num++] = exported->chunks[i].bytes;
    }
    return EPIC_OK;
}

/* Lets the device `device` read and write the mapped chunks in [at, at + bytes). */
static CUresult allow_device(CUdeviceptr at, size_t bytes, int device)
{
    const CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return driver.set_access(at, bytes, &access, 1);
}

epic_result p2p_chunks_allow(const void *at, size_t bytes, int device)
{
    TRY(need_driver());
    const CUresult error = allow_device((CUdeviceptr)(uintptr_t)at, bytes, device);
    if (error == CUDA_SUCCESS) return EPIC_OK;
    return epic_fail(EPIC_ENOTSUP, "device %d cannot access the memory at %p (%s)", device, at,
                     text_of(error));
}

/* Maps the chunks at the reserved addresses of `out`. Sets *mapped to the number of bytes that
 * it has mapped, even if it returns an error. */
static CUresult map_chunks(const p2p_chunks *chunks, int device, const p2p_mapping *out,
                           size_t *mapped)
{
    const CUdeviceptr at = (CUdeviceptr)(uintptr_t)out->at;
    for (int i = 0; i < chunks->num; i++) {
        const size_t bytes = (size_t)chunks->bytes[i];
        const CUresult error = driver.map(at + *mapped, bytes, 0, chunks->handles[i], 0);
        if (error != CUDA_SUCCESS) return error;
        *mapped += bytes;
    }
    return allow_device(at, out->bytes, device);
}

epic_result p2p_chunks_map(const p2p_chunks *chunks, int device, p2p_mapping *out)
{
    CUdeviceptr at = 0;
    size_t bytes = 0, mapped = 0;
    for (int i = 0; i < chunks->num; i++) bytes += (size_t)chunks->bytes[i];
    CUresult error = driver.reserve(&at, bytes, 0, 0, 0);
    if (error == CUDA_SUCCESS) {
        *out = (p2p_mapping){(void *)(uintptr_t)at, bytes};
        error = map_chunks(chunks, device, out, &mapped);
        if (error == CUDA_SUCCESS) return EPIC_OK;
        if (mapped) (void)driver.unmap(at, mapped);
        (void)driver.free_address(at, bytes);
    }
    *out = (p2p_mapping){0};
    return epic_fail(EPIC_ENOTSUP, "device %d cannot map its memory (%s)", device,
                     text_of(error));
}

void p2p_chunks_unmap(p2p_mapping *mapping)
{
    const CUdeviceptr at = (CUdeviceptr)(uintptr_t)mapping->at;
    (void)driver.unmap(at, mapping->bytes);
    (void)driver.free_address(at, mapping->bytes);
    *mapping = (p2p_mapping){0};
}
