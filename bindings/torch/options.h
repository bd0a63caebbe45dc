/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the option structs of the core from the arguments of an operator. A field is an
 * argument of its own, whose name is a prefix and the name of the field, or several small
 * fields are packed into one integer argument. */
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

/* Parts of the schemas of operators. */
#define SCHEMA_INT(prefix, name) ", int " prefix #name
#define SCHEMA_REAL(prefix, name) ", float " prefix #name
#define LAYER_SCHEMA ", int layer_rules, int layer_slabs, int layer_leaves"
#define ROUTER_SCHEMA ROUTER_FIELDS(SCHEMA_INT, SCHEMA_REAL, "router_")
#define MLP_SCHEMA(prefix) \
    ", int " prefix "_kind, float " prefix "_limit, float " prefix "_alpha"
#define EXPERTS_SCHEMA ", int experts_sizes" MLP_SCHEMA("experts")
#define SHARED_SCHEMA MLP_SCHEMA("shared")

/* Read options from the next arguments of a call. Small fields are packed into one integer, the
 * first field in the lowest bits, because torch needs host time for each argument and allows at
 * most 64 of them. The integers, with the number of bits of each field:
 * - layer_rules: num_experts, num_logical (17 each), top_k (7), flags (12), sum_order (2),
 *   partial_type (3), overflow, priority, layout (2 each)
 * - layer_slabs: alignment (32), expert_capacity (32)
 * - layer_leaves: leaves (32)
 * - experts_sizes: num_local_experts (32), hidden (32)
 * - .._kind: inner (32), activation (8), ungated, interleaved, weighting, weight_type,
 *   grad_type, row_type (4 each) */
epic_layer read_layer(torch_call *call);
/* Like read_layer(), for the operators of the whole layer (moe.c). Also sets *flags to the
 * flags of epic_moe, which are bits 32 to 62 of layer_leaves. */
epic_layer read_layer_with_flags(torch_call *call, uint32_t *flags);

/* For Python: stores a layer in a group (groups.h). rules, slabs and leaves contain the layer,
 * packed in the same way as the arguments of read_layer(). Returns the id of the layer, or 0 on
 * failure. */
int64_t epic_torch_layer_add(int64_t group, int64_t rules, int64_t slabs, int64_t leaves,
                             int64_t capacity, int64_t plan_bytes, int64_t has_int64_counts);
epic_router read_router(torch_call *call);

/* The options of a whole layer. If a program composes the layer of single operators, Python
 * passes these options to the operator of the plan, so that the ranks compare them. The field
 * `moe` points to the other fields. */
#define COMPARED_SCHEMA                                              \
    ", float balance_coeff, float z_coeff, SymInt sequence_tokens, " \
    "int flags" ROUTER_SCHEMA EXPERTS_SCHEMA SHARED_SCHEMA
typedef struct compared_options {
    epic_router router;
    epic_experts experts, shared;
    epic_moe moe;
} compared_options;
void read_compared(torch_call *call, compared_options *out, const epic_layer *layer);

/* Types of the tensors of an MLP. */
typedef struct mlp_types {
    /* set by the caller: types of the tensors, used if the integer `kind` does not contain
     * them */
    uint32_t row, weight;
    /* set by the function: epic_type of the gradients of the weights; 0: default */
    uint32_t grad;
} mlp_types;

/* Read the options of the experts (first function) or of the shared expert (second function)
 * from the next arguments of a call. *types has the types that the arguments may leave out. The
 * functions set types->grad. */
epic_experts read_experts(torch_call *call, mlp_types *types);
/* Checks the types and shapes of the weights of an MLP: w_gate_up, w_down, b_gate_up and
 * b_down. `names` contains their names in errors. Weights in e4m3 are transposed in forward,
 * but not in backward. */
void check_mlp(torch_call *call, const epic_experts *experts, const call_array arrays[4],
               const char *const names[4], uint32_t row_type, bool is_backward);
extern const char *const expert_names[4]; /* of the experts' weights */
/* Returns a struct with inner 0 if the layer has no shared expert. */
epic_experts read_shared(torch_call *call, epic_experts experts, uint32_t weight_type);

#endif
