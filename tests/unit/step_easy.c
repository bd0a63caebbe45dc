/* SPDX-License-Identifier: Apache-2.0 */
/* The simple step against plain loops: the experts multiply by a factor of their own, so every
 * output and every gradient has a formula. */
#include <string.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"

enum { TOKENS = 7, TOP_K = 3, EXPERTS = 12, HIDDEN = 9, RANKS = 3 };

static float factor(int expert)
{
    return (float)(expert % 5 + 1);
}

/* Whole numbers and eighths: every sum is exact. */
typedef struct part {
    float tokens[TOKENS][HIDDEN], weights[TOKENS][TOP_K], out[TOKENS][HIDDEN];
    float d_out[TOKENS][HIDDEN], d_tokens[TOKENS][HIDDEN], d_weights[TOKENS][TOP_K];
    int32_t topk_idx[TOKENS][TOP_K];
    int num_tokens;
} part;

static void fill(part *p, int rank, int round)
{
    p->num_tokens = (rank * 3 + round * 2) % (TOKENS + 1);
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < HIDDEN; h++) {
            p->tokens[t][h] = (float)((t * 5 + h * 3 + rank + round) % 17 - 8);
            p->d_out[t][h] = (float)((t + h * 7 + rank * 2) % 11 - 5);
        }
        for (int k = 0; k < TOP_K; k++) {
            p->topk_idx[t][k] = (t * 3 + k * 5 + rank + round) % (EXPERTS + 2);
            if (p->topk_idx[t][k] >= EXPERTS) p->topk_idx[t][k] = -1;
            p->weights[t][k] = (float)(k + 1) / 8;
        }
    }
    memset(p->out, 0xff, sizeof p->out);
    memset(p->d_tokens, 0xff, sizeof p->d_tokens);
    memset(p->d_weights, 0xff, sizeof p->d_weights);
}

/* results = factor * rows, slab after slab; the same for gradients. */
static void run_experts(const epic_slots *s)
{
    const float *row = s->rows;
    float *result = s->results;
    for (int e = 0; e < s->num_local_experts; e++)
        for (int i = 0; i < s->expert_rows[e] * HIDDEN; i++)
            *result++ = *row++ * factor(s->first_expert + e);
}

static void check_forward(const part *p, bool weighted)
{
    for (int t = 0; t < p->num_tokens; t++)
        for (int h = 0; h < HIDDEN; h++) {
            float want = 0;
            for (int k = 0; k < TOP_K; k++)
                if (p->topk_idx[t][k] >= 0)
                    want += (weighted ? p->weights[t][k] : 1) * factor(p->topk_idx[t][k]) *
                            p->tokens[t][h];
            CHECK(p->out[t][h] == want);
        }
}

static void check_backward(const part *p)
{
    for (int t = 0; t < p->num_tokens; t++) {
        float d_token[HIDDEN] = {0};
        for (int k = 0; k < TOP_K; k++) {
            const int expert = p->topk_idx[t][k];
            float dot = 0;
            for (int h = 0; h < HIDDEN && expert >= 0; h++) {
                dot += p->d_out[t][h] * factor(expert) * p->tokens[t][h];
                d_token[h] += p->weights[t][k] * factor(expert) * p->d_out[t][h];
            }
            CHECK(p->d_weights[t][k] == dot);
        }
        CHECK(!memcmp(d_token, p->d_tokens[t], sizeof d_token));
    }
}

static void run_round(epic_step *step, part *p, bool weighted, bool gradients)
{
    epic_slots slots, d_slots;
    CHECK(epic_step_dispatch(step, p->tokens, *p->topk_idx, weighted ? *p->weights : NULL,
                             p->num_tokens, &slots) == EPIC_OK);
    CHECK((slots.results != slots.rows) == gradients);
    run_experts(&slots);
    CHECK(epic_step_combine(step, p->out) == EPIC_OK);
    check_forward(p, weighted);
    if (!gradients || !weighted) return;
    CHECK(epic_step_combine_backward(step, p->d_out, &d_slots) == EPIC_OK);
    run_experts(&d_slots);
    CHECK(epic_step_dispatch_backward(step, p->d_tokens, *p->d_weights) == EPIC_OK);
    check_backward(p);
}

