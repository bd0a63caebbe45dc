/* SPDX-License-Identifier: Apache-2.0 */
/* Reads plans on the device, and receives records while a plan is made.
 *
 * A plan is in device memory. PlanView contains a copy of its header, which has been checked,
 * and pointers to its arrays (rules/device_layout.h). A *record* is a list of a token's slots
 * on one rank, in ascending order of k. The token's own rank sends the record to the rank that
 * has these slots. With layout FLAT, a record contains the token's local experts there instead
 * (plan/flat.cuh). A record has at most top_k stamped words, which are valid only in the
 * running epoch. Its last word has the flag RECORD_LAST. The planner of the token's rank stores
 * the record, and a warp of the receiving rank polls it. */
#ifndef EPIC_PLAN_VIEW_CUH
#define EPIC_PLAN_VIEW_CUH

#include "cuda/net/operation.cuh"

/* Returns how many slots of its receive buffer this rank may use; 0: no limit. This is the
 * lower of two limits: job.capacity (0: no limit) and, if the caller passed it in device
 * memory, *job.capacity_limit. */
static __device__ __forceinline__ int32_t read_capacity(const p2p_plan_job &job)
{
    if (job.capacity_limit == NULL) return job.capacity;
    const int32_t limit = max(*job.capacity_limit, 1);
    return job.capacity ? min(job.capacity, limit) : limit;
}

/* Flag in the last word of a record. In a word of the array `counts` (plan/counts.cuh), this
 * bit means that the input of the sending rank is wrong. */
#define RECORD_LAST 0x80000000u
/* Value of the first word of a record if no choice of the token goes to the receiving rank. In
 * backend `hosts` without lists (plan/record_lists.cuh), unused words at the end of a record
 * also have this value. */
#define RECORD_ABSENT 0x7fffffffu
/* Value of a word of a record if the plan is invalid: the choice goes to the receiving rank,
 * but has no slot there. The sender may already have sent the token's row. So the receiving
 * rank must receive the row, and then discards it. */
#define RECORD_DISCARD 0x7ffffffeu

/* Returns the bit mask of the lanes below this lane. */
__device__ __forceinline__ uint32_t lanes_below()
{
    return (1u << lane_id()) - 1;
}

/* ----------------------------------------------------------------------------- reading ---- */

/* number of words that each lane loads when one warp loads the whole header of a plan */
#define HEADER_LANE_WORDS ((int)((sizeof(device_plan_header) / 4 + WARP - 1) / WARP))

/* A plan that a kernel reads. The struct is in shared memory. The arrays are in the plan's
 * memory. */
struct PlanView {
    device_plan_header header;
    /* the plan's arrays, which src/rules/device_layout.h describes */
    const int32_t *slab_begin, *rank_of, *records;
    /* [1 << slab_bits]: for each local expert, the padding slots at the end of its slab (the
     * range of its slots). Entries after the last local expert are {0, 0}. */
    const device_padding *padding;
    /* 2^slab_bits is the number of local experts, rounded up to a power of two */
    int32_t slab_bits;
    int32_t most_tokens; /* the largest number of tokens that any rank has */
    /* 1: the plan is undamaged, was made for this rank, and fits the layer and the number of
     * tokens of this call */
    uint32_t is_valid;
};

/* Returns where a record begins in the plan's array of records: the index of its first element.
 * The record describes `token`, a token of `rank`. */
__device__ __forceinline__ int64_t record_index(const p2p_self &self, int rank, int32_t token,
                                                int top_k)
{
    return ((int64_t)rank * self.max_tokens + token) * top_k;
}

/* Returns the checksum of a plan's header. Lane n passes the header's words n, n + 32, and so
 * on. Called by one warp. */
static __device__ uint32_t header_checksum(const uint32_t (&words)[HEADER_LANE_WORDS])
{
    uint32_t sum = 0;
#pragma unroll
    for (int n = 0; n < HEADER_LANE_WORDS; n++) {
        const int i = n * WARP + lane_id();
        if (i < (int)offsetof(device_plan_header, sum) / 4)
            sum += device_header_share(words[n], (uint32_t)i);
    }
    return __reduce_add_sync(ALL_LANES, sum);
}

/* Returns whether the plan was made for the layer of this call. Also returns true if the call
 * has no layer (layer_hashes[0] is 0). */
__device__ __forceinline__ bool is_plan_of_layer(const device_plan_header &h,
                                                 const p2p_self &self)
{
    return !self.layer_hashes[0] || h.layer_hash == self.layer_hashes[0] ||
           h.layer_hash == self.layer_hashes[1];
}

/* Returns the id that plans of this group have in the given generation (a period without a
 * change of members). The id depends on the generation, so a plan of an earlier generation is
 * rejected. self.group_id alone would not suffice: a CUDA graph that was captured in an earlier
 * generation still contains the group_id of epic_open. */
