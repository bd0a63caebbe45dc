/* SPDX-License-Identifier: Apache-2.0 */
/* Calls the handlers for GPUs as XLA calls them, on a machine without a GPU. The device "GPU 3"
 * of this test has a host context. Arrays that only a GPU could read have an address that the
 * host cannot read. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epic/epic.h"
#include "frames_call.h"

handler epic_jax_combine, epic_jax_cuda_combine, epic_jax_no_graph_combine;
handler epic_jax_cuda_plan_dispatch, epic_jax_cuda_combine_backward,
    epic_jax_cuda_allreduce_sum;
handler epic_jax_cuda_dispatch_backward, epic_jax_cuda_plan, epic_jax_cuda_router;
handler epic_jax_cuda_moe, epic_jax_no_graph_moe, epic_jax_cuda_moe_backward;
handler epic_jax_cuda_experts, epic_jax_cuda_experts_backward;
int epic_jax_member_add(const char *name, int is_gpu, int32_t ordinal, const char *devices,
                        int32_t rank, epic_context *ctx);
epic_context *epic_jax_member_remove(const char *name, int is_gpu, int32_t ordinal);

enum { TOKENS = 3, HIDDEN = 4, EXPERTS = 2, SLOTS = 4, INNER = 2, TAIL = 16 };

/* --------------------------------------------------------------------------- the calls ---- */

static float x[TOKENS][HIDDEN], w[TOKENS], recv[SLOTS][HIDDEN], slot[SLOTS];
static float out[TOKENS][HIDDEN], d_rows[SLOTS][HIDDEN], d_slot[SLOTS], d_x[TOKENS][HIDDEN];
static float d_w[TOKENS];
static const int32_t chosen[TOKENS] = {1, 0, 1};
static int32_t rows[EXPERTS], tokens[EXPERTS], load[EXPERTS], demand[1];
static unsigned char *plan;
static int64_t plan_bytes;

static void add_layer(call *c, int64_t top_k)
{
    static const char *const zero[] = {"layout",       "overflow",    "expert_capacity",
                                       "priority",     "sum_order",   "leaves",
                                       "partial_type", "num_logical", "flags"};
    add_int(c, "num_experts", EXPERTS);
    add_int(c, "top_k", top_k);
    add_int(c, "alignment", 1);
    for (size_t i = 0; i < sizeof zero / sizeof *zero; i++) add_int(c, zero[i], 0);
    add_int(c, "capacity", SLOTS);
    add_int(c, "num_local_experts", EXPERTS);
    add_int(c, "has_moe", 0);
}

/* Calls a collective handler. Its last result is the byte of a finished call. */
static int run_collective(handler *function, call *c)
{
    static unsigned char done;
    add_int(c, "max_sms", 0);
    add(c, RESULT, XLA_FFI_DataType_U8, &done, 1, 0);
    return run(function, c);
}

static int plan_dispatch(const char *group, int64_t top_k, XLA_FFI_DataType row_type)
{
    call *c = calloc(1, sizeof *c);
    add(c, ARG, XLA_FFI_DataType_S32, chosen, TOKENS, 1);
    add_none(c, ARG); /* rank_of_expert */
    add_none(c, ARG); /* logical_of_expert */
    add_none(c, ARG); /* capacity_limit */
    add(c, ARG, XLA_FFI_DataType_F32, x, TOKENS, HIDDEN);
    add(c, ARG, XLA_FFI_DataType_F32, w, TOKENS, 1);
    add_site(c);
    add_number(c);
    add(c, RESULT, XLA_FFI_DataType_U8, plan, plan_bytes + TAIL, 0);
    add(c, RESULT, XLA_FFI_DataType_S32, rows, EXPERTS, 0);
    add(c, RESULT, XLA_FFI_DataType_S32, tokens, EXPERTS, 0);
    add(c, RESULT, XLA_FFI_DataType_S32, load, EXPERTS, 0);
    add(c, RESULT, XLA_FFI_DataType_S32, demand, 1, 0);
    add_none(c, RESULT);
    add(c, RESULT, row_type, recv, SLOTS, HIDDEN);
    add(c, RESULT, XLA_FFI_DataType_F32, slot, SLOTS, 0);
    add_layer(c, top_k);
    if (group != NULL) add_group(c, group);
    const int code = run_collective(epic_jax_cuda_plan_dispatch, c);
    free(c);
    return code;
}

