/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/p2p/window_memory.h"

#include <string.h>

#include "base/error.h"

_Static_assert(sizeof(cudaIpcMemHandle_t) <= sizeof((p2p_window_message *)0)->handle,
               "a message has no space for a handle");

epic_result p2p_memory_allocate(epic_group *g, int64_t bytes, uint8_t **data)
{
    *data = p2p_allocate(g, (size_t)bytes);
    if (!*data)
        return epic_fail(EPIC_ENOMEM, "bytes is %lld: the GPU has no such memory; pass less",
                         (long long)bytes);
    TRY(p2p_cuda(cudaMemsetAsync(*data, 0, (size_t)bytes, g->side), "clearing a window"));
    return p2p_cuda(cudaStreamSynchronize(g->side), "clearing a window");
}

/* ----------------------------------------------------------------- memory of this rank ---- */

static epic_result check_device(const epic_group *g, const void *data)
{
    struct cudaPointerAttributes where;
    const cudaError_t error = cudaPointerGetAttributes(&where, data);
    (void)cudaGetLastError();
    if (error != cudaSuccess || where.type != cudaMemoryTypeDevice)
        return epic_fail(
            EPIC_ENOTSUP,
            "data is %p: must be memory of cudaMalloc, or memory of cuMemCreate that "
            "the GPU can access (cuMemSetAccess)",
            data);
    if (where.device == g->device) return EPIC_OK;
    return epic_fail(EPIC_ENOTSUP,
                     "data is on device %d: must be on device %d, which the context uses",
                     where.device, g->device);
}

static bool has_other_processes(const epic_group *g)
{
    for (int q = 0; q < g->num_ranks; q++)
        if (p2p_is_elsewhere(g, q)) return true;
    return false;
}

/* Returns an error if `data` is memory of a pool (cudaMallocAsync) and the group has other
 * processes or devices, because these cannot access memory of a pool. */
static epic_result check_pool(const epic_group *g, const void *data)
{
    if (g->ranks_here == g->num_ranks && !has_other_processes(g)) return EPIC_OK;
    if (!p2p_is_of_pool(data)) return EPIC_OK;
    return epic_fail(EPIC_ENOTSUP,
                     "data is %p: must be memory of cudaMalloc or cuMemCreate, so that other "
                     "GPUs and processes can access it; it is memory of a pool "
                     "(cudaMallocAsync)",
                     data);
}

/* If there are other processes, writes to *message the IPC handle of an allocation of
 * cudaMalloc. In one process no handle is needed, because other devices can access such memory
 * (p2p_heap_connect). */
static epic_result export_allocation(const epic_group *g, const void *data,
                                     p2p_window_message *message)
{
    cudaIpcMemHandle_t handle;
    if (!has_other_processes(g)) return EPIC_OK;
    const cudaError_t error =
        cudaIpcGetMemHandle(&handle, (uint8_t *)(uintptr_t)data - message->offset);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return epic_fail(
            EPIC_ENOTSUP,
            "data is %p: must be memory of cudaMalloc or cuMemCreate, so that other "
            "processes can map it; CUDA reports \"%s\" for its IPC handle",
            data, cudaGetErrorString(error));
    }
    memcpy(message->handle, &handle, sizeof handle);
    return EPIC_OK;
}

static epic_result export_chunks(const epic_group *g, const uint8_t *data,
                                 const p2p_chunks *chunks, p2p_window_message *message,
                                 p2p_exported_chunks *out)
{
    TRY(p2p_chunks_check(chunks, data, message->offset, g->device));
    message->num_chunks = (uint32_t)chunks->num;
    return has_other_processes(g) ? p2p_chunks_export(chunks, data, out) : EPIC_OK;
}

