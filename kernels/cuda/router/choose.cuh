/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the experts of a token: the k largest selection values.  Ties go to the lower id,
 * NaNs come last.
 *
 * Each selection value becomes a key, an unsigned number with the same order; 0 and -0 have the
 * same key.  Each lane owns a run of ids of one group, and the runs ascend with the lanes.  In
 * each of k rounds the warp finds the largest key of all lanes.  The first lane that has it
 * owns the lowest id, and drops it.  With groups, the warp first scores the groups and keeps
 * the best topk_groups. */
#ifndef EPIC_CHOOSE_CUH
#define EPIC_CHOOSE_CUH

#include "cuda/router/router.cuh"

#define KEY_NONE 0u /* no id: never chosen */
#define KEY_NAN 1u
#define KEY_ZERO 0x80000000u

/* Converts a value to its key, and back. */
__device__ __forceinline__ uint32_t key_of(float x)
{
    const uint32_t bits = __float_as_uint(x + 0.0f); /* -0 becomes 0 */
    const uint32_t key = bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
    return x != x ? KEY_NAN : key;
}

__device__ __forceinline__ float value_of_key(uint32_t key)
{
    const uint32_t bits = key & 0x80000000u ? key ^ 0x80000000u : ~key;
    return key == KEY_NAN ? NAN : __uint_as_float(bits);
}

/* The keys of the ids [first, first + count) that a lane owns, largest first, in V
 * registers. */
template <int V> struct Owned {
    int first, count;
    uint32_t key[V];

    __device__ __forceinline__ uint32_t top() const
    {
        return key[0]; /* KEY_NONE: none is left */
    }
    /* A bitonic sorting network, whose indices are known to the compiler. */
    __device__ __forceinline__ void sort()
    {
#pragma unroll
        for (int size = 2; size <= V; size *= 2)
#pragma unroll
            for (int stride = size / 2; stride > 0; stride /= 2)
#pragma unroll
                for (int i = 0; i < V; i++) {
                    const int j = i ^ stride;
                    if (j < i) continue;
                    const uint32_t high = max(key[i], key[j]), low = min(key[i], key[j]);
                    key[i] = i & size ? low : high;
                    key[j] = i & size ? high : low;
                }
    }
    __device__ __forceinline__ void read(const uint32_t *keys, int first_id, int num_ids)
    {
        first = first_id;
        count = num_ids;
#pragma unroll
        for (int v = 0; v < V; v++)
            key[v] = v < count ? keys[padded_index(first + v)] : KEY_NONE;
        sort();
    }
    __device__ __forceinline__ void fill(uint32_t *keys, uint32_t value)
    {
        if (value != KEY_NONE)
            for (int v = 0; v < count; v++) keys[padded_index(first + v)] = value;
#pragma unroll
        for (int v = 0; v < V; v++) key[v] = v < count ? value : KEY_NONE;
    }
    __device__ __forceinline__ void drop(bool mine)
    {
#pragma unroll
        for (int v = 0; v < V; v++) key[v] = !mine ? key[v] : v + 1 < V ? key[v + 1] : KEY_NONE;
    }
};

/* The keys of any number of ids, which stay in shared memory.  Equal keys come by ascending
 * id. */
template <> struct Owned<0> {
    int first, count, place;
    uint32_t best;
    const uint32_t *keys;

    __device__ uint32_t top() const
    {
        return best;
    }
    __device__ int id() const
    {
        return first + place;
    }
    /* Finds the largest key after (last, last_place) in this order. */
    __device__ void find(uint32_t last, int last_place)
    {
        best = KEY_NONE;
        for (int v = 0; v < count; v++) {
            const uint32_t key = keys[padded_index(first + v)];
            const bool left = key < last || (key == last && v > last_place);
            if (left && key > best) best = key, place = v;
        }
    }
    __device__ void read(const uint32_t *from, int first_id, int num_ids)
    {
        keys = from;
        first = first_id;
        count = num_ids;
        place = 0;
        find(0xffffffffu, -1);
    }
    __device__ void fill(uint32_t *to, uint32_t value)
    {
        for (int v = 0; v < count; v++) to[padded_index(first + v)] = value;
        find(0xffffffffu, -1);
    }
    __device__ void drop(bool mine)
    {
        if (mine) find(best, place);
    }
};

