/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the experts' grouped MLP with plain float64 loops over tokens, and its gradients
 * with central differences of those loops. */
#include "experts/onednn.h"
#include "oracles/experts_oracle.h"

/* Tests every activation, gate, weighting and bias in float64, at several alignments. */
static void test_combinations(void)
{
    static const int alignments[] = {1, 16, 128};
    const tolerances exact = {1e-12, 1e-6, 1e-6};
    int turn = 0;
    for (uint32_t activation = 0; activation <= EPIC_CLAMPED_SILU; activation++)
        for (uint32_t shape = 0; shape < 3; shape++) /* gated, not gated, interleaved */
            for (uint32_t weighting = 0; weighting < 3; weighting++)
                for (int biased = 0; biased < 2; biased++) {
                    problem p;
                    const epic_experts ex = {.num_local_experts = 4,
                                             .hidden = 5,
                                             .inner = 3,
                                             .activation = activation,
                                             .ungated = shape == 1,
                                             .interleaved = shape == 2,
                                             .weighting = weighting,
                                             .row_type = EPIC_F64,
                                             .limit = 0.75f};
                    if (shape == 1 && activation >= EPIC_CLAMPED_SWIGLU) continue;
                    make_problem(&p, &ex, few, alignments[turn++ % 3], biased);
                    check_all(&p, exact);
                    free_problem(&p);
                }
}

/* Tests every pair of types, and the default limit and alpha of clamped SwiGLU. With oneDNN,
 * activations of BF16 are rounded to BF16. */
static void test_types(void)
{
    static const struct {
        uint32_t rows, weights;
        tolerances tolerances;
    } cases[] = {
        {EPIC_F32, EPIC_F32, {1e-5, 1e-4, 1e-4}},   {EPIC_F32, EPIC_BF16, {1e-5, 1e-4, 1e-4}},
        {EPIC_BF16, EPIC_BF16, {5e-3, 5e-3, 1e-4}}, {EPIC_BF16, EPIC_F32, {5e-3, 5e-3, 1e-4}},
        {EPIC_F16, EPIC_F16, {1e-3, 1e-3, 1e-4}},   {EPIC_F16, EPIC_BF16, {1e-3, 1e-3, 1e-4}},
    };
    for (int c = 0; c < 6; c++)
        for (uint32_t activation = 0; activation <= EPIC_CLAMPED_SILU; activation++) {
            problem p;
            const epic_experts ex = {.num_local_experts = 4,
                                     .hidden = 7,
                                     .inner = 6,
                                     .activation = activation,
                                     .weighting = (uint32_t)(c + (int)activation) % 3,
                                     .row_type = cases[c].rows,
                                     .weight_type = cases[c].weights};
            make_problem(&p, &ex, few, 4, activation % 2 == 0);
            tolerances most = cases[c].tolerances;
            const bool halves = cases[c].rows == EPIC_BF16 && cases[c].weights == EPIC_BF16;
            if (halves && onednn_is_ready()) most = (tolerances){1e-2, 1e-2, 1e-2};
            check_all(&p, most);
            free_problem(&p);
        }
}

/* Tests that clamped numbers have gradient 0 and numbers on the limit the full gradient.
 * hidden and inner are 1, so the products are exact. */
static void test_limit(uint32_t activation, uint32_t type)
{
    static const double numbers[] = {-3, -2.5, -2, -1, 2, 2.5, 3}; /* the limit is 2.5 */
    const epic_experts ex = {.num_local_experts = 1,
                             .hidden = 1,
                             .inner = 1,
                             .activation = activation,
                             .row_type = type,
                             .limit = 2.5f,
                             .alpha = 1};
    const double slack = type == EPIC_F64 ? 1e-15 : 1e-6, plus = factor(&ex, 0);
    for (int g = 0; g < 7; g++)
        for (int u = 0; u < 7; u++) {
            problem p;
            const int32_t one = 1;
            make_problem(&p, &ex, &one, 1, false);
            put(&p.x, 0, 1);
            put(&p.w_gate_up, 0, numbers[g]);
            put(&p.w_gate_up, 1, numbers[u]);
            put(&p.w_down, 0, 1);
            put(&p.d_y, 0, 1);
            run(&p);
            const double gate = fmin(numbers[g], 2.5), up = fmax(-2.5, fmin(numbers[u], 2.5));
            const double s = 1 / (1 + exp(-gate));
            const double d_gate = numbers[g] > 2.5 ? 0 : s * (1 + gate * (1 - s)) * (up + plus);
            const double d_up = fabs(numbers[u]) > 2.5 ? 0 : gate * s;
            const double got[] = {number(p.d_w_gate_up.data, p.d_w_gate_up.type, 0),
                                  number(p.d_w_gate_up.data, p.d_w_gate_up.type, 1)};
            CHECK(fabs(got[0] - d_gate) <= slack * fabs(d_gate) * 4 &&
                      fabs(got[1] - d_up) <= slack * fabs(d_up) * 4,
                  "activation %u, gate %g, up %g: gradients %g and %g, not %g and %g",
                  activation, numbers[g], numbers[u], got[0], got[1], d_gate, d_up);
            CHECK(fabs(number(p.y.data, type, 0) - gate * s * (up + plus)) <= slack * 40,
                  "activation %u, gate %g, up %g: %g", activation, numbers[g], numbers[u],
                  number(p.y.data, type, 0));
            free_problem(&p);
        }
}

