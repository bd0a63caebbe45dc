/* SPDX-License-Identifier: Apache-2.0 */
/* combine and dispatch_backward for few tokens (lowlat/lowlat.cuh).
 *
 *   rows  [num_rows, row_bytes], weights of their slots  ->  out [num_tokens, row_bytes]
 *
 * A partial sum is the sum of weight * row over a token's slots on one rank. A worker is a warp
 * that moves rows. Each partial sum has a writer and a reader:
 *
 *   writer   worker of an expert's rank: stores the partial sum of a token to the staging of
 *            the token's rank
 *   reader   worker of the token's rank: polls the partial sum until no word is poison (the
 *            mark of a word that has not arrived), adds it to the token's sum, and stores
 *            poison back
 *
 * A worker first sends its partial sums for the peers' tokens. Then it adds the partial sums
 * that arrive for this rank's tokens. A worker waits for nothing until it has sent all its
 * partial sums, so ranks cannot wait for each other in a circle. One warp of the last CTA (the
 * CTA with the highest blockIdx) announces the operation, and the control warp (last warp) of
 * that CTA ends the operation.
 *
 * lowlat/sum.cuh has the units of work for aligned rows whose partial sums are added in the
 * order of ranks. For unaligned rows and for sums in tree order, this kernel uses the units of
 * combine/plain.cuh. */
/* Makes waits poll longer before they sleep, for lower latency. Must be defined before the
 * first #include, because wait.cuh reads it. */
#define LOW_LATENCY 1
/* Number of workers (warps that move rows) per CTA. With the control warp, a CTA has 16 warps,
 * four per scheduler of the SM. This leaves 128 registers per thread. */
#define LOWLAT_WORKERS 15

#include "cuda/common/launch.cuh"
#include "cuda/lowlat/sum.cuh"

/* Divides the units among the workers. A unit is one piece of a token's row. For a token of a
 * peer, the worker sends this rank's partial sum. For a token of this rank (an *own unit*), the
 * worker adds the partial sums of all ranks. To balance the work, the first units of peers'
 * tokens go to the first workers, and the first own units go to the last workers. The argument
 * `own` of a function is true for own units, and false for units of peers' tokens. Own units
 * have the indices u = 0, 1, .... Units of peers' tokens are numbered separately, also from 0
 * on. */
struct CombineUnits {
    const CombineState &c;
    const CtaRange all_ctas;
    /* Index of this worker. The shuffle shows the compiler that the index is equal in all
     * lanes. */
    const int worker;

