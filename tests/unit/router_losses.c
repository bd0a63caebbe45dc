/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the router's losses with plain float64 loops, and their gradients with central
 * differences; tests the update of the bias. */
#include "losses.h"
#include "oracles/router_oracle.h"

typedef struct loss_case {
    bool z;       /* true: z-loss, false: balance loss */
    int sequence; /* tokens of a sequence, or 0 */
    const int32_t *load;
    double coeff;
    int total_tokens;
} loss_case;

static void plain_probabilities(const epic_router *r, const double *z, int n, double *p)
{
    double sum = 0;
    if (r->score == EPIC_SCORE_SOFTMAX || r->score == EPIC_SCORE_LOGITS) {
        plain_softmax(z, n, p);
        return;
    }
    plain_scores(r, z, n, p);
    for (int i = 0; i < n; i++) sum += p[i];
    for (int i = 0; i < n; i++) p[i] /= sum;
}

/* Returns the balance loss of `tokens` tokens from the first on: E coeff / (k T^2) sum_e
 * (sum_t P) n_e. */
static double plain_balance(const problem *p, const double *z, int tokens, const int32_t *load,
                            double coeff, double T)
{
    const epic_router *r = &p->model->router;
    double sum = 0, *row = malloc((size_t)p->n * sizeof *row);
    for (int t = 0; t < tokens; t++) {
        plain_probabilities(r, z + t * p->n, p->n, row);
        for (uint32_t e = 0; e < r->num_experts; e++) sum += row[e] * load[e];
    }
    free(row);
    return r->num_experts * coeff / (r->top_k * T * T) * sum;
}

static double plain_sequences(const problem *p, const double *z, const loss_case *l)
{
    const int num_sequences = l->total_tokens / l->sequence;
    double sum = 0;
    int32_t *load = malloc((size_t)p->n * sizeof *load);
    for (int first = 0; first < p->tokens; first += l->sequence) {
        memset(load, 0, (size_t)p->n * sizeof *load);
        for (int i = first * p->k; i < (first + l->sequence) * p->k; i++)
            if (p->idx[i] >= 0) load[p->idx[i]]++;
        sum += plain_balance(p, z + first * p->n, l->sequence, load, l->coeff, l->sequence);
    }
    free(load);
    return sum / num_sequences;
}

static double plain_loss(const problem *p, const double *z, const loss_case *l)
{
    double sum = 0;
    if (!l->z && l->sequence) return plain_sequences(p, z, l);
    if (!l->z) return plain_balance(p, z, p->tokens, l->load, l->coeff, l->total_tokens);
    for (int t = 0; t < p->tokens; t++) {
        double inner = 0;
        for (int i = 0; i < p->n; i++) inner += exp(z[t * p->n + i]);
        sum += log(inner) * log(inner);
    }
    return l->coeff / l->total_tokens * sum;
}

static loss_args args_of(const problem *p, const loss_case *l)
{
    return (loss_args){
        .router = &p->model->router,
        .logits = p->logits,
        .num_tokens = p->tokens,
        .total_tokens = l->total_tokens,
        .load = l->load,
        .topk_idx = p->idx,
        .sequence_tokens = l->sequence,
        .coeff = l->coeff,
        .workspace = p->workspace,
        .workspace_bytes = p->workspace_bytes,
        .type = p->type,
        .loss_type = EPIC_F64,
    };
}

static void check_loss(problem *p, const loss_case *l)
{
    const bool exact = p->type == EPIC_F64;
    const int64_t all = (int64_t)p->tokens * p->n;
    const float d_loss = 0.75f;
    double loss = 0, *want = malloc((size_t)all * sizeof *want);
    void *d_logits = malloc((size_t)all * 8);
    loss_args args = args_of(p, l);
    args.loss = &loss;
    CHECK((l->z ? z_loss_forward : balance_loss_forward)(NULL, &args) == EPIC_OK, "%s",
          epic_error(NULL));
    CHECK(same(loss, plain_loss(p, p->z, l), exact ? 1e-12 : 1e-6), "%s: loss %.9g is not %.9g",
          p->model->name, loss, plain_loss(p, p->z, l));

    for (int64_t i = 0; i < all; i++) {
        const double here = p->z[i];
        p->z[i] = here + STEP;
        const double above = plain_loss(p, p->z, l);
        p->z[i] = here - STEP;
        const double below = plain_loss(p, p->z, l);
        p->z[i] = here;
        want[i] = d_loss * (above - below) / (2 * STEP);
    }
    args.d_logits = d_logits;
    args.d_loss = &d_loss;
    CHECK((l->z ? z_loss_backward : balance_loss_backward)(NULL, &args) == EPIC_OK, "%s",
          epic_error(NULL));
    const double d = distance(d_logits, p->type, want, all);
    CHECK(d <= (exact ? 1e-6 : 1e-4), "%s, %s loss, sequence %d, type %u: gradient off by %g",
          p->model->name, l->z ? "z" : "balance", l->sequence, p->type, d);
    free(want);
    free(d_logits);
}

