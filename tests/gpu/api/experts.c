/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the public calls of the experts on a CUDA context. Results are compared with the host's
 * for the same float32 arguments, with EPIC's product and with a product of the caller. e4m3 is
 * compared with float32 on the host. Also tests wrong arguments.
 *
 *   api_experts */
#include <math.h>

#include "own_product.h"
#include "scaled.h"

enum { LOCAL = 3, HIDDEN = 24, INNER = 16, WIDTH = 2 * INNER, SLOTS = 60, OUTS = 8 };

static const int32_t rows[LOCAL] = {24, 0, 32}, tokens[LOCAL] = {23, 0, 27};
static epic_context *ctx;
static cudaStream_t stream;
static int failures;

#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%s:%d: not so: %s: %s\n", __FILE__, __LINE__, #condition, \
                    epic_error(ctx));                                                  \
            failures++;                                                                \
        }                                                                              \
    } while (0)

typedef struct arrays {
    both x, weights, w_gate_up, w_down, b_gate_up, b_down, d_y, counts;
    both out[OUTS]; /* y d_x d_w_gate_up d_w_down d_b_gate_up d_b_down d_slot_weights saved */
    both workspace;
} arrays;

static atomic_int multiplied; /* number of calls of the caller's product */

static both fetch_floats(const void *device, int64_t count)
{
    both b = make_both(EPIC_F32, count);
    must_succeed(!cudaMemcpy(b.host, device, (size_t)count * 4, cudaMemcpyDeviceToHost),
                 "a copy");
    for (int64_t i = 0; i < count; i++) b.truth[i] = get_number(b.host, EPIC_F32, i);
    return b;
}

static epic_result refuse_product(void *self, const epic_gemm_args *a)
{
    (void)self;
    (void)a;
    return EPIC_ENOTSUP;
}

/* ------------------------------------------------------------------------------- calls ---- */

static void *data_of(const both *b, bool device)
{
    return device ? b->device : b->host;
}

static void call_experts(const epic_experts *ex, const arrays *a, bool device, uint32_t flags)
{
    epic_context *where = device ? ctx : NULL;
    const int32_t *counts = data_of(&a->counts, device);
    const bool late = ex->weighting == EPIC_WEIGHT_LATE;
    const epic_experts_args f = {.call.stream = device ? stream : NULL,
                                 .experts = ex,
                                 .x = data_of(&a->x, device),
                                 .num_slots = SLOTS,
                                 .expert_rows = counts,
                                 .expert_tokens = counts + LOCAL,
                                 .slot_weights = late ? NULL : data_of(&a->weights, device),
                                 .w_gate_up = data_of(&a->w_gate_up, device),
                                 .w_down = data_of(&a->w_down, device),
                                 .b_gate_up = data_of(&a->b_gate_up, device),
                                 .b_down = data_of(&a->b_down, device),
                                 .saved = data_of(&a->out[7], device),
                                 .saved_bytes = (int64_t)a->out[7].bytes,
                                 .workspace = data_of(&a->workspace, device),
                                 .workspace_bytes = (int64_t)a->workspace.bytes,
                                 .y = data_of(&a->out[0], device)};
    const epic_experts_backward_args b = {.call.stream = f.call.stream,
                                          .experts = ex,
                                          .x = f.x,
                                          .num_slots = SLOTS,
                                          .expert_rows = counts,
                                          .expert_tokens = counts + LOCAL,
                                          .slot_weights = f.slot_weights,
                                          .w_gate_up = f.w_gate_up,
                                          .w_down = f.w_down,
                                          .b_gate_up = f.b_gate_up,
                                          .b_down = f.b_down,
                                          .saved = f.saved,
                                          .saved_bytes = f.saved_bytes,
                                          .workspace = f.workspace,
                                          .workspace_bytes = f.workspace_bytes,
                                          .d_y = data_of(&a->d_y, device),
                                          .d_x = data_of(&a->out[1], device),
                                          .d_w_gate_up = data_of(&a->out[2], device),
                                          .d_w_down = data_of(&a->out[3], device),
                                          .d_b_gate_up = data_of(&a->out[4], device),
                                          .d_b_down = data_of(&a->out[5], device),
                                          .d_slot_weights =
                                              late ? NULL : data_of(&a->out[6], device),
                                          .flags = flags};
    CHECK(epic_experts_forward(where, &f) == EPIC_OK);
    CHECK(epic_experts_backward(where, &b) == EPIC_OK);
    if (device) must_succeed(!cudaStreamSynchronize(stream), "the experts");
}