/* Tests slabs of which one has nearly all tokens. */
static void test_skewed(void)
{
    static const int32_t skewed[5] = {1, 0, 300, 0, 2};
    const epic_experts ex = {.num_local_experts = 5,
                             .hidden = 67,
                             .inner = 33,
                             .weighting = EPIC_WEIGHT_EARLY,
                             .row_type = EPIC_F32};
    problem p;
    make_problem(&p, &ex, skewed, 16, true);
    run(&p);
    check_forward(&p, 1e-5);
    free_problem(&p);
}

/* Tests weights that are converted in several tiles, against the float64 path. */
static void test_tiles(void)
{
    static const int32_t tokens[2] = {3, 2};
    epic_experts ex = {
        .num_local_experts = 2, .hidden = 1300, .inner = 900, .row_type = EPIC_F16};
    problem narrow, wide;
    make_problem(&narrow, &ex, tokens, 4, true);
    ex.row_type = EPIC_F64;
    make_problem(&wide, &ex, tokens, 4, true);
    copy_problem(&wide, &narrow);
    run(&narrow);
    run(&wide);
    const int64_t slots = narrow.occupied * narrow.hidden;
    CHECK(apart(&narrow.y, &wide.y, slots) < 5e-3, "y");
    CHECK(apart(&narrow.d_x, &wide.d_x, slots) < 5e-3, "d_x");
    CHECK(apart(&narrow.d_w_gate_up, &wide.d_w_gate_up, wide.d_w_gate_up.n) < 1e-4,
          "d_w_gate_up");
    CHECK(apart(&narrow.d_w_down, &wide.d_w_down, wide.d_w_down.n) < 1e-4, "d_w_down");
    free_problem(&narrow);
    free_problem(&wide);
}

/* Tests that weights applied by combine and weights applied early give the same result. */
static void test_late_is_early(void)
{
    epic_experts ex = {.num_local_experts = 4,
                       .hidden = 24,
                       .inner = 20,
                       .weighting = EPIC_WEIGHT_EARLY,
                       .row_type = EPIC_F32};
    problem early, late;
    make_problem(&early, &ex, few, 4, true);
    ex.weighting = EPIC_WEIGHT_LATE;
    make_problem(&late, &ex, few, 4, true);
    copy_problem(&late, &early);
    for (int64_t i = 0; i < late.occupied * late.hidden; i++)
        put(&late.d_y, i, early.d_y.truth[i] * early.slot_weights.truth[i / late.hidden]);
    run(&early);
    run(&late);
    const int64_t slots = late.occupied * late.hidden;
    for (int64_t s = 0; s < late.occupied; s++) {
        double sum = 0, size = 1e-3;
        for (int64_t i = s * late.hidden; i < (s + 1) * late.hidden; i++) {
            const double y = number(late.y.data, EPIC_F32, i);
            put(&late.y, i, y * early.slot_weights.truth[s]);
            sum += early.d_y.truth[i] * y;
            size += fabs(early.d_y.truth[i] * y);
        }
        CHECK(fabs(sum - number(early.d_slot_weights.data, EPIC_F32, s)) < 1e-5 * size,
              "weight gradient of slot %lld", (long long)s);
    }
    CHECK(apart(&late.y, &early.y, slots) < 1e-6, "y");
    CHECK(apart(&late.d_x, &early.d_x, slots) < 1e-6, "d_x");
    CHECK(apart(&late.d_w_gate_up, &early.d_w_gate_up, late.d_w_gate_up.n) < 1e-6, "gate, up");
    CHECK(apart(&late.d_w_down, &early.d_w_down, late.d_w_down.n) < 1e-6, "down");
    CHECK(apart(&late.d_b_gate_up, &early.d_b_gate_up, late.d_b_gate_up.n) < 1e-6, "biases");
    CHECK(apart(&late.d_b_down, &early.d_b_down, late.d_b_down.n) < 1e-6, "down bias");
    free_problem(&early);
    free_problem(&late);
}

/* Tests that an expert's results have the same bits alone and among others, elsewhere in the
 * buffer. */
