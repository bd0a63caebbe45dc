/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of a test: threads of one process, or processes, each in one group of a CUDA backend.
 */
#ifndef EPIC_TEST_TEAM_H
#define EPIC_TEST_TEAM_H

#include "backend/p2p/p2p.h"

#define TEAM_LOWLAT_TOKENS \
    128 /* fewer than P2P_LOWLAT_TOKENS, so that a case with more is small */
/* a deadline that is never reached, even on a busy machine */
#define TEAM_LONG_MS (MANY_RANKS ? 1200000 : 150000)

typedef struct team_rank { /* the arguments of a rank of the test */
    int rank, num_ranks;
    epic_group *group;
    cudaStream_t stream;
    void *shared; /* memory of the team, the same for all ranks */
} team_rank;

typedef struct team {
    int num_ranks;
    int num_gpus;          /* rank r uses GPU r % num_gpus */
    int ranks_per_process; /* 0: all ranks are threads of this process */
    int64_t max_tokens, max_row_bytes, staging_bytes;
    /* token limit of the low-latency kernels, for example TEAM_LOWLAT_TOKENS; 0: the library's
     * limit */
    int32_t lowlat_tokens;
    uint32_t timeout_ms;
    uint32_t max_sms;           /* largest number of SMs of a rank; 0: as many as there are */
    int (*work)(team_rank *me); /* returns 0 if it succeeded */
    size_t shared_bytes;
} team;

/* Runs `work` on every rank; returns how many failed, or 1 if there is no rank or no GPU. */
int team_run(const team *t);

/* Returns the ranks per process of an argument: 0 of "threads", 1 of "processes", or a number.
 * One GPU serves about 30 processes, and 32 ranks of one process. */
int team_ranks_per_process(const char *argument);

/* Waits for all ranks of the team, on the host. */
void team_barrier(team_rank *me);

/* Ends the test as failed for all ranks, because the others would wait for a rank that has
 * given up. */
__attribute__((noreturn)) void team_stop(void);

/* Returns EPIC_TEST_MAX_TOP_K, the largest top_k of the drawn layers. 0: any. */
uint32_t team_max_top_k(void);

/* Returns the shared bytes of the running team, also before and after it runs (in the parent
 * process). */
void *team_shared(void);

#define CHECK_CUDA(call)                                       \
    do {                                                       \
        const cudaError_t check_error = (call);                \
        if (check_error != cudaSuccess) {                      \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, \
                    cudaGetErrorString(check_error));          \
            exit(1);                                           \
        }                                                      \
    } while (0)

#endif