__device__ __forceinline__ uint64_t plan_group_id(const p2p_self &self, uint32_t generation)
{
    return self.group_id + (WITH_VACANT_SEATS ? generation * 0x9e3779b97f4a7c15ull : 0);
}

/* Returns whether the header's fields are in range and fit this rank. This must be checked
 * because a plan is in the caller's memory, which can contain any bytes. `plan_bytes`: size of
 * that memory. `generation`: the group's current generation. Called by one warp. */
static __device__ bool is_header_valid(const device_plan_header &h, const p2p_self &self,
                                       int64_t plan_bytes, uint32_t generation)
{
    bool fits = h.magic == DEVICE_PLAN_MAGIC && h.group_id == plan_group_id(self, generation) &&
                h.layout <= EPIC_FLAT && h.bytes <= plan_bytes && h.rank == self.rank &&
                h.num_ranks == self.num_ranks && h.max_tokens == self.max_tokens &&
                h.top_k >= 1 && h.top_k <= DEVICE_MAX_TOP_K &&
                float_stride((int)h.top_k) * self.max_tokens <= self.at.choices &&
                (!MANY_RANKS || (int64_t)h.top_k <= self.at.round->top_k) &&
                h.num_experts >= 1 && h.num_experts <= DEVICE_MAX_EXPERTS && h.alignment >= 1 &&
                h.owned >= 0 && h.owned <= (int32_t)h.num_experts && h.leaves >= 1 &&
                h.num_logical <= h.num_experts;
    for_each_group(self, [&](int first) {
        const int q = first + lane_id();
        if (q < self.num_ranks)
            fits = fits && h.tokens_of[q] >= 0 && h.tokens_of[q] <= self.max_tokens &&
                   h.rank_at[q] < self.num_ranks;
    });
    return __all_sync(ALL_LANES, fits) != 0;
}

/* Sets the pointers to the plan's arrays. */
static __device__ void set_plan_pointers(PlanView &view, const uint8_t *plan,
                                         const p2p_self &self)
{
    const device_plan_header &h = view.header;
    const device_plan_layout at =
        device_plan_layout_of(self.num_ranks, self.max_tokens, h.num_experts, h.top_k);
    view.slab_begin = (const int32_t *)(plan + at.slab_begin);
    view.padding = (const device_padding *)(plan + at.padding);
    view.rank_of = (const int32_t *)(plan + at.rank_of);
    view.records = (const int32_t *)(plan + at.records);
}

/* Reports to the host why this call cannot use the plan. is_intact: true if the plan is
 * undamaged. The reason is then that the plan was made for another layer or number of tokens.
 * Called by one thread. */
static __device__ __noinline__ void report_bad_plan(const p2p_self &self,
                                                    const device_plan_header &h, bool is_intact,
                                                    int32_t num_tokens)
{
    const p2p_fault fault = !is_intact                  ? P2P_FAULT_PLAN
                            : is_plan_of_layer(h, self) ? P2P_FAULT_TOKENS
                                                        : P2P_FAULT_LAYER;
    if (self.operation == EPIC_OP_NONE) return;
    const p2p_control *control = (const p2p_control *)(self.heap[self.rank] + self.at.control);
    p2p_notice notice = {EPIC_EINVAL,
                         epoch_after(load_relaxed(&control->epoch)),
                         (uint32_t)fault,
                         self.rank,
                         {num_tokens, h.tokens_of[self.rank], self.operation, 0}};
    report_data_error(self, notice);
}

/* Value of num_tokens for operations that have no tokens, for example allreduce/replicas.cu.
 * They accept plans with any number of tokens. */
#define ANY_TOKENS (-1)

/* The data that load_header() loads. */
struct LoadedHeader {
    uint32_t words[HEADER_LANE_WORDS]; /* lane n has the header's words n, n + 32, ... */
    uint32_t generation;               /* the group's current generation */
};

/* Loads the header of the plan at `plan`. If the plan's memory is smaller than a header, all
 * words are 0. Called by one warp. */
__device__ __forceinline__ void load_header(LoadedHeader &header, const uint8_t *plan,
                                            int64_t plan_bytes, const p2p_self &self)
{
    const int count = plan_bytes < (int64_t)sizeof(device_plan_header)
                          ? 0
                          : (int)(sizeof(device_plan_header) / 4);
#pragma unroll
    for (int n = 0; n < HEADER_LANE_WORDS; n++) {
        const int i = n * WARP + lane_id();
        header.words[n] = i < count ? __ldcg((const uint32_t *)plan + i) : 0;
    }
    header.generation = WITH_VACANT_SEATS ? load_relaxed(&group_words(self)->generation) : 0;
}

