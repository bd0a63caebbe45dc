/* SPDX-License-Identifier: Apache-2.0 */
/* combine and dispatch_backward of few tokens (lowlat/lowlat.cuh).  A warp first sends its partials for the
 * peers' tokens, of all of them, then adds those of this rank's tokens: nothing that is sent waits
 * for anything.  Units are those of lowlat/sum.cuh; of rows at any address and sums in tree order those
 * of combine/plain.cuh. */
#define EAGER 1        /* before the first header: common/wait.cuh */
#define FEW_WORKERS 15 /* with the speaker four of each scheduler, which have 128 registers */

#include "cuda/common/launch.cuh"
#include "cuda/lowlat/sum.cuh"

/* What a warp does: units of the peers' tokens, then of this rank's.  The first warps begin with
 * those, the last ones with these. */
struct Units {
    const Combine &c;
    const Crew crew;
    const int worker; /* by a shuffle: so the compiler knows that lanes agree */

    __device__ __forceinline__ explicit Units(const Combine &combine)
        : c(combine), crew{0, (int)gridDim.x},
          worker(crew.worker_of(__shfl_sync(ALL_LANES, (int)(threadIdx.x / WARP), 0)))
    {
    }
    __device__ __forceinline__ Unit place(int u, bool own) const
    {
        const int senders = c.job.self.num_ranks - 1, row = u / c.shape.pieces;
        if (own) return {row, 0, u % c.shape.pieces, -1, -1};
        return {row / senders, row % senders, u % c.shape.pieces, -1, -1};
    }
    /* The warps that look at the plan come last of those that begin with own ones. */
    __device__ __forceinline__ int first(bool own) const
    {
        const int back = crew.workers() - 1 - worker;
        if (!own) return worker;
        return back >= crew.ctas ? back - crew.ctas : back + crew.workers() - crew.ctas;
    }
    __device__ __forceinline__ Unit read(int u, bool own, int end) const
    {
        if (u >= end) return {};
        Unit unit = place(u, own);
        unit.slot = read_slot(c, own ? c.job.self.rank : peer_of(c, unit.role), unit.token, 0);
        if (own) unit.ranks = rank_of(c, unit.token, 0);
        return unit;
    }
    /* The first unit, read before the plan's header has been checked.  `likely`: it is one if the
     * peers have as many tokens as this rank. */
    __device__ __forceinline__ Unit read_first(bool own, bool &likely) const
    {
        const p2p_combine_job &job = c.job;
        likely = false;
        if (!own && job.self.num_ranks == 1) return {};
        Unit unit = place(first(own), own);
        const int rank = own ? job.self.rank : peer_of(c, unit.role);
        likely = unit.token < job.num_tokens;
        if (unit.token >= job.self.max_tokens || lane_id() >= job.top_k) return unit;
        unit.slot = __ldg((const int32_t *)(job.plan + job.records_at) +
                          record_at(job.self, rank, unit.token, job.top_k) + lane_id());
        if (own)
            unit.ranks = __ldg((const int32_t *)(job.plan + job.rank_of_at) +
                               (int64_t)unit.token * job.top_k + lane_id());
        return unit;
    }
    /* All of a kind: work(unit, whether it is the first one and was read before: `known`). */
    template <class Do>
    __device__ __forceinline__ bool each(bool own, Unit first_one, bool known, Do work) const
    {
        const int end = own ? c.job.num_tokens * c.shape.pieces
                            : c.plan.most_tokens * (c.job.self.num_ranks - 1) * c.shape.pieces;
        int u = first(own);
        Unit next = known ? first_one : read(u, own, end);
        for (; u < end; u += crew.workers(), known = false) {
            Unit now = next;
            next = read(u + crew.workers(), own, end);
            const int rank = own ? c.job.self.rank : peer_of(c, now.role);
            if (__any_sync(ALL_LANES, now.token >= c.plan.header.tokens_of[rank])) continue;
            now.slot = within(c, now.slot);
            if (!work(now, known)) return false;
        }
        return true;
    }
};

enum { NOTHING_ASKED, SENT_ASKED, OWN_ASKED };

/* A warp's work, of rows as the Sums have them.  It reads its first units, and asks for the rows of one,
 * before the plan's header has been checked; nothing is sent or stored before. */
template <class Sums> struct Worker {
    Unit sent = {}, own = {};
    SlotRows rows;
    int asked = NOTHING_ASKED;
    bool is_ahead = false;

    __device__ __forceinline__ void read_ahead(const Units &units)
    {
        bool sends, adds;
        is_ahead = true;
        sent = units.read_first(false, sends);
        own = units.read_first(true, adds);
        if (Sums::PLAIN || !(sends || adds)) return;
        Unit unit = sends ? sent : own;
        unit.slot = within(units.c, unit.slot);
        if (!slots_first(unit)) return; /* no plan has such a record */
        asked = sends ? SENT_ASKED : OWN_ASKED;
        Sums::ask(units.c, rows, unit);
    }
    __device__ __forceinline__ bool work(const Units &units)
    {
        const Combine &c = units.c;
        return units.each(false, sent, is_ahead, [&](const Unit &u, bool is_first) {
            if (!is_first || asked != SENT_ASKED) Sums::ask(c, rows, u);
            asked = NOTHING_ASKED; /* no more is there of what was */
            Sums::send(c, rows, u);
            return true;
        }) && units.each(true, own, is_ahead, [&](const Unit &u, bool is_first) {
            if (!is_first || asked != OWN_ASKED) Sums::ask(c, rows, u);
            return Sums::take(c, rows, u);
        });
    }
};

