/* SPDX-License-Identifier: Apache-2.0 */
/* The core's option structs as arguments of operators: one for each field, named as the field with
 * a prefix. */
#ifndef EPIC_TORCH_OPTIONS_H
#define EPIC_TORCH_OPTIONS_H

#include "call.h"

/* INT or REAL of each field.  The whole layer has room for no more than 64 arguments (torch's
 * limit): there what another argument tells is left out. */
/* clang-format off */
#define PLACING_FIELDS(INT, prefix) \
    INT(prefix, alignment) INT(prefix, overflow) INT(prefix, expert_capacity) \
    INT(prefix, priority) INT(prefix, sum_order) INT(prefix, leaves) INT(prefix, partial_type)

#define ROUTER_FIELDS(INT, REAL, prefix) \
    INT(prefix, num_experts) INT(prefix, top_k) INT(prefix, score) INT(prefix, zero_experts) \
    INT(prefix, num_groups) INT(prefix, topk_groups) INT(prefix, group_score) \
    INT(prefix, group_best) INT(prefix, group_others) INT(prefix, weight_rule) \
    INT(prefix, normalize) REAL(prefix, eps) REAL(prefix, norm_min) REAL(prefix, jitter) \
    REAL(prefix, scale)

#define EXPERTS_FIELDS(INT, REAL, prefix) \
    INT(prefix, num_local_experts) INT(prefix, hidden) INT(prefix, inner) \
    INT(prefix, activation) INT(prefix, ungated) INT(prefix, interleaved) \
    INT(prefix, weighting) REAL(prefix, limit) REAL(prefix, alpha)

#define SHARED_FIELDS(INT, REAL, prefix) \
    INT(prefix, inner) INT(prefix, activation) INT(prefix, ungated) INT(prefix, interleaved) \
    REAL(prefix, limit) REAL(prefix, alpha)
/* clang-format on */

/* For schemas. */
#define SCHEMA_INT(prefix, name) ", int " prefix #name
#define SCHEMA_REAL(prefix, name) ", float " prefix #name
#define PLACING_SCHEMA PLACING_FIELDS(SCHEMA_INT, "layer_")
#define LAYER_SCHEMA ", int layer_experts, int layer_slabs, int layer_rules"
#define ROUTER_SCHEMA ROUTER_FIELDS(SCHEMA_INT, SCHEMA_REAL, "router_")
#define EXPERTS_SCHEMA EXPERTS_FIELDS(SCHEMA_INT, SCHEMA_REAL, "experts_")
#define SHARED_SCHEMA SHARED_FIELDS(SCHEMA_INT, SCHEMA_REAL, "shared_")

/* The next arguments of a call.  A layer is three numbers, as each argument of an operator takes torch
 * a fifth of a microsecond: num_experts and num_logical above it, 32 bits each; alignment and
 * expert_capacity; and from the lowest bits on top_k (8), overflow, priority, sum_order, layout and
 * partial_type (4 each), flags (8), leaves (28). */
epic_layer read_layer(torch_call *call);
epic_layer read_placing(torch_call *call); /* but for num_experts and top_k */
epic_router read_router(torch_call *call);
epic_experts read_experts(torch_call *call, uint32_t row_type, uint32_t weight_type);
epic_experts read_shared(torch_call *call, epic_experts experts); /* inner 0: there is none */

#endif