    __device__ __forceinline__ explicit CombineUnits(const CombineState &combine)
        : c(combine), all_ctas{0, (int)gridDim.x},
          worker(all_ctas.worker_index_of(__shfl_sync(ALL_LANES, (int)(threadIdx.x / WARP), 0)))
    {
    }
    /* Returns unit u. Its members `slot` and `ranks` are -1; the caller sets them. */
    __device__ __forceinline__ Unit unit_at(int u, bool own) const
    {
        const uint32_t pieces = c.shape.pieces, senders = c.job.self.num_ranks - 1;
        const uint32_t row = (uint32_t)u / pieces;
        Unit unit = {(int32_t)row, 0, (int)((uint32_t)u - row * pieces), -1, -1};
        if (own || senders == 1) return unit;
        unit.token = (int32_t)(row / senders);
        unit.role = (int)(row % senders);
        return unit;
    }
    /* Returns the index of this worker's first unit. The last worker of each CTA also checks
     * the plan, so the first own units go to all other workers. */
    __device__ __forceinline__ int first_index(bool own) const
    {
        const int back = all_ctas.num_workers() - 1 - worker;
        if (!own) return worker;
        return back >= all_ctas.ctas ? back - all_ctas.ctas
                                     : back + all_ctas.num_workers() - all_ctas.ctas;
    }
    /* Returns unit u. In each lane, `slot` is one of the token's slots on this rank, or -1. In
     * an own unit, `ranks` is, in lane k, the rank of the expert of choice k (one of the
     * token's top_k experts). `end`: number of units. If u >= end, returns an empty unit. */
    __device__ __forceinline__ Unit read_unit(int u, bool own, int end) const
    {
        if (u >= end) return {};
        Unit unit = unit_at(u, own);
        unit.slot =
            read_slot(c, own ? c.job.self.rank : peer_of_role(c, unit.role), unit.token, 0);
        if (own) unit.ranks = rank_of_choice(c, unit.token, 0);
        return unit;
    }
    /* Returns this worker's first unit. It may turn out later that this unit does not exist,
     * because the plan's header has not been checked yet, so the peers' numbers of tokens are
     * not known. is_likely becomes true if this rank has a token with the index of the unit's
     * token. The unit then probably exists, because ranks usually have equally many tokens. */
    __device__ __forceinline__ Unit read_first(bool own, bool &is_likely) const
    {
        const p2p_combine_job &job = c.job;
        is_likely = false;
        if (!own && job.self.num_ranks == 1) return {};
        Unit unit = unit_at(first_index(own), own);
        const int rank = own ? job.self.rank : peer_of_role(c, unit.role);
        is_likely = unit.token < job.num_tokens;
        if (unit.token >= job.self.max_tokens || lane_id() >= job.top_k) return unit;
        unit.slot = __ldg((const int32_t *)(job.plan + job.records_at) +
                          record_index(job.self, rank, unit.token, job.top_k) + lane_id());
        if (own)
            unit.ranks = __ldg((const int32_t *)(job.plan + job.rank_of_at) +
                               (int64_t)unit.token * job.top_k + lane_id());
        return unit;
    }
    /* Calls do_unit(unit, is_first) for each unit of this worker: for its own units if `own` is
     * true, otherwise for its units of peers' tokens. If do_unit() returns false, stops and
     * returns false. `is_loaded`: true if the caller has already read the first unit into
     * first_unit. is_first is true only in the call for a unit that the caller has read. */
    template <class Do>
    __device__ __forceinline__ bool for_each_unit(bool own, Unit first_unit, bool is_loaded,
                                                  Do do_unit) const
    {
        const int end = own ? c.job.num_tokens * c.shape.pieces
                            : c.plan.most_tokens * (c.job.self.num_ranks - 1) * c.shape.pieces;
        int u = first_index(own);
        Unit next = is_loaded ? first_unit : read_unit(u, own, end);
        for (; u < end; u += all_ctas.num_workers(), is_loaded = false) {
            Unit unit = next;
            next = read_unit(u + all_ctas.num_workers(), own, end);
            const int rank = own ? c.job.self.rank : peer_of_role(c, unit.role);
            if (__any_sync(ALL_LANES, unit.token >= c.plan.header.tokens_of[rank])) continue;
            unit.slot = clamp_slot(c, unit.slot);
            if (!do_unit(unit, is_loaded)) return false;
        }
        return true;
    }
};

/* Values of Worker::loaded. They mean, in this order: Worker::rows contains no rows, the rows
 * of the unit Worker::sent, or the rows of the unit Worker::own. */
enum { NOTHING_LOADED, SENT_LOADED, OWN_LOADED };

/* The work of one worker. The template argument Sums (QuickSums or PlainSums) loads and adds
 * rows. To save time, the worker loads its first units, and the rows of one of these units,
 * before the plan's header has been checked. It sends and stores nothing before that check. */
template <class Sums> struct Worker {
    /* sent: the first unit of a peer's token that this worker sends. own: the first unit of a
     * token of this rank for which this worker adds partial sums. */
    Unit sent = {}, own = {};
    SlotRows rows;
    int loaded = NOTHING_LOADED;
    bool is_ahead = false; /* true: read_ahead() has set `sent` and `own` */

    /* Sets `sent` and `own`, and loads the rows of one of these units. Called before the first
     * barrier of the CTA, while another warp checks the plan's header. */
    __device__ __forceinline__ void read_ahead(const CombineUnits &units)
    {
        bool sends, adds;
        is_ahead = true;
        sent = units.read_first(false, sends);
        own = units.read_first(true, adds);
        if (Sums::PLAIN || !(sends || adds)) return;
        Unit unit = sends ? sent : own;
        unit.slot = clamp_slot(units.c, unit.slot);
        /* In a valid plan, a token's slots are in the lowest lanes. If they are not, the plan
         * is invalid, and its slots must not be used as addresses. */
        if (!has_slots_in_low_lanes(unit)) return;
        loaded = sends ? SENT_LOADED : OWN_LOADED;
        Sums::load_rows(units.c, rows, unit);
    }
    /* Sends this rank's partial sums for peers' tokens, then adds the partial sums for tokens
     * of this rank. Returns false if the group has failed. */
    __device__ __forceinline__ bool run_units(const CombineUnits &units)
    {
        const CombineState &c = units.c;
        return units.for_each_unit(false, sent, is_ahead, [&](const Unit &u, bool is_first) {
            if (!is_first || loaded != SENT_LOADED) Sums::load_rows(c, rows, u);
            loaded = NOTHING_LOADED; /* from now on, each unit loads its own rows */
            Sums::send_partial(c, rows, u);
            return true;
        }) && units.for_each_unit(true, own, is_ahead, [&](const Unit &u, bool is_first) {
            if (!is_first || loaded != OWN_LOADED) Sums::load_rows(c, rows, u);
            return Sums::add_partials(c, rows, u);
        });
    }
};

