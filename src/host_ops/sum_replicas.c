/* SPDX-License-Identifier: Apache-2.0 */
/* Implements epic_sum_replicas on the host. A *replica* is a copy of a logical expert. A *leaf*
 * is a block of consecutive experts whose rows are added first.
 *
 * For each logical expert with several replicas, every rank first adds its own replicas in its
 * workspace, leaf by leaf. Then epic_allreduce_sum adds the workspaces of all ranks. Example:
 * logical expert a has the replicas 0, 2, 3 and 6, whose rows are x0, x2, x3 and x6. There are
 * two ranks with two leaves of two experts each. Rank 0 adds x0 (experts 0 and 1) and x2 + x3
 * (experts 2 and 3), rank 1 adds 0 (experts 4 and 5) and x6 (experts 6 and 7), and
 * epic_allreduce_sum adds the two sums. */
#include <string.h>

#include "base/error.h"
#include "host_ops/host_ops.h"

/* number of floats added at a time, small enough that partial sums stay in the cache */
#define CHUNK 256
#define MOST_LEVELS 18 /* a tree with MAX_EXPERTS leaves has 17 levels; one more is spare */

typedef struct replica_sum {
    const epic_sum_replicas_args *args;
    const plan_view *plan;
    const host_kernels *kernels;
    int32_t logical;      /* the logical expert whose replicas are being added */
    int64_t count;        /* number of elements in one expert's row */
    int64_t leaf_experts; /* number of experts in a leaf */
    /* index of the first element of the current chunk, and its number of elements */
    int64_t at, n;
    float levels[MOST_LEVELS][CHUNK]; /* partial sums, one row for each level of the tree */
} replica_sum;

/* Returns true if a local expert is a replica of a->logical and is in leaf `leaf`. If `leaf` is
 * -1, accepts replicas in all leaves. */
static bool is_replica_on_leaf(const replica_sum *a, int32_t local, int64_t leaf)
{
    const int32_t expert = a->plan->expert_of[local];
    if (expert < 0 || a->plan->logical_of[expert] != a->logical) return false;
    return leaf < 0 || expert / a->leaf_experts == leaf;
}

static float *numbers_of(const replica_sum *a, int32_t local)
{
    return (float *)a->args->data.data + local * a->count;
}

/* Writes to `out` [n] the sum of this rank's replicas in one leaf, for the current chunk.
 * Begins with 0 and adds the rows of the replicas by ascending expert id. */
static void add_leaf(const replica_sum *a, int64_t leaf, float *out)
{
    memset(out, 0, (size_t)a->n * sizeof *out);
    for (int32_t l = 0; l < a->plan->header->num_local; l++) {
        if (!is_replica_on_leaf(a, l, leaf)) continue;
        const void *const both[] = {out, numbers_of(a, l) + a->at};
        a->kernels->add(out, EPIC_F32, both, 2, EPIC_F32, a->n);
    }
}

/* Adds the sums of the leaves [first, first + count) in a binary tree. count is a power of two.
 * Writes the sum to row `level` of a->levels. May overwrite the rows of a->levels after row
 * `level`. */
static void add_leaves(replica_sum *a, int64_t first, int64_t count, int level)
{
    float *out = a->levels[level];
    if (count == 1) {
        add_leaf(a, first, out);
        return;
    }
    add_leaves(a, first, count / 2, level);
    add_leaves(a, first + count / 2, count / 2, level + 1);
    const void *const both[] = {out, a->levels[level + 1]};
    a->kernels->add(out, EPIC_F32, both, 2, EPIC_F32, a->n);
}

/* Writes the sum of this rank's replicas to the workspace, chunk by chunk. Without EPIC_TREE,
 * all experts of the rank are one leaf. */
static void add_local_replicas(replica_sum *a)
{
    const plan_header *h = a->plan->header;
    const bool tree = h->layer.sum_order == EPIC_TREE;
    const int64_t leaves = tree ? h->layer.leaves / (uint32_t)h->num_members : 1;
    const int64_t first = tree ? a->plan->position_of[h->rank] * leaves : -1;
    for (a->at = 0; a->at < a->count; a->at += CHUNK) {
        const int64_t left = a->count - a->at;
        a->n = left < CHUNK ? left : CHUNK;
        add_leaves(a, first, leaves, 0);
        memcpy(a->args->workspace + a->at, a->levels[0], (size_t)a->n * sizeof(float));
    }
}

/* Copies the sum over all ranks from the workspace to this rank's replicas of a->logical. */
static void copy_sum_to_replicas(const replica_sum *a)
{
    const size_t bytes = (size_t)a->args->data.row_bytes;
    for (int32_t l = 0; l < a->plan->header->num_local; l++)
        if (is_replica_on_leaf(a, l, -1)) memcpy(numbers_of(a, l), a->args->workspace, bytes);
}

/* Sets bit i of `several` if members own more than one replica of logical expert i. */
static void mark_replicated(const plan_view *v, uint64_t *several)
{
    const epic_layer *layer = &v->header->layer;
    uint64_t one[MAX_EXPERTS / 64] = {0};
    for (uint32_t e = 0; layer->num_logical && e < layer->num_experts; e++) {
        const int32_t logical = v->logical_of[e];
        if (logical < 0) continue;
        const uint64_t bit = (uint64_t)1 << logical % 64;
        several[logical / 64] |= one[logical / 64] & bit;
        one[logical / 64] |= bit;
    }
}

/* Implements epic_sum_replicas on the host. First runs an all-reduce of 0 elements: its op
 * headers contain the plan's id, so the ranks compare their plans before they add anything. */
epic_result host_sum_replicas(epic_context *ctx, const epic_sum_replicas_args *args)
{
    plan_op s;
    epic_allreduce_sum_args sum = {.call = args->call};
    plan_op_begin(&s, ctx, EPIC_OP_SUM, args->plan, args->plan_bytes, NULL);
    if (!s.damaged && args->data.num_rows < s.plan.header->num_local)
        return epic_fail(EPIC_EINVAL, "data.num_rows is %lld: the plan has %d local experts",
                         (long long)args->data.num_rows, s.plan.header->num_local);
    TRY(host_sum_with_header(ctx, &sum, &s.op_header));
    const plan_header *h = s.plan.header;
    uint64_t several[MAX_EXPERTS / 64] = {0};
    mark_replicated(&s.plan, several);
    replica_sum a = {.args = args, .plan = &s.plan, .kernels = host_kernels_get()};
    a.count = args->data.row_bytes / (int64_t)sizeof(float);
    a.leaf_experts = h->layer.num_experts / (h->layer.leaves ? h->layer.leaves : 1);
    sum.data = args->workspace;
    sum.count = a.count;
    sum.order = h->layer.sum_order;
    for (uint32_t l = 0; h->result == EPIC_OK && l < h->layer.num_logical; l++) {
        if (!(several[l / 64] >> l % 64 & 1)) continue;
        a.logical = (int32_t)l;
        add_local_replicas(&a);
        TRY(host_sum_with_header(ctx, &sum, &s.op_header));
        copy_sum_to_replicas(&a);
    }
    return EPIC_OK;
}
