/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of devices, and pinned host memory: files in memory, so that other processes can map
 * them. The page after a block is not mapped. */
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "inner.h"

#define PAGE 4096
#define LEAST_REMOVED \
    (1 << 20) /* smallest number of bytes of which fill_memory() removes pages */

typedef struct block {
    uint8_t *begin;
    size_t bytes;
    int fd, device; /* fd: -1: mapped by cuMemMap() */
    enum cudaMemoryType type;
    bool is_of_pool; /* memory of cudaMallocAsync() */
    struct block *next;
} block;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static block *blocks; /* guarded by mutex, like the fields below */
static uint64_t limits[MAX_DEVICES];

/* Finds the block that contains p. The caller holds the mutex. */
static block **find_block(const void *p)
{
    block **link = &blocks;
    const uint8_t *at = p;
    while (*link && (at < (*link)->begin || at >= (*link)->begin + (*link)->bytes))
        link = &(*link)->next;
    return link;
}

static cudaError_t add_block(void **memory, int fd, size_t bytes, int device,
                             enum cudaMemoryType type)
{
    const size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    block *b = malloc(sizeof *b);
    uint8_t *p = mmap(NULL, whole + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!b || p == MAP_FAILED ||
        mmap(p, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0) ==
            MAP_FAILED) {
        if (p != MAP_FAILED) munmap(p, whole + PAGE);
        free(b);
        close(fd);
        return cudaErrorMemoryAllocation;
    }
    pthread_mutex_lock(&mutex);
    *b = (block){p, whole, fd, device, type, false, blocks};
    blocks = b;
    pthread_mutex_unlock(&mutex);
    *memory = p;
    return cudaSuccess;
}

static cudaError_t allocate_block(void **memory, size_t bytes, enum cudaMemoryType type)
{
    const int fd = memfd_create("emulated GPU", MFD_CLOEXEC);
    if (bytes == 0) bytes = 1;
    if (fd < 0) return cudaErrorMemoryAllocation;
    if (ftruncate(fd, (off_t)((bytes + PAGE - 1) / PAGE * PAGE))) {
        close(fd);
        return cudaErrorMemoryAllocation;
    }
    return add_block(memory, fd, bytes, current_device(), type);
}

static cudaError_t give_back(void *memory)
{
    if (!memory) return cudaSuccess;
    pthread_mutex_lock(&mutex);
    block **link = find_block(memory), *b = *link;
    const bool is_block = b && b->begin == memory && b->fd >= 0;
    if (is_block) *link = b->next;
    pthread_mutex_unlock(&mutex);
    if (!is_block) return cudaErrorInvalidValue;
    forget_stores(b->begin, b->bytes);
    munmap(b->begin, b->bytes + PAGE);
    close(b->fd);
    free(b);
    return cudaSuccess;
}

void add_mapping(void *memory, size_t bytes, int device)
{
    block *b = malloc(sizeof *b);
    if (!b) emulator_die("no memory for a mapping");
    pthread_mutex_lock(&mutex);
    *b = (block){memory, bytes, -1, device, cudaMemoryTypeDevice, false, blocks};
    blocks = b;
    pthread_mutex_unlock(&mutex);
}

void remove_mapping(void *memory)
{
    pthread_mutex_lock(&mutex);
    block **link = find_block(memory), *b = *link;
    *link = b->next;
    pthread_mutex_unlock(&mutex);
    forget_stores(b->begin, b->bytes);
    free(b);
}

void fill_memory(void *to, int value, size_t bytes)
{
    uint8_t *begin = to, *end = begin + bytes;
    uint8_t *first = begin + (PAGE - (uintptr_t)begin % PAGE) % PAGE,
            *last = end - (uintptr_t)end % PAGE;
    if (value != 0 || bytes < LEAST_REMOVED ||
        madvise(first, (size_t)(last - first), MADV_REMOVE)) {
        memset(to, value, bytes);
        return;
    }
    memset(begin, 0, (size_t)(first - begin));
    memset(last, 0, (size_t)(end - last));
}

uint64_t emulator_bytes(bool host)
{
    uint64_t bytes = 0;
    pthread_mutex_lock(&mutex);
    for (const block *b = blocks; b; b = b->next)
        if ((b->type == cudaMemoryTypeHost) == host) bytes += b->bytes;
    pthread_mutex_unlock(&mutex);
    return bytes;
}

