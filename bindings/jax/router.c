/* SPDX-License-Identifier: Apache-2.0 */
/* Router and losses as custom calls.  They wait for nobody, so they run on XLA's thread. */
#include "place.h"
#include "read.h"

/* Reads the logits, [num_tokens, E]. */
static ffi_array read_logits(ffi_reader *reader, const epic_router *router)
{
    const int64_t columns = (int64_t)router->num_experts + router->zero_experts;
    const ffi_array logits = ffi_arg(reader, "logits", FFI_SET_FLOATS, FFI_ANY_COUNT);
    ffi_check_count(reader, "logits", logits, ffi_product(logits.rows, columns, 1));
    return logits;
}

static ffi_error *router_forward(ffi_frame *frame, bool on_device)
{
    if (place_is_query(frame, on_device)) return NULL;
    place place = {0};
    ffi_reader reader = place_begin(frame, on_device, &place);
    const epic_router router = read_router(&reader);
    const int64_t top_k = router.top_k;
    const int64_t columns = (int64_t)router.num_experts + router.zero_experts;
    const uint32_t reals = FFI_SET_F32 | FFI_SET(EPIC_F64);
    const ffi_array logits = read_logits(&reader, &router);
    const int64_t tokens = logits.rows;
    const ffi_array bias = ffi_arg_or_none(&reader, "bias", FFI_SET_F32, columns);
    const ffi_array ids = ffi_arg_or_none(&reader, "token_ids", FFI_SET_INDICES, tokens);
    const ffi_array table = ffi_arg_or_none(&reader, "table", FFI_SET_I32, FFI_ANY_COUNT);
    ffi_check_count(&reader, "table", table, table.rows * top_k);
    const ffi_array chosen = ffi_result(&reader, "topk_idx", FFI_SET_I32, tokens * top_k);
    const ffi_array weights = ffi_result(&reader, "weights", reals, tokens * top_k);
    const ffi_array workspace = ffi_result(&reader, "workspace", FFI_SET_U8, FFI_ANY_COUNT);
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
                                   .call.stream = place.stream};
    return place_end(&reader, &place, "router",
                     reader.error ? EPIC_OK : epic_router_forward(place.use.ctx, &args));
}

PLACE_HANDLERS(router, router_forward(frame, on_device))

static ffi_error *router_backward(ffi_frame *frame, bool on_device)
{
    if (place_is_query(frame, on_device)) return NULL;
    place place = {0};
    ffi_reader reader = place_begin(frame, on_device, &place);
    const epic_router router = read_router(&reader);
    const uint32_t reals = FFI_SET_F32 | FFI_SET(EPIC_F64);
    const ffi_array logits = read_logits(&reader, &router);
    const int64_t choices = logits.rows * router.top_k;
    const ffi_array chosen = ffi_arg(&reader, "topk_idx", FFI_SET_I32, choices);
    const ffi_array d_weights = ffi_arg(&reader, "d_weights", reals, choices);
    const ffi_array d_logits =
        ffi_result(&reader, "d_logits", ffi_set(logits.type), logits.count);
    const ffi_array workspace = ffi_result(&reader, "workspace", FFI_SET_U8, FFI_ANY_COUNT);
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
                                            .call.stream = place.stream};
    return place_end(&reader, &place, "router (backward)",
                     reader.error ? EPIC_OK : epic_router_backward(place.use.ctx, &args));
}

PLACE_HANDLERS(router_backward, router_backward(frame, on_device))

/* ---------------------------------------------------------------------------- losses ---- */

/* What the four calls take; out is the loss, or the gradient of the logits. */
typedef struct loss_job {
    epic_context *ctx;
    epic_call call;
    epic_router router;
    ffi_array logits, load, chosen, d_loss, out, workspace;
    int64_t total_tokens, sequence_tokens;
    double coeff;
} loss_job;

static epic_result balance_loss(const loss_job *job)
{
    const epic_balance_loss_args args = {.call = job->call,
                                         .router = &job->router,
                                         .logits = job->logits.data,
                                         .num_tokens = job->logits.rows,
                                         .total_tokens = job->total_tokens,
                                         .sequence_tokens = job->sequence_tokens,
                                         .load = job->load.data,
                                         .topk_idx = job->chosen.data,
                                         .coeff = job->coeff,
                                         .workspace = job->workspace.data,
                                         .workspace_bytes = job->workspace.bytes,
                                         .loss = job->out.data,
                                         .type = job->logits.type};
    return epic_balance_loss_forward(job->ctx, &args);
}

