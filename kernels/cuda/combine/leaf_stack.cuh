/* SPDX-License-Identifier: Apache-2.0 */
/* A LeafStack adds partial sums in the order of a binary tree, for any number of leaves. The
 * kernels of combine use it in two cases. Either a leaf is a block of experts on one rank, or a
 * leaf is a rank. A *node* is the partial sum of all leaves of one subtree, packed into vectors
 * of type PART. */
#ifndef EPIC_LEAF_STACK_CUH
#define EPIC_LEAF_STACK_CUH

#include "cuda/combine/combine.cuh"

/* maximum number of nodes on the stack of a LeafStack: one more than the tree has levels */
#define LEAF_LEVELS (MANY_RANKS ? 10 : 8)

/* Contains, for each node on the stack of a LeafStack, the index of one leaf below this node.
 * Without MANY_RANKS, an index is one byte of a 64-bit word. Then leaf_number() and
 * set_leaf_number() are macros (ranks.cuh gives the reason). */
#if MANY_RANKS
struct LeafNumbers {
    uint16_t numbers[LEAF_LEVELS];
};
__device__ __forceinline__ uint32_t leaf_number(const LeafNumbers &at, int i)
{
    return at.numbers[i];
}
__device__ __forceinline__ void set_leaf_number(LeafNumbers &at, int i, uint32_t leaf)
{
    at.numbers[i] = (uint16_t)leaf;
}
#else
typedef uint64_t LeafNumbers;
#define leaf_number(at, i) ((uint32_t)((at) >> (8 * (i))) & 255)
#define set_leaf_number(at, i, leaf) \
    ((void)((at) = ((at) & ~(255ull << (8 * (i)))) | (uint64_t)(leaf) << (8 * (i))))
#endif

/* Returns the level in the tree of the lowest common ancestor of the leaves `a` and `b`. Leaves
 * are at level 0, their parents at level 1. */
__device__ __forceinline__ int ancestor_level(uint32_t a, uint32_t b)
{
    return 32 - __clz(a ^ b);
}

/* Adds partial sums in the order of a binary tree. The caller pushes one node for each leaf
 * that has a partial sum, in ascending order of leaves. A node stays on the stack, in shared
 * memory, until its right sibling is complete. leaf_at[i] is the index of a leaf below node i
 * of the stack. It shows where node i is in the tree. `depth`: number of nodes on the stack. P:
 * number of 16-byte vectors that each lane has of a node. */
template <class ROW, class PART> struct LeafStack {
    static constexpr int P = PartialSum<ROW, PART>::VECTORS;
    uint4 *memory;
    LeafNumbers leaf_at;
    int depth;

    /* Node i of the stack has P vectors in each lane. Returns the shared-memory address of this
     * lane's vector p. */
    __device__ __forceinline__ uint4 *vector_at(int i, int p) const
    {
        return memory + (i * P + p) * WARP + lane_id();
    }
    /* Returns leaf_at[i]. */
    __device__ __forceinline__ uint32_t leaf_of_level(int i) const
    {
        return leaf_number(leaf_at, i);
    }
    /* Replaces the two top nodes of the stack by their sum. */
    __device__ __forceinline__ void merge_top()
    {
        uint4 a[P], b[P];
#pragma unroll
        for (int p = 0; p < P; p++) {
            a[p] = *vector_at(depth - 2, p);
            b[p] = *vector_at(depth - 1, p);
        }
        PartialSum<ROW, PART>::add_partials(a, b);
        depth--;
#pragma unroll
        for (int p = 0; p < P; p++) *vector_at(depth - 1, p) = a[p];
    }
    /* Pushes `node`, the partial sum of leaf `new_leaf`. First merges the two top nodes of the
     * stack, as long as the smallest subtree that contains both nodes does not contain the new
     * leaf. No later leaf can be in this subtree, because leaves are pushed in ascending
     * order. */
    __device__ __forceinline__ void push_node(const uint4 *node, uint32_t new_leaf)
    {
        while (depth >= 2 &&
               ancestor_level(leaf_of_level(depth - 2), leaf_of_level(depth - 1)) <
                   ancestor_level(leaf_of_level(depth - 1), new_leaf))
            merge_top();
#pragma unroll
        for (int p = 0; p < P; p++) *vector_at(depth, p) = node[p];
        set_leaf_number(leaf_at, depth, new_leaf);
        depth++;
    }
    /* Sets `node` to the sum of all nodes of the stack. Returns false if the stack is empty. */
    __device__ __forceinline__ bool pop_result(uint4 *node)
    {
        while (depth >= 2) merge_top();
#pragma unroll
        for (int p = 0; p < P && depth; p++) node[p] = *vector_at(0, p);
        return depth != 0;
    }
};

#endif
