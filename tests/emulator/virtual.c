/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA's virtual memory API: allocations that are mapped at reserved addresses. An allocation
 * is a file in memory, whose name contains its device. Stricter than a GPU: an address of a
 * reservation cannot be read before cuMemSetAccess(), and the program ends if a kernel stores
 * rows into memory that its device cannot access.
 *
 * All reservations are in one range of addresses, the arena. The array mapping_at has an entry
 * for each granule of the arena, so the mapping of an address is found without a search. */
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
#define ARENA_GRANULES (1 << 20)

typedef struct allocation {
    int fd;
    size_t bytes;
    CUmemAllocationProp properties;
    int count; /* number of handles and mappings; guarded by mutex, like `next` */
    struct allocation *next;
} allocation;

typedef struct mapping {
    uintptr_t begin;
    size_t bytes;
    allocation *memory;
    _Atomic uint32_t devices; /* bit mask of the devices that can read and write it */
} mapping;

/* what CU_MEM_HANDLE_TYPE_FABRIC exports */
typedef struct fabric {
    int64_t pid, fd;
} fabric;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static allocation *allocations; /* guarded by mutex, like the fields below */
static uint8_t *_Atomic arena;
/* the mapping of each granule of the arena, or NULL; kernels read this array */
static mapping *_Atomic mapping_at[ARENA_GRANULES];
/* For each granule of the arena: if a reservation begins there, its number of granules; -1 in
 * its other granules; 0 if the granule is not reserved. */
static int32_t reserved[ARENA_GRANULES];
static size_t last_end; /* granule after the last reservation */

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
    pthread_mutex_lock(&mutex);
    *a = (allocation){fd, bytes, *properties, 1, allocations};
    allocations = a;
    pthread_mutex_unlock(&mutex);
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
    allocation **link = &allocations;
    while (*link != a) link = &(*link)->next;
    *link = a->next;
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
    if (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) {
        const CUresult error = check_fabric(properties->location.id);
        if (error != CUDA_SUCCESS) return error;
    }
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

/* If this process has itself exported the allocation, adds a handle to it and returns it. So
 * thousands of imports need only one descriptor. Otherwise returns NULL. */
