/* SPDX-License-Identifier: Apache-2.0 */
/* The core's option structs as arguments of operators: one argument for each field, named as the field
 * with a prefix, or several small fields in one number. */
#ifndef EPIC_TORCH_OPTIONS_H
#define EPIC_TORCH_OPTIONS_H

#include "call.h"

/* clang-format off */
#define ROUTER_FIELDS(INT, REAL, prefix) \
    INT(prefix, num_experts) INT(prefix, top_k) INT(prefix, score) INT(prefix, zero_experts) \
    INT(prefix, num_groups) INT(prefix, topk_groups) INT(prefix, group_score) \
    INT(prefix, group_best) INT(prefix, group_others) INT(prefix, weight_rule) \
    INT(prefix, normalize) REAL(prefix, eps) REAL(prefix, norm_min) REAL(prefix, jitter) \
    REAL(prefix, scale)
/* clang-format on */

/* Parts of the operators' schemas. */
#define SCHEMA_INT(prefix, name) ", int " prefix #name
#define SCHEMA_REAL(prefix, name) ", float " prefix #name
#define LAYER_SCHEMA ", int layer_rules, int layer_slabs, int layer_leaves"
#define ROUTER_SCHEMA ROUTER_FIELDS(SCHEMA_INT, SCHEMA_REAL, "router_")
#define MLP_SCHEMA(prefix) \
    ", int " prefix "_kind, float " prefix "_limit, float " prefix "_alpha"
#define EXPERTS_SCHEMA ", int experts_sizes" MLP_SCHEMA("experts")
#define SHARED_SCHEMA MLP_SCHEMA("shared")

/* Read options from the next arguments of a call.  Small fields share a number, from the lowest bits
 * on, because torch spends 0.2 us of host time on each argument and allows at most 64:
 *     layer_rules     num_experts, num_logical (17 each), top_k, flags (8), sum_order,
 *                     partial_type (3), overflow, priority, layout (2)
 *     layer_slabs     alignment (32), expert_capacity (32)
 *     layer_leaves    leaves (32)
 *     experts_sizes   num_local_experts (32), hidden (32)
 *     .._kind         inner (32), activation (8), ungated, interleaved, weighting, weight_type,
 *                     grad_type, row_type (4 each) */
epic_layer read_layer(torch_call *call);

/* Called by Python: keeps a layer, which the first three numbers describe, in a group (groups.h).
 * Returns the layer's number. */
int64_t epic_torch_layer_add(int64_t group, int64_t rules, int64_t slabs, int64_t leaves,
                             int64_t capacity, int64_t plan_bytes);
epic_router read_router(torch_call *call);

/* The options of a whole layer, which a plan of a composed layer gets so that the ranks compare them.
 * moe points to the other members. */
#define COMPARED_SCHEMA                                              \
    ", float balance_coeff, float z_coeff, SymInt sequence_tokens, " \
    "int flags" ROUTER_SCHEMA EXPERTS_SCHEMA SHARED_SCHEMA
typedef struct compared_options {
    epic_router router;
    epic_experts experts, shared;
    epic_moe moe;
} compared_options;
void read_compared(torch_call *call, compared_options *out, const epic_layer *layer);

/* Types of an MLP's tensors. */
typedef struct mlp_types {
    uint32_t row, weight; /* in: types of the tensors, used if the kind does not contain them */
    uint32_t
        grad; /* out: type of the weights' gradients; 0: float32, or float64 for float64 rows */
} mlp_types;

epic_experts read_experts(torch_call *call, mlp_types *types);
epic_experts read_shared(torch_call *call, epic_experts experts,
                         uint32_t weight_type); /* inner 0: no shared expert */

#endif
