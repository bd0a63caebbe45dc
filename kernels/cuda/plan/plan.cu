/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel of the operation "plan": computes the slot of every choice of all ranks.
 *
 *   in    topk_idx  [num_tokens, top_k]
 *   out   plan      header and arrays (rules/device_layout.h)
 *
 * A *choice* is a token and one of its top_k experts. A record is what a rank sends to another
 * rank about one of its tokens: the token's slots on that other rank.
 *
 *   planner CTAs     count this rank's choices, compute their slots and send the records
 *                    (plan/planner.cuh)
 *   other CTAs       receive the records that all ranks send to this rank, and copy them into
 *                    the plan; a warp copies the records of several tokens at a time. With
 *                    layout FLAT, they also copy the indices of rows
 *   last CTA         also announces the operation to the peers
 *
 *   writer           stores                           reader that waits
 *   planner CTA 0    counts, to every rank            planner CTAs of every rank
 *   planner CTAs     records, to every rank           warps that copy records there
 *
 * Counts and records are stamped words: a reader accepts a word only if it contains the running
 * epoch. So each word is its own flag, and no other memory order is needed. */
#include "cuda/common/launch.cuh"
#include "cuda/plan/record_rounds.cuh"

#define BLOCK 512

/* Layout FLAT: waits for the row words that rank `source` sends for some of its tokens, and
 * stores them in the plan. The row's index becomes element 0 of the token's record, and the
 * other elements become -1. Called by one warp, which handles the next 32 / top_k tokens from
 * first_token on (at least one). `num_tokens`: number of tokens of rank `source`. `records`:
 * the plan's array of records. Returns false if the group has failed. */
static __device__ bool store_rows(const OpState &op, const p2p_plan_job &job, int32_t *records,
                                  int source, int32_t first_token, int32_t num_tokens)
{
    const int top_k = job.layer.top_k;
    const TokenLanes lanes(top_k);
    const int32_t token = first_token + lanes.token;
    const bool in = lanes.has_choice && token < num_tokens;
    const uint64_t *from = row_word_from(job.self, op, source, in ? token : 0);
    uint64_t word = 0;
    const bool ok = wait_warp(op, record_sender(job.self, source), P2P_PHASE_RECORD, [&] {
        word = load_relaxed(from);
        return __all_sync(ALL_LANES, !in || is_stamped(op, word)) != 0;
    });
    const int32_t row = is_valid_row((uint32_t)word) ? (int32_t)(uint32_t)word : -1;
    for (int k = lanes.k; in && k < top_k; k += WARP)
        records[((int64_t)source * job.self.max_tokens + token) * top_k + k] = k ? -1 : row;
    return ok;
}

/* The kernel of the operation "plan". FEATURES is a combination of PLAN_FLAT and
 * PLAN_DROPS_OR_REPLICAS. */
template <int FEATURES>
__global__ void __launch_bounds__(BLOCK, 1)
    plan_kernel(const __grid_constant__ p2p_plan_job job)
{
    wait_for_previous_kernel();
    constexpr bool FLAT = FEATURES & PLAN_FLAT;
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    __shared__ OpState op;
    __shared__ Planner planner;
    if (!begin_operation(op, job.self, 0, job.num_tokens, read_capacity(job), 0)) return;
    if (MANY_RANKS) choose_record_rounds(job.self, op);
    bool ok = true;
    if ((int)blockIdx.x < job.planners) ok = make_plan<FEATURES>(planner, job, op, memory);
    const device_plan_layout at = device_plan_layout_of(job.self.num_ranks, job.self.max_tokens,
                                                        job.layer.num_experts, job.layer.top_k);
    /* Planner CTAs have more work. So they copy no records if at least half of all CTAs are not
     * planner CTAs. */
    const int first_cta = (int)gridDim.x >= 2 * job.planners ? job.planners : 0;
    RankNumbers tokens_of = {};
    ok = ok && (((int)blockIdx.x < first_cta && SENDS_RECORDS(op)) ||
                read_announcement(job.self, op, P2P_ANNOUNCED_TOKENS, tokens_of));
    int32_t *records = (int32_t *)(job.plan + at.records);
    int32_t *words = FLAT ? (int32_t *)(job.plan + device_locals(&at)) : records;
    const int warp = ((int)blockIdx.x - first_cta) * (BLOCK / WARP) + (int)(threadIdx.x / WARP);
    const auto keep = [&](int source, int32_t first, int32_t stop) {
        return (!FLAT || store_rows(op, job, records, source, first, stop)) &&
               store_records(op, job, words, source, first, stop);
    };
    if (!SENDS_RECORDS(op))
        move_record_rounds<FEATURES>(
            planner, job, op, ok, largest_number(tokens_of), [&](int32_t begin, int32_t end) {
                return warp < 0 ||
                       for_each_token_group(job, tokens_of, warp,
                                            ((int)gridDim.x - first_cta) * (BLOCK / WARP),
                                            begin, end, keep);
            });
    else if (ok && warp >= 0)
        for_each_token_group(job, tokens_of, warp,
                             ((int)gridDim.x - first_cta) * (BLOCK / WARP), 0, INT32_MAX, keep);
    (void)finish_operation(job.self, op, (int)gridDim.x - 1, false);
}

typedef void (*Kernel)(p2p_plan_job);

static const Kernel kernels[] = {plan_kernel<0>, plan_kernel<PLAN_FLAT>,
                                 plan_kernel<PLAN_DROPS_OR_REPLICAS>,
                                 plan_kernel<PLAN_DROPS_OR_REPLICAS | PLAN_FLAT>};

extern "C" cudaError_t p2p_load_plan(void)
{
    for (int kind = 0; kind < 4; kind++) {
        const int bytes = planner_most_bytes() +
                          (kind & PLAN_DROPS_OR_REPLICAS ? PLAN_DROPS_OR_REPLICAS_BYTES : 0);
        const cudaError_t error = cudaFuncSetAttribute(
            kernels[kind], cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

extern "C" cudaError_t p2p_launch_plan(const p2p_plan_job *job, int num_sms,
                                       cudaStream_t stream)
{
    const bool drops_or_replicas = job->layer.num_logical ||
                                   job->layer.overflow == EPIC_OVERFLOW_DROP ||
                                   job->layer.flags & EPIC_DROP_ABSENT;
    const int kind = (job->layer.layout == EPIC_FLAT ? PLAN_FLAT : 0) |
                     (drops_or_replicas ? PLAN_DROPS_OR_REPLICAS : 0);
    return launch_kernel(kernels[kind], num_sms, BLOCK, planner_bytes_with(*job), stream, *job);
}
