/* SPDX-License-Identifier: Apache-2.0 */
/* Tests experts and calls that are refused, each with a sentence that names the wrong
 * argument. */
#include "unit/experts_problem.h"

static void refuse_experts(epic_experts ex, const char *word)
{
    epic_experts_memory_info memory;
    CHECK(epic_experts_memory(NULL, NULL, &ex, 4, &memory) == EPIC_EINVAL, "accepted: %s",
          word);
    CHECK(strstr(epic_error(NULL), word) != NULL, "\"%s\" does not name %s", epic_error(NULL),
          word);
}

static void test_wrong_experts(void)
{
    const epic_experts good = {
        .row_type = EPIC_F32, .num_local_experts = 2, .hidden = 4, .inner = 3};
    epic_experts ex;
#define REFUSE(field, value, word) \
    do {                           \
        ex = good;                 \
        ex.field = value;          \
        refuse_experts(ex, word);  \
    } while (0)
    REFUSE(num_local_experts, 0, "num_local_experts");
    REFUSE(hidden, 0, "hidden");
    REFUSE(inner, 1u << 25, "inner");
    REFUSE(activation, 9, "activation");
    REFUSE(ungated, 2, "ungated");
    REFUSE(interleaved, 2, "interleaved");
    REFUSE(weighting, 3, "weighting");
    REFUSE(row_type, EPIC_I32, "row_type");
    REFUSE(weight_type, EPIC_E8M0, "weight_type");
    REFUSE(weight_type, EPIC_F64, "F64");
    ex = good;
    ex.row_type = EPIC_F64;
    ex.weight_type = EPIC_E4M3;
    refuse_experts(ex, "weight_type");
    REFUSE(limit, -1, "limit");
    REFUSE(flags, 1, "flags");
    ex = good;
    ex.ungated = ex.interleaved = 1;
    refuse_experts(ex, "interleaved needs a gate");
    ex.interleaved = 0;
    ex.activation = EPIC_CLAMPED_SWIGLU;
    refuse_experts(ex, "EPIC_CLAMPED_SWIGLU needs a gate");
    ex.activation = EPIC_CLAMPED_SILU;
    refuse_experts(ex, "EPIC_CLAMPED_SILU needs a gate");
}

/* Without a context config.backend selects the place whose sizes are returned. */
static void test_memory_places(void)
{
    epic_experts ex = {.row_type = EPIC_BF16, .num_local_experts = 2, .hidden = 8, .inner = 8};
    epic_config config = {.max_tokens = 1, .max_row_bytes = 1, .backend = "shm"};
    epic_experts_memory_info none, shm, gpu, hosts;
    CHECK(epic_experts_memory(NULL, NULL, &ex, 64, &none) == EPIC_OK, "host");
    CHECK(epic_experts_memory(NULL, &config, &ex, 64, &shm) == EPIC_OK, "shm");
    CHECK(!memcmp(&none, &shm, sizeof none), "backend shm is not the host");
    CHECK(none.saved_bytes == 64 * 16 * 4, "float32 is saved on the host");
    config.backend = "gpu";
    CHECK(epic_experts_memory(NULL, &config, &ex, 64, &gpu) == EPIC_OK, "gpu");
    config.backend = "hosts";
    CHECK(epic_experts_memory(NULL, &config, &ex, 64, &hosts) == EPIC_OK, "hosts");
    CHECK(!memcmp(&gpu, &hosts, sizeof gpu), "gpu and hosts differ");
    CHECK(gpu.saved_bytes == 64 * 16 * 2, "bfloat16 is saved on a device");
    ex.row_type = EPIC_F64;
    CHECK(epic_experts_memory(NULL, &config, &ex, 64, &gpu) == EPIC_ENOTSUP, "F64 on a device");
    ex.row_type = EPIC_BF16;
    ex.weight_type = EPIC_E4M3;
    CHECK(epic_experts_memory(NULL, &config, &ex, 64, &gpu) == EPIC_OK, "E4M3 on a device");
    CHECK(epic_experts_memory(NULL, NULL, &ex, 64, &none) == EPIC_ENOTSUP, "E4M3 on the host");
    config.backend = "mpi";
    CHECK(epic_experts_memory(NULL, &config, &ex, 64, &none) == EPIC_ENOTSUP, "E4M3 and mpi");
    config.backend = "other";
    CHECK(epic_experts_memory(NULL, &config, &ex, 64, &none) == EPIC_EINVAL, "no such backend");
    CHECK(strstr(epic_error(NULL), "config.backend") != NULL, "%s", epic_error(NULL));
}

