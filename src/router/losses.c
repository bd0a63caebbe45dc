/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the auxiliary losses of the router, and updates the router's bias.
 *
 * T is the number of tokens of all ranks, E the number of experts, z_t the logits of token t,
 * and P_te the probability of expert e for token t (loss_template.h):
 *
 * - Balance loss (Switch Transformer, arXiv 2101.03961): coeff * E / (top_k T^2) * sum_t sum_e
 *   P_te load_e. load_e is the number of choices of expert e on all ranks.
 * - Sequence-wise balance loss (DeepSeek-V3, arXiv 2412.19437): the balance loss of each
 *   sequence of S tokens, averaged over the T / S sequences. In the formula of each sequence, S
 *   replaces T, and load_e is the number of choices in the sequence.
 * - Z-loss (ST-MoE, arXiv 2202.08906): coeff / T * sum_t logsumexp(z_t)^2.
 * - Bias update (arXiv 2408.15664): bias_e += rate * sign(mean load - load_e).
 *
 * Each rank computes its part of the loss: the sum of the terms of its own tokens. The loss is
 * the sum of the parts of all ranks. */
#include <string.h>

#include "base/arrays.h"
#include "base/sized.h"
#include "context/context.h"
#include "router/row.h"
#include "rules/convert.h"
#include "rules/rule.h"

typedef enum pass { FORWARD, BACKWARD } pass;

/* State of one call of a loss. */
typedef struct loss_job {
    epic_context *ctx;
    epic_loss_args args;
    router_job router;
    const router_row_ops *row;
} loss_job;

static epic_result check_loss_arrays(const loss_job *job, pass pass)
{
    const epic_loss_args *a = &job->args;
    const router_job *r = &job->router;
    const bool forward = pass == FORWARD;
    const int64_t numbers = a->num_tokens * r->num_columns;
    const size_t number = a->loss_type == EPIC_F64 ? 8 : 4;
    const call_array arrays[] = {
        ARRAY_IN(a, logits, numbers, (size_t)convert_bytes(r->type)),
        ARRAY_IN(a, load, (int64_t)r->router.num_experts, 4),
        ARRAY_IN(a, topk_idx, a->num_tokens * r->router.top_k, 4),
        ARRAY_IN(a, d_loss, forward ? 0 : 1, 4),
        {"workspace", a->workspace, router_job_workspace_bytes(r), 16, true},
        {"loss", forward ? a->loss : NULL, (int64_t)number, number, true},
        {"d_logits", forward ? NULL : a->d_logits, numbers * convert_bytes(r->grad_type),
         (size_t)convert_bytes(r->grad_type), true}};
    return CHECK_ARRAYS(arrays);
}

/* Checks total_tokens, the arguments that only the forward pass or only the backward pass has,
 * and the alignment and overlap of arrays. */
static epic_result check_pass(const loss_job *job, pass pass)
{
    const epic_loss_args *a = &job->args;
    if (a->total_tokens < a->num_tokens)
        return epic_fail(
            EPIC_EINVAL,
            "total_tokens is %lld: it must be the number of tokens of all ranks, at least "
            "the %lld of this rank",
            (long long)a->total_tokens, (long long)a->num_tokens);
    if (pass == FORWARD && a->loss == NULL)
        return epic_fail(EPIC_EINVAL, "loss is NULL: it must point to room for one number");
    if (pass == FORWARD && a->loss_type > EPIC_F32 && a->loss_type != EPIC_F64)
        return epic_fail(EPIC_EINVAL, "loss_type is %u: it must be EPIC_F32 (or 0) or EPIC_F64",
                         a->loss_type);
    if (pass == BACKWARD && a->d_logits == NULL && a->num_tokens > 0)
        return epic_fail(EPIC_EINVAL,
                         "d_logits is NULL: it must point to room for the gradient");
    return check_loss_arrays(job, pass);
}

static epic_result prepare_loss(loss_job *job, pass pass)
{
    epic_loss_args *a = &job->args;
    if (job->ctx != NULL) TRY(context_check(job->ctx));
    TRY(router_job_init(&job->router, &(router_common){
                                          .router = a->router,
                                          .logits = a->logits,
                                          .num_tokens = a->num_tokens,
                                          .workspace = a->workspace,
                                          .workspace_bytes = a->workspace_bytes,
                                          .type = a->type,
                                          .flags = a->flags,
                                          .known_flags = pass == BACKWARD ? EPIC_ACCUMULATE : 0,
                                      }));
    TRY(router_job_set_grad_type(&job->router, a->grad_type));
    job->row = router_row_of(&job->router);
    a->router = &job->router.router;
    return check_pass(job, pass);
}

