/* SPDX-License-Identifier: Apache-2.0 */
/* The core's option structs from attributes: one attribute for each field, of the same name. */
#include "read.h"

#include <stdio.h>

epic_layer read_layer(ffi_reader *reader)
{
    return (epic_layer){.num_experts = ffi_uint(reader, "num_experts"),
                        .num_logical = ffi_uint(reader, "num_logical"),
                        .top_k = ffi_uint(reader, "top_k"),
                        .alignment = ffi_uint(reader, "alignment"),
                        .layout = ffi_uint(reader, "layout"),
                        .overflow = ffi_uint(reader, "overflow"),
                        .expert_capacity = ffi_uint(reader, "expert_capacity"),
                        .priority = ffi_uint(reader, "priority"),
                        .sum_order = ffi_uint(reader, "sum_order"),
                        .leaves = ffi_uint(reader, "leaves"),
                        .partial_type = ffi_uint(reader, "partial_type"),
                        .flags = ffi_uint(reader, "flags")};
}

epic_router read_router(ffi_reader *reader)
{
    return (epic_router){.num_experts = ffi_uint(reader, "num_experts"),
                         .zero_experts = ffi_uint(reader, "zero_experts"),
                         .top_k = ffi_uint(reader, "top_k"),
                         .score = ffi_uint(reader, "score"),
                         .num_groups = ffi_uint(reader, "num_groups"),
                         .topk_groups = ffi_uint(reader, "topk_groups"),
                         .group_score = ffi_uint(reader, "group_score"),
                         .group_best = ffi_uint(reader, "group_best"),
                         .group_others = ffi_uint(reader, "group_others"),
                         .weight_rule = ffi_uint(reader, "weight_rule"),
                         .normalize = ffi_uint(reader, "normalize"),
                         .eps = ffi_float(reader, "eps"),
                         .norm_min = ffi_float(reader, "norm_min"),
                         .jitter = ffi_float(reader, "jitter"),
                         .scale = ffi_float(reader, "scale")};
}

static uint32_t prefixed(ffi_reader *reader, const char *prefix, const char *name)
{
    char whole[64];
    snprintf(whole, sizeof whole, "%s%s", prefix, name);
    return ffi_uint(reader, whole);
}

static float prefixed_float(ffi_reader *reader, const char *prefix, const char *name)
{
    char whole[64];
    snprintf(whole, sizeof whole, "%s%s", prefix, name);
    return (float)ffi_float(reader, whole);
}

epic_experts read_experts(ffi_reader *reader, const char *prefix)
{
    return (epic_experts){.num_local_experts = prefixed(reader, prefix, "num_local_experts"),
                          .hidden = prefixed(reader, prefix, "hidden"),
                          .inner = prefixed(reader, prefix, "inner"),
                          .activation = prefixed(reader, prefix, "activation"),
                          .ungated = prefixed(reader, prefix, "ungated"),
                          .interleaved = prefixed(reader, prefix, "interleaved"),
                          .weighting = prefixed(reader, prefix, "weighting"),
                          .row_type = prefixed(reader, prefix, "row_type"),
                          .weight_type = prefixed(reader, prefix, "weight_type"),
                          .limit = prefixed_float(reader, prefix, "limit"),
                          .alpha = prefixed_float(reader, prefix, "alpha")};
}

void read_moe(ffi_reader *reader, moe_options *out)
{
    out->layer = read_layer(reader);
    out->router = read_router(reader);
    if (out->layer.num_logical > 0) out->router.num_experts = out->layer.num_logical;
    out->experts = read_experts(reader, "experts_");
    const bool has_shared = ffi_uint(reader, "has_shared") != 0;
    if (has_shared) out->shared = read_experts(reader, "shared_");
    out->moe = (epic_moe){.layer = &out->layer,
                          .router = &out->router,
                          .experts = &out->experts,
                          .shared = has_shared ? &out->shared : NULL,
                          .balance_coeff = ffi_float(reader, "balance_coeff"),
                          .z_coeff = ffi_float(reader, "z_coeff"),
                          .sequence_tokens = ffi_int(reader, "sequence_tokens"),
                          .capacity = ffi_int(reader, "capacity")};
}
