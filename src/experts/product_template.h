/* SPDX-License-Identifier: Apache-2.0 */
/* GEMMs of the experts, and the conversion of their operands. pass_template.h includes this
 * file.
 *
 * GEMMs read operands of type REAL, or BF16 operands if the processor can multiply them
 * (job->is_bf16). Weights of other types are converted to REAL in the workspace, one tile at a
 * time (experts_tile_size). A tile contains all k weights that an output element needs. So no
 * sum is split between tiles; a split would change the order of the additions and therefore the
 * bits. */

/* Converts n elements of `type` to REAL. If REAL is double, the type is EPIC_F64 and the
 * elements are only copied. */
static void load_reals(REAL *out, const void *in, uint32_t type, int64_t n)
{
    if (sizeof *out == sizeof(double))
        memcpy(out, in, (size_t)n * sizeof *out);
    else
        convert_to_float((float *)(void *)out, in, type, n);
}

static void store_reals(void *out, uint32_t type, const REAL *in, int64_t n)
{
    if (sizeof *in == sizeof(double))
        memcpy(out, in, (size_t)n * sizeof *in);
    else
        convert_from_float(out, type, (const float *)(const void *)in, n);
}

static const void *weight_at(const experts_job *job, const void *weights, int64_t index)
{
    return (const char *)weights + index * convert_bytes(job->experts.weight_type);
}

static void *row_at(const experts_job *job, const void *rows, int64_t slot)
{
    return (char *)rows + slot * job->hidden * convert_bytes(job->experts.row_type);
}

static REAL slot_weight_at(const experts_job *job, int64_t slot)
{
    return job->has_f64_weights ? (REAL)((const double *)job->slot_weights)[slot]
                                : (REAL)((const float *)job->slot_weights)[slot];
}

static void store_weight_gradient(const experts_job *job, int64_t slot, double gradient)
{
    if (job->has_f64_weights)
        ((double *)job->d_slot_weights)[slot] = gradient;
    else
        ((float *)job->d_slot_weights)[slot] = (float)gradient;
}

/* Returns the memory in which the caller computes a row of an operand: the row itself or, with
 * job->is_bf16, scratch memory. store_operand_row() later converts the row from scratch
 * memory. */
static REAL *operand_row(const experts_job *job, void *operand, int64_t row, int64_t n)
{
    const int64_t most = job->hidden > job->inner ? job->hidden : job->inner;
    return job->is_bf16 ? (REAL *)job->row_scratch + 2 * most : (REAL *)operand + row * n;
}

/* With job->is_bf16, converts the row in the memory of operand_row() to BF16 and stores it in
 * the operand. Without is_bf16, the row is already in the operand. */
static void store_operand_row(const experts_job *job, void *operand, int64_t row, int64_t n)
{
    if (job->is_bf16)
        store_reals((uint16_t *)operand + row * n, EPIC_BF16, operand_row(job, operand, row, n),
                    n);
}

/* Returns a row of an operand as REAL. With job->is_bf16 the result is in scratch memory. It is
 * valid until the next call of this function or of operand_row(). */
static const REAL *read_operand_row(const experts_job *job, const void *operand, int64_t row,
                                    int64_t n)
{
    if (!job->is_bf16) return (const REAL *)operand + row * n;
    REAL *out = operand_row(job, NULL, 0, n);
    load_reals(out, (const uint16_t *)operand + row * n, EPIC_BF16, n);
    return out;
}

/* Sets an operand's rows of padding to zero. These rows follow the rows of the slab's
 * tokens. */
static void clear_padding(const experts_job *job, const slab *slab, void *operand, int64_t n)
{
    const size_t bytes = (size_t)n * (job->is_bf16 ? sizeof(uint16_t) : sizeof(REAL));
    memset((char *)operand + (size_t)slab->tokens * bytes, 0,
           (size_t)(slab->rows - slab->tokens) * bytes);
}

/* Multiplies two matrices, which are BF16 if job->is_bf16 is set, and REAL if not. */
static void multiply_matrices(const experts_job *job, const gemm *g)
{
    if (job->is_bf16)
        gemm_bf16(g);
    else if (job->is_invariant)
        OF(gemm_invariant)(g, job->product_memory);
    else
        OF(gemm)(g);
}

/* Returns true if gemm_few() computes the slab's GEMMs. The result depends only on the types
 * and on the number of rows, so that slabs with the same number of rows always use the same
 * method and have the same bits. */
static bool is_few(const experts_job *job, const slab *slab)
{
    return job->has_few && slab->rows <= HOST_FEW_ROWS;
}

/* Returns the weight of a slot if experts.weighting equals `weighting` (EPIC_WEIGHT_EARLY or
 * EPIC_WEIGHT_INPUT), and 1 if not. */
static REAL slot_weight(const experts_job *job, uint32_t weighting, int64_t slot)
{
    return job->experts.weighting == weighting ? slot_weight_at(job, slot) : 1;
}

/* Returns the slab's rows of x or d_y as an operand of a GEMM. If GEMMs cannot read the type of
 * the rows, first converts the rows into job->rows. */
static const void *slab_rows(const experts_job *job, const slab *slab, const void *rows)
{
    const void *first = row_at(job, rows, slab->first);
    if (experts_has_ready_rows(job) || job->is_bf16) return first;
    load_reals(job->rows, first, job->experts.row_type, slab->rows * job->hidden);
    return job->rows;
}

/* Returns the left operand of the first GEMM: the slab's rows of x. With EPIC_WEIGHT_INPUT,
 * each row is multiplied by the weight of its slot, and the rows of padding are 0. */
