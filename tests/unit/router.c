/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the router with plain float64 loops for every model, and its gradients with
 * central differences of those loops. */
#include "oracles/router_oracle.h"

static void check_numbers(const problem *p, int t, const char *pattern)
{
    const model *m = p->model;
    const double tolerance = p->type == EPIC_F64 ? 1e-12 : 1e-6;
    const double *z = p->z + t * p->n;
    const int32_t *idx = p->idx + t * p->k;
    double w[MOST_K], sum = 0, *s = malloc((size_t)p->n * sizeof *s);
    plain_weights(&m->router, z, p->n, idx, m->scaled ? p->scale : NULL, w);
    plain_scores(&m->router, z, p->n, s);
    for (int i = 0; i < p->k; i++) sum += idx[i] < 0 ? 0 : s[idx[i]];
    for (int i = 0; i < p->k; i++) {
        const double got = number(p->weights, weights_type(p), t * p->k + i);
        /* Is a score 0 or too small for float32? */
        const bool tiny = idx[i] >= 0 && s[idx[i]] < 1e-37;
        if (m->router.weight_rule == EPIC_WEIGHT_OF_SCORE && (tiny || sum < 1e-30)) w[i] = got;
        CHECK(same(got, w[i], tolerance) && got == got,
              "%s, %s, type %u, token %d, k %d: %.9g is not %.9g", m->name, pattern, p->type, t,
              i, got, w[i]);
    }
    for (int i = 0; i < p->n; i++) {
        const double got = number(p->scores, weights_type(p), t * p->n + i);
        CHECK(same(got, s[i], tolerance),
              "%s, %s, type %u, token %d: score %d %.9g is not %.9g", m->name, pattern, p->type,
              t, i, got, s[i]);
    }
    free(s);
}

/* Returns how many tokens had values too close to each other to compare choices. */
static int check_forward(problem *p, pattern pattern)
{
    const model *m = p->model;
    int unsure = 0;
    run_forward(p);
    for (int t = 0; t < p->tokens; t++) {
        int32_t want[MOST_K];
        bool near = false;
        if (m->table)
            memcpy(want, p->table + p->ids[t] * p->k, (size_t)p->k * sizeof *want);
        else
            plain_choose(&m->router, p->z + t * p->n, m->bias > 0 ? p->bias : NULL, p->n,
                         pattern == EXTREME, want, &near);
        unsure += near;
        CHECK(near || memcmp(want, p->idx + t * p->k, (size_t)p->k * sizeof *want) == 0,
              "%s, %s, type %u, token %d: first chosen %d, not %d", m->name, patterns[pattern],
              p->type, t, p->idx[t * p->k], want[0]);
        check_numbers(p, t, patterns[pattern]);
    }
    return unsure;
}

/* Forces the ids that the router chose for the token before, and checks their weights with
 * plain loops. Then forces the token's own ids, which must have the same bits as without
 * forcing. */