void emulator_limit(int device, uint64_t bytes)
{
    pthread_mutex_lock(&mutex);
    limits[device] = bytes;
    pthread_mutex_unlock(&mutex);
}

static bool has_room(int device, size_t bytes)
{
    uint64_t taken = bytes;
    pthread_mutex_lock(&mutex);
    for (const block *b = blocks; b; b = b->next)
        if (b->type == cudaMemoryTypeDevice && b->device == device && b->fd >= 0)
            taken += b->bytes;
    const bool room = !limits[device] || taken <= limits[device];
    pthread_mutex_unlock(&mutex);
    return room;
}

bool is_known(const void *p)
{
    pthread_mutex_lock(&mutex);
    const bool known = *find_block(p) != NULL;
    pthread_mutex_unlock(&mutex);
    return known;
}

bool is_of_pool(const void *p)
{
    pthread_mutex_lock(&mutex);
    const block *b = *find_block(p);
    const bool found = b && b->is_of_pool;
    pthread_mutex_unlock(&mutex);
    return found;
}

cudaError_t cudaMalloc(void **memory, size_t bytes)
{
    if (!has_room(current_device(), bytes)) return cudaErrorMemoryAllocation;
    return allocate_block(memory, bytes, cudaMemoryTypeDevice);
}

cudaError_t cudaFree(void *memory)
{
    finish_streams(current_device());
    return give_back(memory);
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    *total = (size_t)1 << 40;
    *available = *total - emulator_bytes(false);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **memory, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    const cudaError_t error = cudaMalloc(memory, bytes);
    if (error != cudaSuccess) return error;
    pthread_mutex_lock(&mutex);
    (*find_block(*memory))->is_of_pool = true;
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream)
{
    (void)stream;
    return cudaFree(memory);
}

cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    (void)flags;
    return allocate_block(memory, bytes, cudaMemoryTypeHost);
}

cudaError_t cudaFreeHost(void *memory)
{
    return give_back(memory);
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    (void)flags;
    *device = host;
    return cudaSuccess;
}

/* CUDA does not document what it reports about memory that the current device cannot access. So
 * the emulator reports the less useful answer. */
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *p)
{
    pthread_mutex_lock(&mutex);
    const block *b = can_access(p) ? *find_block(p) : NULL;
    attributes->type = b ? b->type : cudaMemoryTypeUnregistered;
    attributes->device = b ? b->device : -2;
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

/* Finds only memory of the current device, as a GPU does. */
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr at)
{
    pthread_mutex_lock(&mutex);
    const block *b = *find_block((const void *)(uintptr_t)at);
    if (b && b->device != current_device()) b = NULL;
    if (b) {
        *base = (CUdeviceptr)(uintptr_t)b->begin;
        *bytes = b->bytes;
    }
    pthread_mutex_unlock(&mutex);
    return b ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *memory)
{
    pthread_mutex_lock(&mutex);
    const block *b = *find_block(memory);
    if (b && (b->fd < 0 || b->is_of_pool)) b = NULL;
    if (b) *handle = (cudaIpcMemHandle_t){getpid(), b->fd, (int64_t)b->bytes, b->device};
    pthread_mutex_unlock(&mutex);
    return b ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaIpcOpenMemHandle(void **memory, cudaIpcMemHandle_t handle, unsigned flags)
{
    static atomic_int opening; /* threads of this process that open a handle now */
    char path[64];
    (void)flags;
    if (handle.pid == getpid()) return cudaErrorInvalidValue; /* as on a GPU */
    if (atomic_fetch_add(&opening, 1) > 0) { /* as a GPU does if it is the same handle */
        atomic_fetch_sub(&opening, 1);
        return cudaErrorAlreadyMapped;
    }
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    atomic_fetch_sub(&opening, 1);
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)handle.pid,
             (long long)handle.fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return cudaErrorInvalidValue;
    return add_block(memory, fd, (size_t)handle.bytes, (int)handle.device,
                     cudaMemoryTypeDevice);
}

cudaError_t cudaIpcCloseMemHandle(void *memory)
{
    return give_back(memory);
}
