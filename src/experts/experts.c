/* SPDX-License-Identifier: Apache-2.0 */
/* epic_experts_forward and epic_experts_backward: the MLPs of the local experts. Each call
 * checks its arguments. On a CUDA context it then calls the device backend. On the host it
 * computes the slabs one after the other on the calling thread (pass_template.h). */
#include <string.h>

#include "api/config.h"
#include "base/arrays.h"
#include "base/sized.h"
#include "context/context.h"
#include "experts/blas.h"
#include "experts/config.h"
#include "rules/convert.h"
#include "rules/experts_layout.h"

static epic_result check_slots(int64_t num_slots)
{
    if (num_slots < 0 || num_slots > INT32_MAX)
        return epic_fail(EPIC_EINVAL, "num_slots is %lld: it must be 0 to %d",
                         (long long)num_slots, INT32_MAX);
    return EPIC_OK;
}

epic_result experts_memory(const epic_experts *experts, size_t experts_size, int64_t num_slots,
                           bool on_device, epic_experts_memory_info *out)
{
    experts_job job = {.is_device = on_device};
    TRY(experts_read_config(&job, experts, experts_size));
    TRY(check_slots(num_slots));
    if (job.is_e4m3 && !on_device)
        return epic_fail(EPIC_ENOTSUP,
                         "experts.weight_type is E4M3: it is supported on CUDA contexts "
                         "only; pass one, or config.backend \"gpu\"");
    if (job.is_f64 && on_device)
        return epic_fail(EPIC_ENOTSUP,
                         "experts.row_type is F64: it is supported on host contexts only");
    *out = (epic_experts_memory_info){
        .saved_bytes = experts_saved_bytes(&job, num_slots),
        .forward_bytes = experts_workspace_bytes(&job, num_slots, false),
        .backward_bytes = experts_workspace_bytes(&job, num_slots, true)};
    return EPIC_OK;
}

epic_result epic_experts_memory_v1(epic_context *ctx, const epic_config *config,
                                   size_t config_size, const epic_experts *experts,
                                   size_t experts_size, int64_t num_slots,
                                   epic_experts_memory_info *out, size_t size)
{
    epic_config c;
    bool on_device = false;
    epic_experts_memory_info info;
    TRY(CHECK_PLACE(out, size));
    if (ctx || config) TRY(config_of_query(&c, &on_device, ctx, config, config_size));
    TRY(experts_memory(experts, experts_size, num_slots, on_device, &info));
    WRITE_SIZED(out, &info, size);
    return EPIC_OK;
}

/* Returns the number of slots of a local expert without padding. If expert_tokens is NULL,
 * there is no padding. */
static int64_t tokens_of(const experts_job *job, uint32_t expert)
{
    return job->expert_tokens ? job->expert_tokens[expert] : job->expert_rows[expert];
}

/* Checks expert_rows and expert_tokens of each local expert, and the sum of expert_rows. */
static epic_result check_counts(const experts_job *job, int64_t num_slots)
{
    int64_t sum = 0;
    if (job->expert_rows == NULL)
        return epic_fail(
            EPIC_EINVAL,
            "expert_rows is NULL: it must point to the counts that epic_plan returns");
    /* the host cannot read counts in device memory; kernels ignore rows beyond num_slots */
    if (job->is_device) return EPIC_OK;
    for (uint32_t e = 0; e < job->experts.num_local_experts; e++) {
        const int64_t rows = job->expert_rows[e];
        const int64_t tokens = tokens_of(job, e);
        if (rows < 0 || tokens < 0 || tokens > rows)
            return epic_fail(EPIC_EINVAL,
                             "expert_rows of local expert %u is %lld and expert_tokens %lld: "
                             "tokens must be 0 to rows",
                             e, (long long)rows, (long long)tokens);
        sum += rows;
    }
    if (sum > num_slots)
        return epic_fail(EPIC_EINVAL,
                         "expert_rows add up to %lld: their sum must be at most num_slots %lld",
                         (long long)sum, (long long)num_slots);
    return EPIC_OK;
}

