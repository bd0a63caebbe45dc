/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of NCCL that epic_bootstrap_nccl calls. EPIC does not link NCCL and does not
 * include nccl.h. It calls the copy of NCCL that this process has already loaded. */
#ifndef EPIC_NCCL_H
#define EPIC_NCCL_H

#include <cuda_runtime_api.h>
#include <stddef.h>

#include "base/error.h"

/* Values of ncclResult_t and ncclDataType_t, which no release of NCCL has changed. */
enum {
    NCCL_SUCCESS = 0,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_REMOTE_ERROR = 6,
    NCCL_IN_PROGRESS = 7,
    NCCL_INT8 = 0
};

typedef struct nccl_functions {
    int (*get_version)(int *version);
    const char *(*get_error_string)(int result);
    int (*comm_get_async_error)(struct ncclComm *comm, int *result);
    int (*comm_count)(const struct ncclComm *comm, int *count);
    int (*comm_user_rank)(const struct ncclComm *comm, int *rank);
    int (*comm_cu_device)(const struct ncclComm *comm, int *device);
    int (*all_gather)(const void *send, void *recv, size_t count, int type,
                      struct ncclComm *comm, cudaStream_t stream);
} nccl_functions;

/* Finds the copy of NCCL that this process has loaded, and checks its version. Never loads a
 * copy, because a communicator belongs to the copy that created it.
 *
 * NCCL is the loaded file whose name begins with libnccl.so, or the program itself if it
 * exports NCCL's functions. If there are several copies, the environment variable EPIC_NCCL
 * names the file. The library is never closed, because a thread of the bootstrap may still be
 * in one of its functions. Errors: EPIC_ENOTSUP. */
epic_result nccl_find(nccl_functions *out);

#endif
