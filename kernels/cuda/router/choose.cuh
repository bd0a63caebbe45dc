/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the experts of a token: the ids with the k largest selection values (score or logit
 * plus bias). If values are equal, the lower id is chosen first. NaN counts as less than any
 * other value. An id is a column of the logits: an expert or a zero-expert (an expert whose
 * output is its input).
 *
 *   key          a selection value, converted to an unsigned integer. Keys have the same order
 *                as the selection values. 0 and -0 have the same key
 *   IdOwnership  defines which lane owns which ids. Each lane has consecutive ids, in the order
 *                of lanes
 *   Owned        the keys of a lane's ids: sorted in registers, or, if V is 0, in shared memory
 *
 * One warp processes one token. It does the following k times: it finds the largest key of all
 * lanes, chooses the id of this key in the first lane that has the key, and removes the key
 * from this lane. The first lane owns the lowest id with this key. If the router has groups of
 * experts, the warp first computes the score of each group, and keeps only the ids of the
 * topk_groups groups with the largest scores. */
#ifndef EPIC_CHOOSE_CUH
#define EPIC_CHOOSE_CUH

#include "cuda/router/router.cuh"

#define KEY_NONE 0u /* key of an id that cannot be chosen */
/* KEY_NAN: key of the selection value NaN; KEY_ZERO: key of 0 */
#define KEY_NAN 1u
#define KEY_ZERO 0x80000000u

/* Returns the key of a selection value. */
__device__ __forceinline__ uint32_t key_of(float x)
{
    /* adding 0 changes -0 to 0 */
    const uint32_t bits = __float_as_uint(x + 0.0f);
    const uint32_t key = bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
    return x != x ? KEY_NAN : key;
}

/* Returns the selection value of a key. */
__device__ __forceinline__ float value_of_key(uint32_t key)
{
    const uint32_t bits = key & 0x80000000u ? key ^ 0x80000000u : ~key;
    return key == KEY_NAN ? NAN : __uint_as_float(bits);
}

/* The keys of the ids [first, first + count), which one lane owns. The keys are in V registers,
 * in descending order. */
template <int V> struct Owned {
    int first, count;
    uint32_t key[V];

    __device__ __forceinline__ uint32_t top_key() const
    {
        return key[0];
    }
    /* Sorts the keys with a bitonic network whose indices are constants, so that the keys stay
     * in registers. */
    __device__ __forceinline__ void sort_keys()
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
    /* Makes this lane the owner of the ids [first_id, first_id + num_ids), and reads their
     * keys. num_ids: at most V. */
    __device__ __forceinline__ void read_keys(const uint32_t *keys, int first_id, int num_ids)
    {
        first = first_id;
        count = num_ids;
#pragma unroll
        for (int v = 0; v < V; v++)
            key[v] = v < count ? keys[padded_index(first + v)] : KEY_NONE;
        sort_keys();
    }
    /* Sets the keys of all ids of this lane to `value`. If `value` is not KEY_NONE, also sets
     * the same keys in the array `keys` in shared memory, because choose_by_lanes() searches
     * this array to find the id of a key. */
    __device__ __forceinline__ void set_keys(uint32_t *keys, uint32_t value)
    {
        if (value != KEY_NONE)
            for (int v = 0; v < count; v++) keys[padded_index(first + v)] = value;
#pragma unroll
        for (int v = 0; v < V; v++) key[v] = v < count ? value : KEY_NONE;
    }
    /* If `mine` is true, removes this lane's largest key. */
    __device__ __forceinline__ void drop_largest(bool mine)
    {
#pragma unroll
        for (int v = 0; v < V; v++) key[v] = !mine ? key[v] : v + 1 < V ? key[v + 1] : KEY_NONE;
    }
};

/* The keys of the ids [first, first + count), which one lane owns, for any count. The keys are
 * in shared memory and not sorted. `best` is the current key: the largest key that has not been
 * removed. The id of the current key is first + position. Equal keys are removed in ascending
 * order of ids. */