static call *with_plan(void)
{
    call *c = calloc(1, sizeof *c);
    add(c, ARG, XLA_FFI_DataType_U8, plan, plan_bytes + TAIL, 0);
    add_layer(c, 1);
    add_group(c, "g");
    add_int(c, "num_tokens", TOKENS);
    add_int(c, "top_k", 1);
    add_int(c, "capacity", SLOTS);
    add_int(c, "slot_columns", 1);
    return c;
}

static int combine(handler *function)
{
    call *c = with_plan();
    add(c, ARG, XLA_FFI_DataType_F32, recv, SLOTS, HIDDEN);
    add(c, ARG, XLA_FFI_DataType_F32, slot, SLOTS, 0);
    add_site(c);
    add(c, RESULT, XLA_FFI_DataType_F32, out, TOKENS, HIDDEN);
    const int code = run_collective(function, c);
    free(c);
    return code;
}

static int combine_backward(void)
{
    call *c = with_plan();
    add(c, ARG, XLA_FFI_DataType_F32, x, TOKENS, HIDDEN);
    add(c, ARG, XLA_FFI_DataType_F32, recv, SLOTS, HIDDEN);
    add(c, ARG, XLA_FFI_DataType_F32, slot, SLOTS, 0);
    add_site(c);
    add(c, RESULT, XLA_FFI_DataType_F32, d_rows, SLOTS, HIDDEN);
    add(c, RESULT, XLA_FFI_DataType_F32, d_slot, SLOTS, 0);
    const int code = run_collective(epic_jax_cuda_combine_backward, c);
    free(c);
    return code;
}

static int dispatch_backward(void)
{
    call *c = with_plan();
    add(c, ARG, XLA_FFI_DataType_F32, d_rows, SLOTS, HIDDEN);
    add(c, ARG, XLA_FFI_DataType_F32, d_slot, SLOTS, 0);
    add_site(c);
    add(c, RESULT, XLA_FFI_DataType_F32, d_x, TOKENS, HIDDEN);
    add(c, RESULT, XLA_FFI_DataType_F32, d_w, TOKENS, 1);
    const int code = run_collective(epic_jax_cuda_dispatch_backward, c);
    free(c);
    return code;
}

static int sum(const float *from, float *to)
{
    call *c = calloc(1, sizeof *c);
    add(c, ARG, XLA_FFI_DataType_F32, from, HIDDEN, 0);
    add_site(c);
    add_number(c);
    add(c, RESULT, XLA_FFI_DataType_F32, to, HIDDEN, 0);
    add_group(c, "g");
    add_int(c, "order", 0);
    const int code = run_collective(epic_jax_cuda_allreduce_sum, c);
    free(c);
    return code;
}

/* --------------------------------------------------------------------------- the tests ---- */

static void test_traits(handler *function, unsigned wanted)
{
    XLA_FFI_Metadata metadata = {.traits = 99};
    XLA_FFI_Metadata_Extension query = {.metadata = &metadata};
    query.extension_base.type = XLA_FFI_Extension_Metadata;
    XLA_FFI_CallFrame frame = {.api = &api, .extension_start = &query.extension_base};
    CHECK(function(&frame) == NULL);
    CHECK(metadata.traits == wanted);
    CHECK(metadata.api_version.major_version == 0 && metadata.api_version.minor_version == 3);
}

static void test_step(void)
{
    memset(plan, 0xab, (size_t)plan_bytes + TAIL);
    CHECK(plan_dispatch("g", 1, XLA_FFI_DataType_F32) == 0);
    CHECK(stream_asked == 1);
    CHECK(rows[0] == 1 && rows[1] == 2 && load[1] == 2 && demand[0] == 3);
    CHECK(combine(epic_jax_cuda_combine) == 0);
    CHECK(combine(epic_jax_no_graph_combine) == 0);
    CHECK(combine_backward() == 0 && dispatch_backward() == 0);
    for (int t = 0; t < TOKENS; t++) {
        float dot = 0;
        for (int h = 0; h < HIDDEN; h++) {
            CHECK(out[t][h] == w[t] * x[t][h]);
            CHECK(d_x[t][h] == w[t] * x[t][h]);
            dot += x[t][h] * x[t][h];
        }
        CHECK(d_w[t] == dot);
    }
    /* bytes after the plan are not written */
    for (int i = 0; i < TAIL; i++) CHECK(plan[plan_bytes + i] == 0xab);
    CHECK(stream_asked == 5);
    CHECK(sum(x[0], x[0]) == 0 && x[0][1] == 1);
}

