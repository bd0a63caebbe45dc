/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/p2p/fabric.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "backend/p2p/heap_memory.h"
#include "base/error.h"

/* -------------------------------------------------------------------- the GPU's domain ---- */

/* The part of NVML that this file uses. EPIC is built without nvml.h, and looks up the
 * functions by name, because a machine may have no NVML. */
enum { NVML_SUCCESS = 0, NVML_FABRIC_COMPLETED = 3 };

typedef struct fabric_info { /* nvmlGpuFabricInfo_t */
    unsigned char cluster_uuid[16];
    int status;
    unsigned clique_id;
    unsigned char state;
} fabric_info;

static struct {
    int (*init)(void);
    int (*shutdown)(void);
    int (*find_device)(const char *pci_address, void **device);
    int (*get_fabric)(void *device, fabric_info *out);
} nvml;

static const struct {
    const char *name;
    void *function; /* address of a function pointer */
} functions[] = {{"nvmlInit_v2", &nvml.init},
                 {"nvmlShutdown", &nvml.shutdown},
                 {"nvmlDeviceGetHandleByPciBusId_v2", &nvml.find_device},
                 {"nvmlDeviceGetGpuFabricInfo", &nvml.get_fabric}};

static bool has_nvml;

static void find_functions(void)
{
    void *library = NULL;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(RTLD_DEFAULT, functions[i].name);
        if (!found && !library) library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        if (!found && library) found = dlsym(library, functions[i].name);
        if (!found) return;
        /* ISO C has no cast from void * to a function */
        memcpy(functions[i].function, &found, sizeof found);
    }
    has_nvml = true;
}

/* Reads the NVLink domain of a GPU. Returns false if the GPU is in no domain. NVML reports the
 * cluster 0 for GPUs whose NVLink switches connect only one host. */
static bool read_domain(int device, epic_peer *out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    static const unsigned char no_cluster[16];
    char address[32];
    void *handle;
    fabric_info info = {0};
    pthread_once(&once, find_functions);
    if (!has_nvml || cudaDeviceGetPCIBusId(address, sizeof address, device) != cudaSuccess ||
        nvml.init() != NVML_SUCCESS)
        return false;
    const bool found = nvml.find_device(address, &handle) == NVML_SUCCESS &&
                       nvml.get_fabric(handle, &info) == NVML_SUCCESS;
    (void)nvml.shutdown();
    if (!found || info.state != NVML_FABRIC_COMPLETED || info.status != NVML_SUCCESS ||
        !memcmp(info.cluster_uuid, no_cluster, sizeof no_cluster))
        return false;
    memcpy(out->cluster, info.cluster_uuid, sizeof out->cluster);
    out->clique = info.clique_id;
    return true;
}

/* Tries to allocate memory with a fabric handle and to export the handle. */
static peer_fabric try_handle(int device)
{
    p2p_chunks chunks;
    p2p_exported_chunks exported;
    (void)cudaFree(NULL); /* cuMemCreate() needs the context that the runtime creates */
    if (!p2p_chunks_have_fabric(device)) return PEER_FABRIC_UNSUPPORTED;
    epic_result result = p2p_chunks_create(1, device, CU_MEM_HANDLE_TYPE_FABRIC, &chunks);
    if (result == EPIC_OK) result = p2p_chunks_export(&chunks, NULL, &exported);
    p2p_chunks_release(&chunks);
    return result == EPIC_OK ? PEER_FABRIC_READY : PEER_FABRIC_REFUSED;
}

void p2p_identify(epic_peer *mine)
{
    int device = 0;
    if (p2p_heap_may_be_fabric() && cudaGetDevice(&device) == cudaSuccess &&
        read_domain(device, mine))
        mine->fabric = (uint32_t)try_handle(device);
    (void)cudaGetLastError();
}

/* ---------------------------------------------------------------- which ranks can join ---- */

/* Writes to `to` why rank `rank` cannot be in one domain with rank 0. Writes "" if it can. */
static void explain_domain(const epic_peer *peers, int rank, char *to, size_t size)
{
    *to = 0;
    switch (peers[rank].fabric) {
    case PEER_FABRIC_UNSUPPORTED:
        snprintf(to, size, ", and the GPU or driver of rank %d has no fabric handles", rank);
        return;
    case PEER_FABRIC_REFUSED:
        snprintf(to, size,
                 ", and rank %d cannot create fabric handles: it needs an IMEX channel "
                 "(/dev/nvidia-caps-imex-channels/channel0)",
                 rank);
        return;
    case PEER_FABRIC_READY:
        if (!peer_has_domain_of(&peers[rank], &peers[0]))
            snprintf(to, size, ", and ranks 0 and %d are in different NVLink domains", rank);
        return;
    default:
        snprintf(to, size, ", and rank %d is in no NVLink domain", rank);
    }
}

bool p2p_fabric_joins(const epic_peer *peers, int num_ranks, char *why)
{
    char reason[160] = "";
    bool has_domain = false;
    int other = 0;
    while (other < num_ranks && p2p_same(peers[other].host, peers[0].host)) other++;
    if (other == num_ranks || peers_share_domain(peers, num_ranks)) return true;
    for (int q = 0; q < num_ranks; q++) has_domain |= peers[q].fabric != PEER_FABRIC_NONE;
    for (int q = 0; has_domain && !*reason && q < num_ranks; q++)
        explain_domain(peers, q, reason, sizeof reason);
    snprintf(why, 256, "ranks 0 and %d are %s%s: backend hosts, or gpu, joins them", other,
             peers[other].host[0] == peers[0].host[0]
                 ? "in different PID namespaces (containers)"
                 : "on different hosts",
             reason);
    return false;
}
