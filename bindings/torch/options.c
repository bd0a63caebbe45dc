/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#define READ_INT(prefix, name) out.name = call_uint(call, #name);
#define READ_REAL(prefix, name) out.name = call_float(call);
#define READ_FLOAT(prefix, name) out.name = (float)call_float(call);

static uint32_t bits(uint64_t word, int first, int count)
{
    return (uint32_t)(word >> first) & (uint32_t)((1ull << count) - 1);
}

epic_layer read_layer(torch_call *call)
{
    const uint64_t experts = (uint64_t)call_int(call), slabs = (uint64_t)call_int(call);
    const uint64_t rules = (uint64_t)call_int(call);
    return (epic_layer){.num_experts = bits(experts, 0, 32),
                        .num_logical = bits(experts, 32, 32),
                        .alignment = bits(slabs, 0, 32),
                        .expert_capacity = bits(slabs, 32, 32),
                        .top_k = bits(rules, 0, 8),
                        .overflow = bits(rules, 8, 4),
                        .priority = bits(rules, 12, 4),
                        .sum_order = bits(rules, 16, 4),
                        .layout = bits(rules, 20, 4),
                        .partial_type = bits(rules, 24, 4),
                        .flags = bits(rules, 28, 8),
                        .leaves = bits(rules, 36, 28)};
}

epic_layer read_placing(torch_call *call)
{
    epic_layer out = {0};
    PLACING_FIELDS(READ_INT, )
    return out;
}

epic_router read_router(torch_call *call)
{
    epic_router out = {0};
    ROUTER_FIELDS(READ_INT, READ_REAL, )
    return out;
}

epic_experts read_experts(torch_call *call, uint32_t row_type, uint32_t weight_type)
{
    epic_experts out = {.row_type = row_type, .weight_type = weight_type};
    EXPERTS_FIELDS(READ_INT, READ_FLOAT, )
    return out;
}

epic_experts read_shared(torch_call *call, epic_experts experts)
{
    epic_experts out = {.num_local_experts = 1,
                        .hidden = experts.hidden,
                        .row_type = experts.row_type,
                        .weight_type = experts.weight_type};
    SHARED_FIELDS(READ_INT, READ_FLOAT, )
    return out;
}