static void test_refusals(void)
{
    CHECK(plan_dispatch("g", 2, XLA_FFI_DataType_F32) == XLA_FFI_Error_Code_INVALID_ARGUMENT);
    CHECK(strstr(said, "topk_idx has 3 elements: must have 6 [EPIC_EINVAL]"));
    CHECK(plan_dispatch("g", 1, XLA_FFI_DataType_BF16) == XLA_FFI_Error_Code_INVALID_ARGUMENT);
    CHECK(strstr(said, "recv is an array of bfloat16: must be of float32"));
    CHECK(plan_dispatch(NULL, 1, XLA_FFI_DataType_F32) == XLA_FFI_Error_Code_INVALID_ARGUMENT);
    CHECK(strstr(said, "group"));
    CHECK(plan_dispatch("h", 1, XLA_FFI_DataType_F32) ==
          XLA_FFI_Error_Code_FAILED_PRECONDITION);
    CHECK(strstr(said, "\"h\" is not open on CUDA device 3"));
    devices = "devices [1 3]"; /* the host compares only what it can read */
    CHECK(sum(x[0], x[0]) == XLA_FFI_Error_Code_FAILED_PRECONDITION);
    CHECK(strstr(said, "was made for group \"g\" of devices [1 3]") &&
          strstr(said, "has devices [3]"));
    devices = "devices [3]";
    CHECK(sum(x[0], x[0]) == 0);
    ordinal = 2; /* the group also has a CPU device with this number */
    CHECK(sum(x[0], x[0]) == XLA_FFI_Error_Code_FAILED_PRECONDITION);
    CHECK(strstr(said, "CUDA device 2"));
    call none = {0};
    CHECK(run(epic_jax_cuda_router, &none) == XLA_FFI_Error_Code_FAILED_PRECONDITION);
    CHECK(strstr(said, "no group is open on CUDA device 2"));
    CHECK(run(epic_jax_cuda_experts, &none) == XLA_FFI_Error_Code_FAILED_PRECONDITION);
    ordinal = 3;
    CHECK(run(epic_jax_cuda_plan, &none) == XLA_FFI_Error_Code_INVALID_ARGUMENT);
    CHECK(sum(x[0], x[1]) == XLA_FFI_Error_Code_INVALID_ARGUMENT);
    CHECK(strstr(said, "one array"));
}

/* --------------------------------------------------------------------------- the layer ---- */

static float w_gate[HIDDEN][EXPERTS], w_gate_up[EXPERTS][HIDDEN][2 * INNER];
static float w_down[EXPERTS][INNER][HIDDEN], d_gate[HIDDEN][EXPERTS];
static float d_gate_up[EXPERTS][HIDDEN][2 * INNER], d_down[EXPERTS][INNER][HIDDEN];
static float loss[1], d_loss[1] = {2};
static unsigned char *saved, *workspace;
static epic_moe_memory_info sizes;

static const epic_layer the_layer = {.num_experts = EXPERTS, .top_k = 1, .alignment = 1};
static const epic_router the_router = {.num_experts = EXPERTS, .top_k = 1, .scale = 1.5};
static const epic_experts the_experts = {.num_local_experts = EXPERTS,
                                         .hidden = HIDDEN,
                                         .inner = INNER,
                                         .activation = EPIC_GELU,
                                         .row_type = EPIC_F32};
static const epic_moe the_moe = {.layer = &the_layer,
                                 .router = &the_router,
                                 .experts = &the_experts,
                                 .balance_coeff = 0.25,
                                 .z_coeff = 0.5,
                                 .capacity = SLOTS};
static const epic_moe_weights the_weights = {
    .w_gate = w_gate, .w_gate_up = w_gate_up, .w_down = w_down};

static void add_experts(call *c, uint32_t weight_type)
{
    static const char *const zero[] = {"experts_ungated", "experts_interleaved",
                                       "experts_weighting"};
    add_int(c, "experts_num_local_experts", EXPERTS);
    add_int(c, "experts_hidden", HIDDEN);
    add_int(c, "experts_inner", INNER);
    add_int(c, "experts_activation", EPIC_GELU);
    add_int(c, "experts_row_type", EPIC_F32);
    add_int(c, "experts_weight_type", weight_type);
    add_float(c, "experts_limit", 0);
    add_float(c, "experts_alpha", 0);
    for (size_t i = 0; i < sizeof zero / sizeof *zero; i++) add_int(c, zero[i], 0);
}

