/* SPDX-License-Identifier: Apache-2.0 */
/* The router and the losses as custom calls of XLA. They are local calls, which do not wait for
 * other ranks. */
#include "local.h"
#include "options.h"

/* Reads the logits [num_tokens, E]. E is the number of the router's experts and zero-experts
 * together. */
static ffi_array read_logits(ffi_reader *reader, const epic_router *router)
{
    const int64_t columns = (int64_t)router->num_experts + router->zero_experts;
    const ffi_array logits = ffi_read_arg(reader, "logits", FFI_SET_FLOATS, FFI_ANY_COUNT);
    ffi_check_count(reader, "logits", logits, ffi_multiply_sizes(logits.rows, columns, 1));
    return logits;
}

static ffi_error *router_forward(ffi_frame *frame, bool on_device)
{
    if (local_is_query(frame, on_device)) return NULL;
    local_call local = {0};
    ffi_reader reader = local_begin(frame, on_device, &local);
    const epic_router router = options_read_router(&reader);
    const int64_t top_k = router.top_k;
    const int64_t columns = (int64_t)router.num_experts + router.zero_experts;
    const uint32_t reals = FFI_SET_F32 | FFI_SET(EPIC_F64);
    const ffi_array logits = read_logits(&reader, &router);
    const int64_t tokens = logits.rows;
    const ffi_array bias = ffi_read_arg_or_none(&reader, "bias", FFI_SET_F32, columns);
    const ffi_array ids = ffi_read_arg_or_none(&reader, "token_ids", FFI_SET_INDICES, tokens);
    const ffi_array table = ffi_read_arg_or_none(&reader, "table", FFI_SET_I32, FFI_ANY_COUNT);
    ffi_check_count(&reader, "table", table, table.rows * top_k);
    const ffi_array forced =
        ffi_read_arg_or_none(&reader, "forced ids", FFI_SET_I32, tokens * top_k);
    const ffi_array chosen = ffi_read_result(&reader, "topk_idx", FFI_SET_I32, tokens * top_k);
    const ffi_array weights = ffi_read_result(&reader, "weights", reals, tokens * top_k);
    const ffi_array workspace =
        ffi_read_result(&reader, "workspace", FFI_SET_U8, FFI_ANY_COUNT);
    const epic_router_args args = {.router = &router,
                                   .logits = logits.data,
                                   .num_tokens = logits.rows,
                                   .bias = bias.data,
                                   .token_ids = ids.data,
                                   .table = table.data,
                                   .table_rows = table.rows,
                                   .workspace = workspace.data,
                                   .workspace_bytes = workspace.bytes,
                                   .topk_idx = chosen.data,
                                   .weights = weights.data,
                                   .type = logits.type,
                                   .weights_type = weights.type,
                                   .token_id_type = ids.type,
                                   .topk_idx_in = forced.data,
                                   .call.stream = local.stream};
    return local_end(&reader, &local, "router",
                     reader.error ? EPIC_OK : epic_router_forward(local.use.ctx, &args));
}

LOCAL_EXPORTS(router, router_forward(frame, on_device))

static ffi_error *router_backward(ffi_frame *frame, bool on_device)
{
    if (local_is_query(frame, on_device)) return NULL;
    local_call local = {0};
    ffi_reader reader = local_begin(frame, on_device, &local);
    const epic_router router = options_read_router(&reader);
    const uint32_t reals = FFI_SET_F32 | FFI_SET(EPIC_F64);
    const ffi_array logits = read_logits(&reader, &router);
    const int64_t choices = logits.rows * router.top_k;
    const ffi_array chosen = ffi_read_arg(&reader, "topk_idx", FFI_SET_I32, choices);
    const ffi_array d_weights = ffi_read_arg(&reader, "d_weights", reals, choices);
    const ffi_array d_logits =
        ffi_read_result(&reader, "d_logits", ffi_set_of(logits.type), logits.count);
    const ffi_array workspace =
        ffi_read_result(&reader, "workspace", FFI_SET_U8, FFI_ANY_COUNT);
    const epic_router_backward_args args = {.router = &router,
                                            .logits = logits.data,
                                            .num_tokens = logits.rows,
                                            .topk_idx = chosen.data,
                                            .d_weights = d_weights.data,
                                            .workspace = workspace.data,
                                            .workspace_bytes = workspace.bytes,
                                            .d_logits = d_logits.data,
                                            .type = logits.type,
                                            .weights_type = d_weights.type,
                                            .call.stream = local.stream};
    return local_end(&reader, &local, "router (backward)",
                     reader.error ? EPIC_OK : epic_router_backward(local.use.ctx, &args));
}

LOCAL_EXPORTS(router_backward, router_backward(frame, on_device))

/* ---------------------------------------------------------------------------- losses ---- */

/* Arguments of the four loss calls. `out` is the loss or, in backward, the gradient of the
 * logits. */
typedef struct loss_inputs {
    epic_context *ctx;
    epic_call call;
    epic_router router;
    ffi_array logits, load, chosen, d_loss, out, workspace;
    int64_t total_tokens, sequence_tokens;
    double coeff;
} loss_inputs;