static void refuse(epic_step_config config, epic_context *ctx, const char *word)
{
    epic_step *step = (epic_step *)&config;
    config.ctx = ctx;
    CHECK(epic_step_open(&step, &config) == EPIC_EINVAL && step == NULL);
    CHECK(strstr(epic_error(NULL), word) != NULL);
}

static void check_refusals(const epic_step_config *good, epic_context *ctx, epic_step *step)
{
    epic_step_config bad = *good;
    bad.type = EPIC_I32;
    refuse(bad, ctx, "config.type is 7");
    bad = *good;
    bad.hidden = 0;
    refuse(bad, ctx, "config.hidden is 0");
    bad = *good;
    bad.num_experts = EXPERTS + 1;
    refuse(bad, ctx, "config.num_experts is 13");
    bad = *good;
    bad.gradients = 2;
    refuse(bad, ctx, "config.gradients is 2");
    CHECK(epic_step_open(NULL, good) == EPIC_EINVAL);
    CHECK(epic_step_dispatch(NULL, NULL, NULL, NULL, 0, NULL) == EPIC_EINVAL);
    CHECK(epic_step_combine(step, NULL) == EPIC_EINVAL); /* none is under way */
    CHECK(strstr(epic_error(NULL), "epic_step_dispatch comes first") != NULL);
    epic_step_close(NULL);
}

static void work(void *unused, int rank, epic_context *ctx)
{
    (void)unused;
    for (int gradients = 0; gradients < 2; gradients++) {
        epic_step *step;
        part p;
        const epic_step_config config = {.max_tokens = TOKENS,
                                         .num_experts = EXPERTS,
                                         .top_k = TOP_K,
                                         .hidden = HIDDEN,
                                         .type = EPIC_F32,
                                         .alignment = gradients ? 4 : 0,
                                         .gradients = (uint32_t)gradients,
                                         .tag = 40,
                                         .ctx = ctx};
        if (!CHECK(epic_step_open(&step, &config) == EPIC_OK)) return;
        CHECK(epic_step_context(step) == ctx);
        if (rank == 0) check_refusals(&config, ctx, step);
        for (int round = 0; round < 6; round++) {
            fill(&p, rank, round);
            run_round(step, &p, round % 3 != 2, gradients);
        }
        epic_step_close(step);
    }
}

static void seat(const epic_meet *meet, void *self)
{
    epic_context *ctx;
    const epic_config config = {.max_tokens = TOKENS, .max_row_bytes = HIDDEN * sizeof(float)};
    if (CHECK(epic_open(&ctx, meet, &config) == EPIC_OK)) work(self, epic_rank(ctx), ctx);
    epic_close(ctx);
}

/* Without a context: the environment says who meets, and nothing in it is a group of one. */
static void check_alone(void)
{
    epic_step *step;
    part p;
    const epic_step_config config = {.max_tokens = TOKENS,
                                     .num_experts = EXPERTS,
                                     .top_k = TOP_K,
                                     .hidden = HIDDEN,
                                     .type = EPIC_F32,
                                     .gradients = 1};
    if (!CHECK(epic_step_open(&step, &config) == EPIC_OK)) return;
    CHECK(epic_num_ranks(epic_step_context(step)) == 1);
    fill(&p, 1, 2);
    run_round(step, &p, true, true);
    epic_step_close(step);
}

int main(void)
{
    check_begin();
    run_alarm(50);
    check_alone();
    run_threads(RANKS, seat, NULL);
    run_processes(2, seat, NULL, 40);
    return check_end();
}
