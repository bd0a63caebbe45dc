/* SPDX-License-Identifier: Apache-2.0 */
/* Checks the options of the experts and lays out their workspace. */
#include "experts/config.h"

#include "base/sized.h"
#include "experts/blas.h"
#include "kernels/kernels.h"
#include "rules/convert.h"
#include "rules/experts_layout.h"

#define MAX_EXPERTS 65536
#define MAX_ROW_NUMBERS (1 << 24) /* maximum value of `hidden` and of `inner` */
/* maximum number of elements in the weights of all experts together, so that their size in
 * bytes fits into an int64_t */
#define MAX_WEIGHT_NUMBERS (1ll << 56)
/* Maximum number of elements in a tile (some columns or rows of a weight matrix, config.h): 4
 * MiB of float32. Such a tile fits into a core's cache, and still has many columns or rows. */
#define TILE_NUMBERS (1 << 20)

static epic_result check_range(const char *name, uint32_t value, uint32_t first, uint32_t last)
{
    if (value < first || value > last)
        return epic_fail(EPIC_EINVAL, "experts.%s is %u: it must be %u to %u", name, value,
                         first, last);
    return EPIC_OK;
}

/* Checks the types. Rows and weights must both be F64, or neither of them. Only weights may be
 * E4M3. */
static epic_result check_types(const epic_experts *ex)
{
    if (convert_bytes(ex->row_type) == 0)
        return epic_fail(EPIC_EINVAL,
                         "experts.row_type is %u: it must be EPIC_F32, BF16, F16 or F64",
                         ex->row_type);
    if (ex->weight_type == EPIC_E4M3 && ex->row_type != EPIC_F64) return EPIC_OK;
    if (convert_bytes(ex->weight_type) == 0)
        return epic_fail(EPIC_EINVAL,
                         "experts.weight_type is %u: it must be 0 (row_type), EPIC_F32, BF16, "
                         "F16, F64 or, with row_type F32, BF16 or F16, E4M3",
                         ex->weight_type);
    if ((ex->row_type == EPIC_F64) != (ex->weight_type == EPIC_F64))
        return epic_fail(
            EPIC_EINVAL,
            "experts.row_type is %s and weight_type is %s: both or neither must be F64",
            convert_name(ex->row_type), convert_name(ex->weight_type));
    return EPIC_OK;
}

static epic_result check_activation(const epic_experts *ex)
{
    TRY(check_range("activation", ex->activation, 0, EPIC_CLAMPED_SILU));
    TRY(check_range("ungated", ex->ungated, 0, 1));
    TRY(check_range("interleaved", ex->interleaved, 0, 1));
    TRY(check_range("weighting", ex->weighting, 0, EPIC_WEIGHT_INPUT));
    const bool swiglu = ex->activation == EPIC_CLAMPED_SWIGLU;
    if (ex->ungated && (experts_is_clamped(ex) || ex->interleaved))
        return epic_fail(EPIC_EINVAL, "experts.ungated is 1: %s needs a gate",
                         ex->interleaved ? "interleaved"
                         : swiglu        ? "EPIC_CLAMPED_SWIGLU"
                                         : "EPIC_CLAMPED_SILU");
    if (!(ex->limit > 0) || ex->alpha - ex->alpha != 0)
        return epic_fail(
            EPIC_EINVAL,
            "experts.limit is %g and alpha is %g: the limit must be above 0, alpha "
            "finite",
            ex->limit, ex->alpha);
    return EPIC_OK;
}

/* Reads and checks the options of the experts, and fills in the defaults: weight_type is
 * row_type, limit is 7 (10 for clamped SiLU), and alpha is 1.702, as in gpt-oss. For clamped
 * SiLU alpha is always 1. */
