/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA's virtual memory API: allocations that are mapped at reserved addresses. An allocation
 * is a file in memory, whose name contains its device. Stricter than a GPU: an address of a
 * reservation cannot be read before cuMemSetAccess(), and the program ends if a kernel stores
 * rows into memory that its device cannot access. */
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "inner.h"

#define GRANULE (2 << 20)
#define MOST_MAPPINGS 4096

typedef struct allocation {
    int fd;
    size_t bytes;
    CUmemAllocationProp properties;
    int count; /* handles and mappings; guarded by mutex */
} allocation;

typedef struct mapping {     /* guarded by mutex; kernels read begin, bytes and devices */
    _Atomic uintptr_t begin; /* 0: not in use */
    size_t bytes;
    allocation *memory;
    _Atomic uint32_t devices; /* bit mask of the devices that can read and write it */
} mapping;

typedef struct reservation {
    uintptr_t begin;
    size_t bytes;
    struct reservation *next;
} reservation;

/* what CU_MEM_HANDLE_TYPE_FABRIC exports */
typedef struct fabric {
    int64_t pid, fd;
} fabric;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static mapping mappings[MOST_MAPPINGS];
static atomic_int num_mappings;   /* mappings that were ever in use at once, at most */
static reservation *reservations; /* guarded by mutex */

/* ----------------------------------------------------------------------- allocations ---- */

static CUresult add_allocation(CUmemGenericAllocationHandle *handle, int fd, size_t bytes,
                               const CUmemAllocationProp *properties)
{
    allocation *a = malloc(sizeof *a);
    if (!a || fd < 0) {
        if (fd >= 0) close(fd);
        free(a);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *a = (allocation){fd, bytes, *properties, 1};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)a;
    return CUDA_SUCCESS;
}

static allocation *allocation_of(CUmemGenericAllocationHandle handle)
{
    return (allocation *)(uintptr_t)handle;
}

/* The caller holds the mutex. */
static void release_allocation(allocation *a)
{
    if (--a->count) return;
    close(a->fd);
    free(a);
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags flags)
{
    (void)properties;
    (void)flags;
    *bytes = GRANULE;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *properties, unsigned long long flags)
{
    char name[64];
    if (flags || !bytes || bytes % GRANULE ||
        properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.id < 0 || properties->location.id >= num_devices())
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, sizeof name, "allocation %d %d", properties->location.id,
             (int)properties->requestedHandleTypes);
    const int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)bytes) != 0) {
        close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return add_allocation(handle, fd, bytes, properties);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    pthread_mutex_lock(&mutex);
    release_allocation(allocation_of(handle));
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle handle)
{
    *properties = allocation_of(handle)->properties;
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags)
{
    const allocation *a = allocation_of(handle);
    if (flags || !(a->properties.requestedHandleTypes & type)) return CUDA_ERROR_INVALID_VALUE;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
        const fabric f = {getpid(), a->fd};
        memset(shareable, 0, sizeof(CUmemFabricHandle));
        memcpy(shareable, &f, sizeof f);
        return CUDA_SUCCESS;
    }
    const int fd = fcntl(a->fd, F_DUPFD, 0); /* not O_CLOEXEC, like CUDA's */
    memcpy(shareable, &fd, sizeof fd);
    return fd < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

/* Reads the properties of an allocation from the name of its file. */
static bool read_properties(int fd, CUmemAllocationProp *out)
{
    char path[64], name[128] = {0};
    int device, types;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, name, sizeof name - 1) < 0 ||
        sscanf(name, "/memfd:allocation %d %d", &device, &types) != 2)
        return false;
    *out = (CUmemAllocationProp){CU_MEM_ALLOCATION_TYPE_PINNED,
                                 (CUmemAllocationHandleType)types,
                                 {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    return true;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        CUmemAllocationHandleType type)
{
    CUmemAllocationProp properties;
    struct stat status;
    int fd;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
        char path[64];
        fabric f;
        memcpy(&f, shareable, sizeof f);
        snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)f.pid, (long long)f.fd);
        fd = open(path, O_RDWR | O_CLOEXEC);
    } else {
        fd = fcntl((int)(uintptr_t)shareable, F_DUPFD_CLOEXEC, 0);
    }
    if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
    if (fstat(fd, &status) != 0 || !read_properties(fd, &properties)) {
        close(fd);
        return CUDA_ERROR_INVALID_VALUE;
    }
    return add_allocation(handle, fd, (size_t)status.st_size, &properties);
}

/* ------------------------------------------------------------------------- addresses ---- */

CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags)
{
    (void)hint;
    if (flags || alignment > GRANULE || !bytes || bytes % GRANULE)
        return CUDA_ERROR_INVALID_VALUE;
    reservation *r = malloc(sizeof *r);
    uint8_t *p = mmap(NULL, bytes + GRANULE, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!r || p == MAP_FAILED) {
        free(r);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const size_t before = (GRANULE - (uintptr_t)p % GRANULE) % GRANULE;
    if (before) munmap(p, before);
    if (before < GRANULE) munmap(p + before + bytes, GRANULE - before);
    pthread_mutex_lock(&mutex);
    *r = (reservation){(uintptr_t)p + before, bytes, reservations};
    reservations = r;
    pthread_mutex_unlock(&mutex);
    *at = r->begin;
    return CUDA_SUCCESS;
}

/* Returns the number of mapped bytes in the range, which must consist of whole mappings.
 * Returns 0 if it does not. If `remove` is true, unmaps them. The caller holds the mutex. */
static size_t find_mapped(CUdeviceptr at, size_t bytes, bool remove)
{
    size_t found = 0;
    for (int i = 0; i < MOST_MAPPINGS; i++) {
        mapping *m = &mappings[i];
        const uintptr_t begin = m->begin;
        if (!begin || begin + m->bytes <= at || begin >= at + bytes) continue;
        if (begin < at || begin + m->bytes > at + bytes) return 0;
        found += m->bytes;
        if (!remove) continue;
        remove_mapping((void *)begin);
        m->begin = 0;
        mmap((void *)begin, m->bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        release_allocation(m->memory);
    }
    return found;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    reservation **link = &reservations;
    while (*link && (*link)->begin != at) link = &(*link)->next;
    reservation *r = *link;
    if (r && r->bytes == bytes && find_mapped(at, bytes, false) == 0) {
        *link = r->next;
        munmap((void *)r->begin, bytes);
        free(r);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Maps the allocation into a free entry. The caller holds the mutex. */
static CUresult add_mapping_locked(CUdeviceptr at, size_t bytes, allocation *a)
{
    const reservation *r = reservations;
    int i = 0;
    while (r && (at < r->begin || at + bytes > r->begin + r->bytes)) r = r->next;
    while (i < MOST_MAPPINGS && mappings[i].begin) i++;
    for (int k = 0; k < MOST_MAPPINGS; k++)
        if (mappings[k].begin && mappings[k].begin < at + bytes &&
            at < mappings[k].begin + mappings[k].bytes)
            return CUDA_ERROR_INVALID_VALUE;
    if (!r || i == MOST_MAPPINGS || at % GRANULE || bytes % GRANULE || bytes > a->bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (mmap((void *)(uintptr_t)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, a->fd, 0) ==
        MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    mapping *m = &mappings[i];
    m->bytes = bytes;
    m->memory = a;
    m->devices = 0;
    m->begin = at;
    a->count++;
    if (i >= num_mappings) num_mappings = i + 1;
    add_mapping((void *)(uintptr_t)at, bytes, a->properties.location.id);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    if (offset || flags) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    const CUresult result = add_mapping_locked(at, bytes, allocation_of(handle));
    pthread_mutex_unlock(&mutex);
    return result;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t bytes)
{
    pthread_mutex_lock(&mutex);
    const bool whole = find_mapped(at, bytes, false) == bytes;
    if (whole) find_mapped(at, bytes, true);
    pthread_mutex_unlock(&mutex);
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access,
                        size_t count)
{
    pthread_mutex_lock(&mutex);
    const bool whole = find_mapped(at, bytes, false) == bytes;
    for (int i = 0; whole && i < MOST_MAPPINGS; i++) {
        mapping *m = &mappings[i];
        if (m->begin < at || m->begin >= at + bytes) continue;
        for (size_t k = 0; k < count; k++)
            if (access[k].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
                m->devices |= 1u << access[k].location.id;
        if (m->devices) mprotect((void *)m->begin, m->bytes, PROT_READ | PROT_WRITE);
    }
    pthread_mutex_unlock(&mutex);
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* --------------------------------------------------------------------------- queries ---- */

static mapping *mapping_of(const void *p)
{
    const uintptr_t at = (uintptr_t)p;
    for (int i = 0; i < num_mappings; i++) {
        const uintptr_t begin = mappings[i].begin;
        if (begin && at >= begin && at < begin + mappings[i].bytes) return &mappings[i];
    }
    return NULL;
}

bool can_access(const void *p)
{
    const mapping *m = num_mappings ? mapping_of(p) : NULL;
    return !m || m->devices >> current_device() & 1;
}

void check_access(const void *p)
{
    if (!can_access(p))
        emulator_die("a store to %p, which device %d cannot access", p, current_device());
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *at)
{
    pthread_mutex_lock(&mutex);
    const mapping *m = mapping_of(at);
    if (m) {
        m->memory->count++;
        *handle = (CUmemGenericAllocationHandle)(uintptr_t)m->memory;
    }
    pthread_mutex_unlock(&mutex);
    return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr at)
{
    const void *p = (const void *)(uintptr_t)at;
    pthread_mutex_lock(&mutex);
    const mapping *m = mapping_of(p);
    const unsigned flags = !m || m->devices >> current_device() & 1 ? 3 : 0;
    pthread_mutex_unlock(&mutex);
    if (!is_known(p)) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_ACCESS_FLAGS) {
        memcpy(value, &flags, sizeof flags);
        return CUDA_SUCCESS;
    }
    const CUmemoryPool pool = (CUmemoryPool)(uintptr_t)(is_of_pool(p) ? 1 : 0);
    memcpy(value, &pool, sizeof pool);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = error == CUDA_SUCCESS               ? "no error"
            : error == CUDA_ERROR_INVALID_VALUE ? "invalid argument"
            : error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory"
                                                : "operation failed";
    return CUDA_SUCCESS;
}