static void add_moe(call *c)
{
    static const char *const zero[] = {"zero_experts", "score",          "num_groups",
                                       "topk_groups",  "group_score",    "group_best",
                                       "group_others", "weight_rule",    "normalize",
                                       "has_shared",   "sequence_tokens"};
    for (size_t i = 0; i < sizeof zero / sizeof *zero; i++) add_int(c, zero[i], 0);
    add_layer(c, 1);
    add_experts(c, EPIC_F32);
    add_float(c, "eps", 0);
    add_float(c, "norm_min", 0);
    add_float(c, "jitter", 0);
    add_float(c, "scale", 1.5);
    add_float(c, "balance_coeff", 0.25);
    add_float(c, "z_coeff", 0.5);
    add_int(c, "moe_flags", 0);
    add_group(c, "g");
}

static void add_weights(call *c)
{
    add(c, ARG, XLA_FFI_DataType_F32, w_gate, HIDDEN, EXPERTS);
    add_none(c, ARG);
    add_none(c, ARG);
    add(c, ARG, XLA_FFI_DataType_F32, w_gate_up, EXPERTS * HIDDEN, 2 * INNER);
    add(c, ARG, XLA_FFI_DataType_F32, w_down, EXPERTS * INNER, HIDDEN);
    for (int i = 0; i < 8; i++) add_none(c, ARG);
}

/* limit: capacity_limit, or NULL. */
static int moe(handler *function, const int32_t *limit)
{
    call *c = calloc(1, sizeof *c);
    add(c, ARG, XLA_FFI_DataType_F32, x, TOKENS, HIDDEN);
    add_weights(c);
    for (int i = 0; i < 6; i++) add_none(c, ARG);
    if (limit)
        add(c, ARG, XLA_FFI_DataType_S32, limit, 1, 0);
    else
        add_none(c, ARG);
    add_site(c);
    add_number(c);
    add(c, RESULT, XLA_FFI_DataType_F32, out, TOKENS, HIDDEN);
    add(c, RESULT, XLA_FFI_DataType_F32, loss, 1, 0);
    add(c, RESULT, XLA_FFI_DataType_S32, load, EXPERTS, 0);
    add(c, RESULT, XLA_FFI_DataType_S32, demand, 1, 0);
    for (int i = 0; i < 3; i++) add_none(c, RESULT);
    add(c, RESULT, XLA_FFI_DataType_U8, saved, sizes.saved_bytes, 0);
    add(c, RESULT, XLA_FFI_DataType_U8, workspace, sizes.forward_bytes, 0);
    add_moe(c);
    const int code = run_collective(function, c);
    free(c);
    return code;
}

static int moe_backward(void)
{
    call *c = calloc(1, sizeof *c);
    add(c, ARG, XLA_FFI_DataType_F32, x, TOKENS, HIDDEN);
    add_weights(c);
    add(c, ARG, XLA_FFI_DataType_U8, saved, sizes.saved_bytes, 0);
    add(c, ARG, XLA_FFI_DataType_F32, x, TOKENS, HIDDEN);
    add(c, ARG, XLA_FFI_DataType_F32, d_loss, 1, 0);
    add_site(c);
    add_number(c);
    add(c, RESULT, XLA_FFI_DataType_F32, d_x, TOKENS, HIDDEN);
    add(c, RESULT, XLA_FFI_DataType_F32, d_gate, HIDDEN, EXPERTS);
    add_none(c, RESULT);
    add(c, RESULT, XLA_FFI_DataType_F32, d_gate_up, EXPERTS * HIDDEN, 2 * INNER);
    add(c, RESULT, XLA_FFI_DataType_F32, d_down, EXPERTS * INNER, HIDDEN);
    for (int i = 0; i < 7; i++) add_none(c, RESULT);
    add(c, RESULT, XLA_FFI_DataType_U8, workspace, sizes.backward_bytes, 0);
    add_moe(c);
    const int code = run_collective(epic_jax_cuda_moe_backward, c);
    free(c);
    return code;
}