static void test_losses(void)
{
    for (int m = 0; m < NUM_MODELS; m++)
        for (int type = 0; type < 2; type++) {
            problem p;
            int32_t load[256];
            if (models[m].router.num_experts > 130) continue;
            make_problem(&p, &models[m], 6, type ? EPIC_F64 : EPIC_F32, RANDOM);
            run_forward(&p);
            for (int e = 0; e < 256; e++) load[e] = (int32_t)between(0, 9);
            check_loss(&p, &(loss_case){.load = load, .coeff = 0.01, .total_tokens = 10});
            check_loss(&p, &(loss_case){.sequence = 3, .coeff = 0.5, .total_tokens = 12});
            check_loss(&p, &(loss_case){.z = true, .coeff = 0.001, .total_tokens = 9});
            free_problem(&p);
        }
}

/* Checks that the parts of two ranks and of a third without tokens add up to the loss of all
 * tokens. */
static void test_losses_add_up(void)
{
    problem p;
    int32_t load[8];
    double whole = 0, sum = 0;
    make_problem(&p, &models[0], 12, EPIC_F32, RANDOM);
    run_forward(&p);
    for (int e = 0; e < 8; e++) load[e] = e;
    const loss_case cases[] = {{.load = load, .coeff = 1, .total_tokens = 12},
                               {.sequence = 4, .coeff = 1, .total_tokens = 12},
                               {.z = true, .coeff = 1, .total_tokens = 12}};
    for (int c = 0; c < 3; c++) {
        loss_call *loss = cases[c].z ? z_loss_forward : balance_loss_forward;
        loss_args args = args_of(&p, &cases[c]);
        args.loss = &whole;
        CHECK(loss(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
        sum = 0;
        for (int rank = 0; rank < 3; rank++) {
            static const int first[] = {0, 4, 12, 12};
            double part = -1;
            args.loss = &part;
            args.num_tokens = first[rank + 1] - first[rank];
            args.logits = (float *)p.logits + first[rank] * p.n;
            args.topk_idx = p.idx + first[rank] * p.k;
            CHECK(loss(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
            sum += part;
        }
        CHECK(same(sum, whole, 1e-12), "case %d: %.15g is not %.15g", c, sum, whole);
    }
    float narrow = 0;
    loss_args args = args_of(&p, &cases[2]);
    args.loss_type = 0;
    args.loss = &narrow;
    CHECK(z_loss_forward(NULL, &args) == EPIC_OK && narrow == (float)whole, "%g", narrow);
    free_problem(&p);
}

static void test_bias_update(void)
{
    float bias[5] = {0, 1, -1, 0.5f, 2};
    const int32_t load[5] = {4, 6, 5, 0, 10};
    const float want[5] = {0.25f, 0.75f, -1, 0.75f, 1.75f};
    epic_bias_update_args args = {.bias = bias, .load = load, .num_experts = 5, .rate = 0.25f};
    CHECK(epic_bias_update(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
    for (int e = 0; e < 5; e++) CHECK(bias[e] == want[e], "bias %d is %g", e, bias[e]);
    args.num_experts = 0;
    CHECK(epic_bias_update(NULL, &args) == EPIC_EINVAL, "no experts");
    args = (epic_bias_update_args){.load = load, .num_experts = 5};
    CHECK(epic_bias_update(NULL, &args) == EPIC_EINVAL, "bias NULL");
}

int main(void)
{
    test_losses();
    test_losses_add_up();
    test_bias_update();
    if (failures) printf("%d checks failed\n", failures);
    return failures ? 1 : 0;
}
