/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the option structs of the core from attributes. The attribute for a field has the name
 * of the field, sometimes after a prefix. */
#include "options.h"

#include <stdio.h>

epic_layer options_read_layer(ffi_reader *reader)
{
    return (epic_layer){.num_experts = ffi_read_uint(reader, "num_experts"),
                        .num_logical = ffi_read_uint(reader, "num_logical"),
                        .top_k = ffi_read_uint(reader, "top_k"),
                        .alignment = ffi_read_uint(reader, "alignment"),
                        .layout = ffi_read_uint(reader, "layout"),
                        .overflow = ffi_read_uint(reader, "overflow"),
                        .expert_capacity = ffi_read_uint(reader, "expert_capacity"),
                        .priority = ffi_read_uint(reader, "priority"),
                        .sum_order = ffi_read_uint(reader, "sum_order"),
                        .leaves = ffi_read_uint(reader, "leaves"),
                        .partial_type = ffi_read_uint(reader, "partial_type"),
                        .flags = ffi_read_uint(reader, "flags")};
}

epic_router options_read_router(ffi_reader *reader)
{
    return (epic_router){.num_experts = ffi_read_uint(reader, "num_experts"),
                         .zero_experts = ffi_read_uint(reader, "zero_experts"),
                         .top_k = ffi_read_uint(reader, "top_k"),
                         .score = ffi_read_uint(reader, "score"),
                         .num_groups = ffi_read_uint(reader, "num_groups"),
                         .topk_groups = ffi_read_uint(reader, "topk_groups"),
                         .group_score = ffi_read_uint(reader, "group_score"),
                         .group_best = ffi_read_uint(reader, "group_best"),
                         .group_others = ffi_read_uint(reader, "group_others"),
                         .weight_rule = ffi_read_uint(reader, "weight_rule"),
                         .normalize = ffi_read_uint(reader, "normalize"),
                         .eps = ffi_read_float(reader, "eps"),
                         .norm_min = ffi_read_float(reader, "norm_min"),
                         .jitter = ffi_read_float(reader, "jitter"),
                         .scale = ffi_read_float(reader, "scale")};
}

/* Returns the integer attribute with the name `prefix` + `name`. read_prefixed_float() returns
 * a float attribute. */
static uint32_t read_prefixed_uint(ffi_reader *reader, const char *prefix, const char *name)
{
    char whole[64];
    snprintf(whole, sizeof whole, "%s%s", prefix, name);
    return ffi_read_uint(reader, whole);
}

static float read_prefixed_float(ffi_reader *reader, const char *prefix, const char *name)
{
    char whole[64];
    snprintf(whole, sizeof whole, "%s%s", prefix, name);
    return (float)ffi_read_float(reader, whole);
}

epic_experts options_read_experts(ffi_reader *reader, const char *prefix)
{
    return (epic_experts){.num_local_experts =
                              read_prefixed_uint(reader, prefix, "num_local_experts"),
                          .hidden = read_prefixed_uint(reader, prefix, "hidden"),
                          .inner = read_prefixed_uint(reader, prefix, "inner"),
                          .activation = read_prefixed_uint(reader, prefix, "activation"),
                          .ungated = read_prefixed_uint(reader, prefix, "ungated"),
                          .interleaved = read_prefixed_uint(reader, prefix, "interleaved"),
                          .weighting = read_prefixed_uint(reader, prefix, "weighting"),
                          .row_type = read_prefixed_uint(reader, prefix, "row_type"),
                          .weight_type = read_prefixed_uint(reader, prefix, "weight_type"),
                          .limit = read_prefixed_float(reader, prefix, "limit"),
                          .alpha = read_prefixed_float(reader, prefix, "alpha")};
}

void options_read_moe(ffi_reader *reader, moe_options *out)
{
    out->layer = options_read_layer(reader);
    out->router = options_read_router(reader);
    if (out->layer.num_logical > 0) out->router.num_experts = out->layer.num_logical;
    out->experts = options_read_experts(reader, "experts_");
    const bool has_shared = ffi_read_uint(reader, "has_shared") != 0;
    if (has_shared) out->shared = options_read_experts(reader, "shared_");
    out->moe = (epic_moe){.layer = &out->layer,
                          .router = &out->router,
                          .experts = &out->experts,
                          .shared = has_shared ? &out->shared : NULL,
                          .balance_coeff = ffi_read_float(reader, "balance_coeff"),
                          .z_coeff = ffi_read_float(reader, "z_coeff"),
                          .sequence_tokens = ffi_read_int(reader, "sequence_tokens"),
                          .capacity = ffi_read_int(reader, "capacity"),
                          .flags = ffi_read_uint(reader, "moe_flags")};
}