/* Loads and adds aligned rows. Adds the partial sums in the order of ranks. EXACT: a row
 * consists of whole pieces. AT_ONCE: number of partial sums that a warp polls together. */
template <class ROW_, bool EXACT, int AT_ONCE> struct QuickSums {
    typedef ROW_ ROW;
    static constexpr int V = 1; /* number of 16-byte vectors per lane of a piece */
    static constexpr bool PLAIN = false;

    static __device__ __forceinline__ void load_rows(const CombineState &c, SlotRows &rows,
                                                     const Unit &u)
    {
        load_unit_rows<EXACT>(c, rows, u);
    }
    static __device__ __forceinline__ void send_partial(const CombineState &c, SlotRows &rows,
                                                        const Unit &u)
    {
        send_sum<ROW, EXACT>(c, rows, u);
    }
    static __device__ __forceinline__ bool add_partials(const CombineState &c, SlotRows &rows,
                                                        const Unit &u)
    {
        return receive_sum<ROW, EXACT, AT_ONCE>(c, rows, u);
    }
};

/* Adds rows that are not aligned, or adds partial sums in tree order. Loads no rows in
 * advance. */
template <class ROW_> struct PlainSums {
    typedef ROW_ ROW;
    static constexpr int V = 2;
    static constexpr bool PLAIN = true;

    static __device__ __forceinline__ void load_rows(const CombineState &, SlotRows &,
                                                     const Unit &)
    {
    }
    static __device__ __forceinline__ void send_partial(const CombineState &c, SlotRows &,
                                                        const Unit &u)
    {
        do_expert_unit<ROW, ROW, V, false>(c, u);
    }
    static __device__ __forceinline__ bool add_partials(const CombineState &c, SlotRows &,
                                                        const Unit &u)
    {
        return do_source_unit<ROW, ROW, V, false>(c, u);
    }
};

/* Zeroes all outputs. Called by `threads` threads, each with its own index `thread`. */
static __device__ __noinline__ void clear_outputs(const p2p_combine_job &job, int64_t thread,
                                                  int64_t threads)
{
    zero_rows(job.out, job.row_bytes, 0, job.num_tokens, thread, threads);
    zero_floats(job.choice_floats, 0, (int64_t)job.num_tokens * job.top_k, thread, threads);
}

/* Called by all threads of all CTAs if a rank's receive buffer has too few rows. The CTA that
 * calls it last reports that rank and zeroes all outputs. */
static __device__ __noinline__ void
clear_after_overflow(const p2p_combine_job &job, OpState &op, const device_plan_header &h)
{
    if (is_last_cta_of_overflow(op, h)) clear_outputs(job, threadIdx.x, LOWLAT_BLOCK);
}

/* The kernel. The template argument Sums (QuickSums or PlainSums) defines how rows are added.
 *
 *   1. The last worker of each CTA loads and checks the plan's header. The control warp (last
 *      warp) sets op, the state of the operation. The other workers load their first units and
 *      rows.
 *   2. After the first barrier of the CTA, one warp of the grid announces the operation.
 *   3. Workers send partial sums for the peers' tokens. Then they add the partial sums for this
 *      rank's own tokens. The control warp of the last CTA ends the operation.
 *   4. If the plan is invalid, or the receive buffer of a rank has too few rows, the CTAs write
 *      zeros to all outputs. */