/* Checks the arguments that only the balance loss has: `load` or, if the loss is computed per
 * sequence, topk_idx and the length of the sequences. */
static epic_result check_balance(const loss_job *job)
{
    const epic_loss_args *a = &job->args;
    if (a->sequence_tokens < 0)
        return epic_fail(EPIC_EINVAL, "sequence_tokens is %lld: it must be 0 or more",
                         (long long)a->sequence_tokens);
    if (a->sequence_tokens == 0 && a->load == NULL)
        return epic_fail(EPIC_EINVAL,
                         "load is NULL: the balance loss needs the number of choices of each "
                         "expert, which epic_plan returns");
    if (a->sequence_tokens == 0 || a->num_tokens == 0) return EPIC_OK;
    if (a->num_tokens % a->sequence_tokens != 0)
        return epic_fail(EPIC_EINVAL,
                         "num_tokens is %lld: it must be a multiple of sequence_tokens %lld",
                         (long long)a->num_tokens, (long long)a->sequence_tokens);
    if (a->topk_idx == NULL)
        return epic_fail(EPIC_EINVAL, "topk_idx is NULL: the sequence-wise balance loss counts "
                                      "the choices of each sequence");
    if (context_on_device(job->ctx)) return EPIC_OK;
    return router_check_ids(&job->router, a->topk_idx, a->num_tokens);
}

static epic_result check_reserved(uint32_t pad)
{
    return pad ? epic_fail(EPIC_EINVAL, "reserved fields must be zero: one is %u", pad)
               : EPIC_OK;
}

static double incoming_gradient(const epic_loss_args *args)
{
    return args->d_loss ? *args->d_loss : 1;
}

static void store_loss(const epic_loss_args *args, double loss)
{
    const float narrow = (float)loss;
    if (args->loss_type == EPIC_F64)
        memcpy(args->loss, &loss, sizeof loss);
    else
        memcpy(args->loss, &narrow, sizeof narrow);
}

/* Returns the factor of the balance loss: the loss is this factor times the sum of P * load
 * over tokens and experts. */
static double balance_factor(const loss_job *job)
{
    const epic_loss_args *a = &job->args;
    const double T = (double)a->total_tokens;
    /* With S = sequence_tokens, the loss of one sequence is divided by S^2. The loss is the
     * mean over the T / S sequences, so all terms are divided by S^2 * T / S = S * T. */
    const double counted = a->sequence_tokens > 0 ? (double)a->sequence_tokens : T;
    if (T == 0) return 0;
    return job->router.router.num_experts * a->coeff / job->router.router.top_k / counted / T;
}

/* Returns an array with the number of choices of each expert in the sequence that begins at
 * token `first`. */
static const int32_t *count_choices(const loss_job *job, int64_t first)
{
    const router_job *r = &job->router;
    const int32_t *topk_idx = job->args.topk_idx + first * r->router.top_k;
    memset(r->order, 0, (size_t)r->num_columns * sizeof *r->order);
    for (int64_t i = 0; i < job->args.sequence_tokens * r->router.top_k; i++)
        if (topk_idx[i] >= 0) r->order[topk_idx[i]]++;
    return r->order;
}

/* Sets *load to an array with the number of choices of each expert: in the sequence that begins
 * at token `first` if the loss is computed per sequence, and in the whole group if not. Returns
 * the number of tokens, from `first` on, to which *load applies. */
static int64_t next_load(const loss_job *job, int64_t first, const int32_t **load)
{
    const bool whole = job->args.sequence_tokens == 0;
    *load = whole ? job->args.load : count_choices(job, first);
    return whole ? job->args.num_tokens : job->args.sequence_tokens;
}

/* Zeroes the partial sums of a loss (LOSS_RUNS). A GPU uses one thread per partial sum and adds
 * in the same order, so host and GPU compute the same bits. */
static void zero_runs(const loss_job *job)
{
    memset(job->router.runs, 0, LOSS_RUNS * sizeof *job->router.runs);
}

static double *run_at(const loss_job *job, int64_t token)
{
    return job->router.runs + token / loss_run_tokens(job->args.num_tokens);
}