/* If the experts multiply rows by slot weights, checks that the slot weights are set. If not,
 * checks that they are NULL. */
static epic_result check_weighting(const experts_job *job, int64_t num_slots)
{
    const bool late = job->experts.weighting == EPIC_WEIGHT_LATE;
    if (late && (job->slot_weights != NULL || job->d_slot_weights != NULL))
        return epic_fail(
            EPIC_EINVAL,
            "%s is not NULL: it must be NULL if experts.weighting is EPIC_WEIGHT_LATE; pass "
            "the weights to combine, or set EPIC_WEIGHT_EARLY or _INPUT",
            job->slot_weights ? "slot_weights" : "d_slot_weights");
    if (!late && job->slot_weights == NULL && num_slots > 0)
        return epic_fail(
            EPIC_EINVAL,
            "slot_weights is NULL: experts.weighting %u needs the weights that dispatch "
            "returns",
            job->experts.weighting);
    return EPIC_OK;
}

static epic_result check_memory(const char *name, const void *memory, int64_t bytes,
                                int64_t needed)
{
    if (needed > 0 && (memory == NULL || bytes < needed))
        return epic_fail(EPIC_EINVAL,
                         "%s has %lld bytes%s: it must have %lld (epic_experts_memory)", name,
                         (long long)bytes, memory ? "" : " and is NULL", (long long)needed);
    return EPIC_OK;
}

/* An array of scales. It must be set for E4M3 weights, and NULL for weights of other types. */
typedef struct named_scales {
    const char *name;
    const float *scales;
} named_scales;

static epic_result check_scales(const experts_job *job, const named_scales *all, int count,
                                int64_t num_slots)
{
    for (int i = 0; i < count; i++) {
        if (job->is_e4m3 && all[i].scales == NULL && num_slots > 0)
            return epic_fail(EPIC_EINVAL, "%s is NULL: experts.weight_type E4M3 needs it",
                             all[i].name);
        if (!job->is_e4m3 && all[i].scales != NULL)
            return epic_fail(EPIC_EINVAL,
                             "%s is not NULL: it must be NULL if experts.weight_type is %s",
                             all[i].name, convert_name(job->experts.weight_type));
    }
    return EPIC_OK;
}

static epic_result check_e4m3(const experts_job *job, const char *call)
{
    if (!job->is_e4m3) return EPIC_OK;
    if (!job->is_device)
        return epic_fail(EPIC_ENOTSUP,
                         "experts.weight_type is E4M3: %s supports it on CUDA contexts only",
                         call);
    if (job->experts.gemm != NULL)
        return epic_fail(
            EPIC_ENOTSUP,
            "experts.gemm is not NULL: it must be NULL if experts.weight_type is E4M3");
    return EPIC_OK;
}

typedef struct required {
    const char *name;
    const void *array;
} required;

static epic_result check_required(const required *arrays, int count, int64_t num_slots)
{
    for (int i = 0; i < count && num_slots > 0; i++)
        if (arrays[i].array == NULL)
            return epic_fail(EPIC_EINVAL, "%s is NULL: the experts need it", arrays[i].name);
    return EPIC_OK;
}

static epic_result check_flags(uint32_t flags, uint32_t allowed)
{
    if ((flags & ~allowed) != 0)
        return epic_fail(EPIC_EINVAL, "flags is %u: it must have no bits except %u", flags,
                         allowed);
    return EPIC_OK;
}

static epic_result read_weights_type(experts_job *job, uint32_t type)
{
    job->has_f64_weights = type == EPIC_F64;
    if (type == 0 || type == EPIC_F32 || (type == EPIC_F64 && job->is_f64)) return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     "weights_type is %u: it must be EPIC_F32 (or 0), or EPIC_F64 with "
                     "experts.row_type EPIC_F64",
                     type);
}

epic_result experts_read_grad_type(uint32_t *type, uint32_t row_type, bool device)
{
    const uint32_t plain = row_type == EPIC_F64 ? EPIC_F64 : EPIC_F32;
    if (*type == 0) *type = plain;
    if (*type == plain || (device && *type == row_type)) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "grad_type is %u: it must be 0 or %s%s%s", *type,
                     convert_name(plain), device ? ", or experts.row_type " : "",
                     device ? convert_name(row_type) : " on host contexts");
}