/* Returns rows with zeros in slots without a token, as dispatch leaves them. */
static both make_rows(int64_t columns)
{
    both b = random_both(EPIC_F32, SLOTS * columns, 1);
    int64_t first = 0;
    for (int e = 0; e < LOCAL; e++) {
        for (int64_t i = (first + tokens[e]) * columns; i < (first + rows[e]) * columns; i++)
            set_number(&b, i, 0);
        first += rows[e];
    }
    return b;
}

static arrays make_arrays(const epic_experts *ex)
{
    epic_experts_memory_info host, need;
    const int64_t counts[OUTS] = {SLOTS * HIDDEN,
                                  SLOTS * HIDDEN,
                                  LOCAL * HIDDEN * WIDTH,
                                  LOCAL * INNER * HIDDEN,
                                  LOCAL * WIDTH,
                                  LOCAL * HIDDEN,
                                  SLOTS,
                                  0};
    arrays a = {.x = make_rows(HIDDEN),
                .d_y = make_rows(HIDDEN),
                .weights = random_both(EPIC_F32, SLOTS, 1),
                .w_gate_up = random_both(EPIC_F32, LOCAL * HIDDEN * WIDTH, 0.4),
                .w_down = random_both(EPIC_F32, LOCAL * INNER * HIDDEN, 0.5),
                .b_gate_up = random_both(EPIC_F32, LOCAL * WIDTH, 0.5),
                .b_down = random_both(EPIC_F32, LOCAL * HIDDEN, 0.5),
                .counts = make_both(EPIC_F32, 2 * LOCAL)};
    memcpy(a.counts.host, rows, sizeof rows);
    memcpy((int32_t *)a.counts.host + LOCAL, tokens, sizeof tokens);
    CHECK(epic_experts_memory(NULL, NULL, ex, SLOTS, &host) == EPIC_OK);
    CHECK(epic_experts_memory(ctx, NULL, ex, SLOTS, &need) == EPIC_OK);
    CHECK(need.saved_bytes >= SLOTS * WIDTH * 4 && need.forward_bytes > 0 &&
          need.backward_bytes >= need.forward_bytes);
    const int64_t saved =
        host.saved_bytes > need.saved_bytes ? host.saved_bytes : need.saved_bytes;
    const int64_t work =
        host.backward_bytes > need.backward_bytes ? host.backward_bytes : need.backward_bytes;
    for (int i = 0; i < OUTS; i++)
        a.out[i] = make_both(EPIC_F32, i == 7 ? saved / 4 : counts[i]);
    a.workspace = make_both(EPIC_F32, work / 4);
    return a;
}

static void push_all(const arrays *a)
{
    const both *all[] = {&a->x,         &a->weights, &a->w_gate_up, &a->w_down,
                         &a->b_gate_up, &a->b_down,  &a->d_y,       &a->counts};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) push_to_device(all[i]);
    for (int i = 0; i < OUTS; i++) push_to_device(&a->out[i]);
}

static void free_arrays(arrays *a)
{
    both *all[] = {&a->x,      &a->weights, &a->w_gate_up, &a->w_down,   &a->b_gate_up,
                   &a->b_down, &a->d_y,     &a->counts,    &a->workspace};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free_both(all[i]);
    for (int i = 0; i < OUTS; i++) free_both(&a->out[i]);
}

