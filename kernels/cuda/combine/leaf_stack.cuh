/* SPDX-License-Identifier: Apache-2.0 */
/* A LeafStack adds partial sums in the order of a binary tree, for any number of leaves. The
 * kernels of combine use it for the leaves of one rank and for the partial sums of many ranks.
 * A *node* is the sum of all leaves below one node of the tree, packed into vectors of type
 * PART. */
#ifndef EPIC_LEAF_STACK_CUH
#define EPIC_LEAF_STACK_CUH

#include "cuda/combine/combine.cuh"

/* maximum number of nodes on the stack of a LeafStack: one more than the tree has levels */
#define LEAF_LEVELS (MANY_RANKS ? 10 : 8)

/* For each node of a LeafStack, the index of one leaf below it. In libraries without
 * MANY_RANKS, the index is one byte of a 64-bit word, and the functions are macros for the
 * reason in ranks.cuh. */
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
 * that has a partial sum, in ascending order of leaves. A node whose right sibling is not
 * complete stays on the stack, in shared memory. leaf_at[i] is a leaf below node i of the
 * stack, which shows where the node is in the tree. `depth`: number of nodes on the stack. P:
 * number of 16-byte vectors of a node in each lane. */
template <class ROW, class PART> struct LeafStack {
    static constexpr int P = PartialSum<ROW, PART>::VECTORS;
    uint4 *memory;
    LeafNumbers leaf_at;
    int depth;

    /* Returns the address in shared memory of this lane's vector p of node i of the stack. */
    __device__ __forceinline__ uint4 *vector_at(int i, int p) const
    {
        return memory + (i * P + p) * WARP + lane_id();
    }
    /* Returns the leaf that is stored for node i of the stack. */
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
    /* Pushes the node of leaf `new_leaf`. Before this, adds the two top nodes of the stack as
     * long as their smallest common subtree does not contain the new leaf. Such a subtree is
     * complete, because leaves come in ascending order. */
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