/* The assignment of ids to lanes. */
struct Deal {
    int groups;          /* number of groups; 1 without groups */
    int each;            /* ids of a group */
    int lane_bits;       /* 1 << lane_bits lanes share one group, */
    int groups_per_lane; /* or one lane has this many groups */
    int run;             /* largest number of ids of a lane */

    __device__ __forceinline__ int lanes() const
    {
        return 1 << lane_bits;
    }
    __device__ __forceinline__ int group() const
    {
        return lane_id() >> lane_bits;
    }
    __device__ __forceinline__ int lane_of_group() const
    {
        return lane_id() & (lanes() - 1);
    }
};

/* Returns the assignment for a router. */
static inline Deal deal_of(const epic_router &r, int columns)
{
    Deal d = {r.num_groups ? (int)r.num_groups : 1, 0, 0, 1, 0};
    d.each = columns / d.groups;
    while (d.groups * (2 << d.lane_bits) <= WARP) d.lane_bits++;
    if (d.groups > WARP) d.groups_per_lane = (d.groups + WARP - 1) / WARP;
    const int lanes = 1 << d.lane_bits;
    d.run = (d.each + lanes - 1) / lanes * d.groups_per_lane;
    return d;
}

/* The ids [first, first + count). */
struct Run {
    int first, count;
};

/* Returns the ids of this lane, all of one group. */
__device__ __forceinline__ Run own_run(const Deal &d)
{
    const int begin = d.lane_of_group() * d.run;
    const int count = d.group() < d.groups ? min(d.run, d.each - begin) : 0;
    return {d.group() * d.each + begin, max(count, 0)};
}

/* Returns the first lane that has the warp's largest key. */
__device__ __forceinline__ int best_lane(uint32_t top)
{
    const uint32_t largest = __reduce_max_sync(ALL_LANES, top);
    return __ffs(__ballot_sync(ALL_LANES, top == largest)) - 1;
}

/* Returns the sum of the m largest values of this lane's group, added from the largest on. */
template <int V>
__device__ __forceinline__ float score_group(const Deal &d, Owned<V> own, int m)
{
    const uint32_t members = (d.lanes() == WARP ? ALL_LANES : (1u << d.lanes()) - 1)
                             << (d.group() << d.lane_bits);
    float score = 0;
    for (int i = 0; i < m; i++) {
        uint32_t largest = own.top();
        for (int distance = 1; distance < d.lanes(); distance *= 2)
            largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
        const uint32_t ties = __ballot_sync(ALL_LANES, own.top() == largest) & members;
        score += value_of_key(largest);
        if (i + 1 < m) own.drop(lane_id() == __ffs(ties) - 1);
    }
    return score;
}

/* Returns whether this lane's group is one of the best topk_groups.  score: that of this
 * lane's group. */
__device__ __forceinline__ bool keep_group(const Deal &d, float score, int topk_groups)
{
    const bool leads = d.lane_of_group() == 0 && d.group() < d.groups;
    uint32_t key = leads ? key_of(score) : KEY_NONE;
    bool kept = false;
    for (int i = 0; i < topk_groups; i++) {
        const int winner = best_lane(key);
        kept |= winner >> d.lane_bits == d.group();
        if (winner == lane_id()) key = KEY_NONE;
    }
    return kept;
}

/* Keeps the best groups if there are more groups than lanes: a lane scores its groups one by
 * one, into group_keys.  The ids of groups that are not kept get the key `others`. */
__device__ __noinline__ void keep_many_groups(const epic_router &r, const Deal &d,
                                              uint32_t *keys, uint32_t *group_keys, int m,
                                              uint32_t others)
{
    const int first = min(d.groups, lane_id() * d.groups_per_lane);
    const int end = min(d.groups, first + d.groups_per_lane);
    uint32_t kept = 0;
    Owned<0> own;
    for (int g = first; g < end; g++) {
        float score = 0;
        own.read(keys, g * d.each, d.each);
        for (int i = 0; i < m; i++) {
            score += value_of_key(own.top());
            if (i + 1 < m) own.drop(true);
        }
        group_keys[padded_index(g)] = key_of(score);
    }
    own.read(group_keys, first, end - first);
    for (uint32_t i = 0; i < r.topk_groups; i++) {
        const bool mine = best_lane(own.top()) == lane_id();
        if (mine) kept |= 1u << (own.id() - first);
        own.drop(mine);
    }
    for (int g = first; g < end; g++)
        for (int i = 0; i < d.each && !(kept >> (g - first) & 1); i++)
            keys[padded_index(g * d.each + i)] = others;
}