static int experts(bool backward)
{
    call *c = calloc(1, sizeof *c);
    epic_experts_memory_info memory;
    CHECK(epic_experts_memory(NULL, NULL, &the_experts, SLOTS, &memory) == EPIC_OK);
    add(c, ARG, XLA_FFI_DataType_F32, recv, SLOTS, HIDDEN);
    add(c, ARG, XLA_FFI_DataType_S32, rows, EXPERTS, 0);
    add(c, ARG, XLA_FFI_DataType_S32, tokens, EXPERTS, 0);
    add_none(c, ARG);
    add(c, ARG, XLA_FFI_DataType_F32, w_gate_up, EXPERTS * HIDDEN, 2 * INNER);
    add(c, ARG, XLA_FFI_DataType_F32, w_down, EXPERTS * INNER, HIDDEN);
    for (int i = 0; i < 4; i++) add_none(c, ARG);
    if (backward) {
        add(c, ARG, XLA_FFI_DataType_U8, saved, memory.saved_bytes, 0);
        add(c, ARG, XLA_FFI_DataType_F32, recv, SLOTS, HIDDEN);
    } else {
        add_none(c, ARG); /* scales of the rows */
    }
    add(c, RESULT, XLA_FFI_DataType_F32, d_rows, SLOTS, HIDDEN);
    if (backward) {
        add_none(c, RESULT);
        add(c, RESULT, XLA_FFI_DataType_F32, d_gate_up, EXPERTS * HIDDEN, 2 * INNER);
        add(c, RESULT, XLA_FFI_DataType_F32, d_down, EXPERTS * INNER, HIDDEN);
        for (int i = 0; i < 2; i++) add_none(c, RESULT);
    } else {
        add(c, RESULT, XLA_FFI_DataType_U8, saved, memory.saved_bytes, 0);
    }
    add(c, RESULT, XLA_FFI_DataType_U8, workspace, memory.backward_bytes, 0);
    add_experts(c, EPIC_F32);
    add_int(c, "max_sms", 0);
    const int code = run(backward ? epic_jax_cuda_experts_backward : epic_jax_cuda_experts, c);
    free(c);
    return code;
}

/* Calls the experts with e4m3 weights and their scales.  kept: backward gets these weights too,
 * and returns no gradients of them. */
static int experts_e4m3(bool backward, bool kept)
{
    static unsigned char q[EXPERTS * HIDDEN * 2 * INNER];
    static float scales[SLOTS];
    const bool is_e4m3 = !backward || kept;
    const XLA_FFI_DataType type = is_e4m3 ? XLA_FFI_DataType_F8E4M3FN : XLA_FFI_DataType_F32;
    const void *up = is_e4m3 ? (const void *)q : w_gate_up;
    const void *down = is_e4m3 ? (const void *)q : w_down;
    epic_experts_memory_info memory;
    CHECK(epic_experts_memory(NULL, NULL, &the_experts, SLOTS, &memory) == EPIC_OK);
    call *c = calloc(1, sizeof *c);
    add(c, ARG, backward ? XLA_FFI_DataType_F32 : XLA_FFI_DataType_F8E4M3FN,
        backward ? (const void *)recv : q, SLOTS, HIDDEN);
    add(c, ARG, XLA_FFI_DataType_S32, rows, EXPERTS, 0);
    add(c, ARG, XLA_FFI_DataType_S32, tokens, EXPERTS, 0);
    add_none(c, ARG);
    add(c, ARG, type, up, EXPERTS * 2 * INNER, HIDDEN);
    add(c, ARG, type, down, EXPERTS * HIDDEN, INNER);
    for (int i = 0; i < 2; i++) add_none(c, ARG);
    for (int i = 0; i < 2; i++)
        if (is_e4m3)
            add(c, ARG, XLA_FFI_DataType_F32, scales, EXPERTS, 1);
        else
            add_none(c, ARG);
    if (backward) {
        add(c, ARG, XLA_FFI_DataType_U8, saved, 1024, 0);
        add(c, ARG, XLA_FFI_DataType_F32, recv, SLOTS, HIDDEN);
    } else {
        add(c, ARG, XLA_FFI_DataType_F32, scales, SLOTS, 1);
    }
    add(c, RESULT, XLA_FFI_DataType_F32, d_rows, SLOTS, HIDDEN);
    if (backward)
        for (int i = 0; i < 5; i++) add_none(c, RESULT);
    else
        add(c, RESULT, XLA_FFI_DataType_U8, saved, 1024, 0);
    add(c, RESULT, XLA_FFI_DataType_U8, workspace, memory.backward_bytes, 0);
    add_experts(c, is_e4m3 ? EPIC_E4M3 : EPIC_F32);
    add_int(c, "max_sms", 3);
    const int code = run(backward ? epic_jax_cuda_experts_backward : epic_jax_cuda_experts, c);
    free(c);
    return code;
}

