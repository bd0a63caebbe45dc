/* SPDX-License-Identifier: Apache-2.0 */
/* Windows and heaps may be memory of CUDA's virtual memory API (cuMemCreate, cuMemMap). A
 * program reserves addresses and maps allocations at these addresses. Several allocations that
 * are mapped one after another look like one array. torch does this with expandable segments. A
 * *chunk* is the part of such an array that one cuMemMap() has mapped. */
#ifndef EPIC_P2P_CHUNKS_H
#define EPIC_P2P_CHUNKS_H

#include <cuda.h>

#include "backend/p2p/p2p.h"

/* this cuda.h does not declare fabric handles */
#if defined(CUDA_VERSION) && CUDA_VERSION < 12030
#define CU_MEM_HANDLE_TYPE_FABRIC ((CUmemAllocationHandleType)8)
#define CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED ((CUdevice_attribute)128)
typedef struct CUmemFabricHandle {
    unsigned char data[64];
} CUmemFabricHandle;
#endif

/* maximum number of chunks of a window: Linux sends at most 253 descriptors in one message */
#define P2P_MAX_CHUNKS 250

/* Consecutive chunks, and the handles that keep the memory of these chunks alive. */
typedef struct p2p_chunks {
    int num;
    int64_t bytes[P2P_MAX_CHUNKS]; /* size of each chunk */
    CUmemGenericAllocationHandle handles[P2P_MAX_CHUNKS];
} p2p_chunks;

/* The chunks of one rank's window or heap, in a form that other processes can import. */
typedef struct p2p_exported_chunks {
    int32_t num, num_descriptors;
    /* File descriptors of the chunks whose type is CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, in
     * the order of the chunks. They are sent as control data of the message (SCM_RIGHTS), not
     * in its bytes. */
    int descriptors[P2P_MAX_CHUNKS];
    struct {
        int64_t bytes;
        uint32_t type; /* CUmemAllocationHandleType */
        uint32_t reserved;
        CUmemFabricHandle fabric; /* set if the type is CU_MEM_HANDLE_TYPE_FABRIC */
    } chunks[P2P_MAX_CHUNKS];
} p2p_exported_chunks;

/* Sets *base and *size to the address and size of the allocation or chunk that contains `at`.
 * Returns EPIC_ENOTSUP if `at` is not in memory of the current device. */
epic_result p2p_find_range(const void *at, uint8_t **base, int64_t *size);
/* Returns whether the memory at this address belongs to a memory pool (cudaMallocAsync). */
bool p2p_is_of_pool(const void *at);

/* Finds the chunks of the current device that contain the range [data, data + bytes), and sets
 * *offset to the offset of `data` in the first chunk. If `data` is not memory of the virtual
 * memory API, sets out->num to 0. The caller releases the result with p2p_chunks_release(). */
epic_result p2p_chunks_find(const uint8_t *data, int64_t bytes, p2p_chunks *out,
                            int64_t *offset);
void p2p_chunks_release(p2p_chunks *chunks);

/* Allocates at least `bytes` bytes of memory of the device `device` as one chunk. The chunk can
 * be exported as a handle of type `type`, and the caller releases it with p2p_chunks_release().
 * Errors: EPIC_ENOMEM; EPIC_ENOTSUP if the device cannot allocate memory with such a handle. */
epic_result p2p_chunks_create(int64_t bytes, int device, CUmemAllocationHandleType type,
                              p2p_chunks *out);
/* Returns whether the device and its driver have fabric handles. p2p_chunks_create() can still
 * fail, because a fabric handle also needs an IMEX channel. */
bool p2p_chunks_have_fabric(int device);
/* Lets the device `device` read and write chunks that this process has already mapped, in the
 * range [at, at + bytes). Errors: EPIC_ENOTSUP. */
epic_result p2p_chunks_allow(const void *at, size_t bytes, int device);
/* Sets *device to the device of the chunk that contains `at`. This works even if the current
 * device cannot access this memory. Errors: EPIC_EDEVICE. */
epic_result p2p_chunk_device(const void *at, int *device);
/* Checks that the chunks are on the device `device`, and that this device can read and write
 * them. `data` is the address of the window, which begins at `offset` in the first chunk.
 * Errors: EPIC_ENOTSUP. */
epic_result p2p_chunks_check(const p2p_chunks *chunks, const uint8_t *data, int64_t offset,
                             int device);

/* Exports chunks for other processes. `data` is the address of the window or heap, for error
 * texts. The caller must close the descriptors with p2p_chunks_close(). Errors: EPIC_ENOTSUP
 * if cuMemCreate() was called without a handle type that can be exported. */
epic_result p2p_chunks_export(const p2p_chunks *chunks, const uint8_t *data,
                              p2p_exported_chunks *out);
void p2p_chunks_close(p2p_exported_chunks *exported);
/* Imports chunks that another process has exported, so that p2p_chunks_map() can map them.
 * Errors: EPIC_ENOTSUP. */
epic_result p2p_chunks_import(const p2p_exported_chunks *exported, p2p_chunks *out);

/* Maps chunks one after another at a new address. Makes the new address accessible to the
 * device `device`. The mapping keeps the memory alive. */
epic_result p2p_chunks_map(const p2p_chunks *chunks, int device, p2p_mapping *out);
void p2p_chunks_unmap(p2p_mapping *mapping);

#endif