static const void *make_inputs(const experts_job *job, const slab *slab)
{
    if (job->experts.weighting != EPIC_WEIGHT_INPUT) return slab_rows(job, slab, job->x);
    for (int64_t r = 0; r < slab->tokens; r++) {
        const REAL w = slot_weight_at(job, slab->first + r);
        REAL *row = operand_row(job, job->rows, r, job->hidden);
        load_reals(row, row_at(job, job->x, slab->first + r), job->experts.row_type,
                   job->hidden);
        for (int64_t i = 0; i < job->hidden; i++) row[i] *= w;
        store_operand_row(job, job->rows, r, job->hidden);
    }
    clear_padding(job, slab, job->rows, job->hidden);
    return job->rows;
}

static const REAL *bias_of(const experts_job *job, const slab *slab, const void *biases,
                           int64_t n)
{
    if (biases == NULL) return NULL;
    const void *bias = weight_at(job, biases, slab->expert * n);
    if (experts_has_ready_weights(job)) return bias;
    load_reals(job->bias, bias, job->experts.weight_type, n);
    return job->bias;
}

/* Multiplies `a` by the weights W [k, n] of the slab's expert: out [rows, n] = a [rows, k]
 * W. */
static void multiply_weights(const experts_job *job, const slab *slab, REAL *out, const void *a,
                             const void *weights, int64_t k, int64_t n)
{
    const int64_t start = slab->expert * k * n;
    gemm g = {.m = slab->rows, .n = n, .k = k, .a = a, .lda = k, .ldc = n};
    if (experts_has_ready_weights(job) || job->is_bf16 || is_few(job, slab)) {
        g.b = weight_at(job, weights, start);
        g.ldb = n;
        g.c = out;
        if (is_few(job, slab))
            gemm_few(&g, job->is_bf16 ? EPIC_BF16 : EPIC_F32, job->experts.weight_type,
                     job->product_memory);
        else
            multiply_matrices(job, &g);
        return;
    }
    const int64_t columns = experts_tile_size(k, n);
    REAL *tile = job->weights_tile;
    for (int64_t first = 0; first < n; first += columns) {
        g.n = n - first < columns ? n - first : columns;
        for (int64_t i = 0; i < k; i++)
            load_reals(tile + i * g.n, weight_at(job, weights, start + i * n + first),
                       job->experts.weight_type, g.n);
        g.b = tile;
        g.ldb = g.n;
        g.c = out + first;
        multiply_matrices(job, &g);
    }
}

/* Multiplies `a` by the transposed weights W [n, k] of the slab's expert: out [rows, n] = a
 * [rows, k] W^T. */
static void multiply_weights_transposed(const experts_job *job, const slab *slab, REAL *out,
                                        const void *a, const void *weights, int64_t k,
                                        int64_t n)
{
    const int64_t start = slab->expert * k * n;
    gemm g = {.m = slab->rows,
              .n = n,
              .k = k,
              .a = a,
              .lda = k,
              .ldb = k,
              .ldc = n,
              .transpose_b = true};
    if (experts_has_ready_weights(job) || job->is_bf16) {
        g.b = weight_at(job, weights, start);
        g.c = out;
        multiply_matrices(job, &g);
        return;
    }
    const int64_t lines = experts_tile_size(k, n);
    for (int64_t first = 0; first < n; first += lines) {
        g.n = n - first < lines ? n - first : lines;
        load_reals(job->weights_tile, weight_at(job, weights, start + first * k),
                   job->experts.weight_type, g.n * k);
        g.b = job->weights_tile;
        g.c = out + first;
        multiply_matrices(job, &g);
    }
}

/* Computes the gradient of a weight matrix [m, n] of the slab's expert: a^T d, with a [rows, m]
 * and d [rows, n]. Adds the gradient to d_weights if job->accumulate is true, and overwrites
 * d_weights if not. Does nothing if d_weights is NULL. */
static void weight_gradient(const experts_job *job, const slab *slab, void *d_weights,
                            const void *a, int64_t m, const void *d, int64_t n)
{
    if (d_weights == NULL) return;
    const gemm g = {.m = m,
                    .n = n,
                    .k = slab->rows,
                    .a = a,
                    .lda = m,
                    .transpose_a = true,
                    .b = d,
                    .ldb = n,
                    .c = (REAL *)d_weights + slab->expert * m * n,
                    .ldc = n,
                    .add = job->accumulate};
    multiply_matrices(job, &g);
}

/* Computes the gradient of a bias [n] of the slab's expert: the sum of the rows of d, in
 * ascending order, without the rows of padding. If `weighted` is true and experts.weighting is
 * EPIC_WEIGHT_EARLY, each row is multiplied by its slot's weight. Adds the gradient to d_biases
 * if job->accumulate is true, and overwrites d_biases if not. Does nothing if d_biases is
 * NULL. */
static void bias_gradient(const experts_job *job, const slab *slab, void *d_biases,
                          const void *d, int64_t n, bool weighted)
{
    if (d_biases == NULL) return;
    REAL *sum = (REAL *)d_biases + slab->expert * n;
    if (!job->accumulate) memset(sum, 0, (size_t)n * sizeof *sum);
    for (int64_t r = 0; r < slab->tokens; r++) {
        const REAL w = weighted ? slot_weight(job, EPIC_WEIGHT_EARLY, slab->first + r) : 1;
        const REAL *row = read_operand_row(job, d, r, n);
        for (int64_t i = 0; i < n; i++) sum[i] += w * row[i];
    }
}
