/* SPDX-License-Identifier: Apache-2.0 */
/* Tests what the router and its losses refuse and the sentences of the errors, and logits
 * that are NaN. */
#include "losses.h"
#include "oracles/router_oracle.h"

static void refuse_router(epic_router r, const char *word)
{
    int64_t bytes = -1;
    CHECK(epic_router_workspace(&r, &bytes) == EPIC_EINVAL && bytes == 0, "accepted: %s", word);
    CHECK(strstr(epic_error(NULL), word) != NULL, "\"%s\" does not name %s", epic_error(NULL),
          word);
}

static void test_wrong_routers(void)
{
    const epic_router good = {.num_experts = 16, .top_k = 4};
    epic_router r = good;
#define REFUSE(field, value, word) \
    do {                           \
        r = good;                  \
        r.field = value;           \
        refuse_router(r, word);    \
    } while (0)
    REFUSE(num_experts, 0, "num_experts");
    REFUSE(num_experts, 65537, "65536");
    REFUSE(zero_experts, 0xffffffffu, "zero_experts");
    REFUSE(top_k, 0, "top_k");
    REFUSE(top_k, 17, "top_k");
    REFUSE(score, 4, "score");
    REFUSE(weight_rule, 4, "weight_rule");
    REFUSE(jitter, -0.1, "jitter");
    REFUSE(jitter, NAN, "jitter");
    REFUSE(normalize, 3, "normalize");
    REFUSE(normalize, EPIC_NORMALIZE_CLAMPED, "norm_min");
    REFUSE(eps, -1, "eps");
    REFUSE(scale, NAN, "scale");
    REFUSE(flags, 1, "flags");
    REFUSE(num_groups, 3, "num_groups");
    REFUSE(num_groups, 4, "topk_groups");
    r = (epic_router){.num_experts = 16, .top_k = 4, .num_groups = 8, .topk_groups = 1};
    refuse_router(r, "increase topk_groups");
    r.topk_groups = 8;
    r.group_score = EPIC_GROUP_SUM;
    refuse_router(r, "group_best");
    int64_t bytes;
    CHECK(epic_router_workspace(NULL, &bytes) == EPIC_EINVAL, "NULL accepted");
    CHECK(epic_router_workspace(&good, NULL) == EPIC_EINVAL, "NULL accepted");
}

static void refuse_forward(epic_router_args args, const char *word)
{
    CHECK(epic_router_forward(NULL, &args) == EPIC_EINVAL, "accepted: %s", word);
    CHECK(strstr(epic_error(NULL), word) != NULL, "\"%s\" does not name %s", epic_error(NULL),
          word);
}

