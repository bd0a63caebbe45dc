/* SPDX-License-Identifier: Apache-2.0 */
/* Forward on one slab (the slots of one expert). pass_template.h includes this file. Writes
 * gate_up, the result of the first GEMM (config.h), to `saved` for backward. Then computes the
 * activations and the second GEMM. */

static void add_bias(REAL *rows, const REAL *bias, int64_t num_rows, int64_t n)
{
    if (bias == NULL) return;
    for (int64_t r = 0; r < num_rows; r++)
        for (int64_t i = 0; i < n; i++) rows[r * n + i] += bias[i];
}

/* Computes one row of activations, out [inner], from one row of the first GEMM, gate_up
 * [width]. A row contains first the gate and then the up projection. With experts.interleaved,
 * elements of the gate and of the up projection alternate. */
static void activate_row(const experts_job *job, REAL *out, const REAL *gate_up)
{
    const epic_experts *ex = &job->experts;
    const int step = ex->interleaved ? 2 : 1;
    const REAL *up = gate_up + (ex->interleaved ? 1 : job->inner);
    apply_activation(out, gate_up, job->inner, step, ex);
    if (!ex->ungated)
        for (int64_t i = 0; i < job->inner; i++) out[i] *= up_factor(up[i * step], ex);
}

/* Returns the activations of the slab, which are the left matrix of the second GEMM. With
 * EPIC_WEIGHT_EARLY the activations are multiplied by the slots' weights. The rows of padding
 * are 0. */
static const void *make_activations(const experts_job *job, const slab *slab,
                                    const REAL *gate_up)
{
    const int64_t n = job->inner;
    for (int64_t r = 0; r < slab->tokens; r++) {
        REAL *row = operand_row(job, job->activations, r, n);
        activate_row(job, row, gate_up + r * job->width);
        const REAL w = slot_weight(job, EPIC_WEIGHT_EARLY, slab->first + r);
        if (w != 1)
            for (int64_t i = 0; i < n; i++) row[i] *= w;
        store_operand_row(job, job->activations, r, n);
    }
    clear_padding(job, slab, job->activations, n);
    return job->activations;
}

/* Adds b_down to the rows of y, except to rows of padding. With EPIC_WEIGHT_EARLY, first
 * multiplies b_down by the slot's weight. */
static void add_down_bias(const experts_job *job, const slab *slab, REAL *y)
{
    const REAL *bias = bias_of(job, slab, job->b_down, job->hidden);
    if (bias == NULL) return;
    for (int64_t r = 0; r < slab->tokens; r++) {
        const REAL w = slot_weight(job, EPIC_WEIGHT_EARLY, slab->first + r);
        for (int64_t i = 0; i < job->hidden; i++) y[r * job->hidden + i] += w * bias[i];
    }
}

void OF(experts_forward)(const experts_job *job, const slab *slab)
{
    const int64_t hidden = job->hidden, inner = job->inner, width = job->width;
    const bool ready = experts_has_ready_rows(job);
    REAL *gate_up = (REAL *)job->saved + slab->first * width;

    multiply_weights(job, slab, gate_up, make_inputs(job, slab), job->w_gate_up, hidden, width);
    add_bias(gate_up, bias_of(job, slab, job->b_gate_up, width), slab->rows, width);
    if (job->is_recompute) return;
    void *y = row_at(job, job->y, slab->first);
    REAL *out = ready ? y : job->rows;
    multiply_weights(job, slab, out, make_activations(job, slab, gate_up), job->w_down, inner,
                     hidden);
    add_down_bias(job, slab, out);
    if (!ready) store_reals(y, job->experts.row_type, out, slab->rows * hidden);
}