/* Compares the host's results with the device's. */
static void compare_results(const arrays *a, const char *what, bool late)
{
    for (int i = 0; i < 7; i++) {
        const both *out = &a->out[i];
        both there = fetch_floats(out->device, out->count);
        const int64_t count = i == 0 || i == 1 ? (rows[0] + rows[2]) * HIDDEN
                              : i == 6         ? (late ? 0 : rows[0] + rows[2])
                                               : out->count;
        for (int64_t j = 0; j < count; j++) {
            const double want = get_number(out->host, EPIC_F32, j), got = there.truth[j];
            if (fabs(got - want) <= 2e-5 * (1 + fabs(want))) continue;
            fprintf(stderr, "%s: result %d, number %lld is %.9g, on the host %.9g\n", what, i,
                    (long long)j, got, want);
            failures++;
            break;
        }
        free_both(&there);
    }
}

static void test_values(uint32_t weighting, const epic_gemm *gemm, uint32_t flags)
{
    epic_experts ex = {.num_local_experts = LOCAL,
                       .hidden = HIDDEN,
                       .inner = INNER,
                       .weighting = weighting,
                       .row_type = EPIC_F32};
    arrays a = make_arrays(&ex);
    for (int i = 2; i < 6 && flags; i++)
        for (int64_t j = 0; j < a.out[i].count; j++)
            put_number(a.out[i].host, EPIC_F32, j, 0.5);
    push_all(&a);
    call_experts(&ex, &a, false, flags);
    ex.gemm = gemm;
    call_experts(&ex, &a, true, flags);
    compare_results(&a, gemm ? "with the caller's product" : "with ours", !weighting);
    free_arrays(&a);
}

/* Returns the expected values of an array, rounded to float32. */
static both widen_both(const both *b)
{
    both wide = make_both(EPIC_F32, b->count);
    for (int64_t i = 0; i < b->count; i++) set_number(&wide, i, b->truth[i]);
    push_to_device(&wide);
    return wide;
}

typedef struct scaled_arrays { /* e4m3 arrays and the numbers that they represent */
    both x, w_gate_up, w_down, x_scales, wide[3];
    scaled_weights of_gate_up, of_down;
} scaled_arrays;

static scaled_arrays make_scaled(void)
{
    scaled_arrays s = {.x = random_both(EPIC_E4M3, SLOTS * HIDDEN, 1),
                       .w_gate_up = random_both(EPIC_E4M3, LOCAL * HIDDEN * WIDTH, 0.4),
                       .w_down = random_both(EPIC_E4M3, LOCAL * INNER * HIDDEN, 0.5)};
    push_to_device(&s.x);
    s.x_scales = scale_rows(&s.x, HIDDEN);
    s.of_gate_up = scale_weights(&s.w_gate_up, LOCAL, HIDDEN, WIDTH);
    s.of_down = scale_weights(&s.w_down, LOCAL, INNER, HIDDEN);
    s.wide[0] = widen_both(&s.x);
    s.wide[1] = widen_both(&s.w_gate_up);
    s.wide[2] = widen_both(&s.w_down);
    return s;
}

