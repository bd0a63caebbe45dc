/* SPDX-License-Identifier: Apache-2.0 */
/* Reads option structs from the integers into which they are packed. options.h lists the
 * bits. */
#include "options.h"

#define READ_INT(prefix, name) out.name = call_uint(call, #name);
#define READ_REAL(prefix, name) out.name = call_float(call);

/* Returns `count` bits of a word, starting at bit `first`. */
static uint32_t extract_bits(uint64_t word, int first, int count)
{
    return (uint32_t)(word >> first) & (uint32_t)((1ull << count) - 1);
}

/* Returns the layer that is packed into three integers. */
static epic_layer unpack_layer(uint64_t rules, uint64_t slabs, uint64_t leaves)
{
    return (epic_layer){.num_experts = extract_bits(rules, 0, 17),
                        .num_logical = extract_bits(rules, 17, 17),
                        .top_k = extract_bits(rules, 34, 7),
                        .flags = extract_bits(rules, 41, 12),
                        .sum_order = extract_bits(rules, 53, 2),
                        .partial_type = extract_bits(rules, 55, 3),
                        .overflow = extract_bits(rules, 58, 2),
                        .priority = extract_bits(rules, 60, 2),
                        .layout = extract_bits(rules, 62, 2),
                        .alignment = extract_bits(slabs, 0, 32),
                        .expert_capacity = extract_bits(slabs, 32, 32),
                        .leaves = extract_bits(leaves, 0, 32)};
}

epic_layer read_layer(torch_call *call)
{
    const uint64_t rules = (uint64_t)call_int(call), slabs = (uint64_t)call_int(call);
    return unpack_layer(rules, slabs, (uint64_t)call_int(call));
}

epic_layer read_layer_with_flags(torch_call *call, uint32_t *flags)
{
    const uint64_t rules = (uint64_t)call_int(call), slabs = (uint64_t)call_int(call);
    const uint64_t leaves = (uint64_t)call_int(call);
    *flags = extract_bits(leaves, 32, 31);
    return unpack_layer(rules, slabs, leaves);
}

TORCH_EXPORT int64_t epic_torch_layer_add(int64_t group, int64_t rules, int64_t slabs,
                                          int64_t leaves, int64_t capacity, int64_t plan_bytes,
                                          int64_t has_int64_counts)
{
    const group_layer layer = {unpack_layer((uint64_t)rules, (uint64_t)slabs, (uint64_t)leaves),
                               capacity, plan_bytes, has_int64_counts != 0};
    return group_add_layer(group, &layer);
}

epic_router read_router(torch_call *call)
{
    epic_router out = {0};
    ROUTER_FIELDS(READ_INT, READ_REAL, )
    return out;
}

/* Reads the integer `kind` of an MLP, and the two floats after it: limit and alpha. */
static void read_kind(torch_call *call, epic_experts *out, mlp_types *types)
{
    const uint64_t kind = (uint64_t)call_int(call);
    out->inner = extract_bits(kind, 0, 32);
    out->activation = extract_bits(kind, 32, 8);
    out->ungated = extract_bits(kind, 40, 4);
    out->interleaved = extract_bits(kind, 44, 4);
    out->weighting = extract_bits(kind, 48, 4);
    out->row_type = extract_bits(kind, 60, 4) != 0 ? extract_bits(kind, 60, 4) : types->row;
    out->weight_type =
        extract_bits(kind, 52, 4) != 0 ? extract_bits(kind, 52, 4) : types->weight;
    types->grad = extract_bits(kind, 56, 4);
    out->limit = (float)call_float(call);
    out->alpha = (float)call_float(call);
}

epic_experts read_experts(torch_call *call, mlp_types *types)
{
    const uint64_t sizes = (uint64_t)call_int(call);
    epic_experts out = {.num_local_experts = extract_bits(sizes, 0, 32),
                        .hidden = extract_bits(sizes, 32, 32)};
    read_kind(call, &out, types);
    return out;
}

epic_experts read_shared(torch_call *call, epic_experts experts, uint32_t weight_type)
{
    epic_experts out = {.num_local_experts = 1, .hidden = experts.hidden};
    mlp_types types = {.row = experts.row_type, .weight = weight_type};
    read_kind(call, &out, &types);
    return out;
}

const char *const expert_names[4] = {"w_gate_up", "w_down", "b_gate_up", "b_down"};

void check_mlp(torch_call *call, const epic_experts *experts, const call_array arrays[4],
               const char *const names[4], uint32_t row_type, bool is_backward)
{
    const uint32_t type = arrays[0].type;
    const bool turned = type == EPIC_E4M3 && !is_backward;
    const int64_t local = experts->num_local_experts, hidden = experts->hidden;
    const int64_t inner = experts->inner, width = experts->ungated ? inner : 2 * inner;
    const int64_t shapes[4][3] = {
        {local, turned ? width : hidden, turned ? hidden : width},
        {local, turned ? hidden : inner, turned ? inner : hidden},
        {local, width},
        {local, hidden},
    };
    for (int i = 0; i < 4; i++) {
        call_check_type(call, names[i], arrays[i],
                        i < 2 || type != EPIC_E4M3 ? type : row_type);
        call_check_shape(call, names[i], arrays[i], i < 2 ? 3 : 2, shapes[i]);
    }
}

void read_compared(torch_call *call, compared_options *out, const epic_layer *layer)
{
    *out = (compared_options){.moe.layer = layer};
    mlp_types types = {0}; /* all zero, because here the arguments contain every type */
    out->moe.balance_coeff = call_float(call);
    out->moe.z_coeff = call_float(call);
    out->moe.sequence_tokens = call_int(call);
    out->moe.flags = call_uint(call, "flags");
    out->router = read_router(call);
    out->experts = read_experts(call, &types);
    out->shared = read_shared(call, out->experts, 0);
    out->moe.router = &out->router;
    out->moe.experts = &out->experts;
    out->moe.shared = out->shared.inner != 0 ? &out->shared : NULL;
}