typedef struct shapes {
    /* local: number of local experts. slots: number of slots. The other fields: number of
     * elements of each array. */
    int64_t local, slots, rows, gate_up, down, biases_up, biases_down;
    /* number of elements of each array of scales; set only with E4M3 weights */
    int64_t x_scales, gate_up_scales, down_scales;
    /* size of one element of each array in bytes */
    size_t x, row, weight, bias, gradient, slot_weight;
} shapes;

/* Returns the number of elements of each array for num_slots slots, and the sizes of their
 * elements in bytes. With E4M3 weights, x is E4M3 in forward, and of row_type in backward. */
static shapes shapes_of(const experts_job *job, int64_t num_slots, bool backward)
{
    const int64_t local = job->experts.num_local_experts;
    const int64_t hidden = experts_blocks(job->hidden), inner = experts_blocks(job->inner);
    const size_t row = (size_t)convert_bytes(job->experts.row_type);
    const size_t weight = (size_t)convert_bytes(job->experts.weight_type);
    return (shapes){.local = local,
                    .slots = num_slots,
                    .rows = num_slots * job->hidden,
                    .gate_up = local * job->hidden * job->width,
                    .down = local * job->inner * job->hidden,
                    .biases_up = local * job->width,
                    .biases_down = local * job->hidden,
                    .x_scales = num_slots * hidden,
                    .gate_up_scales = local * experts_blocks(job->width) * hidden,
                    .down_scales = local * hidden * inner,
                    .x = job->is_e4m3 && !backward ? 1 : row,
                    .row = row,
                    .weight = job->is_e4m3 ? 1 : weight,
                    .bias = job->is_e4m3 ? row : weight,
                    .gradient = (size_t)(job->grad_type ? convert_bytes(job->grad_type) : 4),
                    .slot_weight = job->has_f64_weights ? 8 : 4};
}

/* The input arrays that forward and backward have in common. */
#define INPUTS(a, s)                                                                        \
    ARRAY_IN(a, x, s.rows, s.x), ARRAY_IN(a, expert_rows, s.local, 4),                      \
        ARRAY_IN(a, expert_tokens, s.local, 4),                                             \
        ARRAY_IN(a, slot_weights, s.slots, s.slot_weight),                                  \
        ARRAY_IN(a, w_gate_up, s.gate_up, s.weight), ARRAY_IN(a, w_down, s.down, s.weight), \
        ARRAY_IN(a, b_gate_up, s.biases_up, s.bias),                                        \
        ARRAY_IN(a, b_down, s.biases_down, s.bias)

static epic_result check_forward_arrays(const experts_job *job, const epic_experts_args *a)
{
    const shapes s = shapes_of(job, a->num_slots, false);
    const call_array arrays[] = {
        INPUTS(a, s),
        ARRAY_IN(a, x_scales, s.x_scales, 4),
        ARRAY_IN(a, w_gate_up_scales, s.gate_up_scales, 4),
        ARRAY_IN(a, w_down_scales, s.down_scales, 4),
        {"saved", a->saved, experts_saved_bytes(job, s.slots), 16, true},
        {"workspace", a->workspace, experts_workspace_bytes(job, s.slots, false), 16, true},
        ARRAY_OUT(a, y, job->is_recompute ? 0 : s.rows, s.row)};
    return CHECK_ARRAYS(arrays);
}

static epic_result check_backward_arrays(const experts_job *job,
                                         const epic_experts_backward_args *a)
{
    const shapes s = shapes_of(job, a->num_slots, true);
    const call_array arrays[] = {
        INPUTS(a, s),
        ARRAY_IN(a, w_gate_up_scales, s.gate_up_scales, 4),
        ARRAY_IN(a, w_down_scales, s.down_scales, 4),
        {"saved", a->saved, experts_saved_bytes(job, s.slots), 16, false},
        {"workspace", a->workspace, experts_workspace_bytes(job, s.slots, true), 16, true},
        ARRAY_IN(a, d_y, s.rows, s.row),
        ARRAY_OUT(a, d_x, s.rows, s.row),
        ARRAY_OUT(a, d_w_gate_up, s.gate_up, s.gradient),
        ARRAY_OUT(a, d_w_down, s.down, s.gradient),
        ARRAY_OUT(a, d_b_gate_up, s.biases_up, s.gradient),
        ARRAY_OUT(a, d_b_down, s.biases_down, s.gradient),
        ARRAY_OUT(a, d_slot_weights, s.slots, s.slot_weight)};
    return CHECK_ARRAYS(arrays);
}