static epic_result balance_loss_backward(const loss_job *job)
{
    const epic_balance_loss_backward_args args = {.call = job->call,
                                                  .router = &job->router,
                                                  .logits = job->logits.data,
                                                  .num_tokens = job->logits.rows,
                                                  .total_tokens = job->total_tokens,
                                                  .sequence_tokens = job->sequence_tokens,
                                                  .load = job->load.data,
                                                  .topk_idx = job->chosen.data,
                                                  .coeff = job->coeff,
                                                  .workspace = job->workspace.data,
                                                  .workspace_bytes = job->workspace.bytes,
                                                  .d_loss = job->d_loss.data,
                                                  .d_logits = job->out.data,
                                                  .type = job->logits.type};
    return epic_balance_loss_backward(job->ctx, &args);
}

static epic_result z_loss(const loss_job *job)
{
    const epic_z_loss_args args = {.call = job->call,
                                   .router = &job->router,
                                   .logits = job->logits.data,
                                   .num_tokens = job->logits.rows,
                                   .total_tokens = job->total_tokens,
                                   .coeff = job->coeff,
                                   .workspace = job->workspace.data,
                                   .workspace_bytes = job->workspace.bytes,
                                   .loss = job->out.data,
                                   .type = job->logits.type};
    return epic_z_loss_forward(job->ctx, &args);
}

static epic_result z_loss_backward(const loss_job *job)
{
    const epic_z_loss_backward_args args = {.call = job->call,
                                            .router = &job->router,
                                            .logits = job->logits.data,
                                            .num_tokens = job->logits.rows,
                                            .total_tokens = job->total_tokens,
                                            .coeff = job->coeff,
                                            .workspace = job->workspace.data,
                                            .workspace_bytes = job->workspace.bytes,
                                            .d_loss = job->d_loss.data,
                                            .d_logits = job->out.data,
                                            .type = job->logits.type};
    return epic_z_loss_backward(job->ctx, &args);
}

typedef epic_result loss_call(const loss_job *job);

/* Arguments: logits, load or none, topk_idx or none, d_loss or none.  Results: the loss, or
 * d_logits, and workspace. */
static ffi_error *loss(ffi_frame *frame, bool on_device, const char *what, bool is_backward,
                       loss_call *call)
{
    if (place_is_query(frame, on_device)) return NULL;
    place place = {0};
    ffi_reader reader = place_begin(frame, on_device, &place);
    loss_job job = {.router = read_router(&reader)};
    job.logits = read_logits(&reader, &job.router);
    const int64_t choices = job.logits.rows * job.router.top_k;
    job.load = ffi_arg_or_none(&reader, "load", FFI_SET_I32, job.router.num_experts);
    job.chosen = ffi_arg_or_none(&reader, "topk_idx", FFI_SET_I32, choices);
    job.d_loss = ffi_arg_or_none(&reader, "d_loss", FFI_SET_F32, 1);
    job.out = is_backward
                  ? ffi_result(&reader, "d_logits", ffi_set(job.logits.type), job.logits.count)
                  : ffi_result(&reader, "loss", FFI_SET_F32, 1);
    job.workspace = ffi_result(&reader, "workspace", FFI_SET_U8, FFI_ANY_COUNT);
    job.total_tokens = ffi_int(&reader, "total_tokens");
    job.sequence_tokens = ffi_int(&reader, "sequence_tokens");
    job.coeff = ffi_float(&reader, "coeff");
    job.ctx = place.use.ctx;
    job.call.stream = place.stream;
    return place_end(&reader, &place, what, reader.error ? EPIC_OK : call(&job));
}

PLACE_HANDLERS(balance_loss, loss(frame, on_device, "balance_loss", false, balance_loss))
PLACE_HANDLERS(balance_loss_backward,
               loss(frame, on_device, "balance_loss (backward)", true, balance_loss_backward))
PLACE_HANDLERS(z_loss, loss(frame, on_device, "z_loss", false, z_loss))
PLACE_HANDLERS(z_loss_backward,
               loss(frame, on_device, "z_loss (backward)", true, z_loss_backward))
