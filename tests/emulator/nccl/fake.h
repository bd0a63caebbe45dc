/* SPDX-License-Identifier: Apache-2.0 */
/* A small NCCL for the emulator, whose ranks are threads of one process. It is a library of its
 * own, as NCCL is. The functions nccl* have NCCL's names and meanings. */
#ifndef EPIC_FAKE_NCCL_H
#define EPIC_FAKE_NCCL_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

struct ncclComm;

enum { FAKE_SYSTEM_ERROR = 2, FAKE_INVALID = 4, FAKE_REMOTE_ERROR = 6, FAKE_IN_PROGRESS = 7 };

/* How a communicator behaves. Zeros: like an NCCL that works. */
typedef struct fake_behavior {
    int num_ranks;       /* not 0: the number that ncclCommCount returns */
    int state;           /* the result that ncclCommGetAsyncError reports */
    int polls_to_finish; /* reports ncclInProgress this often, then `state` */
    int gather_result;   /* not 0: ncclAllGather returns it and does nothing */
    bool is_unblocking;  /* ncclAllGather returns ncclInProgress, twice reported as the state */
    bool waits_in_call;  /* ncclAllGather returns when all ranks have called it, not before */
    bool has_other_data; /* ncclAllGather stores other bytes for rank 1 */
} fake_behavior;

/* Changes the behaviour of a communicator that no other thread uses. */
void fake_nccl_behave(struct ncclComm *comm, const fake_behavior *behavior);

int ncclCommInitAll(struct ncclComm **comms, int num_ranks, const int *devices);
int ncclCommDestroy(struct ncclComm *comm);
int ncclCommAbort(struct ncclComm *comm);
int ncclGetVersion(int *version);
const char *ncclGetErrorString(int result);
int ncclCommGetAsyncError(struct ncclComm *comm, int *state);
int ncclCommCount(const struct ncclComm *comm, int *count);
int ncclCommUserRank(const struct ncclComm *comm, int *rank);
int ncclCommCuDevice(const struct ncclComm *comm, int *device);
int ncclAllGather(const void *send, void *recv, size_t count, int type, struct ncclComm *comm,
                  cudaStream_t stream);

#endif
