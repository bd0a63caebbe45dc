/* SPDX-License-Identifier: Apache-2.0 */
/* The passes of the model. A "block" is one of the LEAVES parts of the tokens of all ranks. */
#include "model.h"

#include <math.h>
#include <string.h>

#include "device.h"
#include "product.h"

static const float tiny = 1e-6f; /* keeps norm finite for a row of zeros */

static float *value(const model *m, int number)
{
    return m->value + m->parameters[number].offset;
}

static float *gradient(const model *m, int number)
{
    return m->gradient + m->parameters[number].offset;
}

static void begin_pass(model *m, const unsigned char *const *at, int64_t tokens)
{
    m->at = at;
    m->tokens = tokens;
    m->block = tokens * m->group.num_ranks / LEAVES;
    m->all_tokens = tokens * m->group.num_ranks;
}

/* --------------------------------------------------------------- the sums of blocks ---- */

/* Writes block b's part of a gradient into memory that is zero. */
typedef void block_sum(model *m, int which, int64_t b, float *part);

/* Sums the parts of blocks [b, b + num) in a binary tree. */
static void add_blocks(model *m, block_sum *part_of, int which, int64_t b, int64_t num,
                       int64_t count, float *out, float *scratch)
{
    if (num == 1) {
        memset(out, 0, (size_t)count * sizeof *out);
        part_of(m, which, b, out);
        return;
    }
    add_blocks(m, part_of, which, b, num / 2, count, out, scratch);
    add_blocks(m, part_of, which, b + num / 2, num / 2, count, scratch, scratch + count);
    for (int64_t i = 0; i < count; i++) out[i] += scratch[i];
}

/* Computes this rank's part of the gradient of a dense parameter. */
static void sum_blocks(model *m, block_sum *part_of, int number, int which)
{
    add_blocks(m, part_of, which, 0, m->tokens / m->block, m->parameters[number].count,
               gradient(m, number), m->scratch);
}

static float tree(const float *values, int64_t count)
{
    if (count == 1) return values[0];
    return tree(values, count / 2) + tree(values + count / 2, count / 2);
}

/* ------------------------------------------------------------------------- embedding ---- */

static void embed(model *m)
{
    const float *table = value(m, EMBED);
    for (int64_t t = 0; t < m->tokens; t++) {
        float *x = m->x[0] + t * m->hidden;
        memset(x, 0, (size_t)m->hidden * sizeof *x);
        for (int64_t c = 0; c < CONTEXT; c++) {
            const float *row = table + (c * BYTES + m->at[t][c - CONTEXT]) * m->hidden;
            for (int64_t i = 0; i < m->hidden; i++) x[i] += row[i];
        }
    }
}

static void embed_backward(model *m, int which, int64_t b, float *part)
{
    (void)which;
    for (int64_t t = b * m->block; t < (b + 1) * m->block; t++)
        for (int64_t c = 0; c < CONTEXT; c++) {
            const float *d_x = m->d_x + t * m->hidden;
            float *row = part + (c * BYTES + m->at[t][c - CONTEXT]) * m->hidden;
            for (int64_t i = 0; i < m->hidden; i++) row[i] += d_x[i];
        }
}

/* ------------------------------------------------------------------------------ norm ---- */

/* Returns 1 / sqrt(mean of squares). */
static float inverse_size(const float *x, int64_t n)
{
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return 1 / sqrtf(sum / (float)n + tiny);
}

static void norm(model *m, int which)
{
    const float *gain = value(m, NORM + which);
    for (int64_t t = 0; t < m->tokens; t++) {
        const float *x = m->x[which] + t * m->hidden;
        float *h = m->h[which] + t * m->hidden;
        const float inverse = inverse_size(x, m->hidden);
        for (int64_t i = 0; i < m->hidden; i++) h[i] = gain[i] * (x[i] * inverse);
    }
}

/* Adds the gradient of x, computed from d_h, to d_x. Writes the gradient of the gain to
 * part. */
