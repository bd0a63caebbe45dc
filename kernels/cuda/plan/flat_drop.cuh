/* SPDX-License-Identifier: Apache-2.0 */
/* Decides which choices are dropped if a rank has too few slots. A *choice* is a token and one
 * of its top_k experts. All experts of a rank get the same *keep limit*: the maximum number of
 * choices that each of them may keep. It is the largest number for which the rank's slots
 * suffice.
 *
 *   EXPERT_MAJOR   the number of slots that a rank needs depends only on the loads of its
 *                  experts. Every rank has all loads, so it computes all limits by itself
 *                  (find_keep_limit)
 *   FLAT           a rank needs one row for each token of which its experts keep a choice. The
 *                  loads do not show how many such tokens there are. So each rank tries a
 *                  limit, counts the rows that its own tokens need with this limit, and
 *                  exchanges the counts with all ranks. The ranks repeat this as a bisection
 *                  (find_flat_keep_limits)
 *
 * With FLAT only one CTA per rank makes the plan, so that it sees all choices of the rank in
 * order. The ranks exchange the counts in stamped words (valid only in the running epoch),
 * which also contain the index of the repetition. Libraries for many ranks exchange them as in
 * plan/owner_exchange.cuh. With few ranks, each rank sends its counts to all ranks. In backend
 * `p2p`, even and odd repetitions then use different words. Two sets of words are enough: a rank sends the words of repetition n + 2
 * only after it has received the words of repetition n + 1 from all ranks. Every rank sends the
 * words of repetition n + 1 only after it has read the words of repetition n. So no rank
 * overwrites a word that another rank has not read. */
#ifndef EPIC_FLAT_DROP_CUH
#define EPIC_FLAT_DROP_CUH

#include "cuda/plan/flat.cuh"
#include "cuda/plan/keep_by_k.cuh"
#include "cuda/plan/owner_exchange.cuh"

/* Returns whether the layer may drop choices. */
__device__ __forceinline__ bool layer_drops(const p2p_plan_job &job)
{
    return job.layer.overflow == EPIC_OVERFLOW_DROP;
}

/* Returns the number of choices that an expert keeps. This is the smallest of three numbers:
 * its load (number of choices), the keep limit of its rank, and its quota (expert_capacity). */
__device__ __forceinline__ int32_t num_kept(const Planner &p, const p2p_plan_job &job,
                                            int expert)
{
    return min(p.load[expert],
               min(p.keep_limit[p.owner[expert]], expert_quota(p, job, expert)));
}

/* Returns 0 if the expert keeps choice k of a token, otherwise the reason why it drops the
 * choice (EPIC_FATE_*). `warp_position`: number of choices of the expert that the warp had
 * counted before (plan/counts.cuh). */
__device__ __forceinline__ int32_t fate_of_choice(const Planner &p, const p2p_plan_job &job,
                                                  int expert, int k, int32_t warp_position)
{
    const int32_t position =
        keep_position_of(p, job, num_tallies(job, true), expert, k, warp_position);
    if (position < num_kept(p, job, expert)) return 0;
    return position >= expert_quota(p, job, expert) ? EPIC_FATE_EXPERT_FULL
                                                    : EPIC_FATE_RANK_FULL;
}

/* Counts the rows that this warp's tokens need on each rank with the limits p.keep_limit.
 * (p.keep_limit[q] limits how many choices each expert of rank q keeps.) Reads the
 * warp_position of each choice from `warp_positions`, and writes its warp_row to `warp_rows`
 * (plan/counts.cuh). */
static __device__ void count_kept_rows(Planner &p, const p2p_plan_job &job,
                                       const int32_t *warp_positions, int32_t *warp_rows)
{
    const TokenLanes lanes(job.layer.top_k);
    const TokenRange range = range_of_warp(p, job);
    const int top_k = job.layer.top_k, experts = job.layer.num_experts;
    int32_t *tally =
        p.tally + threadIdx.x / WARP * num_tallies(job, true) + num_choice_tallies(job);
    RankMask seen = no_ranks();
    if ((int)threadIdx.x / WARP >= p.num_warps) return;
    for_each_group(job.self, [&](int first) {
        if (first + lane_id() < job.self.num_ranks) tally[first + lane_id()] = 0;
    });
    __syncwarp();
    for (int t = range.begin; t < range.end; t += lanes.tokens_at_once)
        for (int chunk = 0; chunk < lanes.num_chunks; chunk++) {
            const int token = t + lanes.token, k = lanes.k + chunk * WARP;
            const bool in = lanes.has_choice && token < range.end && k < top_k;
            const int64_t choice = in ? (int64_t)token * top_k + k : 0;
            const int64_t id = in ? planned_id<PLAN_DROPS_OR_REPLICAS>(job, choice) : -1;
            int32_t owner = -1;
            if (id >= 0 && id < experts &&
                fate_of_choice(p, job, (int)id, k, warp_positions[choice]) == 0)
                owner = p.owner[id];
            const int32_t warp_row = count_rows(tally, lanes, owner, chunk, seen);
            if (in) warp_rows[choice] = warp_row;
        }
}

/* Returns the address in `heap` of the words that `rank` sends in repetition number `search` of
 * the bisection. Word d contains the number of rows that the tokens of `rank` need on rank
 * d. */
__device__ __forceinline__ uint64_t *search_words(const p2p_self &self, const OpState &op,
                                                  uint8_t *heap, int rank, int search)
{
    return (uint64_t *)(heap + self.at.searches) +
           (((int64_t)epoch_parity(op) * self.num_ranks + rank) * P2P_SEARCHES +
            search % P2P_SEARCHES) *
               DEVICE_MAX_RANKS;
}

