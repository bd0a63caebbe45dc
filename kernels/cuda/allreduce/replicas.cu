/* SPDX-License-Identifier: Apache-2.0 */
/* sum_replicas: adds the float32 arrays (such as gradients) of the replicas of each logical
 * expert, and stores the sum to every replica.
 *
 *   data  [local experts, count] float32, input and output
 *
 *   1. send     for each vector (four floats) of a logical expert: add this rank's replicas,
 *               store the sum to the staging of every peer
 *   2. receive  poll this rank's staging for the sums of every peer
 *   3. add      add the sums of all ranks, store the result to every replica on this rank
 *
 * The vectors of all logical experts with two or more replicas form one list, ordered by
 * logical expert. The list is equal on all ranks. If a rank has no replica of an expert, it
 * sends zeros for the vectors of this expert. A round processes as many vectors of the list as
 * fit into the staging. In a round, all warps of all CTAs do the same work: if the grid has N
 * threads, thread t handles vectors t, t + N, ... Each word in staging is its own flag, as in
 * sum.cu: the word is poison (0xffffffff) until the peer's store arrives. A warp sends all its
 * vectors of the round before it polls for the first vector of a peer. So ranks cannot wait for
 * each other in a circle. */
#include "cuda/allreduce/sum.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/plan/view.cuh"

#define BLOCK 512
/* Special value of an element of Replicas.nth or Replicas.mine. It means: the logical expert
 * has only one replica, so there is nothing to add. */
#define SINGLE_REPLICA 0xffff
/* Maximum number of levels of a binary tree over the leaves (blocks of experts) of a rank,
 * including the root. */
#define LEAF_LEVELS 8
static_assert(1 << (LEAF_LEVELS - 1) == P2P_MOST_LEAVES, "a tree over all leaves of a rank");

/* Tables in shared memory about the *replicated* experts: the logical experts with two or more
 * replicas. In all comments of this struct, n is the index of a replicated expert among the
 * replicated experts, in ascending order of their ids. */
struct Replicas {
    union { /* these two arrays share memory, because they are needed at different times */
        /* for each logical expert: number of its replicas on all ranks; only read_replicas()
         * needs this array */
        int32_t num_replicas[P2P_REPLICATED_EXPERTS + 1];
        /* first[n]: index in `local` of the first replica on this rank of the replicated expert
         * n. The last replica on this rank has index first[n + 1] - 1. */
        int32_t first[P2P_REPLICATED_EXPERTS + 1];
    };
    /* for each logical expert: its index n, or SINGLE_REPLICA if the expert is not
     * replicated */
    uint16_t nth[P2P_REPLICATED_EXPERTS];
    /* for each local expert: the index n of its logical expert, or SINGLE_REPLICA */
    uint16_t mine[P2P_REPLICATED_EXPERTS];
    /* the local experts that are replicas of a replicated expert, ordered by the index n of
     * this expert */
    uint16_t local[P2P_REPLICATED_EXPERTS];
    /* for each local expert: the index, among the leaves of this rank, of the leaf (block of
     * experts) to which the expert belongs */
    uint16_t leaf[P2P_REPLICATED_EXPERTS];
    /* number of replicated experts */
    int32_t num_replicated;
    /* number of leaves of the sum tree on this rank; 1 if sums are not added in a tree */
    int32_t leaves;
};

/* Computes exclusive prefix sums in place: count[i], for i below num, becomes the sum of the
 * elements before it, and count[num] becomes the sum of all num elements. Called by one
 * warp. */
static __device__ void prefix_sum(int32_t *count, int num)
{
    int32_t before = 0;
    for (int i = 0; i < num; i += WARP) {
        const int n = i + lane_id();
        const int32_t here = n < num ? count[n] : 0;
        int32_t upto = here;
        for (int d = 1; d < WARP; d *= 2) {
            const int32_t lower = __shfl_up_sync(ALL_LANES, upto, d);
            if (lane_id() >= d) upto += lower;
        }
        if (n < num) count[n] = before + upto - here;
        before += __shfl_sync(ALL_LANES, upto, WARP - 1);
    }
    __syncwarp();
    if (lane_id() == 0) count[num] = before;
}

/* Sets r.nth and r.num_replicated from r.num_replicas. Called by one warp. */
static __device__ void number_replicated(Replicas &r, int num_logical)
{
    int num_replicated = 0;
    for (int i = 0; i < num_logical; i += WARP) {
        const int l = i + lane_id();
        const bool is = l < num_logical && r.num_replicas[l] > 1;
        const uint32_t lanes = __ballot_sync(ALL_LANES, is);
        if (l < num_logical)
            r.nth[l] = is ? (uint16_t)(num_replicated + __popc(lanes & lanes_below()))
                          : SINGLE_REPLICA;
        num_replicated += __popc(lanes);
    }
    if (lane_id() == 0) r.num_replicated = num_replicated;
}

