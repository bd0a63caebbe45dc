/* SPDX-License-Identifier: Apache-2.0 */
/* Lists the rows that a CTA must copy to slots in a direct dispatch (windows.cuh) or
 * combine_backward (combine/backward_windows.cu). Every token has at most one slot on each
 * rank. */
#ifndef EPIC_LIST_ROWS_CUH
#define EPIC_LIST_ROWS_CUH

#include "cuda/dispatch/moving.cuh"
#include "cuda/net/windows.cuh"

/* Lists rows of this rank's tokens [begin, end) in `list`. If is_remote is true, lists the rows
 * that go to peers, otherwise the rows that stay on this rank. There is one thread for each
 * choice of these tokens (a choice is a token and one of its top_k experts). Called by all
 * threads of a CTA, and ends with a barrier.
 *
 *   slot_of  [num_tokens, top_k]: slot of each choice, from the plan
 *   rows     number of rows of this rank's output
 *   each(token, k, rank, n)  called for each choice that goes to a peer (is_remote is true) or
 *                            stays on this rank (is_remote is false). rank: the rank to which
 *                            choice k of `token` goes. n: index of this choice among the
 *                            token's choices that go to this rank */
template <int THREADS, class M, class Each>
__device__ __forceinline__ void list_rows(const M &m, const p2p_self &self,
                                          const WindowState &w, RowList<THREADS> &list,
                                          const int32_t *slot_of, int32_t rows, bool is_remote,
                                          int32_t begin, int32_t end, Each each)
{
    const int i = (int)threadIdx.x, k = i % m.top_k;
    const int32_t token = begin + i / m.top_k;
    const int64_t choice = (int64_t)token * m.top_k + k;
    int32_t rank = -1, slot = -1;
    if (token < end) {
        /* This kernel may have written the plan, so loads must not use the read-only cache. */
        rank = __ldcg(m.plan.rank_of + choice);
        slot = __ldcg(slot_of + choice);
    }
    if (i == 0) list.count = 0;
    list.ranks[i] = rank;
    __syncthreads();
    int n = 0;
    for (int j = 1; j <= k; j++) n += list.ranks[i - j] == rank;
    const bool goes = rank >= 0 && (rank != self.rank) == is_remote;
    if (goes) each(token, k, rank, n);
    if (goes && n == 0 && (uint32_t)slot < (uint32_t)(is_remote ? w.rows[rank] : rows))
        list.rows[atomicAdd(&list.count, 1u)] = {token, slot, rank};
    __syncthreads();
}

#endif