/* Adds all partial sums in a binary tree, and returns the total. */
static double sum_runs(const loss_job *job)
{
    double *runs = job->router.runs;
    for (int distance = LOSS_RUNS / 2; distance > 0; distance /= 2)
        for (int i = 0; i < distance; i++) runs[i] += runs[i + distance];
    return runs[0];
}

static epic_result balance_forward(loss_job *job)
{
    TRY(prepare_loss(job, FORWARD));
    TRY(check_balance(job));
    if (context_on_device(job->ctx))
        return CONTEXT_OP(job->ctx, balance_loss_forward, &job->args, balance_factor(job));
    zero_runs(job);
    for (int64_t t = 0; t < job->args.num_tokens;) {
        const int32_t *load;
        const int64_t end = t + next_load(job, t, &load);
        for (; t < end; t++)
            *run_at(job, t) += job->row->balance(
                &job->router, router_job_logits_row(&job->router, job->args.logits, t), load);
    }
    store_loss(&job->args, balance_factor(job) * sum_runs(job));
    return EPIC_OK;
}

static epic_result balance_backward(loss_job *job)
{
    TRY(prepare_loss(job, BACKWARD));
    TRY(check_balance(job));
    if (context_on_device(job->ctx))
        return CONTEXT_OP(job->ctx, balance_loss_backward, &job->args, balance_factor(job));
    const double factor = balance_factor(job) * incoming_gradient(&job->args);
    for (int64_t t = 0; t < job->args.num_tokens;) {
        const int32_t *load;
        const int64_t end = t + next_load(job, t, &load);
        for (; t < end; t++)
            job->row->balance_backward(
                &job->router, router_job_logits_row(&job->router, job->args.logits, t), load,
                factor, router_job_d_logits_row(&job->router, job->args.d_logits, t));
    }
    return EPIC_OK;
}

epic_result epic_balance_loss_forward_v1(epic_context *ctx, const epic_balance_loss_args *args,
                                         size_t size)
{
    epic_balance_loss_args a;
    TRY(READ_SIZED(&a, args, size, "args"));
    return balance_forward(&(loss_job){.ctx = ctx,
                                       .args = {.router = a.router,
                                                .logits = a.logits,
                                                .num_tokens = a.num_tokens,
                                                .total_tokens = a.total_tokens,
                                                .sequence_tokens = a.sequence_tokens,
                                                .load = a.load,
                                                .topk_idx = a.topk_idx,
                                                .coeff = a.coeff,
                                                .workspace = a.workspace,
                                                .workspace_bytes = a.workspace_bytes,
                                                .loss = a.loss,
                                                .type = a.type,
                                                .loss_type = a.loss_type,
                                                .stream = a.call.stream}});
}

epic_result epic_balance_loss_backward_v1(epic_context *ctx,
                                          const epic_balance_loss_backward_args *args,
                                          size_t size)
{
    epic_balance_loss_backward_args a;
    TRY(READ_SIZED(&a, args, size, "args"));
    TRY(check_reserved(a.reserved));
    return balance_backward(&(loss_job){.ctx = ctx,
                                        .args = {.router = a.router,
                                                 .logits = a.logits,
                                                 .num_tokens = a.num_tokens,
                                                 .total_tokens = a.total_tokens,
                                                 .sequence_tokens = a.sequence_tokens,
                                                 .load = a.load,
                                                 .topk_idx = a.topk_idx,
                                                 .coeff = a.coeff,
                                                 .workspace = a.workspace,
                                                 .workspace_bytes = a.workspace_bytes,
                                                 .d_loss = a.d_loss,
                                                 .d_logits = a.d_logits,
                                                 .type = a.type,
                                                 .grad_type = a.grad_type,
                                                 .flags = a.flags,
                                                 .stream = a.call.stream}});
}

/* Returns the factor of the z-loss: the loss is this factor times the sum of logsumexp^2. */
static double z_factor(const loss_job *job)
{
    return job->args.total_tokens ? job->args.coeff / (double)job->args.total_tokens : 0;
}

static epic_result z_forward(loss_job *job)
{
    TRY(prepare_loss(job, FORWARD));
    if (context_on_device(job->ctx))
        return CONTEXT_OP(job->ctx, z_loss_forward, &job->args, z_factor(job));
    zero_runs(job);
    for (int64_t t = 0; t < job->args.num_tokens; t++)
        *run_at(job, t) += job->row->z_square(
            &job->router, router_job_logits_row(&job->router, job->args.logits, t));
    store_loss(&job->args, z_factor(job) * sum_runs(job));
    return EPIC_OK;
}