static void free_scaled_arrays(scaled_arrays *s)
{
    both *all[] = {&s->x,       &s->w_gate_up, &s->w_down, &s->x_scales,
                   &s->wide[0], &s->wide[1],   &s->wide[2]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free_both(all[i]);
    free_scaled(&s->of_gate_up);
    free_scaled(&s->of_down);
}

/* Returns the distance of two results as vectors, over the slots with a token. */
static double vector_distance(const both *got, const both *want)
{
    double difference = 0, size = 0;
    int64_t first = 0;
    for (int e = 0; e < LOCAL; e++) {
        for (int64_t i = first * HIDDEN; i < (first + tokens[e]) * HIDDEN; i++) {
            const double w = get_number(want->host, EPIC_F32, i), d = got->truth[i] - w;
            difference += d * d;
            size += w * w;
        }
        first += rows[e];
    }
    return sqrt(difference / size);
}

static void expect_refusal(epic_result result, epic_result want, const char *word)
{
    CHECK(result == want);
    if (strstr(epic_error(ctx), word)) return;
    fprintf(stderr, "\"%s\" does not speak of \"%s\"\n", epic_error(ctx), word);
    failures++;
}

static void refuse_scaled(epic_experts_args f)
{
    epic_experts ex = *f.experts;
    const epic_gemm own = {own_multiply, &multiplied};
    f.experts = &ex;
    const epic_experts_backward_args b = {.experts = &ex,
                                          .x = f.x,
                                          .num_slots = SLOTS,
                                          .expert_rows = f.expert_rows,
                                          .w_gate_up = f.w_gate_up,
                                          .w_down = f.w_down,
                                          .d_y = f.x};
    expect_refusal(epic_experts_backward(ctx, &b), EPIC_EINVAL, "w_gate_up_scales is NULL");
    expect_refusal(epic_experts_backward(NULL, &b), EPIC_ENOTSUP, "E4M3");
    ex.gemm = &own;
    expect_refusal(epic_experts_forward(ctx, &f), EPIC_ENOTSUP, "experts.gemm");
    ex.gemm = NULL;
    f.x_scales = NULL;
    expect_refusal(epic_experts_forward(ctx, &f), EPIC_EINVAL, "x_scales is NULL");
}

/* Compares e4m3 arrays with scales with float32 arrays of the same values. They differ only
 * because activations are rounded. */
static void test_scaled(void)
{
    epic_experts ex = {
        .num_local_experts = LOCAL, .hidden = HIDDEN, .inner = INNER, .row_type = EPIC_F32};
    epic_experts_memory_info need;
    scaled_arrays s = make_scaled();
    arrays a = make_arrays(&ex);
    push_all(&a);
    epic_experts_args f = {.experts = &ex,
                           .x = s.wide[0].host,
                           .num_slots = SLOTS,
                           .expert_rows = a.counts.host,
                           .expert_tokens = (const int32_t *)a.counts.host + LOCAL,
                           .w_gate_up = s.wide[1].host,
                           .w_down = s.wide[2].host,
                           .b_down = a.b_down.host,
                           .saved = a.out[7].host,
                           .saved_bytes = (int64_t)a.out[7].bytes,
                           .workspace = a.workspace.host,
                           .workspace_bytes = (int64_t)a.workspace.bytes,
                           .y = a.out[0].host};
    CHECK(epic_experts_forward(NULL, &f) == EPIC_OK);
    ex.weight_type = EPIC_E4M3;
    CHECK(epic_experts_memory(NULL, NULL, &ex, SLOTS, &need) == EPIC_ENOTSUP);
    CHECK(epic_experts_memory(ctx, NULL, &ex, SLOTS, &need) == EPIC_OK);
    CHECK(need.saved_bytes == SLOTS * WIDTH * 4);
    f.call.stream = stream;
    f.x = s.x.device;
    f.x_scales = s.x_scales.device;
    f.expert_rows = a.counts.device;
    f.expert_tokens = (const int32_t *)a.counts.device + LOCAL;
    f.w_gate_up = s.of_gate_up.turned.device;
    f.w_gate_up_scales = s.of_gate_up.turned_scales.device;
    f.w_down = s.of_down.turned.device;
    f.w_down_scales = s.of_down.turned_scales.device;
    f.b_down = a.b_down.device;
    f.saved = a.out[7].device;
    f.saved_bytes = need.saved_bytes;
    f.workspace = a.workspace.device;
    f.workspace_bytes = need.forward_bytes;
    f.y = a.out[0].device;
    CHECK(epic_experts_forward(ctx, &f) == EPIC_OK);
    must_succeed(!cudaStreamSynchronize(stream), "the experts");
    both there = fetch_floats(a.out[0].device, a.out[0].count);
    const double far = vector_distance(&there, &a.out[0]);
    if (!(far > 1e-4 && far < 5e-2)) {
        fprintf(stderr, "e4m3 is %.2e from float32\n", far);
        failures++;
    }
    refuse_scaled(f);
    free_both(&there);
    free_arrays(&a);
    free_scaled_arrays(&s);
}

static void test_refusals(void)
{
    epic_experts ex = {
        .num_local_experts = LOCAL, .hidden = HIDDEN, .inner = INNER, .row_type = EPIC_F32};
    arrays a = make_arrays(&ex);
    epic_experts_args f = {.call.stream = stream,
                           .experts = &ex,
                           .x = a.x.device,
                           .num_slots = SLOTS,
                           .expert_rows = a.counts.device,
                           .w_gate_up = a.w_gate_up.device,
                           .w_down = a.w_down.device,
                           .saved = a.out[7].device,
                           .saved_bytes = 64,
                           .workspace = a.workspace.device,
                           .workspace_bytes = (int64_t)a.workspace.bytes,
                           .y = a.out[0].device};
    expect_refusal(epic_experts_forward(ctx, &f), EPIC_EINVAL, "saved has 64 bytes");
    f.saved_bytes = (int64_t)a.out[7].bytes;
    f.workspace_bytes = 128;
    expect_refusal(epic_experts_forward(ctx, &f), EPIC_EINVAL, "workspace has 128 bytes");
    f.workspace_bytes = (int64_t)a.workspace.bytes;
    f.workspace = (char *)a.workspace.device + 4;
    expect_refusal(epic_experts_forward(ctx, &f), EPIC_EINVAL, "workspace");
    f.workspace = a.workspace.device;
    const epic_gemm broken = {refuse_product, NULL};
    ex.gemm = &broken;
    expect_refusal(epic_experts_forward(ctx, &f), EPIC_ENOTSUP, "experts.gemm");
    ex.gemm = NULL;
    epic_experts_backward_args b = {.call.stream = stream,
                                    .experts = &ex,
                                    .x = f.x,
                                    .num_slots = SLOTS,
                                    .expert_rows = f.expert_rows,
                                    .w_gate_up = f.w_gate_up,
                                    .w_down = f.w_down,
                                    .saved = f.saved,
                                    .saved_bytes = f.saved_bytes,
                                    .workspace = f.workspace,
                                    .workspace_bytes = f.workspace_bytes,
                                    .d_y = a.d_y.device,
                                    .grad_type = EPIC_BF16};
    expect_refusal(epic_experts_backward(ctx, &b), EPIC_EINVAL, "grad_type is 2");
    expect_refusal(epic_experts_backward(NULL, &b), EPIC_EINVAL, "grad_type is 2");
    b.grad_type = 0;
    b.reserved = 1;
    expect_refusal(epic_experts_backward(ctx, &b), EPIC_EINVAL,
                   "reserved fields must be zero: one is 1");
    ex.row_type = EPIC_F64;
    expect_refusal(epic_experts_forward(ctx, &f), EPIC_ENOTSUP, "float64");
    free_arrays(&a);
}

int main(void)
{
    const epic_config config = {.max_tokens = 16, .max_row_bytes = 64, .backend = "p2p"};
    const epic_gemm own = {own_multiply, &multiplied};
    must_succeed(epic_open(&ctx, NULL, &config) == EPIC_OK, "open");
    must_succeed(!cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    for (uint32_t weighting = 0; weighting < 3; weighting++)
        for (uint32_t flags = 0; flags <= EPIC_ACCUMULATE; flags += EPIC_ACCUMULATE) {
            test_values(weighting, NULL, flags);
            test_values(weighting, &own, flags);
        }
    CHECK(multiplied == 6 * 6);
    test_scaled();
    test_refusals();
    CHECK(epic_check(ctx) == EPIC_OK);
    cudaStreamDestroy(stream);
    epic_close(ctx);
    printf("experts: %s\n", failures ? "WRONG" : "good");
    return failures != 0;
}