template <> struct Owned<0> {
    int first, count, position;
    uint32_t best;
    const uint32_t *keys;

    __device__ uint32_t top_key() const
    {
        return best;
    }
    __device__ int current_id() const
    {
        return first + position;
    }
    /* `last` is the key that was removed last, at position last_position. Makes the next lower
     * key the current key. Exception: if a key at a position after last_position equals `last`,
     * this key becomes the current key. */
    __device__ void find_next(uint32_t last, int last_position)
    {
        best = KEY_NONE;
        for (int v = 0; v < count; v++) {
            const uint32_t key = keys[padded_index(first + v)];
            const bool left = key < last || (key == last && v > last_position);
            if (left && key > best) best = key, position = v;
        }
    }
    /* Makes this lane the owner of the ids [first_id, first_id + num_ids), whose keys are in
     * `from`. */
    __device__ void read_keys(const uint32_t *from, int first_id, int num_ids)
    {
        keys = from;
        first = first_id;
        count = num_ids;
        position = 0;
        find_next(0xffffffffu, -1);
    }
    /* Sets the keys of all ids of this lane to `value`. The key of the first id becomes the
     * current key. */
    __device__ void set_keys(uint32_t *to, uint32_t value)
    {
        for (int v = 0; v < count; v++) to[padded_index(first + v)] = value;
        find_next(0xffffffffu, -1);
    }
    /* If `mine` is true, removes this lane's largest key; the next key becomes the current
     * key. */
    __device__ void drop_largest(bool mine)
    {
        if (mine) find_next(best, position);
    }
};

/* Defines how the lanes of a warp divide the expert ids among themselves. If there are at most
 * 32 groups of experts, 1 << lane_bits lanes share the ids of one group. If there are more
 * groups, each lane owns all ids of groups_per_lane groups. */
struct IdOwnership {
    int groups; /* number of groups of experts; 1 if the router has no groups */
    int ids_per_group;
    int lane_bits;       /* log2 of the number of lanes that share a group */
    int groups_per_lane; /* number of groups that one lane owns; 1 if lanes share groups */
    int ids_per_lane;    /* maximum number of ids that a lane owns */

    __device__ __forceinline__ int lanes_per_group() const
    {
        return 1 << lane_bits;
    }
    __device__ __forceinline__ int group_of_lane() const
    {
        return lane_id() >> lane_bits;
    }
    __device__ __forceinline__ int lane_of_group() const
    {
        return lane_id() & (lanes_per_group() - 1);
    }
};

/* Returns the division of `columns` ids among the lanes of a warp. */
static inline IdOwnership id_ownership(const epic_router &r, int columns)
{
    IdOwnership d = {r.num_groups ? (int)r.num_groups : 1, 0, 0, 1, 0};
    d.ids_per_group = columns / d.groups;
    while (d.groups * (2 << d.lane_bits) <= WARP) d.lane_bits++;
    if (d.groups > WARP) d.groups_per_lane = (d.groups + WARP - 1) / WARP;
    const int lanes = 1 << d.lane_bits;
    d.ids_per_lane = (d.ids_per_group + lanes - 1) / lanes * d.groups_per_lane;
    return d;
}

/* The ids [first, first + count). */
struct IdRange {
    int first, count;
};

/* Returns the range of ids that this lane owns. Only for routers with at most 32 groups of
 * experts. */
__device__ __forceinline__ IdRange own_ids(const IdOwnership &d)
{
    const int begin = d.lane_of_group() * d.ids_per_lane;
    const int count =
        d.group_of_lane() < d.groups ? min(d.ids_per_lane, d.ids_per_group - begin) : 0;
    return {d.group_of_lane() * d.ids_per_group + begin, max(count, 0)};
}

/* Returns the index of the first lane that passes the maximum value of `top` in the warp.
 * Called by all lanes. */
