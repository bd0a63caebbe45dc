/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters of the model, and the memory of its passes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "model.h"
#include "random.h"

static const double balance = 0.05; /* of the balance loss */

int model_owner(const model *m, int number)
{
    if (number < UP) return -1;
    return (number - UP) % EXPERTS / (EXPERTS / m->seat.num_ranks);
}

static void add(model *m, int number, int64_t count, double spread, bool decays)
{
    const int owner = model_owner(m, number);
    parameter *p = &m->parameters[number];
    p->count = count;
    p->spread = spread;
    p->decays = decays;
    p->offset = owner < 0 || owner == m->seat.rank ? m->count : -1;
    if (p->offset >= 0) m->count += count;
}

static void list_dense(model *m)
{
    add(m, EMBED, (int64_t)CONTEXT * BYTES * m->hidden, 0.25, true);
    add(m, HEAD, m->hidden * BYTES, 0.02, true);
    for (int i = 0; i <= LAYERS; i++) add(m, NORM + i, m->hidden, 0, false);
    for (int i = 0; i < LAYERS; i++) add(m, GATE + i, m->hidden * EXPERTS, 0.02, true);
    m->dense_count = m->count;
    m->count += NUM_SUMS;
}

static void list_experts(model *m)
{
    for (int i = 0; i < LAYERS * EXPERTS; i++)
        add(m, UP + i, m->hidden * 2 * m->inner, 1 / sqrt((double)m->hidden), true);
    for (int i = 0; i < LAYERS * EXPERTS; i++)
        add(m, DOWN + i, m->inner * m->hidden, 1 / sqrt((double)m->inner), true);
}

static void name_all(model *m)
{
    parameter *p = m->parameters;
    snprintf(p[EMBED].name, sizeof p->name, "embed");
    snprintf(p[HEAD].name, sizeof p->name, "head");
    for (int i = 0; i <= LAYERS; i++) snprintf(p[NORM + i].name, sizeof p->name, "norm%d", i);
    for (int i = 0; i < LAYERS; i++) snprintf(p[GATE + i].name, sizeof p->name, "gate%d", i);
    for (int i = 0; i < LAYERS * EXPERTS; i++) {
        const int layer = i / EXPERTS, expert = i % EXPERTS;
        snprintf(p[UP + i].name, sizeof p->name, "layer%d.expert%d.up", layer, expert);
        snprintf(p[DOWN + i].name, sizeof p->name, "layer%d.expert%d.down", layer, expert);
    }
}

/* The same values for every number of ranks: they depend on the parameter's number alone. */
static void begin_values(model *m, uint64_t seed)
{
    for (int n = 0; n < NUM_PARAMETERS; n++) {
        const parameter *p = &m->parameters[n];
        const double reach = p->spread * sqrt(12); /* of an even distribution */
        for (int64_t i = 0; p->offset >= 0 && i < p->count; i++) {
            const double u = random_unit(seed, STREAM_PARAMETERS + (uint64_t)n, (uint64_t)i);
            m->value[p->offset + i] = p->spread > 0 ? (float)(reach * (u - 0.5)) : 1;
        }
    }
}

epic_config model_config(int num_ranks, int64_t hidden, int64_t tokens)
{
    return (epic_config){.max_tokens = tokens / num_ranks,
                         .max_row_bytes = hidden * (int64_t)sizeof(float),
                         .num_ranks = (uint32_t)num_ranks,
                         .name = "train_text"};
}

static bool describe_layer(model *m, int64_t tokens)
{
    const uint32_t local = EXPERTS / (uint32_t)m->seat.num_ranks;
    const epic_config config = model_config(m->seat.num_ranks, m->hidden, tokens);
    m->layer = (epic_layer){.num_experts = EXPERTS,
                            .top_k = TOP_K,
                            .alignment = 16,
                            .sum_order = EPIC_TREE,
                            .leaves = LEAVES};
    m->router = (epic_router){.num_experts = EXPERTS,
                              .top_k = TOP_K,
                              .score = EPIC_SCORE_SOFTMAX,
                              .weight_rule = EPIC_WEIGHT_SOFTMAX_CHOSEN};
    m->experts = (epic_experts){.num_local_experts = local,
                                .hidden = (uint32_t)m->hidden,
                                .inner = (uint32_t)m->inner,
                                .activation = EPIC_SILU};
    m->moe = (epic_moe){
        .layer = &m->layer,
        .layer_size = sizeof m->layer,
        .router = &m->router,
        .router_size = sizeof m->router,
        .experts = &m->experts,
        .experts_size = sizeof m->experts,
        .balance_coeff = balance,
        .capacity = epic_capacity_bound(&config, sizeof config, &m->layer, sizeof m->layer)};
    return works(&m->seat,
                 epic_moe_memory(&config, sizeof config, &m->moe, sizeof m->moe, &m->moe_memory,
                                 sizeof m->moe_memory),
                 "the layer's memory");
}

static void allocate(model *m, int64_t tokens)
{
    const int64_t here = tokens / m->seat.num_ranks, row = m->hidden * 4;
    const epic_moe_memory_info *need = &m->moe_memory;
    for (int i = 0; i <= LAYERS; i++) {
        m->x[i] = memory(here * row);
        m->h[i] = memory(here * row);
    }
    for (int i = 0; i < LAYERS; i++) m->saved[i] = memory(need->saved_bytes);
    m->work_bytes =
        need->forward_bytes > need->backward_bytes ? need->forward_bytes : need->backward_bytes;
    m->work = memory(m->work_bytes);
    m->d_x = memory(here * row);
    m->d_h = memory(here * row);
    m->logits = memory(tokens / LEAVES * BYTES * 4);
    m->scratch = memory(m->parameters[EMBED].count * 4 * 3); /* log2(LEAVES) levels */
}

model *model_open(const seat *s, int64_t hidden, int64_t inner, int64_t tokens, uint64_t seed)
{
    model *m = memory(sizeof *m);
    m->seat = *s;
    m->hidden = hidden;
    m->inner = inner;
    list_dense(m);
    list_experts(m);
    name_all(m);
    float **const arrays[] = {&m->value, &m->gradient, &m->first, &m->second};
    for (int i = 0; i < 4; i++) *arrays[i] = memory(m->count * 4);
    m->sums = m->gradient + m->dense_count;
    begin_values(m, seed);
    if (!describe_layer(m, tokens)) {
        model_close(m);
        return NULL;
    }
    allocate(m, tokens);
    return m;
}

void model_close(model *m)
{
    if (!m) return;
    void *const all[] = {m->value, m->gradient, m->first,  m->second, m->work,
                         m->d_x,   m->d_h,      m->logits, m->scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    for (int i = 0; i <= LAYERS; i++) {
        free(m->x[i]);
        free(m->h[i]);
    }
    for (int i = 0; i < LAYERS; i++) free(m->saved[i]);
    free(m);
}