template <class ROW_, bool EXACT, int SIDE> struct QuickSums {
    typedef ROW_ ROW;
    static constexpr int V = 1; /* vectors a lane and piece */
    static constexpr bool PLAIN = false;

    static __device__ __forceinline__ void ask(const Combine &c, SlotRows &rows, const Unit &u)
    {
        ask_unit<EXACT>(c, rows, u);
    }
    static __device__ __forceinline__ void send(const Combine &c, SlotRows &rows, const Unit &u)
    {
        send_sum<ROW, EXACT>(c, rows, u);
    }
    static __device__ __forceinline__ bool take(const Combine &c, SlotRows &rows, const Unit &u)
    {
        return take_sum<ROW, EXACT, SIDE>(c, rows, u);
    }
};

template <class ROW_> struct PlainSums {
    typedef ROW_ ROW;
    static constexpr int V = 2;
    static constexpr bool PLAIN = true;

    static __device__ __forceinline__ void ask(const Combine &, SlotRows &, const Unit &)
    {
    }
    static __device__ __forceinline__ void send(const Combine &c, SlotRows &, const Unit &u)
    {
        expert_unit<ROW, ROW, V, false>(c, u);
    }
    static __device__ __forceinline__ bool take(const Combine &c, SlotRows &, const Unit &u)
    {
        return source_unit<ROW, ROW, V, false>(c, u);
    }
};

/* All threads: zeros, when nothing was moved. */
static __device__ void clear(const Combine &c, int64_t thread, int64_t threads)
{
    zero_rows(c.job.out, c.job.row_bytes, 0, c.job.num_tokens, thread, threads);
    zero_floats(c.job.choice_floats, 0, (int64_t)c.job.num_tokens * c.job.top_k, thread,
                threads);
}

template <class Sums>
__global__ void __launch_bounds__(FEW_BLOCK, 1)
    few_combine_kernel(const __grid_constant__ p2p_combine_job job)
{
    __shared__ Now now;
    __shared__ Plan plan;
    __shared__ Stride unused;
    __shared__ bool enough; /* rows everywhere, as far as is known */
    const p2p_self &self = job.self;
    touch(job);
    if (self.operation == EPIC_OP_NONE) return;
    if (is_announcer(false)) fence_system();
    const Opening opening = read_opening(self);
    const bool reads = threadIdx.x / WARP == FEW_WORKERS - 1;
    if (reads) {
        uint32_t header[HEADER_LANE_WORDS];
        load_header(header, job.plan, job.plan_bytes);
        view_plan(plan, header, job.plan, job.plan_bytes, self, job.num_tokens);
        if (lane_id() == 0)
            now.signature = self.signature ^ ((uint32_t)plan.header.id & 0x0fffffffu);
    }
    Combine c = {job,
                 now,
                 plan,
                 unused,
                 unused,
                 NULL,
                 row_shape<Sums::V>(job.row_bytes, !Sums::PLAIN || job.aligned),
                 policy_once(),
                 0,
                 0};
    const Units units(c);
    Worker<Sums> worker;
    if (is_speaker()) {
        open_few(now, self, opening, job.num_tokens, 0, job.num_rows);
        find_few_boxes(now, self);
    } else if (!reads) {
        worker.read_ahead(units);
    }
    if (threadIdx.x == 0) enough = true;
    if (!__syncthreads_and(opening.broken == 0)) {
        if (threadIdx.x == 0) tell_end(now);
        return;
    }
    announce_sizes(self, now, job.num_tokens, 0, job.num_rows);
    count_begun(self, now);
    if (is_announcer(false)) announce_begun(self, now);

    const device_plan_header &h = plan.header;
    const bool moves = plan.good && h.result == EPIC_OK;
    /* The header's, which is the layer's: the compiler keeps it in a register, where it would load
     * job.top_k from the constant bank again for each unit. */
    c.top_k = (int)h.top_k;
    if (is_speaker()) {
        const bool good = !moves || hear_rows(self, now, h);
        if (lane_id() == 0) enough = good;
        if (is_last_cta()) finish_few(self, now, opening, false);
    } else if (moves) {
        (void)worker.work(units);
    }
    if (!moves) clear(c, grid_thread(), grid_threads());
    end_few(now);
    if (!enough && is_last_of_short(now, h)) clear(c, threadIdx.x, FEW_BLOCK);
}

typedef void (*Kernel)(p2p_combine_job);

/* Which one: of plain sums, or else of rows of whole pieces, and of two ranks. */
struct Kind {
    bool plain, exact, two;
};

template <class ROW> static Kernel kernel_for(const Kind &kind)
{
    if (kind.plain) return few_combine_kernel<PlainSums<ROW>>;
    if (kind.exact)
        return kind.two ? few_combine_kernel<QuickSums<ROW, true, 2>>
                        : few_combine_kernel<QuickSums<ROW, true, 4>>;
    return kind.two ? few_combine_kernel<QuickSums<ROW, false, 2>>
                    : few_combine_kernel<QuickSums<ROW, false, 4>>;
}

static Kernel kernel_of(uint32_t type, const Kind &kind)
{
    if (type == EPIC_BF16) return kernel_for<Bf16>(kind);
    return type == EPIC_F16 ? kernel_for<F16>(kind) : kernel_for<F32>(kind);
}

extern "C" cudaError_t p2p_load_few_combine(void)
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

extern "C" cudaError_t p2p_launch_few_combine(const p2p_combine_job *job, int num_sms,
                                              cudaStream_t stream)
{
    const Kind kind = {!job->aligned || job->tree, job->row_bytes % (WARP * 16) == 0,
                       job->self.num_ranks <= 2};
    return enqueue(kernel_of(job->type, kind), num_sms, FEW_BLOCK, 0, stream, *job);
}