__device__ __forceinline__ int best_lane(uint32_t top)
{
    const uint32_t largest = __reduce_max_sync(ALL_LANES, top);
    return __ffs(__ballot_sync(ALL_LANES, top == largest)) - 1;
}

/* Returns the score of this lane's group of experts: the sum of the m largest selection values
 * in the group, added from the largest to the smallest. `own`: a copy of this lane's keys; the
 * function removes keys from the copy. Called by all lanes. */
template <int V>
__device__ __forceinline__ float score_group(const IdOwnership &d, Owned<V> own, int m)
{
    const uint32_t members =
        (d.lanes_per_group() == WARP ? ALL_LANES : (1u << d.lanes_per_group()) - 1)
        << (d.group_of_lane() << d.lane_bits);
    float score = 0;
    for (int i = 0; i < m; i++) {
        uint32_t largest = own.top_key();
        for (int distance = 1; distance < d.lanes_per_group(); distance *= 2)
            largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
        const uint32_t ties = __ballot_sync(ALL_LANES, own.top_key() == largest) & members;
        score += value_of_key(largest);
        if (i + 1 < m) own.drop_largest(lane_id() == __ffs(ties) - 1);
    }
    return score;
}

/* Returns true if `score`, the score of this lane's group, is one of the topk_groups largest
 * scores. Called by all lanes. */
__device__ __forceinline__ bool keep_group(const IdOwnership &d, float score, int topk_groups)
{
    const bool leads = d.lane_of_group() == 0 && d.group_of_lane() < d.groups;
    uint32_t key = leads ? key_of(score) : KEY_NONE;
    bool is_kept = false;
    for (int i = 0; i < topk_groups; i++) {
        const int winner = best_lane(key);
        is_kept |= winner >> d.lane_bits == d.group_of_lane();
        if (winner == lane_id()) key = KEY_NONE;
    }
    return is_kept;
}

/* For routers with more than 32 groups of experts: selects the topk_groups groups with the
 * largest scores. Each lane computes the scores of its groups (a score is the sum of the m
 * largest selection values of a group), and writes the keys of these scores to group_keys. In
 * `keys`, the keys of all ids in groups that are not selected become `others`. Called by a
 * whole warp. */
__device__ __noinline__ void keep_many_groups(const epic_router &r, const IdOwnership &d,
                                              uint32_t *keys, uint32_t *group_keys, int m,
                                              uint32_t others)
{
    const int first = min(d.groups, lane_id() * d.groups_per_lane);
    const int end = min(d.groups, first + d.groups_per_lane);
    uint32_t kept_groups = 0;
    Owned<0> own;
    for (int g = first; g < end; g++) {
        float score = 0;
        own.read_keys(keys, g * d.ids_per_group, d.ids_per_group);
        for (int i = 0; i < m; i++) {
            score += value_of_key(own.top_key());
            if (i + 1 < m) own.drop_largest(true);
        }
        group_keys[padded_index(g)] = key_of(score);
    }
    own.read_keys(group_keys, first, end - first);
    for (uint32_t i = 0; i < r.topk_groups; i++) {
        const bool mine = best_lane(own.top_key()) == lane_id();
        if (mine) kept_groups |= 1u << (own.current_id() - first);
        own.drop_largest(mine);
    }
    for (int g = first; g < end; g++)
        for (int i = 0; i < d.ids_per_group && !(kept_groups >> (g - first) & 1); i++)
            keys[padded_index(g * d.ids_per_group + i)] = others;
}

/* Reads the keys of this lane's ids into `own`. If the router has groups of experts, also
 * selects topk_groups groups. Keys of ids in groups that are not selected become KEY_NONE or,
 * if router_others_out() returns false, KEY_ZERO. on_logits: true if the keys come from logits,
 * false if they come from scores. */