static epic_result z_backward(loss_job *job)
{
    TRY(prepare_loss(job, BACKWARD));
    if (context_on_device(job->ctx))
        return CONTEXT_OP(job->ctx, z_loss_backward, &job->args, z_factor(job));
    const double factor = z_factor(job) * incoming_gradient(&job->args);
    for (int64_t t = 0; t < job->args.num_tokens; t++)
        job->row->z_backward(&job->router,
                             router_job_logits_row(&job->router, job->args.logits, t), factor,
                             router_job_d_logits_row(&job->router, job->args.d_logits, t));
    return EPIC_OK;
}

epic_result epic_z_loss_forward_v1(epic_context *ctx, const epic_z_loss_args *args, size_t size)
{
    epic_z_loss_args a;
    TRY(READ_SIZED(&a, args, size, "args"));
    return z_forward(&(loss_job){.ctx = ctx,
                                 .args = {.router = a.router,
                                          .logits = a.logits,
                                          .num_tokens = a.num_tokens,
                                          .total_tokens = a.total_tokens,
                                          .coeff = a.coeff,
                                          .workspace = a.workspace,
                                          .workspace_bytes = a.workspace_bytes,
                                          .loss = a.loss,
                                          .type = a.type,
                                          .loss_type = a.loss_type,
                                          .stream = a.call.stream}});
}

epic_result epic_z_loss_backward_v1(epic_context *ctx, const epic_z_loss_backward_args *args,
                                    size_t size)
{
    epic_z_loss_backward_args a;
    TRY(READ_SIZED(&a, args, size, "args"));
    TRY(check_reserved(a.reserved));
    return z_backward(&(loss_job){.ctx = ctx,
                                  .args = {.router = a.router,
                                           .logits = a.logits,
                                           .num_tokens = a.num_tokens,
                                           .total_tokens = a.total_tokens,
                                           .coeff = a.coeff,
                                           .workspace = a.workspace,
                                           .workspace_bytes = a.workspace_bytes,
                                           .d_loss = a.d_loss,
                                           .d_logits = a.d_logits,
                                           .type = a.type,
                                           .grad_type = a.grad_type,
                                           .flags = a.flags,
                                           .stream = a.call.stream}});
}

static epic_result check_bias(const epic_bias_update_args *a)
{
    if (a->bias == NULL || a->load == NULL)
        return epic_fail(EPIC_EINVAL, "%s is NULL: the update needs bias and load",
                         a->bias ? "load" : "bias");
    if (a->num_experts < 1 || a->num_experts > MAX_COLUMNS)
        return epic_fail(EPIC_EINVAL, "num_experts is %lld: it must be 1 to %d",
                         (long long)a->num_experts, MAX_COLUMNS);
    if (a->flags != 0) return epic_fail(EPIC_EINVAL, "flags is 0x%x: it must be 0", a->flags);
    const call_array arrays[] = {ARRAY_OUT(a, bias, a->num_experts, 4),
                                 ARRAY_IN(a, load, a->num_experts, 4)};
    return CHECK_ARRAYS(arrays);
}

/* Updates the bias: bias_e += rate * sign(mean load - load_e). The sign is computed as the sign
 * of total - num_experts * load_e in integers, where `total` is the sum of all loads, so that
 * rounding cannot change the sign. */
static void update_bias(const epic_bias_update_args *a)
{
    int64_t total = 0;
    for (int64_t e = 0; e < a->num_experts; e++) total += a->load[e];
    for (int64_t e = 0; e < a->num_experts; e++) {
        const int64_t below = total - a->num_experts * a->load[e];
        a->bias[e] += a->rate * (float)((below > 0) - (below < 0));
    }
}

epic_result epic_bias_update_v1(epic_context *ctx, const epic_bias_update_args *args,
                                size_t size)
{
    epic_bias_update_args a;
    TRY(READ_SIZED(&a, args, size, "args"));
    if (ctx != NULL) TRY(context_check(ctx));
    TRY(check_bias(&a));
    if (context_on_device(ctx)) return CONTEXT_OP(ctx, bias_update, &a);
    update_bias(&a);
    return EPIC_OK;
}