static void norm_backward(model *m, int which, int64_t b, float *part)
{
    const float *gain = value(m, NORM + which);
    for (int64_t t = b * m->block; t < (b + 1) * m->block; t++) {
        const float *x = m->x[which] + t * m->hidden, *d_h = m->d_h + t * m->hidden;
        float *d_x = m->d_x + t * m->hidden;
        const float inverse = inverse_size(x, m->hidden);
        float along = 0;
        for (int64_t i = 0; i < m->hidden; i++) {
            part[i] += d_h[i] * (x[i] * inverse);
            along += d_h[i] * gain[i] * (x[i] * inverse);
        }
        along /= (float)m->hidden;
        for (int64_t i = 0; i < m->hidden; i++)
            d_x[i] += inverse * (d_h[i] * gain[i] - along * (x[i] * inverse));
    }
}

/* -------------------------------------------------------------------- layer of experts ---- */

static epic_rows rows(const model *m, float *data)
{
    return (epic_rows){data, m->tokens, m->hidden * (int64_t)sizeof *data};
}

static epic_const_rows const_rows(const model *m, const float *data)
{
    return (epic_const_rows){data, m->tokens, m->hidden * (int64_t)sizeof *data};
}

/* Returns the weights of this rank's experts. */
static epic_moe_weights weights_of(const model *m, int layer)
{
    const int mine = layer * EXPERTS + m->group.rank * (EXPERTS / m->group.num_ranks);
    return (epic_moe_weights){.w_gate = value(m, GATE + layer),
                              .w_gate_up = value(m, UP + mine),
                              .w_down = value(m, DOWN + mine)};
}

static epic_moe_gradients gradients_of(const model *m, int layer)
{
    const int mine = layer * EXPERTS + m->group.rank * (EXPERTS / m->group.num_ranks);
    return (epic_moe_gradients){.w_gate = gradient(m, GATE + layer),
                                .w_gate_up = gradient(m, UP + mine),
                                .w_down = gradient(m, DOWN + mine)};
}

/* x[layer + 1] = x[layer] + moe(h[layer]) */
static bool mix(model *m, int layer, float *balance)
{
    const epic_moe_weights weights = weights_of(m, layer);
    const epic_moe_args args = {.moe = &m->moe,
                                .weights = &weights,
                                .x = const_rows(m, m->h[layer]),
                                .out = rows(m, m->x[layer + 1]),
                                .saved = m->saved[layer],
                                .saved_bytes = m->moe_memory.saved_bytes,
                                .workspace = m->work,
                                .workspace_bytes = m->work_bytes,
                                .loss = balance,
                                .load = m->load[layer]};
    if (!works(&m->group, epic_moe_forward(m->group.ctx, &args), "layer forward")) return false;
    for (int64_t i = 0; i < m->tokens * m->hidden; i++) m->x[layer + 1][i] += m->x[layer][i];
    return true;
}

/* d_h = the gradient of h[layer], from d_x */
static bool mix_backward(model *m, int layer)
{
    const epic_moe_weights weights = weights_of(m, layer);
    const epic_moe_gradients gradients = gradients_of(m, layer);
    const epic_moe_backward_args args = {.moe = &m->moe,
                                         .weights = &weights,
                                         .x = const_rows(m, m->h[layer]),
                                         .d_out = const_rows(m, m->d_x),
                                         .d_x = rows(m, m->d_h),
                                         .gradients = &gradients,
                                         .saved = m->saved[layer],
                                         .saved_bytes = m->moe_memory.saved_bytes,
                                         .workspace = m->work,
                                         .workspace_bytes = m->work_bytes};
    return works(&m->group, epic_moe_backward(m->group.ctx, &args), "layer backward");
}

/* ------------------------------------------------------------------------------ head ---- */

static void predict_block(const model *m, int64_t b, float *logits)
{
    const product p = {.m = m->block,
                       .n = BYTES,
                       .k = m->hidden,
                       .a = m->h[LAYERS] + b * m->block * m->hidden,
                       .b = value(m, HEAD),
                       .c = logits};
    multiply(&p);
}

/* Returns -log softmax(logits)[target]. Replaces the logits by their gradient, times
 * `scale`. */