/* Number of bits of the row count in a word of search_words(). The higher bits contain the
 * index of the repetition. 24 bits suffice because a rank has at most 2^20 tokens
 * (p2p_group_device()). */
#define SEARCH_ROW_BITS 24

/* Sets the tallies of the warps for rank d to the sums of the tallies of earlier warps. Returns
 * the sum of all warps: the number of rows that this rank's tokens need on rank d. Called by
 * one thread. */
__device__ __forceinline__ int32_t add_warp_tallies(Planner &p, const p2p_plan_job &job, int d)
{
    int32_t sum = 0;
    for (int w = 0; w < p.num_warps; w++) {
        int32_t *tally = p.tally + w * num_tallies(job, true) + num_choice_tallies(job) + d;
        const int32_t count = *tally;
        *tally = sum;
        sum += count;
    }
    return sum;
}

/* Counts the rows that this rank's tokens need on each rank with the limits p.keep_limit, and
 * exchanges the counts with all ranks. Sets p.needed_rows (rows for the tokens of all ranks)
 * and p.rows_before_cta (rows for the tokens of lower ranks). `search`: index of this
 * repetition. Called by all threads of the CTA; thread d handles the rows of rank d. Returns
 * false if the group has failed. */
static __device__ bool count_needed_rows(Planner &p, const p2p_plan_job &job, const OpState &op,
                                         int search)
{
    const p2p_self &self = job.self;
    const int choices = num_choice_tallies(job), tallies = num_tallies(job, true);
    const device_plan_layout layout = device_plan_layout_of(
        self.num_ranks, self.max_tokens, job.layer.num_experts, job.layer.top_k);
    const int d = threadIdx.x;
    bool ok = true;
    count_kept_rows(p, job, (const int32_t *)(job.plan + layout.fate),
                    (int32_t *)(job.plan + layout.rank_of));
    __syncthreads();
    if (MANY_RANKS)
        return exchange_needed_rows(p, op, search,
                                    d < self.num_ranks ? add_warp_tallies(p, job, d) : 0);
    if (d < self.num_ranks) {
        int32_t sum = 0, low = 0, all = 0;
        for (int w = 0; w < p.num_warps; w++) {
            const int32_t count = p.tally[w * tallies + choices + d];
            p.tally[w * tallies + choices + d] = sum;
            sum += count;
        }
        for (int i = 1; i <= self.num_ranks; i++) {
            const int q = wrap_rank(self.rank + i, self.num_ranks);
            if (is_vacant(op, q)) continue;
            store_relaxed(search_words(self, op, self.heap[q], self.rank, search) + d,
                          stamp_word(op, (uint32_t)search << SEARCH_ROW_BITS | (uint32_t)sum));
            if (HOSTS)
                post_put(op, q, search_words(self, op, self.heap[q], self.rank, search) + d, 8);
        }
        for (int q = 0; q < self.num_ranks && ok; q++) {
            if (is_vacant(op, q)) continue;
            const uint64_t *from = search_words(self, op, inbox_base(op, q), q, search) + d;
            uint64_t word = 0;
            ok = wait_thread(op, q, P2P_PHASE_COUNTS, [&] {
                word = load_relaxed(from);
                return is_stamped(op, word) &&
                       (uint32_t)word >> SEARCH_ROW_BITS == (uint32_t)search;
            });
            const int32_t rows = (int32_t)(word & ((1u << SEARCH_ROW_BITS) - 1));
            if (q < self.rank) low += rows;
            all += rows;
        }
        p.rows_before_cta[d] = low;
        p.needed_rows[d] = all;
    }
    return __syncthreads_and(ok) != 0;
}

/* For each rank, finds by bisection the largest p.keep_limit with which the rank needs no more
 * rows than its capacity. All ranks bisect together, because each repetition needs the counts
 * of all ranks. The last repetition counts once more with the final limits, so that
 * p.needed_rows and p.rows_before_cta are correct for these limits. Called by all threads of
 * the CTA; thread d handles rank d. Returns false if the group has failed. */
static __device__ __noinline__ bool find_flat_keep_limits(Planner &p, const p2p_plan_job &job,
                                                          const OpState &op)
{
    const int experts = job.layer.num_experts, d = threadIdx.x;
    const bool mine = d < job.self.num_ranks;
    int search = 0;
    if (!count_needed_rows(p, job, op, search++)) return false;
    if (mine) {
        int32_t most = 0; /* largest load of an expert; a limit of this size drops no choice */
        for (int e = 0; e < experts; e++) most = max(most, p.load[e]);
        const bool over = p.capacity[d] && p.needed_rows[d] > p.capacity[d];
        p.limit_fits[d] = over ? 0 : 0x7fffffff;
        p.limit_fails[d] = over ? max(most, 1) : 0x7fffffff;
    }
    for (;;) {
        bool open = false;
        if (mine) {
            open = p.limit_fails[d] - p.limit_fits[d] > 1;
            p.keep_limit[d] = open ? p.limit_fits[d] + (p.limit_fails[d] - p.limit_fits[d]) / 2
                                   : p.limit_fits[d];
        }
        open = __syncthreads_and(!open) == 0;
        if (!count_needed_rows(p, job, op, search++)) return false;
        if (!open) return !MANY_RANKS || exchange_lower_rows(p, op, search);
        if (mine && p.keep_limit[d] != p.limit_fits[d])
            (p.needed_rows[d] > p.capacity[d] ? p.limit_fails : p.limit_fits)[d] =
                p.keep_limit[d];
        __syncthreads();
    }
}

#endif