static void refuse_forward(epic_experts_args args, const char *word)
{
    CHECK(epic_experts_forward(NULL, &args) == EPIC_EINVAL, "accepted: %s", word);
    CHECK(strstr(epic_error(NULL), word) != NULL, "\"%s\" does not name %s", epic_error(NULL),
          word);
}

static void test_wrong_arguments(void)
{
    static const int32_t negative[4] = {4, -1, 4, 4}, many[4] = {100, 0, 0, 0};
    const epic_experts ex = {.num_local_experts = 4,
                             .hidden = 4,
                             .inner = 3,
                             .weighting = EPIC_WEIGHT_EARLY,
                             .row_type = EPIC_F32};
    epic_experts late = ex;
    late.weighting = EPIC_WEIGHT_LATE;
    problem p;
    make_problem(&p, &ex, few, 4, true);
    const epic_experts_args good = forward_args(&p);
    epic_experts_args a;
#define REFUSE_CALL(field, value, word) \
    do {                                \
        a = good;                       \
        a.field = value;                \
        refuse_forward(a, word);        \
    } while (0)
    REFUSE_CALL(experts, NULL, "epic_experts");
    REFUSE_CALL(x, NULL, "x is NULL");
    REFUSE_CALL(y, NULL, "y is NULL");
    REFUSE_CALL(w_gate_up, NULL, "w_gate_up");
    REFUSE_CALL(w_down, NULL, "w_down");
    REFUSE_CALL(num_slots, -1, "num_slots");
    REFUSE_CALL(expert_rows, NULL, "expert_rows");
    REFUSE_CALL(expert_rows, negative, "expert_rows of local expert 1 is -1");
    REFUSE_CALL(expert_tokens, many, "expert_tokens 100");
    REFUSE_CALL(num_slots, 7, "add up to 12");
    REFUSE_CALL(slot_weights, NULL, "slot_weights");
    REFUSE_CALL(experts, &late, "EPIC_WEIGHT_LATE");
    REFUSE_CALL(saved_bytes, 8, "saved");
    REFUSE_CALL(workspace, NULL, "workspace");
    REFUSE_CALL(workspace, (char *)p.workspace + 4, "multiple of 16");
    REFUSE_CALL(flags, 1, "flags");
    REFUSE_CALL(w_down_scales, (const float *)p.workspace, "w_down_scales is not NULL");

    epic_experts scaled = ex;
    scaled.weight_type = EPIC_E4M3;
    a = good;
    a.experts = &scaled;
    CHECK(epic_experts_forward(NULL, &a) == EPIC_ENOTSUP && strstr(epic_error(NULL), "CUDA"),
          "%s", epic_error(NULL));

    epic_experts_backward_args b = backward_args(&p);
    b.workspace_bytes = good.workspace_bytes;
    CHECK(epic_experts_backward(NULL, &b) == EPIC_EINVAL &&
              strstr(epic_error(NULL), "workspace"),
          "%s", epic_error(NULL));
    b.d_y = NULL;
    CHECK(epic_experts_backward(NULL, &b) == EPIC_EINVAL && strstr(epic_error(NULL), "d_y"),
          "%s", epic_error(NULL));
    free_problem(&p);
}

int main(void)
{
    test_wrong_experts();
    test_memory_places();
    test_wrong_arguments();
    if (failures) printf("%d checks failed\n", failures);
    return failures ? 1 : 0;
}