/* The handlers accept the arrays, and the core refuses them: the context is on the host. */
static void test_e4m3(void)
{
    CHECK(experts_e4m3(false, false) == XLA_FFI_Error_Code_UNIMPLEMENTED);
    CHECK(strstr(said, "CUDA contexts only"));
    CHECK(experts_e4m3(true, true) == XLA_FFI_Error_Code_UNIMPLEMENTED);
    CHECK(strstr(said, "CUDA contexts only"));
    CHECK(experts_e4m3(true, false) == 0);
}

/* Calls the core directly, with the same arrays. */
static void direct(epic_context *ctx, bool backward)
{
    const epic_const_rows in = {x, TOKENS, sizeof x[0]};
    const epic_moe_gradients gradients = {
        .w_gate = d_gate, .w_gate_up = d_gate_up, .w_down = d_down};
    if (backward)
        CHECK(epic_moe_backward(
                  ctx, &(epic_moe_backward_args){.moe = &the_moe,
                                                 .weights = &the_weights,
                                                 .x = in,
                                                 .d_out = in,
                                                 .d_x = {d_x, TOKENS, sizeof d_x[0]},
                                                 .gradients = &gradients,
                                                 .saved = saved,
                                                 .saved_bytes = sizes.saved_bytes,
                                                 .workspace = workspace,
                                                 .workspace_bytes = sizes.backward_bytes,
                                                 .d_loss = d_loss}) == EPIC_OK);
    else
        CHECK(epic_moe_forward(ctx, &(epic_moe_args){.moe = &the_moe,
                                                     .weights = &the_weights,
                                                     .x = in,
                                                     .out = {out, TOKENS, sizeof out[0]},
                                                     .saved = saved,
                                                     .saved_bytes = sizes.saved_bytes,
                                                     .workspace = workspace,
                                                     .workspace_bytes = sizes.forward_bytes,
                                                     .loss = loss,
                                                     .load = load,
                                                     .demand = demand}) == EPIC_OK);
}

typedef struct results {
    float out[TOKENS][HIDDEN], d_x[TOKENS][HIDDEN], loss, d_gate[HIDDEN][EXPERTS];
    float d_gate_up[EXPERTS][HIDDEN][2 * INNER], d_down[EXPERTS][INNER][HIDDEN];
    int32_t load[EXPERTS], demand;
} results;

/* Copies the results, then overwrites the arrays with garbage. */
static results taken(void)
{
    results r = {.loss = loss[0], .demand = demand[0]};
#define TAKE(array)                             \
    do {                                        \
        memcpy(r.array, array, sizeof r.array); \
        memset(array, 0xee, sizeof r.array);    \
    } while (0)
    TAKE(out);
    TAKE(d_x);
    TAKE(d_gate);
    TAKE(d_gate_up);
    TAKE(d_down);
    TAKE(load);
    loss[0] = -1;
    demand[0] = -1;
    return r;
}

static void test_layer(epic_context *ctx)
{
    CHECK(epic_moe_memory(ctx, NULL, &the_moe, &sizes) == EPIC_OK);
    const size_t most =
        (size_t)(sizes.saved_bytes + sizes.backward_bytes + sizes.forward_bytes);
    saved = aligned_alloc(64, (most + 63) / 64 * 64);
    workspace = aligned_alloc(64, (most + 63) / 64 * 64);
    float *const weights[] = {&w_gate[0][0], &w_gate_up[0][0][0], &w_down[0][0][0]};
    const size_t counts[] = {sizeof w_gate, sizeof w_gate_up, sizeof w_down};
    for (int a = 0; a < 3; a++)
        for (size_t i = 0; i < counts[a] / 4; i++)
            weights[a][i] = (float)((i * 7 + (size_t)a) % 5) / 4 - 0.4f;
    direct(ctx, false);
    direct(ctx, true);
    const results wanted = taken();
    CHECK(wanted.demand == 3 && wanted.loss > 0);
    CHECK(moe(epic_jax_cuda_moe, NULL) == 0 && moe_backward() == 0);
    results got = taken();
    CHECK(memcmp(&got, &wanted, sizeof got) == 0);
    CHECK(moe(epic_jax_no_graph_moe, NULL) == 0 && moe_backward() == 0);
    got = taken();
    CHECK(memcmp(&got, &wanted, sizeof got) == 0);
    int32_t limit = 2; /* the layer needs 3 slots, and may not drop choices */
    CHECK(moe(epic_jax_cuda_moe, &limit) != 0 && strstr(said, "has 2 slots and needs 3"));
    limit = 3;
    CHECK(moe(epic_jax_cuda_moe, &limit) == 0 && moe_backward() == 0);
    got = taken();
    CHECK(memcmp(&got, &wanted, sizeof got) == 0);
}