/* Builds all tables of `r` from the plan. Checks the ids before it uses them as indices,
 * because the caller may have changed the plan's memory. `bytes`: address of the plan in
 * memory. Called by all threads of a CTA. */
static __device__ void read_replicas(Replicas &r, const PlanView &plan, const p2p_self &self,
                                     const OpState &op, const uint8_t *bytes)
{
    const device_plan_header &h = plan.header;
    const int experts = (int)h.num_experts, num_logical = (int)h.num_logical, owned = h.owned;
    const device_plan_layout at =
        device_plan_layout_of(self.num_ranks, self.max_tokens, h.num_experts, h.top_k);
    const int32_t *logical = (const int32_t *)(bytes + device_logical(&at, h.layout));
    const int32_t *expert_of = logical + device_table_bytes(&at) / 4;
    const bool tree = h.sum_order == EPIC_TREE;
    const int leaves = tree ? (int)h.layer_leaves : 1;
    const int each = max(experts / leaves, 1), first = tree ? h.first_expert / each : 0;
    if (threadIdx.x == 0) r.leaves = tree ? max(leaves / num_members(self, op), 1) : 1;
    for (int l = threadIdx.x; l < num_logical; l += BLOCK) r.num_replicas[l] = 0;
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += BLOCK)
        if ((uint32_t)logical[e] < (uint32_t)num_logical)
            atomicAdd(&r.num_replicas[logical[e]], 1);
    __syncthreads();
    if (threadIdx.x < WARP) number_replicated(r, num_logical);
    __syncthreads();
    for (int s = threadIdx.x; s < r.num_replicated; s += BLOCK) r.first[s] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < owned; i += BLOCK) {
        const uint32_t e = (uint32_t)expert_of[i];
        const uint32_t l = e < (uint32_t)experts ? (uint32_t)logical[e] : (uint32_t)num_logical;
        r.mine[i] = l < (uint32_t)num_logical ? r.nth[l] : SINGLE_REPLICA;
        r.leaf[i] = (uint16_t)(tree ? (int)e / each - first : 0);
        if (r.mine[i] != SINGLE_REPLICA) atomicAdd(&r.first[r.mine[i]], 1);
    }
    __syncthreads();
    if (threadIdx.x < WARP) prefix_sum(r.first, r.num_replicated);
    __syncthreads();
    for (int i = threadIdx.x; i < owned; i += BLOCK) {
        int before = 0;
        if (r.mine[i] == SINGLE_REPLICA) continue;
        for (int j = 0; j < i; j++) before += r.mine[j] == r.mine[i];
        r.local[r.first[r.mine[i]] + before] = (uint16_t)i;
    }
    __syncthreads();
}

/* Four floats that a thread adds at a time: elements [i, i + 4) of the array of the replicated
 * expert `nth` (an index n of struct Replicas). */
struct Quad {
    int nth;
    int64_t i;
};

/* Returns the address of the floats of a local expert. */
__device__ __forceinline__ float *floats_of_expert(const p2p_sum_replicas_job &job, int local)
{
    return job.data + local * job.count;
}

/* Adds the four floats `part` of each replica on this rank to x. If this rank has several
 * leaves, adds only the replicas in leaf `leaf`, otherwise all replicas. `n`: index in r.local
 * of the first replica that has not been added yet. The function increases n by the number of
 * replicas that it adds. */
__device__ __forceinline__ void add_leaf(const Replicas &r, const p2p_sum_replicas_job &job,
                                         const Quad &part, int leaf, int &n, float (&x)[4])
{
    for (; n < r.first[part.nth + 1] && (r.leaf[r.local[n]] == leaf || r.leaves == 1); n++) {
        float more[4];
        F32::unpack_floats(load_floats(floats_of_expert(job, r.local[n]), part.i, job.count),
                           more);
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] += more[e];
    }
}

/* Adds the four floats `part` of all replicas on this rank, in the order of the leaves, and
 * returns the sum. Returns zeros if this rank has no replica of the expert. */
static __device__ uint4 add_here(const Replicas &r, const p2p_sum_replicas_job &job,
                                 const Quad &part)
{
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int n = r.first[part.nth];
    if (r.leaves == 1) {
        add_leaf(r, job, part, 0, n, x);
        return F32::pack_floats(x);
    }
    Tree<LEAF_LEVELS> tree;
#pragma unroll 1
    for (int leaf = 0; leaf < r.leaves; leaf++) {
        x[0] = x[1] = x[2] = x[3] = 0.0f;
        add_leaf(r, job, part, leaf, n, x);
        tree.push_leaf(leaf, x);
    }
    tree.sum_leaves(r.leaves, x);
    return F32::pack_floats(x);
}

/* Processes one round: the vectors [begin, begin + vectors) of the list of all vectors, which
 * the top of this file describes. `order`: an epic_sum_order, the order in which the sums of
 * the ranks are added. MANY: as in sum_replicas_kernel(). Returns false if the group has
 * failed. */