/* Checks the header that load_header() has loaded, copies it into the view, and sets the other
 * members of the view. `num_tokens`: number of tokens of this call, or ANY_TOKENS. With
 * `reports`, reports a bad plan to the host. Called by one warp; a barrier must follow before
 * other warps read the view. */
static __device__ void view_plan(PlanView &view, const LoadedHeader &header,
                                 const uint8_t *plan, int64_t plan_bytes, const p2p_self &self,
                                 int32_t num_tokens, bool reports = true)
{
#pragma unroll
    for (int n = 0; n < HEADER_LANE_WORDS; n++)
        if (n * WARP + lane_id() < (int)(sizeof(device_plan_header) / 4))
            ((uint32_t *)&view.header)[n * WARP + lane_id()] = header.words[n];
    const uint32_t sum = header_checksum(header.words);
    __syncwarp();
    const device_plan_header &h = view.header;
    const bool fits = is_header_valid(h, self, plan_bytes, header.generation),
               is_intact = sum == h.sum && fits;
    int32_t tokens = lane_id() < self.num_ranks ? h.tokens_of[lane_id()] : 0;
    for (int q = WARP + lane_id(); MANY_RANKS && q < self.num_ranks; q += WARP)
        tokens = max(tokens, h.tokens_of[q]);
    const int32_t most = __reduce_max_sync(ALL_LANES, tokens);
    if (lane_id() == 0) {
        view.most_tokens = most;
        view.is_valid = is_intact && is_plan_of_layer(h, self) &&
                        (num_tokens == ANY_TOKENS || h.tokens_of[self.rank] == num_tokens);
        if (!view.is_valid) {
            if (blockIdx.x == 0 && reports) report_bad_plan(self, h, is_intact, num_tokens);
            view.header.id = 0;
            view.header.result = EPIC_EINVAL;
        }
        set_plan_pointers(view, plan, self);
        view.slab_bits = device_slab_bits(h.owned);
    }
}

/* Reads the plan at `plan` into the view. If the plan is damaged, or was made for another layer
 * or number of tokens, sets is_valid and header.id to 0, and header.result to EPIC_EINVAL. With
 * `reports`, also reports the bad plan to the host. Called by all threads of a CTA. */
static __device__ void read_plan(PlanView &view, const uint8_t *plan, int64_t plan_bytes,
                                 const p2p_self &self, int32_t num_tokens, bool reports = true)
{
    if (threadIdx.x < WARP) {
        LoadedHeader header;
        load_header(header, plan, plan_bytes, self);
        view_plan(view, header, plan, plan_bytes, self, num_tokens, reports);
    }
    __syncthreads();
}

/* Does the work of read_plan() and begin_operation() faster: the first warp reads the plan
 * while the second warp reads the state of the group. The id of the plan is the `mark`. */
static __device__ bool read_plan_and_begin(PlanView &view, OpState &op, const uint8_t *plan,
                                           int64_t plan_bytes, const p2p_self &self,
                                           int32_t num_tokens, int32_t num_rows)
{
    bool is_intact = true;
    if (self.operation == EPIC_OP_NONE) return false;
    if (threadIdx.x < WARP) {
        LoadedHeader header;
        load_header(header, plan, plan_bytes, self);
        view_plan(view, header, plan, plan_bytes, self, num_tokens);
        if (lane_id() == 0) op.signature = signature_with(self, (uint32_t)view.header.id);
    } else if (threadIdx.x < 2 * WARP) {
        is_intact = open_operation(op, self, num_tokens, 0, num_rows);
    }
    return start_operation(op, self, is_intact);
}

/* Waits until all ranks have announced how many rows their receive buffers have. Returns true
 * if each rank's buffer has at least as many rows as the plan has slots on that rank. If a
 * buffer has too few rows and `reports` is true, reports the first such rank to the host. Also
 * returns true if the group has failed, because that error is reported elsewhere. Any thread
 * may call the function. */
static __device__ __noinline__ bool check_rows(const p2p_self &self, const OpState &op,
                                               const volatile device_plan_header *h,
                                               bool reports)
{
    for (int q = 0; q < self.num_ranks; q++) {
        if (is_vacant(op, q)) continue;
        const int32_t needed = h->slots_of[q];
        const uint64_t *announced =
            announcement_words(op, word_base(op, q), q) + P2P_ANNOUNCED_ROWS;
        uint64_t word = 0;
        if (!wait_thread(op, q, P2P_PHASE_ARRIVE, [&] {
                word = load_relaxed(announced);
                return is_stamped(op, word);
            }))
            return true;
        const int32_t rows = (int32_t)(uint32_t)word;
        if (needed <= rows) continue;
        if (reports)
            report_data_error(self, {EPIC_EOVERFLOW,
                                     op.epoch,
                                     P2P_FAULT_ROWS,
                                     q,
                                     {rows, needed, self.operation, 0}});
        return false;
    }
    return true;
}

