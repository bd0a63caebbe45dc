/* SPDX-License-Identifier: Apache-2.0 */
/* The handlers for GPUs, called as XLA calls them, on a machine without one: a host context sits
 * on a member that says "GPU 3".  What lies in device memory only has an address nobody can read. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epic/epic.h"
#include "xla/ffi/api/c_api.h"

typedef XLA_FFI_Error *handler(XLA_FFI_CallFrame *frame);
handler epic_jax_combine, epic_jax_cuda_combine, epic_jax_no_graph_combine;
handler epic_jax_cuda_plan_dispatch, epic_jax_cuda_combine_backward, epic_jax_cuda_sum;
handler epic_jax_cuda_dispatch_backward, epic_jax_cuda_plan, epic_jax_cuda_router;
handler epic_jax_cuda_none;
int epic_jax_member_add(const char *name, int is_gpu, int32_t ordinal, const char *devices,
                        int32_t rank, epic_context *ctx);
epic_context *epic_jax_member_remove(const char *name, int is_gpu, int32_t ordinal);

enum { TOKENS = 3, HIDDEN = 4, EXPERTS = 2, SLOTS = 4, MOST = 24, TAIL = 16 };
static const int32_t unreadable = 1; /* the address of what only the GPU can read */

static int failed;

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            failed = 1;                                                               \
        }                                                                             \
    } while (0)

/* --------------------------------------------------------------------------- XLA's side ---- */

struct XLA_FFI_Error {
    int code;
    char text[1100];
};

static int32_t ordinal = 3;
static int stream_asked;

static XLA_FFI_Error *error_create(XLA_FFI_Error_Create_Args *args)
{
    XLA_FFI_Error *error = calloc(1, sizeof *error);
    error->code = (int)args->errc;
    snprintf(error->text, sizeof error->text, "%s", args->message);
    return error;
}

static XLA_FFI_Error *ordinal_get(XLA_FFI_DeviceOrdinal_Get_Args *args)
{
    args->device_ordinal = ordinal;
    return NULL;
}

/* NULL is a stream too, and the one that host contexts accept. */
static XLA_FFI_Error *stream_get(XLA_FFI_Stream_Get_Args *args)
{
    stream_asked++;
    args->stream = NULL;
    return NULL;
}

static const XLA_FFI_Api api = {.XLA_FFI_Error_Create = error_create,
                                .XLA_FFI_DeviceOrdinal_Get = ordinal_get,
                                .XLA_FFI_Stream_Get = stream_get};

typedef struct call {
    XLA_FFI_Buffer buffers[2][MOST];
    void *at[2][MOST];
    int64_t dims[2][MOST][2];
    XLA_FFI_Scalar scalars[MOST];
    int64_t ints[MOST];
    double floats[MOST];
    XLA_FFI_ByteSpan names[MOST], texts[MOST], *name_at[MOST];
    void *attr_at[MOST];
    XLA_FFI_AttrType types[MOST];
    int64_t sizes[2], num_attrs;
} call;

enum { ARG, RESULT };

static void add(call *c, int side, XLA_FFI_DataType type, const void *data, int64_t rows,
                int64_t columns)
{
    const int64_t i = c->sizes[side]++;
    c->dims[side][i][0] = rows;
    c->dims[side][i][1] = columns;
    c->buffers[side][i] = (XLA_FFI_Buffer){.dtype = type,
                                           .data = (void *)(uintptr_t)data,
                                           .rank = columns ? 2 : 1,
                                           .dims = c->dims[side][i]};
    c->at[side][i] = &c->buffers[side][i];
}

static void add_none(call *c, int side)
{
    add(c, side, XLA_FFI_DataType_U8, &unreadable, 1, 0);
}

static void add_number(call *c) /* a site, a rank or a channel, in device memory */
{
    add(c, ARG, XLA_FFI_DataType_S32, (const void *)(uintptr_t)unreadable, 1, 0);
    c->buffers[ARG][c->sizes[ARG] - 1].rank = 0;
}

static void add_site(call *c) /* and the rank */
{
    add_number(c);
    add_number(c);
}

static int64_t add_attr(call *c, const char *name, XLA_FFI_AttrType type)
{
    const int64_t i = c->num_attrs++;
    c->names[i] = (XLA_FFI_ByteSpan){name, strlen(name)};
    c->name_at[i] = &c->names[i];
    c->types[i] = type;
    return i;
}

static void add_int(call *c, const char *name, int64_t value)
{
    const int64_t i = add_attr(c, name, XLA_FFI_AttrType_SCALAR);
    c->ints[i] = value;
    c->scalars[i] = (XLA_FFI_Scalar){XLA_FFI_DataType_S64, &c->ints[i]};
    c->attr_at[i] = &c->scalars[i];
}

static void add_text(call *c, const char *name, const char *text)
{
    const int64_t i = add_attr(c, name, XLA_FFI_AttrType_STRING);
    c->texts[i] = (XLA_FFI_ByteSpan){text, strlen(text)};
    c->attr_at[i] = &c->texts[i];
}

static const char *devices = "devices [3]"; /* that the program takes group "g" to have */

static void add_group(call *c, const char *name)
{
    add_text(c, "group", name);
    add_text(c, "devices", devices);
}

/* The code of its error, 0 for none; the text goes to `said`. */
static char said[1100];

