/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters of the model, and the memory of its passes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "device.h"
#include "random.h"

static const double balance = 0.05; /* coefficient of the balance loss */

int model_owner(const model *m, int number)
{
    if (number < UP) return -1;
    return (number - UP) % EXPERTS / (EXPERTS / m->group.num_ranks);
}

static void describe_expert(parameter *out, int number, int64_t hidden, int64_t inner)
{
    const bool up = number < DOWN;
    const int i = up ? number - UP : number - DOWN;
    out->count = up ? hidden * 2 * inner : inner * hidden;
    out->spread = 1 / sqrt((double)(up ? hidden : inner));
    snprintf(out->name, sizeof out->name, "layer%d.expert%d.%s", i / EXPERTS, i % EXPERTS,
             up ? "up" : "down");
}

void parameter_describe(parameter *out, int number, int64_t hidden, int64_t inner)
{
    *out = (parameter){.spread = 0.02, .decays = true};
    if (number == EMBED) {
        out->count = (int64_t)CONTEXT * BYTES * hidden;
        out->spread = 0.25;
        snprintf(out->name, sizeof out->name, "embed");
    } else if (number == HEAD) {
        out->count = hidden * BYTES;
        snprintf(out->name, sizeof out->name, "head");
    } else if (number < GATE) {
        out->count = hidden;
        out->spread = 0;
        out->decays = false;
        snprintf(out->name, sizeof out->name, "norm%d", number - NORM);
    } else if (number < UP) {
        out->count = hidden * EXPERTS;
        snprintf(out->name, sizeof out->name, "gate%d", number - GATE);
    } else {
        describe_expert(out, number, hidden, inner);
    }
}

static void list_parameters(model *m)
{
    for (int n = 0; n < NUM_PARAMETERS; n++) {
        const int owner = model_owner(m, n);
        parameter *p = &m->parameters[n];
        if (n == UP) { /* the dense parameters end here */
            m->dense_count = m->count;
            m->count += NUM_SUMS;
        }
        parameter_describe(p, n, m->hidden, m->inner);
        p->offset = owner < 0 || owner == m->group.rank ? m->count : -1;
        if (p->offset >= 0) m->count += p->count;
    }
}

/* Sets the initial values. They depend on the parameter's number only, not on the number of
 * ranks. */
static void begin_values(model *m, uint64_t seed)
{
    for (int n = 0; n < NUM_PARAMETERS; n++) {
        const parameter *p = &m->parameters[n];
        const double reach = p->spread * sqrt(12); /* width of the uniform distribution */
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
    const uint32_t local = EXPERTS / (uint32_t)m->group.num_ranks;
    const epic_config config = model_config(m->group.num_ranks, m->hidden, tokens);
    m->layer = (epic_layer){.num_experts = EXPERTS,
                            .top_k = TOP_K,
                            .alignment = 16,
                            .sum_order = m->group.cuda ? EPIC_BY_RANK : EPIC_TREE,
                            .leaves = m->group.cuda ? 0 : LEAVES};
    m->router = (epic_router){.num_experts = EXPERTS,
                              .top_k = TOP_K,
                              .score = EPIC_SCORE_SOFTMAX,
                              .weight_rule = EPIC_WEIGHT_SOFTMAX_CHOSEN};
    m->experts = (epic_experts){.row_type = m->group.cuda ? EPIC_BF16 : EPIC_F32,
                                .num_local_experts = local,
                                .hidden = (uint32_t)m->hidden,
                                .inner = (uint32_t)m->inner,
                                .activation = EPIC_SILU};
    m->moe = (epic_moe){.layer = &m->layer,
                        .router = &m->router,
                        .experts = &m->experts,
                        .balance_coeff = balance};
    return works(&m->group, epic_capacity_bound(&config, &m->layer, &m->moe.capacity),
                 "the layer's capacity") &&
           works(&m->group, epic_moe_memory(m->group.ctx, NULL, &m->moe, &m->moe_memory),
                 "the layer's memory");
}

static void allocate(model *m, int64_t tokens)
{
    const int64_t here = tokens / m->group.num_ranks, row = m->hidden * 4;
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

model *model_open(const group *g, int64_t hidden, int64_t inner, int64_t tokens, uint64_t seed)
{
    model *m = memory(sizeof *m);
    m->group = *g;
    m->hidden = hidden;
    m->inner = inner;
    list_parameters(m);
    float **const arrays[] = {&m->value, &m->gradient, &m->first, &m->second};
    for (int i = 0; i < 4; i++) *arrays[i] = memory(m->count * 4);
    m->sums = m->gradient + m->dense_count;
    begin_values(m, seed);
    if (!describe_layer(m, tokens)) {
        model_close(m);
        return NULL;
    }
    if (!g->cuda) {
        allocate(m, tokens);
        return m;
    }
    m->device = device_open(m, tokens);
    if (m->device && device_store(m)) return m;
    model_close(m);
    return NULL;
}

void model_close(model *m)
{
    if (!m) return;
    device_close(m->device);
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
