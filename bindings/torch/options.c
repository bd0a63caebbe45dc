/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#define READ_INT(prefix, name) out.name = call_uint(call, #name);
#define READ_REAL(prefix, name) out.name = call_float(call);
#define READ_FLOAT(prefix, name) out.name = (float)call_float(call);

epic_layer read_layer(torch_call *call)
{
    epic_layer out = {0};
    LAYER_FIELDS(READ_INT, )
    return out;
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