/* The next four functions each call a loss function of the core with the arguments in *in. */
static epic_result call_balance_loss(const loss_inputs *in)
{
    const epic_balance_loss_args args = {.call = in->call,
                                         .router = &in->router,
                                         .logits = in->logits.data,
                                         .num_tokens = in->logits.rows,
                                         .total_tokens = in->total_tokens,
                                         .sequence_tokens = in->sequence_tokens,
                                         .load = in->load.data,
                                         .topk_idx = in->chosen.data,
                                         .coeff = in->coeff,
                                         .workspace = in->workspace.data,
                                         .workspace_bytes = in->workspace.bytes,
                                         .loss = in->out.data,
                                         .type = in->logits.type};
    return epic_balance_loss_forward(in->ctx, &args);
}

static epic_result call_balance_loss_backward(const loss_inputs *in)
{
    const epic_balance_loss_backward_args args = {.call = in->call,
                                                  .router = &in->router,
                                                  .logits = in->logits.data,
                                                  .num_tokens = in->logits.rows,
                                                  .total_tokens = in->total_tokens,
                                                  .sequence_tokens = in->sequence_tokens,
                                                  .load = in->load.data,
                                                  .topk_idx = in->chosen.data,
                                                  .coeff = in->coeff,
                                                  .workspace = in->workspace.data,
                                                  .workspace_bytes = in->workspace.bytes,
                                                  .d_loss = in->d_loss.data,
                                                  .d_logits = in->out.data,
                                                  .type = in->logits.type};
    return epic_balance_loss_backward(in->ctx, &args);
}

static epic_result call_z_loss(const loss_inputs *in)
{
    const epic_z_loss_args args = {.call = in->call,
                                   .router = &in->router,
                                   .logits = in->logits.data,
                                   .num_tokens = in->logits.rows,
                                   .total_tokens = in->total_tokens,
                                   .coeff = in->coeff,
                                   .workspace = in->workspace.data,
                                   .workspace_bytes = in->workspace.bytes,
                                   .loss = in->out.data,
                                   .type = in->logits.type};
    return epic_z_loss_forward(in->ctx, &args);
}

static epic_result call_z_loss_backward(const loss_inputs *in)
{
    const epic_z_loss_backward_args args = {.call = in->call,
                                            .router = &in->router,
                                            .logits = in->logits.data,
                                            .num_tokens = in->logits.rows,
                                            .total_tokens = in->total_tokens,
                                            .coeff = in->coeff,
                                            .workspace = in->workspace.data,
                                            .workspace_bytes = in->workspace.bytes,
                                            .d_loss = in->d_loss.data,
                                            .d_logits = in->out.data,
                                            .type = in->logits.type};
    return epic_z_loss_backward(in->ctx, &args);
}

typedef epic_result loss_function(const loss_inputs *in);

/* Runs a loss call. Its arguments are the logits, and load, topk_idx and d_loss, which may be
 * absent. Its results are the loss (in backward d_logits) and the workspace. */
static ffi_error *run_loss(ffi_frame *frame, bool on_device, const char *what, bool is_backward,
                           loss_function *call)
{
    if (local_is_query(frame, on_device)) return NULL;
    local_call local = {0};
    ffi_reader reader = local_begin(frame, on_device, &local);
    loss_inputs in = {.router = options_read_router(&reader)};
    in.logits = read_logits(&reader, &in.router);
    const int64_t choices = in.logits.rows * in.router.top_k;
    in.load = ffi_read_arg_or_none(&reader, "load", FFI_SET_I32, in.router.num_experts);
    in.chosen = ffi_read_arg_or_none(&reader, "topk_idx", FFI_SET_I32, choices);
    in.d_loss = ffi_read_arg_or_none(&reader, "d_loss", FFI_SET_F32, 1);
    in.out = is_backward ? ffi_read_result(&reader, "d_logits", ffi_set_of(in.logits.type),
                                           in.logits.count)
                         : ffi_read_result(&reader, "loss", FFI_SET_F32, 1);
    in.workspace = ffi_read_result(&reader, "workspace", FFI_SET_U8, FFI_ANY_COUNT);
    in.total_tokens = ffi_read_int(&reader, "total_tokens");
    in.sequence_tokens = ffi_read_int(&reader, "sequence_tokens");
    in.coeff = ffi_read_float(&reader, "coeff");
    in.ctx = local.use.ctx;
    in.call.stream = local.stream;
    return local_end(&reader, &local, what, reader.error ? EPIC_OK : call(&in));
}

LOCAL_EXPORTS(balance_loss,
              run_loss(frame, on_device, "balance_loss", false, call_balance_loss))
LOCAL_EXPORTS(balance_loss_backward, run_loss(frame, on_device, "balance_loss (backward)", true,
                                              call_balance_loss_backward))
LOCAL_EXPORTS(z_loss, run_loss(frame, on_device, "z_loss", false, call_z_loss))
LOCAL_EXPORTS(z_loss_backward,
              run_loss(frame, on_device, "z_loss (backward)", true, call_z_loss_backward))