/* If the caller has passed a context, checks the context and sets job->is_device. */
static epic_result read_context(experts_job *job, epic_context *ctx)
{
    if (ctx == NULL) return EPIC_OK;
    TRY(context_check(ctx));
    job->is_device = context_on_device(ctx);
    return EPIC_OK;
}

static bool next_slab(const experts_job *job, slab *slab)
{
    slab->expert++;
    if (slab->expert >= job->experts.num_local_experts) return false;
    slab->first += slab->rows;
    slab->rows = job->expert_rows[slab->expert];
    slab->tokens = tokens_of(job, (uint32_t)slab->expert);
    return true;
}

static epic_result prepare_forward(experts_job *job, const epic_experts_args *a)
{
    TRY(experts_read_config(job, a->experts, sizeof *a->experts));
    job->x = a->x;
    job->expert_rows = a->expert_rows;
    job->expert_tokens = a->expert_tokens;
    job->slot_weights = a->slot_weights;
    job->w_gate_up = a->w_gate_up;
    job->w_down = a->w_down;
    job->b_gate_up = a->b_gate_up;
    job->b_down = a->b_down;
    job->saved = a->saved;
    job->y = a->y;

    job->is_recompute = (a->flags & EPIC_RECOMPUTE) != 0;
    const required arrays[] = {
        {"x", a->x}, {"w_gate_up", a->w_gate_up}, {"w_down", a->w_down}, {"y", a->y}};
    const named_scales scales[] = {{"x_scales", a->x_scales},
                                   {"w_gate_up_scales", a->w_gate_up_scales},
                                   {"w_down_scales", a->w_down_scales}};
    TRY(check_slots(a->num_slots));
    TRY(check_flags(a->flags, EPIC_RECOMPUTE | EPIC_LEAVE_PADDING));
    TRY(check_e4m3(job, "epic_experts_forward"));
    TRY(read_weights_type(job, a->weights_type));
    TRY(check_required(arrays, job->is_recompute ? 3 : 4, a->num_slots));
    TRY(check_scales(job, scales, 3, a->num_slots));
    TRY(check_forward_arrays(job, a));
    TRY(check_counts(job, a->num_slots));
    TRY(check_weighting(job, a->num_slots));
    TRY(check_memory("saved", a->saved, a->saved_bytes,
                     experts_saved_bytes(job, a->num_slots)));
    TRY(check_memory("workspace", a->workspace, a->workspace_bytes,
                     experts_workspace_bytes(job, a->num_slots, false)));
    if (!job->is_device) experts_layout_workspace(job, a->num_slots, false, a->workspace);
    return EPIC_OK;
}

epic_result epic_experts_forward_v1(epic_context *ctx, const epic_experts_args *args,
                                    size_t size)
{
    epic_experts_args a;
    experts_job job = {0};
    TRY(READ_SIZED(&a, args, size, "args"));
    TRY(read_context(&job, ctx));
    TRY(prepare_forward(&job, &a));
    if (job.is_device) {
        a.experts = &job.experts;
        return CONTEXT_OP(ctx, experts_forward, &a);
    }
    experts_blas_enter();
    for (slab slab = {.expert = -1}; next_slab(&job, &slab);) {
        if (slab.rows == 0) continue;
        if (job.is_f64)
            experts_forward_f64(&job, &slab);
        else
            experts_forward_f32(&job, &slab);
    }
    experts_blas_leave();
    return EPIC_OK;
}

