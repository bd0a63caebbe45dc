/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of CUDA's virtual memory API for tests: several allocations in consecutive ranges. */
#ifndef EPIC_TEST_VIRTUAL_MEMORY_H
#define EPIC_TEST_VIRTUAL_MEMORY_H

#include <cuda.h>
#include <stddef.h>

typedef struct virtual_memory {
    unsigned char *base;
    size_t bytes, reserved;
} virtual_memory;

/* Makes memory of `count` allocations, each of at least `each` bytes, on a device. `types`:
 * CUmemAllocationHandleType. `access`: 0: no device can access the memory. After it,
 * addresses are reserved but not mapped. Returns CUDA_SUCCESS or the first error. */
static inline CUresult virtual_make(virtual_memory *v, int count, size_t each, int types,
                                    int device, int access)
{
    const CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = (CUmemAllocationHandleType)types,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    const CUmemAccessDesc owner = {.location = properties.location,
                                   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    size_t granule = 0;
    CUdeviceptr at = 0;
    CUresult error =
        cuMemGetAllocationGranularity(&granule, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (error != CUDA_SUCCESS) return error;
    each = (each + granule - 1) / granule * granule;
    v->bytes = each * (size_t)count;
    v->reserved = v->bytes + granule;
    error = cuMemAddressReserve(&at, v->reserved, 0, 0, 0);
    if (error != CUDA_SUCCESS) return error;
    v->base = (unsigned char *)(uintptr_t)at;
    for (int i = 0; i < count; i++) {
        CUmemGenericAllocationHandle handle;
        error = cuMemCreate(&handle, each, &properties, 0);
        if (error != CUDA_SUCCESS) return error;
        error = cuMemMap(at + (size_t)i * each, each, 0, handle, 0);
        if (error != CUDA_SUCCESS) return error;
        error = cuMemRelease(handle); /* the mapping keeps the memory */
        if (error != CUDA_SUCCESS) return error;
    }
    return access ? cuMemSetAccess(at, v->bytes, &owner, 1) : CUDA_SUCCESS;
}

static inline CUresult virtual_free(virtual_memory *v)
{
    const CUdeviceptr at = (CUdeviceptr)(uintptr_t)v->base;
    const CUresult unmapped = cuMemUnmap(at, v->bytes);
    const CUresult freed = cuMemAddressFree(at, v->reserved);
    return unmapped != CUDA_SUCCESS ? unmapped : freed;
}

#endif
