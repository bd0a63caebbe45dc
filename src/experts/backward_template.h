/* SPDX-License-Identifier: Apache-2.0 */
/* Backward on one slab (the slots of one expert). pass_template.h includes this file after
 * forward_template.h.
 *
 * Symbols in the formulas: `a` [slots, inner] are the activations, and `d_z` is the gradient of
 * any array z. The forward pass is y = (w a) W_down + w b_down. With EPIC_WEIGHT_EARLY, `w`
 * [slots] are the slots' weights; otherwise w is 1. The gradients follow by the chain rule:
 *
 * - d_W_down = (w a)^T d_y, and d_b_down is the sum of w d_y over the rows. Below, d_a is d_y
 *   W_down^T, the gradient of the product w a.
 * - d_w = dot(d_a, a) + dot(d_y, b_down) for each slot. This formula does not contain y, so y
 *   need not be saved.
 * - d_gate_up = w d_a times the derivative of the activation.
 * - d_W_gate_up = x^T d_gate_up, d_b_gate_up = sum of d_gate_up over the rows.
 * - d_x = d_gate_up W_gate_up^T.
 *
 * With EPIC_WEIGHT_INPUT the forward pass multiplies x by w. In this case d_w = dot(d_x', x)
 * and d_x = w d_x', where d_x' is the gradient of the product w x. */

/* Returns the dot product of two rows of n elements, summed in float64. */
static double dot_product(const REAL *a, const REAL *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)a[i] * b[i];
    return sum;
}

/* Computes one row of d_gate_up from gate_up and d, the gradient of the activations. */
static void activate_row_backward(const experts_job *job, REAL *d_gate_up, const REAL *gate_up,
                                  const REAL *d)
{
    const epic_experts *ex = &job->experts;
    const int step = ex->interleaved ? 2 : 1;
    const int64_t n = job->inner;
    const int64_t second = ex->interleaved ? 1 : n;
    REAL *value = job->row_scratch;
    REAL *slope = value + n;
    make_slopes(slope, gate_up, n, step, ex);
    if (ex->ungated) {
        for (int64_t i = 0; i < n; i++) d_gate_up[i] = d[i] * slope[i];
        return;
    }
    apply_activation(value, gate_up, n, step, ex);
    for (int64_t i = 0; i < n; i++) {
        const REAL up = gate_up[second + i * step];
        d_gate_up[i * step] = d[i] * up_factor(up, ex) * slope[i];
        d_gate_up[second + i * step] = d[i] * value[i] * up_slope(up, ex);
    }
}

/* Returns the gradient of a slot's weight with EPIC_WEIGHT_EARLY: dot(d, a) + dot(d_y, b_down),
 * where d is the gradient of the weighted activations. `row` is the index of the slot in its
 * slab. */
static double early_gradient(const experts_job *job, const REAL *gate_up, const REAL *d,
                             const void *d_y, int64_t row, const REAL *b_down)
{
    activate_row(job, job->row_scratch, gate_up);
    const double sum = dot_product(d, job->row_scratch, job->inner);
    return b_down ? sum + dot_product(read_operand_row(job, d_y, row, job->hidden), b_down,
                                      job->hidden)
                  : sum;
}

/* Computes job->d_gate_up from d [slots, inner], and then the gradients of the slots' weights.
 * d is the gradient of the activations or, with EPIC_WEIGHT_EARLY, of the weighted activations.
 * Sets the rows of padding slots to 0. */
static void activations_backward(const experts_job *job, const slab *slab, REAL *d,
                                 const void *d_y)
{
    const bool early = job->experts.weighting == EPIC_WEIGHT_EARLY;
    const REAL *gate_up = (const REAL *)job->saved_in + slab->first * job->width;
    const REAL *b_down = early ? bias_of(job, slab, job->b_down, job->hidden) : NULL;
    for (int64_t r = 0; r < slab->tokens; r++) {
        const REAL *row = gate_up + r * job->width;
        REAL *d_row = d + r * job->inner;
        const int64_t slot = slab->first + r;
        if (early && job->d_slot_weights != NULL)
            store_weight_gradient(job, slot, early_gradient(job, row, d_row, d_y, r, b_down));
        const REAL w = slot_weight(job, EPIC_WEIGHT_EARLY, slot);
        if (w != 1)
            for (int64_t i = 0; i < job->inner; i++) d_row[i] *= w;
        activate_row_backward(job, operand_row(job, job->d_gate_up, r, job->width), row, d_row);
        store_operand_row(job, job->d_gate_up, r, job->width);
    }
    clear_padding(job, slab, job->d_gate_up, job->width);
}

/* For EPIC_WEIGHT_INPUT: computes the gradients of the slots' weights from d, the gradient of w
 * x. After that, multiplies each row of d by its slot's weight, so that d becomes the gradient
 * of x. */
static void inputs_backward(const experts_job *job, const slab *slab, REAL *d)
{
    REAL *x = job->row_scratch;
    for (int64_t r = 0; r < slab->tokens; r++) {
        const int64_t slot = slab->first + r;
        REAL *d_row = d + r * job->hidden;
        load_reals(x, row_at(job, job->x, slot), job->experts.row_type, job->hidden);
        if (job->d_slot_weights != NULL)
            store_weight_gradient(job, slot, dot_product(d_row, x, job->hidden));
        const REAL w = slot_weight_at(job, slot);
        for (int64_t i = 0; i < job->hidden; i++) d_row[i] *= w;
    }
}

/* Computes d_x from job->d_gate_up and, with EPIC_WEIGHT_INPUT, the gradients of the slots'
 * weights. May overwrite job->rows. */
static void rows_backward(const experts_job *job, const slab *slab)
{
    const bool input = job->experts.weighting == EPIC_WEIGHT_INPUT;
    const bool in_place = experts_has_ready_rows(job) && job->d_x != NULL;
    if (job->d_x == NULL && !(input && job->d_slot_weights != NULL)) return;
    void *d_x = job->d_x ? row_at(job, job->d_x, slab->first) : NULL;
    REAL *d = in_place ? d_x : job->rows;
    multiply_weights_transposed(job, slab, d, job->d_gate_up, job->w_gate_up, job->width,
                                job->hidden);
    if (input) inputs_backward(job, slab, d);
    if (d_x != NULL && !in_place)
        store_reals(d_x, job->experts.row_type, d, slab->rows * job->hidden);
}

void OF(experts_backward)(const experts_job *job, const slab *slab)
{
    const int64_t hidden = job->hidden, inner = job->inner, width = job->width;
    const REAL *gate_up = (const REAL *)job->saved_in + slab->first * width;
    const void *d_y = slab_rows(job, slab, job->d_y);
    REAL *d = job->activations;

    /* the gradients of padding slots stay 0 */
    for (int64_t r = 0; job->d_slot_weights != NULL && r < slab->rows; r++)
        store_weight_gradient(job, slab->first + r, 0);
    bias_gradient(job, slab, job->d_b_down, d_y, hidden, true);
    if (job->d_w_down != NULL)
        weight_gradient(job, slab, job->d_w_down, make_activations(job, slab, gate_up), inner,
                        d_y, hidden);
    multiply_weights_transposed(job, slab, d, d_y, job->w_down, hidden, inner);
    activations_backward(job, slab, d, d_y);

    bias_gradient(job, slab, job->d_b_gate_up, job->d_gate_up, width, false);
    if (job->d_w_gate_up != NULL)
        weight_gradient(job, slab, job->d_w_gate_up, make_inputs(job, slab), hidden,
                        job->d_gate_up, width);
    rows_backward(job, slab);
}