static double surprise(float *logits, int target, float scale)
{
    float most = logits[0];
    double sum = 0;
    for (int i = 1; i < BYTES; i++) most = logits[i] > most ? logits[i] : most;
    const double loss = -(double)(logits[target] - most);
    for (int i = 0; i < BYTES; i++) {
        logits[i] = expf(logits[i] - most);
        sum += logits[i];
    }
    const float inverse = scale / (float)sum;
    for (int i = 0; i < BYTES; i++) logits[i] *= inverse;
    logits[target] -= scale;
    return loss + log(sum);
}

/* Computes m->losses[b] and the gradient of the logits. */
static void judge_block(model *m, int64_t b)
{
    double sum = 0;
    predict_block(m, b, m->logits);
    for (int64_t t = 0; t < m->block; t++)
        sum +=
            surprise(m->logits + t * BYTES, *m->at[b * m->block + t], 1 / (float)m->all_tokens);
    m->losses[b] = (float)(sum / (double)m->all_tokens);
}

/* Computes d_h of the block and its part of the head's gradient. */
static void head_backward(model *m, int which, int64_t b, float *part)
{
    (void)which;
    const int64_t first = b * m->block * m->hidden;
    judge_block(m, b);
    const product d_head = {.m = m->hidden,
                            .n = BYTES,
                            .k = m->block,
                            .a = m->h[LAYERS] + first,
                            .transpose_a = true,
                            .b = m->logits,
                            .c = part};
    multiply(&d_head);
    const product d_h = {.m = m->block,
                         .n = m->hidden,
                         .k = BYTES,
                         .a = m->logits,
                         .b = value(m, HEAD),
                         .transpose_b = true,
                         .c = m->d_h + first};
    multiply(&d_h);
}

/* ---------------------------------------------------------------------------- passes ---- */

/* Runs the model up to the last norm. balance: this rank's part of each layer's balance
 * loss. */
static bool forward(model *m, float balance[LAYERS])
{
    embed(m);
    for (int layer = 0; layer < LAYERS; layer++) {
        norm(m, layer);
        if (!mix(m, layer, balance + layer)) return false;
    }
    norm(m, LAYERS);
    return true;
}

bool model_loss(model *m, const unsigned char *const *at, int64_t tokens, float *loss)
{
    float balance[LAYERS];
    if (m->device) return device_loss(m, at, tokens, loss);
    begin_pass(m, at, tokens);
    if (!forward(m, balance)) return false;
    for (int64_t b = 0; b < m->tokens / m->block; b++) judge_block(m, b);
    *loss = tree(m->losses, m->tokens / m->block);
    return true;
}

bool model_predict(model *m, const unsigned char *const *at, int64_t tokens, float *out)
{
    float balance[LAYERS];
    if (m->device) return device_predict(m, at, tokens, out);
    begin_pass(m, at, tokens);
    if (!forward(m, balance)) return false;
    for (int64_t b = 0; b < m->tokens / m->block; b++)
        predict_block(m, b, out + b * m->block * BYTES);
    return true;
}

bool model_gradients(model *m, const unsigned char *const *at, int64_t tokens)
{
    float balance[LAYERS];
    if (m->device) return device_gradients(m, at, tokens);
    begin_pass(m, at, tokens);
    if (!forward(m, balance)) return false;
    sum_blocks(m, head_backward, HEAD, 0);
    memset(m->d_x, 0, (size_t)(m->tokens * m->hidden) * sizeof *m->d_x);
    sum_blocks(m, norm_backward, NORM + LAYERS, LAYERS);
    for (int layer = LAYERS - 1; layer >= 0; layer--) {
        if (!mix_backward(m, layer)) return false;
        sum_blocks(m, norm_backward, NORM + layer, layer);
    }
    sum_blocks(m, embed_backward, EMBED, 0);
    memset(m->sums, 0, NUM_SUMS * sizeof *m->sums);
    m->sums[SUM_LOSS] = tree(m->losses, m->tokens / m->block);
    memcpy(m->sums + SUM_BALANCE, balance, sizeof balance);
    return true;
}