static void check_forced(problem *p, pattern pattern)
{
    const size_t ids = (size_t)p->tokens * p->k;
    const size_t bytes = ids * (size_t)(weights_type(p) == EPIC_F64 ? 8 : 4);
    epic_router_args args = forward_args(p);
    int32_t *chosen = malloc(ids * sizeof *chosen), *other = malloc(ids * sizeof *other);
    void *weights = malloc(bytes);
    memcpy(chosen, p->idx, ids * sizeof *chosen);
    memcpy(weights, p->weights, bytes);
    for (size_t i = 0; i < ids; i++) other[i] = chosen[(i + (size_t)p->k) % ids];
    args.token_ids = NULL;
    args.table = NULL;
    args.topk_idx_in = other;
    CHECK(epic_router_forward(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(memcmp(p->idx, other, ids * sizeof *other) == 0, "%s: forced ids", p->model->name);
    for (int t = 0; t < p->tokens; t++) check_numbers(p, t, patterns[pattern]);
    args.topk_idx_in = chosen;
    CHECK(epic_router_forward(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(memcmp(p->idx, chosen, ids * sizeof *chosen) == 0 &&
              memcmp(p->weights, weights, bytes) == 0,
          "%s, %s, type %u: other bits for forced ids", p->model->name, patterns[pattern],
          p->type);
    free(chosen);
    free(other);
    free(weights);
}

static void test_forward(void)
{
    static const uint32_t types[] = {EPIC_F32, EPIC_BF16, EPIC_F16, EPIC_F64};
    for (int m = 0; m < NUM_MODELS; m++)
        for (int type = 0; type < 4; type++)
            for (pattern pattern = RANDOM; pattern <= EXTREME; pattern++) {
                problem p;
                const int tokens = models[m].router.num_experts > 1000 ? 5 : 60;
                make_problem(&p, &models[m], tokens, types[type], pattern);
                const int unsure = check_forward(&p, pattern);
                check_forced(&p, pattern);
                CHECK(pattern != RANDOM || unsure <= 3, "%s: %d of %d tokens were too near",
                      models[m].name, unsure, tokens);
                free_problem(&p);
            }
}

/* --------------------------------------------------------------------------- gradients ---- */

static double weighted_sum(const problem *p, const double *z, const int32_t *idx,
                           const double *cotangent)
{
    double w[MOST_K], sum = 0;
    plain_weights(&p->model->router, z, p->n, idx, p->model->scaled ? p->scale : NULL, w);
    for (int i = 0; i < p->k; i++) sum += cotangent[i] * w[i];
    return sum;
}

static void differences(const problem *p, const double *cotangents, double *out)
{
    double *z = malloc((size_t)p->n * sizeof *z);
    for (int t = 0; t < p->tokens; t++) {
        const int32_t *idx = p->idx + t * p->k;
        const double *c = cotangents + t * p->k;
        memcpy(z, p->z + t * p->n, (size_t)p->n * sizeof *z);
        for (int i = 0; i < p->n; i++) {
            const double here = z[i];
            z[i] = here + STEP;
            const double above = weighted_sum(p, z, idx, c);
            z[i] = here - STEP;
            const double below = weighted_sum(p, z, idx, c);
            z[i] = here;
            out[t * p->n + i] = (above - below) / (2 * STEP);
        }
    }
    free(z);
}

/* Checks the gradient of scale_of_expert by the change that a small step causes. */
static void check_scale(problem *p, epic_router_backward_args args, const double *cotangents,
                        double tolerance)
{
    double *want = calloc((size_t)p->n, sizeof *want);
    void *got = malloc((size_t)p->n * 8);
    for (int e = 0; e < p->n; e++) {
        const double here = p->scale[e];
        for (int side = -1; side <= 1; side += 2) {
            p->scale[e] = here + side * STEP;
            for (int t = 0; t < p->tokens; t++)
                want[e] +=
                    side / (2 * STEP) *
                    weighted_sum(p, p->z + t * p->n, p->idx + t * p->k, cotangents + t * p->k);
        }
        p->scale[e] = here;
    }
    args.d_scale_of_expert = got;
    args.flags = 0;
    for (int times = 1; times <= 2; times++) {
        CHECK(epic_router_backward(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
        const double d = distance(got, weights_type(p), want, p->n);
        CHECK(d <= tolerance, "%s, type %u: gradient of the scale off by %g after %d",
              p->model->name, p->type, d, times);
        for (int e = 0; e < p->n; e++) want[e] *= 2;
        args.flags = EPIC_ACCUMULATE;
    }
    free(want);
    free(got);
}

static void check_backward(problem *p, uint32_t grad_type, double tolerance)
{
    const model *m = p->model;
    const int64_t all = (int64_t)p->tokens * p->n, chosen = (int64_t)p->tokens * p->k;
    double *c = malloc((size_t)chosen * sizeof *c), *want = malloc((size_t)all * sizeof *want);
    void *d_weights = malloc((size_t)chosen * 8), *d_logits = malloc((size_t)all * 8);
    run_forward(p);
    for (int64_t i = 0; i < chosen; i++) {
        put(d_weights, weights_type(p), i, between(-1, 1));
        c[i] = number(d_weights, weights_type(p), i);
    }
    differences(p, c, want);
    epic_router_backward_args args = {
        .router = &m->router,
        .logits = p->logits,
        .num_tokens = p->tokens,
        .topk_idx = p->idx,
        .scale_of_expert = m->scaled ? p->scale_of : NULL,
        .d_weights = d_weights,
        .workspace = p->workspace,
        .workspace_bytes = p->workspace_bytes,
        .d_logits = d_logits,
        .type = p->type,
        .weights_type = weights_type(p),
        .grad_type = grad_type,
    };
    CHECK(epic_router_backward(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
    const uint32_t type = grad_type ? grad_type : p->type;
    const double d = distance(d_logits, type, want, all);
    CHECK(d <= tolerance, "%s, type %u: gradient off by %g", m->name, p->type, d);

    args.flags = EPIC_ACCUMULATE;
    CHECK(epic_router_backward(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
    for (int64_t i = 0; i < all; i++) want[i] *= 2;
    const double twice = distance(d_logits, type, want, all);
    CHECK(twice <= tolerance, "%s, type %u: accumulated gradient off by %g", m->name, p->type,
          twice);
    if (m->scaled) check_scale(p, args, c, p->type == EPIC_F64 ? 1e-6 : 1e-4);
    free(c);
    free(want);
    free(d_weights);
    free(d_logits);
}

static void test_backward(void)
{
    for (int m = 0; m < NUM_MODELS; m++) {
        static const struct {
            uint32_t type, grad_type;
            double tolerance;
        } cases[] = {{EPIC_F64, 0, 1e-6},  {EPIC_F64, EPIC_F32, 1e-6},
                     {EPIC_F32, 0, 1e-4},  {EPIC_BF16, EPIC_F32, 1e-4},
                     {EPIC_BF16, 0, 1e-2}, {EPIC_F16, 0, 2e-3}};
        for (int i = 0; i < 6; i++) {
            problem p;
            const int tokens = models[m].router.num_experts > 100 ? 2 : 7;
            if (models[m].router.num_experts > 1000 && i > 0) continue;
            make_problem(&p, &models[m], tokens, cases[i].type, RANDOM);
            check_backward(&p, cases[i].grad_type, cases[i].tolerance);
            free_problem(&p);
        }
    }
}

/* Tests that weights and gradients stay finite for logits far apart. */
static void test_far_gradients(void)
{
    for (int m = 0; m < NUM_MODELS; m++) {
        problem p;
        make_problem(&p, &models[m], 20, EPIC_F32, EXTREME);
        run_forward(&p);
        const int64_t all = (int64_t)p.tokens * p.n;
        float *d_weights = malloc((size_t)(p.tokens * p.k) * sizeof *d_weights);
        float *d_logits = malloc((size_t)all * sizeof *d_logits);
        for (int i = 0; i < p.tokens * p.k; i++) d_weights[i] = (float)between(-1, 1);
        const epic_router_backward_args args = {.type = EPIC_F32,
                                                .router = &models[m].router,
                                                .logits = p.logits,
                                                .num_tokens = p.tokens,
                                                .topk_idx = p.idx,
                                                .d_weights = d_weights,
                                                .workspace = p.workspace,
                                                .workspace_bytes = p.workspace_bytes,
                                                .d_logits = d_logits};
        CHECK(epic_router_backward(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
        for (int64_t i = 0; i < all; i++)
            CHECK(isfinite(d_logits[i]), "%s: gradient %lld is %g", models[m].name,
                  (long long)i, d_logits[i]);
        free(d_weights);
        free(d_logits);
        free_problem(&p);
    }
}

int main(void)
{
    test_forward();
    test_backward();
    test_far_gradients();
    if (failures) printf("%d checks failed\n", failures);
    return failures ? 1 : 0;
}