/* The host cannot read the counts, so slots past the last slab are not written.  One slot is
 * free. */
static void test_experts(void)
{
    CHECK(plan_dispatch("g", 1, XLA_FFI_DataType_F32) == 0);
    memset(d_rows, 0, sizeof d_rows);
    d_rows[SLOTS - 1][0] = -7;
    CHECK(experts(false) == 0 && d_rows[SLOTS - 1][0] == -7 && d_rows[SLOTS - 2][0] != 0);
    memset(d_down, 0, sizeof d_down);
    CHECK(experts(true) == 0 && d_rows[SLOTS - 1][0] == -7 && d_down[1][0][0] != 0);
}

/* The next call reports the error that broke the group, and does nothing else. */
static void test_broken(epic_context *ctx)
{
    epic_abort(ctx, 0, "enough");
    out[0][0] = -7;
    CHECK(combine(epic_jax_cuda_combine) == XLA_FFI_Error_Code_UNAVAILABLE);
    CHECK(strstr(said, "enough") && out[0][0] == -7);
}

int main(void)
{
    const epic_config config = {
        .max_tokens = TOKENS, .max_row_bytes = sizeof x[0], .num_ranks = 1, .backend = "self"};
    const epic_layer layer = {.num_experts = EXPERTS, .top_k = 1};
    epic_context *ctx;
    CHECK(epic_open(&ctx, NULL, &config) == EPIC_OK);
    CHECK(epic_plan_bytes(&config, &layer, &plan_bytes) == EPIC_OK);
    plan = aligned_alloc(64, ((size_t)plan_bytes + TAIL + 63) / 64 * 64);
    for (int t = 0; t < TOKENS; t++) {
        w[t] = 0.5f * (float)(t + 1);
        for (int h = 0; h < HIDDEN; h++) x[t][h] = (float)(t + h);
    }
    CHECK(epic_jax_member_add("g", 1, 3, "devices [3]", 0, ctx) == 0);
    CHECK(epic_jax_member_add("g", 1, 3, "devices [3]", 0, ctx) == 1);
    CHECK(epic_jax_member_add("g", 0, 2, "devices [3]", 0, ctx) == 0);
    test_traits(epic_jax_combine, 0);
    test_traits(epic_jax_cuda_combine, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
    test_traits(epic_jax_no_graph_combine, 0);
    test_traits(epic_jax_cuda_moe, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
    test_traits(epic_jax_no_graph_moe, 0);
    test_traits(epic_jax_cuda_experts, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
    test_step();
    test_layer(ctx);
    test_experts();
    test_e4m3();
    test_refusals();
    test_broken(ctx);
    CHECK(epic_jax_member_remove("g", 0, 2) == ctx);
    CHECK(epic_jax_member_remove("g", 1, 3) == ctx);
    CHECK(epic_jax_member_remove("g", 1, 3) == NULL);
    CHECK(sum(x[0], x[0]) == XLA_FFI_Error_Code_FAILED_PRECONDITION);
    CHECK(strstr(said, "group \"g\" was closed on CUDA device 3"));
    CHECK(epic_jax_member_add("g", 1, 3, "devices [3]", 0, ctx) == 0);
    CHECK(epic_jax_member_remove("g", 1, 3) == ctx);
    epic_close(ctx);
    free(plan);
    free(saved);
    free(workspace);
    puts(failed ? "frames: FAILED" : "frames: the handlers for GPUs are right");
    return failed;
}
