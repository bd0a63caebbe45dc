/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of CUDA's virtual memory API (cuMemCreate, cuMemMap), which windows may use. There an
 * allocation is mapped at an address that the program has reserved. Several allocations may be
 * mapped one after another, and then look like one: torch does this with expandable segments. A
 * *chunk* is the part of such memory that one cuMemMap() has mapped. */
#ifndef EPIC_P2P_CHUNKS_H
#define EPIC_P2P_CHUNKS_H

#include <cuda.h>

#include "backend/p2p/p2p.h"

#if defined(CUDA_VERSION) && CUDA_VERSION < 12030 /* cuda.h lacks the handles of fabrics */
#define CU_MEM_HANDLE_TYPE_FABRIC ((CUmemAllocationHandleType)8)
typedef struct CUmemFabricHandle {
    unsigned char data[64];
} CUmemFabricHandle;
#endif

/* largest number of chunks of a window: Linux sends at most 253 descriptors in one message */
#define P2P_MAX_CHUNKS 250

/* Consecutive chunks, and handles that keep their memory alive. */
typedef struct p2p_chunks {
    int num;
    int64_t bytes[P2P_MAX_CHUNKS]; /* size of each chunk */
    CUmemGenericAllocationHandle handles[P2P_MAX_CHUNKS];
} p2p_chunks;

/* The chunks of a rank, in a form that other processes can import. */
typedef struct p2p_exported_chunks {
    int32_t num, num_descriptors;
    /* File descriptors of the chunks whose type is CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, in
     * the order of the chunks. They are not a part of the message, but travel with it. */
    int descriptors[P2P_MAX_CHUNKS];
    struct {
        int64_t bytes;
        uint32_t type; /* CUmemAllocationHandleType */
        uint32_t reserved;
        CUmemFabricHandle fabric; /* if the type is CU_MEM_HANDLE_TYPE_FABRIC */
    } chunks[P2P_MAX_CHUNKS];
} p2p_exported_chunks;

/* Memory of another rank that is mapped here. */
typedef struct p2p_mapping {
    void *at;     /* NULL: nothing is mapped */
    size_t bytes; /* size of the mapped chunks; 0: a result of cudaIpcOpenMemHandle() */
} p2p_mapping;

/* Sets *base and *size to the allocation or chunk of the current device that contains `at`. CUDA
 * does not find memory of another device. Returns EPIC_ENOTSUP if there is no memory. */
epic_result p2p_find_range(const void *at, uint8_t **base, int64_t *size);
/* Returns whether the memory at this address belongs to a memory pool (cudaMallocAsync). */
bool p2p_is_of_pool(const void *at);

/* Finds the chunks of the current device that contain the range [data, data + bytes), and sets
 * *offset to the offset of `data` in the first one. If `data` is not memory of the virtual memory
 * API, sets num to 0. The caller releases the result with p2p_chunks_release(). */
epic_result p2p_chunks_find(const uint8_t *data, int64_t bytes, p2p_chunks *out,
                            int64_t *offset);
void p2p_chunks_release(p2p_chunks *chunks);
/* Sets *device to the device of the chunk that contains `at`. Also finds memory that the current
 * device cannot access. Errors: EPIC_EDEVICE. */
epic_result p2p_chunk_device(const void *at, int *device);
/* Checks that the memory is on this device, which can read and write it. `data` is the address
 * of the window in the chunks, at this offset. Errors: EPIC_ENOTSUP. */
epic_result p2p_chunks_check(const p2p_chunks *chunks, const uint8_t *data, int64_t offset,
                             int device);

/* Exports chunks for other processes. The caller closes the descriptors with
 * p2p_chunks_close(). Errors: EPIC_ENOTSUP if cuMemCreate() was called without a handle type
 * that can be exported. */
epic_result p2p_chunks_export(const p2p_chunks *chunks, const uint8_t *data,
                              p2p_exported_chunks *out);
void p2p_chunks_close(p2p_exported_chunks *exported);
/* Imports chunks that another process has exported. */
epic_result p2p_chunks_import(const p2p_exported_chunks *exported, p2p_chunks *out);

/* Maps chunks one after another at a new address, for reading and writing by this device. The
 * mapping keeps the memory alive. */
epic_result p2p_chunks_map(const p2p_chunks *chunks, int device, p2p_mapping *out);
void p2p_chunks_unmap(p2p_mapping *mapping);

#endif