static epic_result prepare_backward(experts_job *job, const epic_experts_backward_args *a)
{
    TRY(experts_read_config(job, a->experts, sizeof *a->experts));
    job->x = a->x;
    job->expert_rows = a->expert_rows;
    job->expert_tokens = a->expert_tokens;
    job->slot_weights = a->slot_weights;
    job->w_gate_up = a->w_gate_up;
    job->w_down = a->w_down;
    job->b_gate_up = a->b_gate_up;
    job->b_down = a->b_down;
    job->saved_in = a->saved;
    job->d_y = a->d_y;
    job->d_x = a->d_x;
    job->d_w_gate_up = a->d_w_gate_up;
    job->d_w_down = a->d_w_down;
    job->d_b_gate_up = a->d_b_gate_up;
    job->d_b_down = a->d_b_down;
    job->d_slot_weights = a->d_slot_weights;
    job->accumulate = (a->flags & EPIC_ACCUMULATE) != 0;

    const required arrays[] = {
        {"x", a->x}, {"w_gate_up", a->w_gate_up}, {"w_down", a->w_down}, {"d_y", a->d_y}};
    const named_scales scales[] = {{"w_gate_up_scales", a->w_gate_up_scales},
                                   {"w_down_scales", a->w_down_scales}};
    TRY(check_slots(a->num_slots));
    TRY(check_flags(a->flags, EPIC_ACCUMULATE | EPIC_LEAVE_PADDING));
    TRY(check_e4m3(job, "epic_experts_backward"));
    TRY(read_weights_type(job, a->weights_type));
    job->grad_type = a->grad_type;
    TRY(experts_read_grad_type(&job->grad_type, job->experts.row_type, job->is_device));
    if (a->reserved != 0)
        return epic_fail(EPIC_EINVAL, "reserved fields must be zero: one is %u", a->reserved);
    TRY(check_required(arrays, 4, a->num_slots));
    TRY(check_scales(job, scales, 2, a->num_slots));
    TRY(check_backward_arrays(job, a));
    TRY(check_counts(job, a->num_slots));
    TRY(check_weighting(job, a->num_slots));
    TRY(check_memory("saved", a->saved, a->saved_bytes,
                     experts_saved_bytes(job, a->num_slots)));
    TRY(check_memory("workspace", a->workspace, a->workspace_bytes,
                     experts_workspace_bytes(job, a->num_slots, true)));
    if (!job->is_device) experts_layout_workspace(job, a->num_slots, true, a->workspace);
    return EPIC_OK;
}

/* Zeroes the gradients of an expert that has no slots. Backward does not run for such an
 * expert. */
static void zero_gradients(const experts_job *job, int64_t expert)
{
    const struct {
        void *gradient;
        int64_t numbers;
    } all[] = {
        {job->d_w_gate_up, job->hidden * job->width},
        {job->d_w_down, job->inner * job->hidden},
        {job->d_b_gate_up, job->width},
        {job->d_b_down, job->hidden},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const size_t bytes = (size_t)all[i].numbers * (job->is_f64 ? 8 : 4);
        if (all[i].gradient != NULL)
            memset((char *)all[i].gradient + (size_t)expert * bytes, 0, bytes);
    }
}

epic_result epic_experts_backward_v1(epic_context *ctx, const epic_experts_backward_args *args,
                                     size_t size)
{
    epic_experts_backward_args a;
    experts_job job = {0};
    TRY(READ_SIZED(&a, args, size, "args"));
    TRY(read_context(&job, ctx));
    TRY(prepare_backward(&job, &a));
    if (job.is_device) {
        a.experts = &job.experts;
        a.grad_type = job.grad_type;
        return CONTEXT_OP(ctx, experts_backward, &a);
    }
    experts_blas_enter();
    for (slab slab = {.expert = -1}; next_slab(&job, &slab);) {
        if (slab.rows == 0 && !job.accumulate)
            zero_gradients(&job, slab.expert);
        else if (slab.rows > 0 && job.is_f64)
            experts_backward_f64(&job, &slab);
        else if (slab.rows > 0)
            experts_backward_f32(&job, &slab);
    }
    experts_blas_leave();
    return EPIC_OK;
}