template <bool MANY>
static __device__ bool sum_vectors(const Replicas &r, const OpState &op,
                                   const p2p_sum_replicas_job &job, uint32_t order,
                                   int64_t begin, int64_t vectors)
{
    const int64_t each = (job.count + 3) / 4;
    const auto part_of = [&](int64_t v) {
        return Quad{(int)((begin + v) / each), (begin + v) % each * 4};
    };
    const auto make_rank_sum = [&](int64_t v) {
        const bool in = v < vectors;
        return RankSum{op,    job.self,
                       order, v * 4,
                       in,    in ? add_here(r, job, part_of(v)) : make_uint4(0, 0, 0, 0)};
    };
    for (int64_t v = grid_thread(); v < vectors; v += grid_threads())
        make_rank_sum(v).send_floats();
    post_put_vectors(op, vectors);
    for (int64_t v = grid_thread() - lane_id(); v < vectors; v += grid_threads()) {
        const RankSum s = make_rank_sum(v + lane_id());
        float x[4];
        if (!add_ranks<MANY>(s, x)) return false;
        if (!s.in) continue;
        const Quad part = part_of(v + lane_id());
        for (int n = r.first[part.nth]; n < r.first[part.nth + 1]; n++)
            store_floats(floats_of_expert(job, r.local[n]), part.i, job.count, x);
    }
    return true;
}

/* Returns true if `data` of every rank has at least num_local rows. num_local: maximum number
 * of experts of any rank. If the result is false, CTA 0 also reports an error with the first
 * rank that has announced fewer rows. `ok` becomes false if the group has failed, otherwise
 * true. Called by all threads of all CTAs. */
static __device__ bool check_local_rows(const OpState &op, const p2p_sum_replicas_job &job,
                                        int32_t num_local, bool &ok)
{
    const p2p_self &self = job.self;
    uint32_t short_of = 0;
    ok = true;
    for_each_group(self, [&](int first) {
        if (MANY_RANKS && (!ok || short_of)) return;
        int32_t rows = 0;
        ok = read_group_announcement(*op.self, op, first, P2P_ANNOUNCED_ROWS, rows);
        const bool few = ok && is_member(self, op, first + lane_id()) && rows < num_local;
        short_of = __ballot_sync(ALL_LANES, few);
        const int lane = __ffs(short_of) - 1;
        rows = __shfl_sync(ALL_LANES, rows, max(lane, 0));
        if (short_of && blockIdx.x == 0 && threadIdx.x == 0)
            report_data_error(job.self, {EPIC_EINVAL,
                                         op.epoch,
                                         P2P_FAULT_LOCAL,
                                         first + lane,
                                         {rows, num_local, 0, 0}});
    });
    ok = __syncthreads_and(ok) != 0;
    return !short_of;
}

/* The kernel of sum_replicas. MANY: true if the group has more than MAX_UNROLLED_RANKS ranks,
 * so that each thread loops over the ranks. */
template <bool MANY>
__global__ void __launch_bounds__(BLOCK, 1)
    sum_replicas_kernel(const __grid_constant__ p2p_sum_replicas_job job)
{
    wait_for_previous_kernel();
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ Replicas replicas;
    const p2p_self &self = job.self;
    read_plan(plan, job.plan, job.plan_bytes, self, ANY_TOKENS);
    if (!begin_operation(op, self, (uint32_t)plan.header.id, 0, 0, job.num_rows)) return;
    const device_plan_header &h = plan.header;
    bool ok = true;
    if (plan.is_valid && h.result == EPIC_OK && h.num_logical && job.count > 0 &&
        h.num_experts <= P2P_REPLICATED_EXPERTS && check_local_rows(op, job, h.num_local, ok) &&
        ok) {
        read_replicas(replicas, plan, self, op, job.plan);
        const int64_t all = (job.count + 3) / 4 * replicas.num_replicated;
        const int64_t most = self.at.source_bytes / 16;
        for (int64_t begin = 0;; begin += most) {
            ok = sum_vectors<MANY>(replicas, op, job, h.sum_order, begin,
                                   min(all - begin, most));
            if (begin + most >= all || !__syncthreads_and(ok) || !next_round(op)) break;
        }
    }
    finish_operation(op);
}

extern "C" cudaError_t p2p_load_sum_replicas(void)
{
    cudaFuncAttributes attributes;
    const cudaError_t error =
        cudaFuncGetAttributes(&attributes, (const void *)sum_replicas_kernel<false>);
    if (error != cudaSuccess) return error;
    return cudaFuncGetAttributes(&attributes, (const void *)sum_replicas_kernel<true>);
}

extern "C" cudaError_t p2p_launch_sum_replicas(const p2p_sum_replicas_job *job, int num_sms,
                                               cudaStream_t stream)
{
    const auto kernel = job->self.num_ranks > MAX_UNROLLED_RANKS ? sum_replicas_kernel<true>
                                                                 : sum_replicas_kernel<false>;
    return launch_kernel(kernel, num_sms, BLOCK, 0, stream, *job);
}
