/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/p2p/layers.h"

#include "base/error.h"
#include "rules/sentences.h"

void p2p_sign_layer(signature *a, const epic_layer *layer)
{
    signature_mix(a, (uint64_t)layer->num_experts << 32 | layer->top_k);
    signature_mix(a, (uint64_t)layer->alignment << 32 | layer->overflow);
    signature_mix(a, (uint64_t)layer->expert_capacity << 32 | layer->sum_order);
    signature_mix(a, (uint64_t)layer->leaves << 32 | layer->partial_type);
    signature_mix(a, (uint64_t)layer->num_logical << 32 | layer->flags);
    if (layer->layout != EPIC_EXPERT_MAJOR) signature_mix(a, layer->layout);
    if (layer->priority != EPIC_BY_TOKEN) signature_mix(a, ~(uint64_t)layer->priority);
}

/* Returns a hash of a layer with all defaults filled in. The hash is never 0, because 0 means
 * "any layer". */
static uint32_t hash_layer(const epic_layer *layer)
{
    signature a = {0};
    p2p_sign_layer(&a, layer);
    return (uint32_t)(a.hash >> 32) | 1;
}

/* Sets self->layer_hashes to two hashes. A plan must have one of them. The two hashes differ
 * only with EPIC_BY_HOSTS: with this option a plan has the sum order EPIC_BY_RANK or EPIC_TREE,
 * depending on whether it was made with rank_of_expert. Only the plan in device memory shows
 * which order it has, so there is one hash per order, and the kernels accept either. */
void p2p_expect_layer(p2p_self *self, const epic_layer *layer)
{
    epic_layer order = *layer;
    self->layer_hashes[0] = self->layer_hashes[1] = hash_layer(layer);
    if (layer->sum_order != EPIC_BY_HOSTS) return;
    order.sum_order = EPIC_BY_RANK;
    self->layer_hashes[0] = hash_layer(&order);
    order.sum_order = EPIC_TREE;
    self->layer_hashes[1] = hash_layer(&order);
}

bool p2p_keeps_by_k(const epic_layer *layer)
{
    return layer->priority == EPIC_BY_K && layer->overflow == EPIC_OVERFLOW_DROP &&
           layer->top_k > 1;
}

epic_result p2p_read_layer(const epic_group *g, epic_layer *out, const epic_layer *layer)
{
    *out = *layer;
    if (out->num_logical && out->num_experts > P2P_REPLICATED_EXPERTS)
        return epic_fail(
            EPIC_ENOTSUP,
            "layer.num_experts is %u: must be at most %d in CUDA contexts with replicas",
            out->num_experts, P2P_REPLICATED_EXPERTS);
    if (out->num_experts > DEVICE_MAX_EXPERTS)
        return epic_fail(EPIC_ENOTSUP,
                         "layer.num_experts is %u: must be at most %d in CUDA contexts",
                         out->num_experts, DEVICE_MAX_EXPERTS);
    if (p2p_keeps_by_k(out) && (uint64_t)out->num_experts * out->top_k > P2P_BY_K_TALLIES)
        return epic_fail(EPIC_ENOTSUP,
                         "layer.priority is EPIC_BY_K, layer.num_experts %u, layer.top_k %u: "
                         "their product must be at most %d in CUDA contexts",
                         out->num_experts, out->top_k, P2P_BY_K_TALLIES);
    if (g->config.max_tokens * out->top_k >= 1ll << P2P_COUNT_BITS)
        return epic_fail(EPIC_ENOTSUP,
                         "layer.top_k is %u, config.max_tokens %lld: their product must "
                         "be below %lld in CUDA contexts",
                         out->top_k, (long long)g->config.max_tokens, 1ll << P2P_COUNT_BITS);
    if (!out->alignment || out->layout == EPIC_FLAT) out->alignment = 1;
    if (!out->leaves) out->leaves = (uint32_t)g->num_ranks;
    if (out->sum_order != EPIC_TREE) out->leaves = (uint32_t)g->num_ranks;
    if (out->sum_order == EPIC_TREE &&
        out->leaves / (uint32_t)p2p_num_members(g) > P2P_MOST_LEAVES)
        return epic_fail(EPIC_ENOTSUP, SENTENCE_MOST_LEAVES, out->leaves, P2P_MOST_LEAVES);
    return EPIC_OK;
}

device_plan_layout p2p_plan_layout(const epic_group *g, const epic_layer *layer)
{
    return device_plan_layout_of(g->num_ranks, g->config.max_tokens, layer->num_experts,
                                 layer->top_k);
}

static epic_result check_plan_bytes(const epic_group *g, const epic_layer *layer,
                                    int64_t plan_bytes)
{
    const int64_t bytes = device_layer_bytes(g->num_ranks, g->config.max_tokens, layer);
    if (plan_bytes >= bytes) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "plan_bytes is %lld: this layer needs %lld (epic_plan_bytes)",
                     (long long)plan_bytes, (long long)bytes);
}

epic_result p2p_read_plan_layer(const epic_group *g, epic_layer *out, const epic_layer *layer,
                                int64_t plan_bytes)
{
    TRY(p2p_read_layer(g, out, layer));
    return check_plan_bytes(g, out, plan_bytes);
}

bool p2p_needs_general_combine(const epic_group *g, const epic_layer *layer)
{
    const bool tree = layer->sum_order == EPIC_TREE;
    const bool is_simple_tree =
        !WITH_VACANT_SEATS && g->num_ranks <= 8 && layer->leaves == (uint32_t)g->num_ranks;
    return layer->partial_type || (tree && !is_simple_tree);
}