template <class Sums>
__global__ void __launch_bounds__(LOWLAT_BLOCK, 1)
    lowlat_combine_kernel(const __grid_constant__ p2p_combine_job job)
{
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ Stride unused; /* required by CombineState, but not used by this kernel */
    /* true if every rank's receive buffer has enough rows for the plan's slots on that rank */
    __shared__ bool enough;
    const p2p_self &self = job.self;
    prefetch_params(job);
    wait_for_previous_kernel();
    if (self.operation == EPIC_OP_NONE) return;
    if (is_announcer(false)) fence_system();
    const StartState start = read_start_state(self);
    const bool checks_plan = threadIdx.x / WARP == LOWLAT_WORKERS - 1;
    if (checks_plan) {
        LoadedHeader header;
        load_header(header, job.plan, job.plan_bytes, self);
        view_plan(plan, header, job.plan, job.plan_bytes, self, job.num_tokens);
        if (lane_id() == 0)
            op.signature = self.signature ^ ((uint32_t)plan.header.id & 0x0fffffffu);
    }
    CombineState c = {job,
                      op,
                      plan,
                      unused,
                      unused,
                      NULL,
                      row_shape<Sums::V>(job.row_bytes, !Sums::PLAIN || job.aligned),
                      policy_once(),
                      0,
                      0};
    const CombineUnits units(c);
    Worker<Sums> worker;
    bool is_intact = true;
    if (is_control_warp()) {
        is_intact = open_lowlat(op, self, start, job.num_tokens, 0, job.num_rows);
        find_lowlat_boxes(op, self);
    } else if (!checks_plan) {
        worker.read_ahead(units);
    }
    if (threadIdx.x == 0) enough = true;
    if (!__syncthreads_and(is_intact)) {
        if (threadIdx.x == 0) report_aborted_wait(op);
        return;
    }
    announce_sizes(self, op, job.num_tokens, 0, job.num_rows);
    count_started_cta(self, op);
    if (is_announcer(false)) announce_start(self, op);

    const device_plan_header &h = plan.header;
    const bool moves = plan.is_valid && h.result == EPIC_OK;
    /* This copy of top_k stays in a register. job.top_k would be loaded again in each unit. */
    c.top_k = (int)h.top_k;
    if (is_control_warp()) {
        const bool good = !moves || have_all_rows(self, op, h);
        if (lane_id() == 0) enough = good;
        if (is_last_cta()) finish_lowlat(self, op, start, false);
    } else if (moves) {
        (void)worker.run_units(units);
    }
    if (!moves) clear_outputs(job, grid_thread(), grid_threads());
    end_lowlat(op);
    if (!enough) clear_after_overflow(job, op, h);
}

typedef void (*Kernel)(p2p_combine_job);

/* Properties of a job. They select the instance of the kernel template that is launched. */
struct Kind {
    /* plain: PlainSums is needed. exact: a row consists of whole pieces. two_ranks: the group
     * has at most two ranks. */
    bool plain, exact, two_ranks;
};

template <class ROW> static Kernel kernel_for(const Kind &kind)
{
    if (kind.plain) return lowlat_combine_kernel<PlainSums<ROW>>;
    if (kind.exact)
        return kind.two_ranks ? lowlat_combine_kernel<QuickSums<ROW, true, 2>>
                              : lowlat_combine_kernel<QuickSums<ROW, true, 4>>;
    return kind.two_ranks ? lowlat_combine_kernel<QuickSums<ROW, false, 2>>
                          : lowlat_combine_kernel<QuickSums<ROW, false, 4>>;
}

static Kernel kernel_of(uint32_t type, const Kind &kind)
{
    if (type == EPIC_BF16) return kernel_for<Bf16>(kind);
    return type == EPIC_F16 ? kernel_for<F16>(kind) : kernel_for<F32>(kind);
}

extern "C" cudaError_t p2p_load_lowlat_combine(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaSuccess;
    for (uint32_t type = EPIC_F32; type <= EPIC_F16; type++)
        for (int i = 0; i < 8 && error == cudaSuccess; i++)
            error = cudaFuncGetAttributes(
                &attributes,
                (const void *)kernel_of(type, {(i & 4) != 0, (i & 2) != 0, (i & 1) != 0}));
    return error;
}

extern "C" cudaError_t p2p_launch_lowlat_combine(const p2p_combine_job *job, int num_sms,
                                                 cudaStream_t stream)
{
    const Kind kind = {!job->aligned || job->tree, job->row_bytes % (WARP * 16) == 0,
                       job->self.num_ranks <= 2};
    return launch_kernel(kernel_of(job->type, kind), num_sms, LOWLAT_BLOCK, 0, stream, *job);
}