template <int V>
__device__ __forceinline__ void read_own_keys(const epic_router &r, const IdOwnership &d,
                                              Owned<V> &own, uint32_t *keys,
                                              uint32_t *group_keys, bool on_logits)
{
    const int m = r.group_score == EPIC_GROUP_SUM ? (int)r.group_best : 1;
    const uint32_t others = router_others_out(&r, on_logits) ? KEY_NONE : KEY_ZERO;
    IdRange range = own_ids(d);
    if (V == 0 && d.groups_per_lane > 1) {
        const int first = min(d.groups, lane_id() * d.groups_per_lane);
        keep_many_groups(r, d, keys, group_keys, m, others);
        range.first = first * d.ids_per_group;
        range.count = (min(d.groups, first + d.groups_per_lane) - first) * d.ids_per_group;
        own.read_keys(keys, range.first, range.count);
        return;
    }
    own.read_keys(keys, range.first, range.count);
    if (r.num_groups == 0) return;
    const float score = score_group(d, own, m);
    if (!keep_group(d, score, (int)r.topk_groups)) own.set_keys(keys, others);
    __syncwarp();
}

/* Chooses k experts for a token whose keys are in shared memory (V is 0). Does the following k
 * times: finds the lane with the largest key, chooses the id of this key and removes the
 * key. */
template <int J> __device__ __forceinline__ Chosen<J> choose_by_lanes(Owned<0> &own, int k)
{
    Chosen<J> c = {k, {-1}};
    for (int i = 0; i < k; i++) {
        const int winner = best_lane(own.top_key());
        const int id = __shfl_sync(ALL_LANES, own.current_id(), winner);
        own.drop_largest(lane_id() == winner);
#pragma unroll
        for (int j = 0; j < J; j++)
            if (lane_id() + j * WARP == i) c.id[j] = id;
    }
    return c;
}

/* Chooses k experts for a token whose keys are in registers. A sorted key does not show its id.
 * So the warp first finds the k largest keys and, for each key, the lane that owns it. Then
 * lane i compares key i with the keys of all ids that the owner of key i owns. If several of
 * these ids have this key, the lower id is chosen first. */
template <int J, int V>
__device__ __forceinline__ Chosen<J> choose_by_lanes(Owned<V> &own, int k, const uint32_t *keys)
{
    Chosen<J> c = {k, {-1}};
    uint32_t key = KEY_NONE;
    int lane = lane_id();
    for (int i = 0; i < k; i++) {
        const uint32_t largest = __reduce_max_sync(ALL_LANES, own.top_key());
        const int winner = __ffs(__ballot_sync(ALL_LANES, own.top_key() == largest)) - 1;
        own.drop_largest(lane_id() == winner);
        if (lane_id() == i) key = largest, lane = winner;
    }
    const uint32_t last_key = __shfl_up_sync(ALL_LANES, key, 1);
    const int last_lane = __shfl_up_sync(ALL_LANES, lane, 1);
    const bool begins = key != last_key || lane != last_lane || lane_id() == 0;
    const uint32_t upto = __ballot_sync(ALL_LANES, begins) & ((2u << lane_id()) - 1);
    /* number of earlier choices of this token that have the same key and the same owner */
    int before = lane_id() - (31 - __clz((int)upto));
    const int first = __shfl_sync(ALL_LANES, own.first, lane);
    const int count = __shfl_sync(ALL_LANES, own.count, lane);
#pragma unroll
    for (int v = 0; v < V; v++)
        if (v < count && lane_id() < k && keys[padded_index(first + v)] == key && before-- == 0)
            c.id[0] = first + v;
    return c;
}

/* Chooses top_k experts for a token. keys [columns]: the token's keys in shared memory.
 * group_keys: shared memory for one key per group; used only if there are more than 32 groups.
 * on_logits: as in read_own_keys(). Called by a whole warp. */
template <int V, int J>
__device__ __forceinline__ Chosen<J> choose_experts(const epic_router &r, const IdOwnership &d,
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