epic_result experts_read_config(experts_job *job, const epic_experts *theirs, size_t size)
{
    epic_experts *ex = &job->experts;
    TRY(READ_SIZED(ex, theirs, size, "experts"));
    if (ex->weight_type == 0) ex->weight_type = ex->row_type;
    const bool silu = ex->activation == EPIC_CLAMPED_SILU;
    if (ex->limit == 0) ex->limit = silu ? 10 : 7;
    if (ex->alpha == 0) ex->alpha = 1.702f;
    /* with alpha 1, the code for clamped SwiGLU also computes clamped SiLU */
    if (silu) ex->alpha = 1;
    TRY(check_range("num_local_experts", ex->num_local_experts, 1, MAX_EXPERTS));
    TRY(check_range("hidden", ex->hidden, 1, MAX_ROW_NUMBERS));
    TRY(check_range("inner", ex->inner, 1, MAX_ROW_NUMBERS));
    TRY(check_types(ex));
    TRY(check_activation(ex));
    if (ex->flags & ~(uint32_t)EPIC_INVARIANT)
        return epic_fail(EPIC_EINVAL, "experts.flags is %u: it must be 0 or EPIC_INVARIANT",
                         ex->flags);
    job->hidden = ex->hidden;
    job->inner = ex->inner;
    job->width = ex->ungated ? job->inner : 2 * job->inner;
    if ((int64_t)ex->num_local_experts > MAX_WEIGHT_NUMBERS / (job->hidden * job->width))
        return epic_fail(EPIC_EINVAL,
                         "experts.num_local_experts is %u: with hidden %u and inner %u the "
                         "weights must have at most %lld numbers",
                         ex->num_local_experts, ex->hidden, ex->inner,
                         (long long)MAX_WEIGHT_NUMBERS);
    job->is_f64 = ex->row_type == EPIC_F64;
    job->is_invariant = (ex->flags & EPIC_INVARIANT) != 0;
    job->is_bf16 = !job->is_invariant && ex->row_type == EPIC_BF16 &&
                   ex->weight_type == EPIC_BF16 && gemm_has_bf16();
    job->is_e4m3 = ex->weight_type == EPIC_E4M3;
    job->has_few = !job->is_f64 && gemm_has_few() &&
                   (ex->weight_type == EPIC_F32 || ex->weight_type == EPIC_BF16);
    return EPIC_OK;
}

bool experts_has_ready_rows(const experts_job *job)
{
    return job->is_f64 || job->experts.row_type == EPIC_F32;
}

bool experts_has_ready_weights(const experts_job *job)
{
    return job->is_f64 || job->experts.weight_type == EPIC_F32;
}

int64_t experts_tile_size(int64_t k, int64_t n)
{
    const int64_t lines = TILE_NUMBERS / k / 64 * 64;
    const int64_t least = lines < 64 ? 64 : lines;
    return least < n ? least : n;
}

static int64_t larger_of(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Returns the number of elements in the largest tile, or 0 if weights need no conversion. */
static int64_t tile_numbers(const experts_job *job)
{
    const int64_t h = job->hidden, i = job->inner, w = job->width;
    const int64_t forward = larger_of(h * experts_tile_size(h, w), i * experts_tile_size(i, h));
    const int64_t backward =
        larger_of(w * experts_tile_size(w, h), h * experts_tile_size(h, i));
    return experts_has_ready_weights(job) ? 0 : larger_of(forward, backward);
}

/* Rounds a number of elements up to a multiple of 16 (64 bytes of float32), so that each part
 * of the workspace begins at a cache line. */
static int64_t pad_numbers(int64_t numbers)
{
    return (numbers + 15) / 16 * 16;
}

static int64_t number_bytes(const experts_job *job)
{
    return job->is_f64 ? 8 : 4;
}

int64_t experts_saved_bytes(const experts_job *job, int64_t num_slots)
{
    if (job->is_device) return experts_layout_of(&job->experts, num_slots, false).saved_bytes;
    return num_slots * job->width * number_bytes(job);
}

static int64_t product_numbers(const experts_job *job)
{
    if (job->is_invariant) return gemm_invariant_bytes(job->is_f64) / number_bytes(job);
    return job->has_few ? HOST_FEW_MEMORY : 0;
}

/* Sets the workspace pointers of *job to parts of the memory at `at`, unless `at` is NULL.
 * Returns the number of elements in all parts together: float64 elements for F64 rows, and
 * float32 elements for all others. */
static int64_t layout_pieces(experts_job *job, int64_t num_slots, bool backward, char *at)
{
    const bool copied =
        !experts_has_ready_rows(job) || job->experts.weighting == EPIC_WEIGHT_INPUT;
    const struct {
        void **piece;
        int64_t numbers;
    } pieces[] = {
        {&job->rows, copied ? num_slots * job->hidden : 0},
        {&job->activations, num_slots * job->inner},
        {&job->d_gate_up, backward ? num_slots * job->width : 0},
        {&job->weights_tile, tile_numbers(job)},
        {&job->row_scratch,
         2 * larger_of(job->hidden, job->inner) + larger_of(job->hidden, job->width)},
        {&job->bias, larger_of(job->width, job->hidden)},
        {&job->product_memory, product_numbers(job)},
    };
    int64_t numbers = 0;
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        if (at != NULL) *pieces[i].piece = at + numbers * number_bytes(job);
        numbers += pad_numbers(pieces[i].numbers);
    }
    return numbers;
}

int64_t experts_workspace_bytes(const experts_job *job, int64_t num_slots, bool backward)
{
    experts_job scratch = *job;
    if (job->is_device) return experts_layout_of(&job->experts, num_slots, backward).bytes;
    if (num_slots == 0) return 0;
    return layout_pieces(&scratch, num_slots, backward, NULL) * number_bytes(job);
}

void experts_layout_workspace(experts_job *job, int64_t num_slots, bool backward,
                              void *workspace)
{
    layout_pieces(job, num_slots, backward, workspace);
}