epic_result p2p_memory_export(const epic_group *g, const uint8_t *data, int64_t bytes,
                              p2p_window_message *message, p2p_exported_chunks *out)
{
    p2p_chunks chunks;
    message->at = (uint64_t)(uintptr_t)data;
    TRY(check_device(g, data));
    TRY(check_pool(g, data));
    epic_result result = p2p_chunks_find(data, bytes, &chunks, &message->offset);
    if (result == EPIC_OK)
        result = chunks.num ? export_chunks(g, data, &chunks, message, out)
                            : export_allocation(g, data, message);
    p2p_chunks_release(&chunks);
    return result;
}

/* --------------------------------------------------------------------- memory of peers ---- */

epic_result p2p_memory_map_chunks(const epic_group *g, const p2p_window_message *its,
                                  const p2p_exported_chunks *exported, p2p_mapping *out)
{
    p2p_chunks chunks;
    int64_t bytes = 0;
    for (int i = 0; i < exported->num; i++) bytes += exported->chunks[i].bytes;
    if (its->offset < 0 || its->offset > bytes || its->bytes > bytes - its->offset)
        return epic_fail(EPIC_EPEER, "its memory has %lld bytes, fewer than the window",
                         (long long)bytes);
    epic_result result = p2p_chunks_import(exported, &chunks);
    if (result == EPIC_OK) result = p2p_chunks_map(&chunks, g->device, out);
    p2p_chunks_release(&chunks);
    return result;
}

/* Finds the chunks of a window that is on another device of this process.
 * cuMemGetAddressRange() finds only memory of the current device, so this function makes the
 * owner's device current during the search. */
static epic_result find_chunks_on(const epic_group *g, int device,
                                  const p2p_window_message *its, p2p_chunks *chunks,
                                  int64_t *offset)
{
    TRY(p2p_cuda(cudaSetDevice(device), "the device of a peer's window"));
    const epic_result found =
        p2p_chunks_find((uint8_t *)(uintptr_t)its->at, its->bytes, chunks, offset);
    const cudaError_t error = cudaSetDevice(g->device);
    return found != EPIC_OK ? found : p2p_cuda(error, "the device of the context");
}

/* Makes a window of another rank of this process accessible, and sets *at to its address.
 * p2p_heap_connect() has already enabled access to all memory from cudaMalloc on the other
 * rank's device. Memory from cuMemCreate on another device must be mapped again, because its
 * owner decides which devices can access its addresses. */
static epic_result map_local(const epic_group *g, const p2p_window_message *its,
                             p2p_mapping *mapping, uint8_t **at)
{
    p2p_chunks chunks = {0};
    int64_t offset;
    int device;
    *at = (uint8_t *)(uintptr_t)its->at;
    if (!its->num_chunks) return EPIC_OK;
    TRY(p2p_chunk_device(*at, &device));
    if (device == g->device) return EPIC_OK;
    epic_result result = find_chunks_on(g, device, its, &chunks, &offset);
    if (result == EPIC_OK) result = p2p_chunks_map(&chunks, g->device, mapping);
    p2p_chunks_release(&chunks);
    if (result == EPIC_OK) *at = (uint8_t *)mapping->at + offset;
    return result;
}

static epic_result map_handle(const p2p_window_message *its, p2p_mapping *mapping)
{
    cudaIpcMemHandle_t handle;
    memcpy(&handle, its->handle, sizeof handle);
    const cudaError_t error = p2p_open_handle(&mapping->at, handle);
    if (error == cudaSuccess) return EPIC_OK;
    return epic_fail(EPIC_ENOTSUP, "CUDA cannot map its memory (%s)",
                     cudaGetErrorString(error));
}

epic_result p2p_memory_map(const epic_group *g, int peer, const p2p_window_message *its,
                           p2p_mapping *mapping, uint8_t **at)
{
    if (!p2p_is_elsewhere(g, peer)) return map_local(g, its, mapping, at);
    if (!its->num_chunks) TRY(map_handle(its, mapping));
    *at = (uint8_t *)mapping->at + its->offset;
    return EPIC_OK;
}