static int run(handler *function, call *c)
{
    XLA_FFI_CallFrame frame = {.api = &api, .stage = XLA_FFI_ExecutionStage_EXECUTE};
    frame.args = (XLA_FFI_Args){.size = c->sizes[ARG], .args = c->at[ARG]};
    frame.rets = (XLA_FFI_Rets){.size = c->sizes[RESULT], .rets = c->at[RESULT]};
    frame.attrs = (XLA_FFI_Attrs){
        .size = c->num_attrs, .types = c->types, .names = c->name_at, .attrs = c->attr_at};
    XLA_FFI_Error *error = function(&frame);
    CHECK(frame.future == NULL); /* enqueued, not waited for */
    said[0] = '\0';
    if (error == NULL) return 0;
    const int code = error->code;
    snprintf(said, sizeof said, "%s", error->text);
    free(error);
    return code;
}

/* ---------------------------------------------------------------------------- the calls ---- */

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
}

static int plan_dispatch(const char *group, int64_t top_k, XLA_FFI_DataType row_type)
{
    call *c = calloc(1, sizeof *c);
    add(c, ARG, XLA_FFI_DataType_S32, chosen, TOKENS, 1);
    add_none(c, ARG);
    add_none(c, ARG);
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
    const int code = run(epic_jax_cuda_plan_dispatch, c);
    free(c);
    return code;
}

static call *with_plan(void)
{
    call *c = calloc(1, sizeof *c);
    add(c, ARG, XLA_FFI_DataType_U8, plan, plan_bytes + TAIL, 0);
    add_group(c, "g");
    return c;
}

static int combine(handler *function)
{
    call *c = with_plan();
    add(c, ARG, XLA_FFI_DataType_F32, recv, SLOTS, HIDDEN);
    add(c, ARG, XLA_FFI_DataType_F32, slot, SLOTS, 0);
    add_site(c);
    add(c, RESULT, XLA_FFI_DataType_F32, out, TOKENS, HIDDEN);
    const int code = run(function, c);
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
    const int code = run(epic_jax_cuda_combine_backward, c);
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
    const int code = run(epic_jax_cuda_dispatch_backward, c);
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
    const int code = run(epic_jax_cuda_sum, c);
    free(c);
    return code;
}

/* ---------------------------------------------------------------------------- the tests ---- */

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
    for (int i = 0; i < TAIL; i++) CHECK(plan[plan_bytes + i] == 0xab); /* never touched */
    CHECK(stream_asked == 5);
    CHECK(sum(x[0], x[0]) == 0 && x[0][1] == 1);
}

static void test_refusals(void)
{
    CHECK(plan_dispatch("g", 2, XLA_FFI_DataType_F32) == XLA_FFI_Error_Code_INVALID_ARGUMENT);
    CHECK(strstr(said, "top_k 2"));
    CHECK(plan_dispatch("g", 1, XLA_FFI_DataType_BF16) == XLA_FFI_Error_Code_INVALID_ARGUMENT);
    CHECK(strstr(said, "recv"));
    CHECK(plan_dispatch(NULL, 1, XLA_FFI_DataType_F32) == XLA_FFI_Error_Code_INVALID_ARGUMENT);
    CHECK(strstr(said, "group"));
    CHECK(plan_dispatch("h", 1, XLA_FFI_DataType_F32) ==
          XLA_FFI_Error_Code_FAILED_PRECONDITION);
    CHECK(strstr(said, "\"h\" is not open on CUDA device 3"));
    devices =
        "devices [1 3]"; /* no number of the call is read: what the host knows is compared */
    CHECK(sum(x[0], x[0]) == XLA_FFI_Error_Code_FAILED_PRECONDITION);
    CHECK(strstr(said, "was made for group \"g\" of devices [1 3]") &&
          strstr(said, "has devices [3]"));
    devices = "devices [3]";
    CHECK(sum(x[0], x[0]) == 0);
    ordinal = 2; /* there is a member of the CPU */
    CHECK(sum(x[0], x[0]) == XLA_FFI_Error_Code_FAILED_PRECONDITION);
    CHECK(strstr(said, "CUDA device 2"));
    call none = {0};
    CHECK(run(epic_jax_cuda_router, &none) == XLA_FFI_Error_Code_FAILED_PRECONDITION);
    CHECK(strstr(said, "no group is open on CUDA device 2"));
    CHECK(run(epic_jax_cuda_none, &none) == XLA_FFI_Error_Code_UNIMPLEMENTED);
    ordinal = 3;
    CHECK(run(epic_jax_cuda_plan, &none) == XLA_FFI_Error_Code_INVALID_ARGUMENT);
    CHECK(sum(x[0], x[1]) == XLA_FFI_Error_Code_INVALID_ARGUMENT);
    CHECK(strstr(said, "one array"));
}

/* What broke the group is said by the next call, which does nothing. */
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
    plan_bytes = (int64_t)epic_plan_bytes(&config, &layer);
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
    test_step();
    test_refusals();
    test_broken(ctx);
    CHECK(epic_jax_member_remove("g", 0, 2) == ctx);
    CHECK(epic_jax_member_remove("g", 1, 3) == ctx);
    CHECK(epic_jax_member_remove("g", 1, 3) == NULL);
    epic_close(ctx);
    free(plan);
    puts(failed ? "frames: FAILED" : "frames: the handlers for GPUs are right");
    return failed;
}