static void test_wrong_arguments(void)
{
    const epic_router router = {.num_experts = 4, .top_k = 2};
    _Alignas(16) static char workspace[32768];
    float logits[8] = {0}, gradient[8], weights[4];
    int32_t idx[4], ids[2] = {0, 7}, table[4] = {0, 1, 2, 9};
    const epic_router_args good = {.type = EPIC_F32,
                                   .router = &router,
                                   .logits = logits,
                                   .num_tokens = 2,
                                   .workspace = workspace,
                                   .workspace_bytes = sizeof workspace,
                                   .topk_idx = idx,
                                   .weights = weights};
    epic_router_args a = good;
#define REFUSE_CALL(field, value, word) \
    do {                                \
        a = good;                       \
        a.field = value;                \
        refuse_forward(a, word);        \
    } while (0)
    CHECK(epic_router_forward(NULL, &good) == EPIC_OK, "%s", epic_error(NULL));
    REFUSE_CALL(router, NULL, "epic_router");
    REFUSE_CALL(logits, NULL, "logits");
    REFUSE_CALL(num_tokens, -1, "num_tokens");
    REFUSE_CALL(workspace_bytes, 8, "epic_router_workspace");
    REFUSE_CALL(workspace, workspace + 4, "multiple of 16");
    REFUSE_CALL(scale_of_expert, weights, "scale_of_expert");
    REFUSE_CALL(topk_idx, NULL, "topk_idx");
    REFUSE_CALL(weights, NULL, "weights");
    REFUSE_CALL(type, EPIC_E4M3, "type");
    REFUSE_CALL(weights_type, EPIC_F64, "weights_type");
    REFUSE_CALL(flags, 4, "flags");
    REFUSE_CALL(table, table, "token_ids");
    a = good;
    a.table = table;
    a.token_ids = ids;
    a.table_rows = 2;
    refuse_forward(a, "token 1 is 7");
    ids[1] = 1;
    refuse_forward(a, "is 9");
    a.topk_idx_in = table;
    refuse_forward(a, "topk_idx_in is not NULL and token_ids is not NULL");
    a.topk_idx_in = NULL;
    a.token_id_type = EPIC_F32;
    refuse_forward(a, "token_id_type");
    REFUSE_CALL(topk_idx_in, table, "topk_idx_in of token 1, k 1, is 9");

    epic_router_backward_args b = {.type = EPIC_F32,
                                   .router = &router,
                                   .logits = logits,
                                   .num_tokens = 2,
                                   .topk_idx = table,
                                   .d_weights = weights,
                                   .workspace = workspace,
                                   .workspace_bytes = sizeof workspace,
                                   .d_logits = gradient};
    CHECK(epic_router_backward(NULL, &b) == EPIC_EINVAL &&
              strstr(epic_error(NULL), "token 1, k 1, is 9"),
          "%s", epic_error(NULL));
    b.d_scale_of_expert = gradient + 4;
    CHECK(epic_router_backward(NULL, &b) == EPIC_EINVAL &&
              strstr(epic_error(NULL), "scale_of_expert is NULL"),
          "%s", epic_error(NULL));
    b.d_scale_of_expert = NULL;
    b.grad_type = EPIC_BF16;
    CHECK(epic_router_backward(NULL, &b) == EPIC_EINVAL &&
              strstr(epic_error(NULL), "grad_type"),
          "%s", epic_error(NULL));

    float loss;
    loss_args l = {.type = EPIC_F32,
                   .router = &router,
                   .logits = logits,
                   .num_tokens = 2,
                   .total_tokens = 1,
                   .workspace = workspace,
                   .workspace_bytes = sizeof workspace,
                   .loss = &loss};
    CHECK(z_loss_forward(NULL, &l) == EPIC_EINVAL && strstr(epic_error(NULL), "total_tokens"),
          "%s", epic_error(NULL));
    l.total_tokens = 2;
    CHECK(balance_loss_forward(NULL, &l) == EPIC_EINVAL && strstr(epic_error(NULL), "load"),
          "%s", epic_error(NULL));
    l.sequence_tokens = 3;
    CHECK(balance_loss_forward(NULL, &l) == EPIC_EINVAL &&
              strstr(epic_error(NULL), "sequence_tokens"),
          "%s", epic_error(NULL));
    l.loss = NULL;
    CHECK(z_loss_forward(NULL, &l) == EPIC_EINVAL, "loss NULL accepted");
    CHECK(z_loss_backward(NULL, &l) == EPIC_EINVAL && strstr(epic_error(NULL), "d_logits"),
          "%s", epic_error(NULL));
}

/* Tests that a NaN among the logits is chosen last, and that no memory outside the arrays is
 * written. */
static void test_not_a_number(void)
{
    const epic_router router = {.num_experts = 4, .top_k = 3, .score = EPIC_SCORE_SIGMOID};
    _Alignas(16) static char workspace[32768];
    const float logits[8] = {NAN, 1, 2, 3, NAN, NAN, NAN, -INFINITY};
    const int32_t want[6] = {3, 2, 1, 3, 0, 1};
    float weights[6];
    int32_t idx[6];
    const epic_router_args args = {.type = EPIC_F32,
                                   .router = &router,
                                   .logits = logits,
                                   .num_tokens = 2,
                                   .workspace = workspace,
                                   .workspace_bytes = sizeof workspace,
                                   .topk_idx = idx,
                                   .weights = weights};
    CHECK(epic_router_forward(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(memcmp(idx, want, sizeof want) == 0, "%d %d %d, %d %d %d", idx[0], idx[1], idx[2],
          idx[3], idx[4], idx[5]);
    CHECK(weights[3] == 0, "sigmoid(-inf) is %g", weights[3]);
}

int main(void)
{
    test_wrong_routers();
    test_wrong_arguments();
    test_not_a_number();
    if (failures) printf("%d checks failed\n", failures);
    return failures ? 1 : 0;
}