static allocation *find_own(const fabric *f)
{
    if (f->pid != getpid()) return NULL;
    pthread_mutex_lock(&mutex);
    allocation *a = allocations;
    while (a && a->fd != f->fd) a = a->next;
    if (a) a->count++;
    pthread_mutex_unlock(&mutex);
    return a;
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
        *handle = (CUmemGenericAllocationHandle)(uintptr_t)find_own(&f);
        if (*handle) return CUDA_SUCCESS;
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

static size_t granule_of(uintptr_t at)
{
    return (at - (uintptr_t)arena) / GRANULE;
}

/* Returns whether the range [at, at + bytes) consists of granules of the arena. */
static bool is_in_arena(uintptr_t at, size_t bytes)
{
    const uintptr_t begin = (uintptr_t)arena;
    return begin && at >= begin && at % GRANULE == 0 && bytes % GRANULE == 0 && bytes &&
           bytes <= (size_t)ARENA_GRANULES * GRANULE &&
           at - begin <= (size_t)ARENA_GRANULES * GRANULE - bytes;
}

/* The caller holds the mutex. */
static bool make_arena(void)
{
    const size_t bytes = (size_t)ARENA_GRANULES * GRANULE;
    if (arena) return true;
    uint8_t *p = mmap(NULL, bytes + GRANULE, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return false;
    arena = p + (GRANULE - (uintptr_t)p % GRANULE) % GRANULE;
    return true;
}

/* Returns the first of `count` consecutive granules that are not reserved, or ARENA_GRANULES if
 * there are none. First looks behind the last reservation, so that an address is used again as
 * late as possible. The caller holds the mutex. */
static size_t find_granules(size_t count)
{
    for (size_t turn = 0, begin = last_end; turn < 2; turn++, begin = 0) {
        size_t length = 0;
        for (size_t i = begin; i < ARENA_GRANULES; i++) {
            length = reserved[i] ? 0 : length + 1;
            if (length == count) return i + 1 - count;
        }
    }
    return ARENA_GRANULES;
}

CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags)
{
    const size_t count = bytes / GRANULE;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    (void)hint;
    if (flags || alignment > GRANULE || !bytes || bytes % GRANULE)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    const size_t begin = make_arena() ? find_granules(count) : ARENA_GRANULES;
    if (begin < ARENA_GRANULES) {
        for (size_t i = 0; i < count; i++) reserved[begin + i] = i ? -1 : (int32_t)count;
        last_end = begin + count;
        *at = (CUdeviceptr)(uintptr_t)(arena + begin * GRANULE);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Returns the number of mapped bytes in the range, which must consist of whole mappings.
 * Returns 0 if it does not. The caller holds the mutex. */
static size_t count_mapped(CUdeviceptr at, size_t bytes)
{
    size_t found = 0;
    if (!is_in_arena(at, bytes)) return 0;
    for (CUdeviceptr p = at; p < at + bytes;) {
        const mapping *m = mapping_at[granule_of(p)];
        if (m && (m->begin != p || m->begin + m->bytes > at + bytes)) return 0;
        found += m ? m->bytes : 0;
        p += m ? m->bytes : GRANULE;
    }
    return found;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    if (is_in_arena(at, bytes) && reserved[granule_of(at)] == (int32_t)(bytes / GRANULE) &&
        count_mapped(at, bytes) == 0) {
        for (size_t i = 0; i < bytes / GRANULE; i++) reserved[granule_of(at) + i] = 0;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Returns whether the range is in one reservation and nothing is mapped there. The caller holds
 * the mutex. */
static bool is_free(CUdeviceptr at, size_t bytes)
{
    if (!is_in_arena(at, bytes)) return false;
    const size_t first = granule_of(at);
    for (size_t i = first; i < first + bytes / GRANULE; i++)
        if (!reserved[i] || (i > first && reserved[i] > 0) || mapping_at[i]) return false;
    return true;
}

/* The caller holds the mutex. */
static CUresult add_mapping_locked(CUdeviceptr at, size_t bytes, allocation *a)
{
    if (!is_free(at, bytes) || bytes > a->bytes) return CUDA_ERROR_INVALID_VALUE;
    mapping *m = malloc(sizeof *m);
    if (!m || mmap((void *)(uintptr_t)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, a->fd, 0) ==
                  MAP_FAILED) {
        free(m);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *m = (mapping){at, bytes, a, 0};
    a->count++;
    for (size_t i = 0; i < bytes / GRANULE; i++) mapping_at[granule_of(at) + i] = m;
    add_mapping((void *)(uintptr_t)at, bytes, a->properties.location.id);
    return CUDA_SUCCESS;
}

/* The caller holds the mutex. */
static void remove_mapping_locked(mapping *m)
{
    remove_mapping((void *)m->begin);
    for (size_t i = 0; i < m->bytes / GRANULE; i++) mapping_at[granule_of(m->begin) + i] = NULL;
    mmap((void *)m->begin, m->bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    release_allocation(m->memory);
    free(m);
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
    const bool whole = count_mapped(at, bytes) == bytes;
    for (size_t i = 0; whole && i < bytes / GRANULE; i++) {
        mapping *m = mapping_at[granule_of(at) + i];
        if (m) remove_mapping_locked(m);
    }
    pthread_mutex_unlock(&mutex);
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access,
                        size_t count)
{
    pthread_mutex_lock(&mutex);
    const bool whole = count_mapped(at, bytes) == bytes;
    for (size_t i = 0; whole && i < bytes / GRANULE; i++) {
        mapping *m = mapping_at[granule_of(at) + i];
        if (m->begin != at + i * GRANULE) continue;
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
    const uintptr_t offset = (uintptr_t)p - (uintptr_t)arena;
    return arena && offset < (uintptr_t)ARENA_GRANULES * GRANULE ? mapping_at[offset / GRANULE]
                                                                 : NULL;
}

void emulator_virtual(int *num_allocations, int *num_reservations)
{
    *num_allocations = *num_reservations = 0;
    pthread_mutex_lock(&mutex);
    for (const allocation *a = allocations; a; a = a->next) ++*num_allocations;
    for (size_t i = 0; i < ARENA_GRANULES; i++) *num_reservations += reserved[i] > 0;
    pthread_mutex_unlock(&mutex);
}

bool can_access(const void *p)
{
    const mapping *m = mapping_of(p);
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
            : error == CUDA_ERROR_NOT_PERMITTED ? "operation not permitted"
            : error == CUDA_ERROR_NOT_SUPPORTED ? "operation not supported"
                                                : "operation failed";
    return CUDA_SUCCESS;
}