/* Returns whether every rank's receive buffer has at least as many rows as the plan has slots
 * on that rank. Also returns true if the group has failed, because other waits of the caller
 * report the failure. Called by one warp. */
__device__ __forceinline__ bool have_all_rows(const p2p_self &self, const OpState &op,
                                              const device_plan_header &h)
{
    bool enough = true;
    for_each_group(self, [&](int first) {
        const int q = first + lane_id();
        int32_t rows = 0;
        enough =
            enough && (!read_group_announcement(self, op, first, P2P_ANNOUNCED_ROWS, rows) ||
                       __all_sync(ALL_LANES, q >= self.num_ranks || h.slots_of[q] <= rows));
    });
    return enough;
}

/* Called by all threads of `ctas` CTAs, after their last store. Returns true only in the CTA
 * that calls it last. This CTA may then overwrite what the other CTAs have stored. */
static __device__ bool is_last_cta_to_end(OpState &op, int ctas)
{
    if (threadIdx.x == 0) {
        __threadfence();
        op.last = atomicAdd(&control_of(op)->ended, 1u) == (uint32_t)ctas - 1;
        if (op.last) control_of(op)->ended = 0;
    }
    __syncthreads();
    return op.last != 0;
}

/* Called by all threads of all CTAs if the receive buffer of a rank has too few rows. Returns
 * true only in the CTA that calls it last. This CTA also reports that rank to the host. */
static __device__ bool is_last_cta_of_overflow(OpState &op, const device_plan_header &h)
{
    if (is_last_cta_to_end(op, (int)gridDim.x))
        (void)check_rows(*op.self, op, &h, threadIdx.x == 0);
    return op.last != 0;
}

/* ------------------------------------------------------------------- receiving records ---- */

/* Returns the address, in this rank's heap or net inbox, of the record (top_k words) that rank
 * `source` sends about its token `token`. `self` is *op.self; it is a parameter because loading
 * op.self would take longer. */
__device__ __forceinline__ const uint64_t *
record_address(const p2p_self &self, const OpState &op, int source, int64_t token, int top_k)
{
    return (const uint64_t *)(word_base(op, source) + self.at.records) +
           ((int64_t)epoch_parity(op) * self.num_ranks +
            source_number(self, self.rank, source)) *
               p2p_index_choices(&self.at) +
           RECORD_INDEX(op, token) * top_k;
}

/* Waits for up to 32 words of a record, one per lane, from word `chunk` * 32 on. `words`:
 * address of the record, which rank `source` sends about one of its tokens. `word`: this lane's
 * word, which the caller has loaded early. If the word had not arrived, the function loads it
 * again. `slot` becomes the slot (FLAT: local expert) that the word contains, RECORD_DISCARD,
 * or -1 if the record has no slot for this lane. `more` becomes true if the record may have
 * words after these 32. Called by one warp. Returns false if the group has failed. */
__device__ __forceinline__ bool receive_record(const OpState &op, const uint64_t *words,
                                               int top_k, int chunk, int source, uint64_t word,
                                               int32_t &slot, bool &more)
{
    const int lane = lane_id(), count = min(WARP, top_k - chunk * WARP);
    uint32_t last_words = 0;
    bool has_polled = false;
    const bool ok = wait_warp(op, record_sender(*op.self, source), P2P_PHASE_RECORD, [&] {
        if (has_polled) word = lane < count ? load_relaxed(words + chunk * WARP + lane) : 0;
        has_polled = true;
        const bool has_arrived = lane < count && is_stamped(op, word);
        const uint32_t arrived = __ballot_sync(ALL_LANES, has_arrived);
        last_words = __ballot_sync(ALL_LANES, has_arrived && ((uint32_t)word & RECORD_LAST));
        /* `hosts` must wait for all words of a record; store_records() gives the reason */
        if (HOSTS && top_k <= WARP && !relays_words(*op.self) && __popc(arrived) < count)
            return false;
        const uint32_t needed = last_words      ? (2u << (__ffs(last_words) - 1)) - 1
                                : count == WARP ? ALL_LANES
                                                : (1u << count) - 1;
        return (arrived & needed) == needed && (last_words || (chunk + 1) * WARP < top_k);
    });
    const int last = last_words ? __ffs(last_words) - 1 : WARP;
    const uint32_t value = (uint32_t)word & ~RECORD_LAST;
    slot = ok && lane <= last && lane < count && value != RECORD_ABSENT ? (int32_t)value : -1;
    more = !last_words;
    return ok;
}

#endif
