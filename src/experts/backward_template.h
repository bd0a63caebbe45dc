/* SPDX-License-Identifier: Apache-2.0 */
/* Backward over one slab.  Included by pass_template.h after forward_template.h. */

/* Sums over a row are in float64: they are short and there is one for each slot. */
static double dot_product(const REAL *a, const REAL *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)a[i] * b[i];
    return sum;
}

/* From the gradient d of a row of activations to that of a row of the first product. */
static void activate_row_backward(const experts_job *job, REAL *d_gate_up, const REAL *gate_up,
                                  const REAL *d)
{
    const epic_experts *ex = &job->experts;
    const int step = ex->interleaved ? 2 : 1;
    const int64_t n = job->inner;
    const int64_t second = ex->interleaved ? 1 : n;
    REAL *value = job->line;
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

/* The gradient of an early weight, from the gradient of its unweighted activations. */
static double early_gradient(const experts_job *job, const REAL *gate_up, const REAL *d,
                             const void *d_y, int64_t row, const REAL *b_down)
{
    activate_row(job, job->line, gate_up);
    const double sum = dot_product(d, job->line, job->inner);
    return b_down ? sum + dot_product(read_operand_row(job, d_y, row, job->hidden), b_down,
                                      job->hidden)
                  : sum;
}

/* From the gradient of the activations, d, to d_gate_up; 0 on padding. */
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

/* Weights on the input: their gradient, then that of the rows themselves, in place. */
static void inputs_backward(const experts_job *job, const slab *slab, REAL *d)
{
    REAL *x = job->line;
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

/* The rows' gradient, and that of weights on the input; `rows` is free again. */
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