static void test_slab_alone(uint32_t type)
{
    static const int32_t crowd[4] = {37, 5, 83, 0}, alone[1] = {83};
    epic_experts ex = {.num_local_experts = 4,
                       .hidden = 200,
                       .inner = 136,
                       .weighting = EPIC_WEIGHT_EARLY,
                       .row_type = type};
    problem a, b;
    make_problem(&a, &ex, crowd, 16, true);
    ex.num_local_experts = 1;
    make_problem(&b, &ex, alone, 16, true);
    const int64_t h = a.hidden, first = a.rows[0] + a.rows[1], rows = b.rows[0];
    const int64_t wide = h * a.width, down = a.inner * h;
    copy_numbers(&b.x, &a.x, 0, first * h, rows * h);
    copy_numbers(&b.d_y, &a.d_y, 0, first * h, rows * h);
    copy_numbers(&b.slot_weights, &a.slot_weights, 0, first, rows);
    copy_numbers(&b.w_gate_up, &a.w_gate_up, 0, 2 * wide, wide);
    copy_numbers(&b.w_down, &a.w_down, 0, 2 * down, down);
    copy_numbers(&b.b_gate_up, &a.b_gate_up, 0, 2 * a.width, a.width);
    copy_numbers(&b.b_down, &a.b_down, 0, 2 * h, h);
    run(&a);
    run(&b);
    CHECK(same_bits(&a.y, first * h, &b.y, 0, rows * h), "y, type %u", type);
    CHECK(same_bits(&a.d_x, first * h, &b.d_x, 0, rows * h), "d_x, type %u", type);
    CHECK(same_bits(&a.d_w_gate_up, 2 * wide, &b.d_w_gate_up, 0, wide), "gate, up, %u", type);
    CHECK(same_bits(&a.d_w_down, 2 * down, &b.d_w_down, 0, down), "down, %u", type);
    CHECK(same_bits(&a.d_slot_weights, first, &b.d_slot_weights, 0, rows), "weights, %u", type);
    CHECK(same_bits(&a.d_b_down, 2 * h, &b.d_b_down, 0, h), "bias, %u", type);
    free_problem(&a);
    free_problem(&b);
}

/* Tests EPIC_ACCUMULATE. An expert without tokens adds nothing. */
static void test_accumulate(void)
{
    const epic_experts ex = {
        .num_local_experts = 4, .hidden = 9, .inner = 5, .row_type = EPIC_F64};
    problem p;
    make_problem(&p, &ex, few, 2, true);
    run(&p);
    array *gradients[] = {&p.d_w_gate_up, &p.d_w_down, &p.d_b_gate_up, &p.d_b_down};
    for (int g = 0; g < 4; g++)
        for (int64_t i = 0; i < gradients[g]->n; i++)
            put(gradients[g], i, number(gradients[g]->data, EPIC_F64, i));
    epic_experts_backward_args b = backward_args(&p);
    b.flags = EPIC_ACCUMULATE;
    b.d_x = NULL;
    CHECK(epic_experts_backward(NULL, &b) == EPIC_OK, "%s", epic_error(NULL));
    for (int g = 0; g < 4; g++)
        for (int64_t i = 0; i < gradients[g]->n; i++) gradients[g]->truth[i] *= 2;
    for (int g = 0; g < 4; g++)
        CHECK(distance(gradients[g], gradients[g]->truth) < 1e-14, "gradient %d", g);
    b.d_w_gate_up = b.d_w_down = b.d_b_gate_up = b.d_b_down = NULL;
    CHECK(epic_experts_backward(NULL, &b) == EPIC_OK, "%s", epic_error(NULL));
    free_problem(&p);
}

/* Tests calls without slots: arrays may be NULL, weight gradients are zeros. */
static void test_nothing(void)
{
    static const int32_t none[2] = {0, 0};
    const epic_experts ex = {
        .row_type = EPIC_F32, .num_local_experts = 2, .hidden = 4, .inner = 3};
    float d_w_down[24] = {1, [23] = 1};
    const epic_experts_args f = {.experts = &ex, .expert_rows = none};
    const epic_experts_backward_args b = {
        .experts = &ex, .expert_rows = none, .d_w_down = d_w_down};
    epic_experts_memory_info memory;
    CHECK(epic_experts_memory(NULL, NULL, &ex, 0, &memory) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(memory.saved_bytes == 0 && memory.backward_bytes == 0, "memory for nothing");
    CHECK(epic_experts_forward(NULL, &f) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(epic_experts_backward(NULL, &b) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(d_w_down[0] == 0 && d_w_down[23] == 0, "not cleared");
}

/* usage: experts [file of a oneDNN to load on any processor] */
int main(int argc, char **argv)
{
    if (argc > 1 && !onednn_load_file(argv[1])) {
        printf("%s is not taken\n", argv[1]);
        return 1;
    }
    test_combinations();
    test_types();
    for (uint32_t kind = EPIC_CLAMPED_SWIGLU; kind <= EPIC_CLAMPED_SILU; kind++) {
        test_limit(kind, EPIC_F64);
        test_limit(kind, EPIC_F32);
    }
    test_skewed();
    test_tiles();
    test_late_is_early();
    test_slab_alone(EPIC_F32);
    test_slab_alone(EPIC_BF16);
    test_accumulate();
    test_nothing();
    printf("with %s\n", epic_blas_name());
    if (failures) printf("%d checks failed\n", failures);
    return failures ? 1 : 0;
}