/* Reads the keys that this lane may choose from into `own`, without the groups that are not
 * kept. */
template <int V>
__device__ __forceinline__ void read_own_keys(const epic_router &r, const Deal &d,
                                              Owned<V> &own, uint32_t *keys,
                                              uint32_t *group_keys, bool on_logits)
{
    const int m = r.group_score == EPIC_GROUP_SUM ? (int)r.group_best : 1;
    const uint32_t others = router_others_out(&r, on_logits) ? KEY_NONE : KEY_ZERO;
    Run run = own_run(d);
    if (V == 0 && d.groups_per_lane > 1) {
        const int first = min(d.groups, lane_id() * d.groups_per_lane);
        keep_many_groups(r, d, keys, group_keys, m, others);
        run.first = first * d.each;
        run.count = (min(d.groups, first + d.groups_per_lane) - first) * d.each;
        own.read(keys, run.first, run.count);
        return;
    }
    own.read(keys, run.first, run.count);
    if (r.num_groups == 0) return;
    const float score = score_group(d, own, m);
    if (!keep_group(d, score, (int)r.topk_groups)) own.fill(keys, others);
    __syncwarp();
}

/* Makes the choices one by one, for keys in shared memory. */
template <int J> __device__ __forceinline__ Chosen<J> choose_by_lanes(Owned<0> &own, int k)
{
    Chosen<J> c = {k, {-1}};
    for (int i = 0; i < k; i++) {
        const int winner = best_lane(own.top());
        const int id = __shfl_sync(ALL_LANES, own.id(), winner);
        own.drop(lane_id() == winner);
#pragma unroll
        for (int j = 0; j < J; j++)
            if (lane_id() + j * WARP == i) c.id[j] = id;
    }
    return c;
}

/* Makes the choices for keys in registers.  First the warp finds the k keys and their lanes.
 * Then all lanes look up at once which ids have these keys; equal keys of one lane by ascending
 * id. */
template <int J, int V>
__device__ __forceinline__ Chosen<J> choose_by_lanes(Owned<V> &own, int k, const uint32_t *keys)
{
    Chosen<J> c = {k, {-1}};
    uint32_t key = KEY_NONE;
    int lane = lane_id();
    for (int i = 0; i < k; i++) {
        const uint32_t largest = __reduce_max_sync(ALL_LANES, own.top());
        const int winner = __ffs(__ballot_sync(ALL_LANES, own.top() == largest)) - 1;
        own.drop(lane_id() == winner);
        if (lane_id() == i) key = largest, lane = winner;
    }
    const uint32_t last_key = __shfl_up_sync(ALL_LANES, key, 1);
    const int last_lane = __shfl_up_sync(ALL_LANES, lane, 1);
    const bool begins = key != last_key || lane != last_lane || lane_id() == 0;
    const uint32_t upto = __ballot_sync(ALL_LANES, begins) & ((2u << lane_id()) - 1);
    int before = lane_id() - (31 - __clz((int)upto)); /* number of equal keys of that lane
                                                         before this one */
    const int first = __shfl_sync(ALL_LANES, own.first, lane);
    const int count = __shfl_sync(ALL_LANES, own.count, lane);
#pragma unroll
    for (int v = 0; v < V; v++)
        if (v < count && lane_id() < k && keys[padded_index(first + v)] == key && before-- == 0)
            c.id[0] = first + v;
    return c;
}

/* Chooses top_k experts from the keys [columns] in shared memory. */
template <int V, int J>
__device__ __forceinline__ Chosen<J> choose_experts(const epic_router &r, const Deal &d,
                                                    uint32_t *keys, uint32_t *group_keys,
                                                    bool on_logits)
{
    Owned<V> own;
    read_own_keys(r, d, own, keys, group_keys, on_logits);
    __syncwarp();
    if constexpr (V == 0)
        return choose_by_lanes<J>(own, (int)r.top_k);
    else
        return choose_by_lanes<J>(own, (int)r.top_k, keys);
}

#endif
