/* SPDX-License-Identifier: Apache-2.0 */
/* The phase of the dispatcher. Each expert multiplies by its own factor, so every output and
 * every gradient has a formula. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "suite_case.h"

enum { TOKENS = 7, TOP_K = 3, HIDDEN = 9 };

/* Inputs of the experts. Values are whole numbers and eighths, so every sum is exact. */
typedef struct part {
    float tokens[TOKENS][HIDDEN], weights[TOKENS][TOP_K], out[TOKENS][HIDDEN];
    float d_out[TOKENS][HIDDEN], d_tokens[TOKENS][HIDDEN], d_weights[TOKENS][TOP_K];
    int32_t topk_idx[TOKENS][TOP_K];
    int num_tokens;
} part;

/* Returns the number of experts: the first multiple of the number of ranks from 48 on. */
static int num_experts_of(int num_ranks)
{
    return (48 + num_ranks - 1) / num_ranks * num_ranks;
}

static float factor(int expert)
{
    return (float)(expert % 5 + 1);
}

static void fill(part *p, int rank, int num_experts, int round)
{
    memset(p, 0xff, sizeof *p);
    p->num_tokens = (rank * 3 + round * 2) % (TOKENS + 1);
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < HIDDEN; h++) {
            p->tokens[t][h] = (float)((t * 5 + h * 3 + rank + round) % 17 - 8);
            p->d_out[t][h] = (float)((t + h * 7 + rank * 2) % 11 - 5);
        }
        for (int k = 0; k < TOP_K; k++) {
            p->topk_idx[t][k] = (t * 3 + k * 5 + rank + round) % (num_experts + 2);
            if (p->topk_idx[t][k] >= num_experts) p->topk_idx[t][k] = -1;
            p->weights[t][k] = (float)(k + 1) / 8;
        }
    }
}

static void check_forward(const part *p, bool weighted)
{
    int wrong = 0;
    for (int t = 0; t < p->num_tokens; t++)
        for (int h = 0; h < HIDDEN; h++) {
            float want = 0;
            for (int k = 0; k < TOP_K; k++)
                if (p->topk_idx[t][k] >= 0)
                    want += (weighted ? p->weights[t][k] : 1) * factor(p->topk_idx[t][k]) *
                            p->tokens[t][h];
            wrong += p->out[t][h] != want;
        }
    CHECK_EQ(wrong, 0);
}

static void check_backward(const part *p)
{
    int wrong = 0;
    for (int t = 0; t < p->num_tokens; t++) {
        float d_token[HIDDEN] = {0};
        for (int k = 0; k < TOP_K; k++) {
            const int expert = p->topk_idx[t][k];
            float dot = 0;
            for (int h = 0; h < HIDDEN && expert >= 0; h++) {
                dot += p->d_out[t][h] * factor(expert) * p->tokens[t][h];
                d_token[h] += p->weights[t][k] * factor(expert) * p->d_out[t][h];
            }
            wrong += p->d_weights[t][k] != dot;
        }
        wrong += memcmp(d_token, p->d_tokens[t], sizeof d_token) != 0;
    }
    CHECK_EQ(wrong, 0);
}

/* Checks the result of a call. On a device the call only enqueues work, so this also waits
 * and checks the context. */
static bool good(epic_dispatcher *dispatcher, epic_result result)
{
    if (result == EPIC_OK && suite_there->synchronise) {
        suite_there->synchronise();
        result = epic_check(epic_dispatcher_context(dispatcher));
    }
    return CHECK_SAY(result == EPIC_OK, "%s", epic_error(NULL));
}

/* Computes results = factor * rows, slab after slab, and the gradients likewise. */
static void run_experts(const epic_slots *s)
{
    const int64_t bytes = s->capacity * HIDDEN * (int64_t)sizeof(float);
    const int64_t count_bytes = s->num_local_experts * (int64_t)sizeof(int32_t);
    int32_t *counts = malloc((size_t)count_bytes);
    float *rows = malloc((size_t)bytes), *at = rows;
    suite_there->copy(counts, s->expert_rows, count_bytes);
    suite_there->copy(rows, s->rows, bytes);
    for (int e = 0; e < s->num_local_experts; e++)
        for (int i = 0; i < counts[e] * HIDDEN; i++) *at++ *= factor(s->first_expert + e);
    suite_there->copy(s->results, rows, bytes);
    free(rows);
    free(counts);
}

static bool run_round(epic_dispatcher *dispatcher, const part *p, part *there, bool weighted,
                      bool gradients)
{
    epic_slots slots, d_slots;
    if (!good(dispatcher, epic_dispatcher_dispatch(dispatcher, there->tokens, *there->topk_idx,
                                                   weighted ? *there->weights : NULL,
                                                   p->num_tokens, &slots)))
        return false;
    CHECK((slots.results != slots.rows) == gradients);
    run_experts(&slots);
    if (!good(dispatcher, epic_dispatcher_combine(dispatcher, there->out))) return false;
    if (!gradients || !weighted) return true;
    if (!good(dispatcher, epic_dispatcher_combine_backward(dispatcher, there->d_out, &d_slots)))
        return false;
    run_experts(&d_slots);
    return good(dispatcher, epic_dispatcher_dispatch_backward(dispatcher, there->d_tokens,
                                                              *there->d_weights));
}

static bool check_round(epic_dispatcher *dispatcher, const epic_bootstrap *bootstrap, int round,
                        bool gradients)
{
    const bool weighted = round % 3 != 2;
    part p;
    fill(&p, bootstrap->rank, num_experts_of(bootstrap->num_ranks), round);
    part *there = suite_there->allocate(sizeof p);
    suite_there->copy(there, &p, sizeof p);
    const bool ran = run_round(dispatcher, &p, there, weighted, gradients);
    suite_there->copy(&p, there, sizeof p);
    suite_there->release(there);
    if (ran) check_forward(&p, weighted);
    if (ran && gradients && weighted) check_backward(&p);
    return ran;
}

void case_easy(epic_context *ctx, const epic_bootstrap *bootstrap, int rounds, bool gradients)
{
    const epic_dispatcher_config config = {
        .max_tokens = TOKENS,
        .num_experts = (uint32_t)num_experts_of(bootstrap->num_ranks),
        .top_k = TOP_K,
        .hidden = HIDDEN,
        .type = EPIC_F32,
        .alignment = gradients ? 4 : 0,
        .gradients = gradients,
        .stream = suite_there->stream ? suite_there->stream() : NULL,
        .tag = 40,
        .ctx = ctx};
    epic_dispatcher *dispatcher;
    if (!CHECK_SAY(epic_dispatcher_open(&dispatcher, &config) == EPIC_OK, "%s",
                   epic_error(NULL)))
        return;
    CHECK(epic_dispatcher_context(dispatcher) == ctx);
    bool going =
        case_agree(bootstrap, true); /* so that no rank allocates while a peer's kernel waits */
    for (int i = 0; going && i < rounds; i++)
        going = check_round(dispatcher, bootstrap, i, gradients);
    case_agree(bootstrap, going);
    epic_dispatcher_close(dispatcher);
}
