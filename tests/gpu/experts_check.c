/* SPDX-License-Identifier: Apache-2.0 */
/* Checks the experts on a CUDA context, forward and backward, against float64 loops with random
 * cotangents: a float64 version without rounding, and one that rounds where the kernels do.
 * Half of the cases run from a captured graph that was recorded with other counts.
 *
 *   gpu_experts_check [CASES] [SEED] [MOST]      MOST: largest hidden and inner */
#include "base/error.h"
#include "cuda/experts/grouped.h"
#include "oracles/experts_rounded.h"
#include "scaled.h"
#include "scaled_cases.h"
#include "team.h"

enum { MOST_LOCAL = 12, TAIL = 40, RESULTS = 7 };

typedef struct problem {
    epic_experts ex;
    int alignment;
    uint32_t grad_type;
    bool biased, accumulate, captured, scaled;
    int32_t tokens[MOST_LOCAL], rows[MOST_LOCAL];
    int64_t slots, width;
    both x, weights, w_gate_up, w_down, b_gate_up, b_down, d_y, counts; /* rows, tokens */
    both x_scales, x_back; /* if weights are scaled: x in the form that backward uses */
    scaled_weights of_gate_up, of_down;
    both out[RESULTS]; /* y d_x d_w_gate_up d_w_down d_b_gate_up d_b_down d_weights */
    double *exact[RESULTS], *near[RESULTS];
    void *saved, *workspace;
    int64_t saved_bytes, workspace_bytes;
} problem;

static const char *const names[RESULTS] = {
    "y", "d_x", "d_w_gate_up", "d_w_down", "d_b_gate_up", "d_b_down", "d_slot_weights"};
/* largest errors so far, without and with rounding, by type */
static double worst[2][4][RESULTS];
static int failures;
static int cases = 40;
static uint64_t seed = 1;
static uint32_t most = 160;

/* ---------------------------------------------------------------------------- problems ---- */

static void draw_problem(problem *p)
{
    static const uint32_t types[] = {EPIC_BF16, EPIC_BF16, EPIC_F16, EPIC_F32};
    static const int alignments[] = {1, 8, 16, 64, 128, 128, 3};
    epic_experts *ex = &p->ex;
    const uint32_t step = random_below(5) ? 8 : 1;
    ex->num_local_experts = 1 + random_below(MOST_LOCAL);
    ex->hidden = (1 + random_below(most / step)) * step;
    ex->inner = (1 + random_below(most / step)) * step;
    ex->activation = random_below(6);
    const bool clamped = ex->activation >= EPIC_CLAMPED_SWIGLU;
    ex->ungated = !clamped && random_below(4) == 0;
    ex->interleaved = !ex->ungated && random_below(3) == 0;
    ex->weighting = random_below(3);
    ex->row_type = types[random_below(4)];
    ex->weight_type = random_below(8) ? ex->row_type : types[random_below(4)];
    ex->limit = clamped ? 0.75f : 7;
    ex->alpha = ex->activation == EPIC_CLAMPED_SILU ? 1 : 1.702f;
    p->scaled = random_below(6) == 0;
    if (p->scaled) {
        ex->weight_type = EPIC_E4M3;
        if (step == 8) ex->hidden = (ex->hidden + 8) / 16 * 16, ex->inner += ex->inner % 16;
    }
    p->alignment = alignments[random_below(7)];
    p->grad_type = random_below(2) ? EPIC_F32 : ex->row_type;
    p->biased = random_below(2);
    p->accumulate = random_below(3) == 0;
    p->captured = random_below(2);
    p->width = (int64_t)ex->inner * (ex->ungated ? 1 : 2);
    for (uint32_t e = 0; e < ex->num_local_experts; e++) {
        p->tokens[e] = random_below(4) ? (int32_t)random_below(random_below(3) ? 40 : 160) : 0;
        p->rows[e] = (p->tokens[e] + p->alignment - 1) / p->alignment * p->alignment;
        p->slots += p->rows[e];
    }
    p->slots += TAIL;
}

/* Rows with a token are random; the others are NaN, which no kernel may read. */
static both make_rows(const problem *p, uint32_t type, int64_t columns)
{
    both b = make_both(type, p->slots * columns);
    int64_t first = 0;
    for (uint32_t e = 0; e < p->ex.num_local_experts; e++) {
        for (int64_t i = first * columns; i < (first + p->tokens[e]) * columns; i++)
            set_number(&b, i, random_number(1));
        first += p->rows[e];
    }
    push_to_device(&b);
    return b;
}

static both make_pushed(uint32_t type, int64_t count, double size)
{
    both b = random_both(type, count, size);
    push_to_device(&b);
    return b;
}

static void make_inputs(problem *p)
{
    const epic_experts *ex = &p->ex;
    const int64_t local = ex->num_local_experts, hidden = ex->hidden, inner = ex->inner;
    const uint32_t bias_type = p->scaled ? ex->row_type : ex->weight_type;
    p->x = make_rows(p, p->scaled ? EPIC_E4M3 : ex->row_type, hidden);
    p->d_y = make_rows(p, ex->row_type, hidden);
    p->weights = make_pushed(EPIC_F32, p->slots, 1);
    p->w_gate_up =
        make_pushed(ex->weight_type, local * hidden * p->width, 2 / sqrt((double)hidden));
    p->w_down = make_pushed(ex->weight_type, local * inner * hidden, 2 / sqrt((double)inner));
    p->b_gate_up = make_pushed(bias_type, local * p->width, 0.5);
    p->b_down = make_pushed(bias_type, local * hidden, 0.5);
    if (p->scaled) {
        p->x_scales = scale_rows(&p->x, hidden);
        p->x_back = make_both(ex->row_type, p->x.count);
        for (int64_t i = 0; i < p->x.count; i++)
            if (!is_poison(&p->x, i)) set_number(&p->x_back, i, p->x.truth[i]);
        push_to_device(&p->x_back);
        p->of_gate_up = scale_weights(&p->w_gate_up, local, hidden, p->width);
        p->of_down = scale_weights(&p->w_down, local, inner, hidden);
    }
    p->counts = make_both(EPIC_F32, 2 * MOST_LOCAL);
    memcpy(p->counts.host, p->rows, sizeof p->rows);
    memcpy((int32_t *)p->counts.host + MOST_LOCAL, p->tokens, sizeof p->tokens);
    push_to_device(&p->counts);
}

static int64_t count_of(const problem *p, int result)
{
    const int64_t local = p->ex.num_local_experts, hidden = p->ex.hidden, inner = p->ex.inner;
    const int64_t counts[RESULTS] = {p->slots * hidden,
                                     p->slots * hidden,
                                     local * hidden * p->width,
                                     local * inner * hidden,
                                     local * p->width,
                                     local * hidden,
                                     p->slots};
    return counts[result];
}

static void make_results(problem *p)
{
    const experts_layout at = experts_layout_of(&p->ex, p->slots, true);
    for (int i = 0; i < RESULTS; i++) {
        const uint32_t type = i < 2 ? p->ex.row_type : i < 6 ? p->grad_type : EPIC_F32;
        p->out[i] = make_both(type, count_of(p, i));
        for (int64_t j = 0; i >= 2 && i < 6 && p->accumulate && j < p->out[i].count; j++)
            put_number(p->out[i].host, type, j, 0.25);
        push_to_device(&p->out[i]);
        p->exact[i] = calloc((size_t)p->out[i].count, sizeof(double));
        p->near[i] = calloc((size_t)p->out[i].count, sizeof(double));
    }
    p->saved_bytes = at.saved_bytes;
    p->workspace_bytes = at.bytes;
    must_succeed(!cudaMalloc(&p->saved, (size_t)at.saved_bytes) &&
                     !cudaMalloc(&p->workspace, (size_t)at.bytes) &&
                     !fill_in(p->saved, 0xff, (size_t)at.saved_bytes) &&
                     !fill_in(p->workspace, 0xff, (size_t)at.bytes),
                 "memory");
}

static void free_problem(problem *p)
{
    both *inputs[] = {&p->x,      &p->weights,   &p->w_gate_up, &p->w_down,
                      &p->b_down, &p->b_gate_up, &p->d_y,       &p->counts};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) free_both(inputs[i]);
    free_both(&p->x_scales);
    free_both(&p->x_back);
    free_scaled(&p->of_gate_up);
    free_scaled(&p->of_down);
    for (int i = 0; i < RESULTS; i++) {
        free_both(&p->out[i]);
        free(p->exact[i]);
        free(p->near[i]);
    }
    cudaFree(p->saved);
    cudaFree(p->workspace);
}

/* ------------------------------------------------------------------------------- calls ---- */

static bool is_late(const problem *p)
{
    return p->ex.weighting == EPIC_WEIGHT_LATE;
}

#define INPUTS(p)                                                           \
    .experts = &(p)->ex, .x = (p)->x.device, .num_slots = (p)->slots,       \
    .expert_rows = (p)->counts.device,                                      \
    .expert_tokens = (const int32_t *)(p)->counts.device + MOST_LOCAL,      \
    .slot_weights = is_late(p) ? NULL : (p)->weights.device,                \
    .w_gate_up = (p)->w_gate_up.device, .w_down = (p)->w_down.device,       \
    .b_gate_up = (p)->biased ? (p)->b_gate_up.device : NULL,                \
    .b_down = (p)->biased ? (p)->b_down.device : NULL, .saved = (p)->saved, \
    .saved_bytes = (p)->saved_bytes, .workspace = (p)->workspace,           \
    .workspace_bytes = (p)->workspace_bytes

static void call_experts(team_rank *me, const problem *p)
{
    epic_experts_args forward = {INPUTS(p), .call.stream = me->stream, .y = p->out[0].device};
    epic_experts_backward_args backward = {INPUTS(p),
                                           .call.stream = me->stream,
                                           .d_y = p->d_y.device,
                                           .d_x = p->out[1].device,
                                           .d_w_gate_up = p->out[2].device,
                                           .d_w_down = p->out[3].device,
                                           .d_b_gate_up = p->biased ? p->out[4].device : NULL,
                                           .d_b_down = p->biased ? p->out[5].device : NULL,
                                           .d_slot_weights =
                                               is_late(p) ? NULL : p->out[6].device,
                                           .flags = p->accumulate ? EPIC_ACCUMULATE : 0,
                                           .grad_type = p->grad_type};
    if (p->scaled) {
        forward.w_gate_up = p->of_gate_up.turned.device;
        forward.w_down = p->of_down.turned.device;
        forward.x_scales = p->x_scales.device;
        forward.w_gate_up_scales = p->of_gate_up.turned_scales.device;
        forward.w_down_scales = p->of_down.turned_scales.device;
        backward.x = p->x_back.device;
        backward.w_gate_up_scales = p->of_gate_up.scales.device;
        backward.w_down_scales = p->of_down.scales.device;
    }
    must_succeed(p2p_ops.experts_forward(me->group, &forward) == EPIC_OK, "forward");
    must_succeed(p2p_ops.experts_backward(me->group, &backward) == EPIC_OK, "backward");
}

/* Records the graph while the counts on the device are invalid. */
static void call_captured(team_rank *me, const problem *p)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK_CUDA(fill_in(p->counts.device, 0x7f, p->counts.bytes));
    CHECK_CUDA(cudaStreamBeginCapture(me->stream, cudaStreamCaptureModeThreadLocal));
    call_experts(me, p);
    CHECK_CUDA(cudaStreamEndCapture(me->stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    push_to_device(&p->counts);
    CHECK_CUDA(cudaGraphLaunch(exec, me->stream));
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    CHECK_CUDA(cudaGraphDestroy(graph));
}

static void ask_oracle(const problem *p, double *const *to, uint32_t held)
{
    const oracle o = {.ex = p->ex,
                      .held = held,
                      .scaled = p->scaled,
                      .biased_gradient = p->biased,
                      .slots = p->slots,
                      .rows = p->rows,
                      .tokens = p->tokens,
                      .x = p->x.truth,
                      .x_back = p->scaled ? p->x_back.truth : p->x.truth,
                      .weights = is_late(p) ? NULL : p->weights.truth,
                      .w_gate_up = p->w_gate_up.truth,
                      .w_down = p->w_down.truth,
                      .b_gate_up = p->biased ? p->b_gate_up.truth : NULL,
                      .b_down = p->biased ? p->b_down.truth : NULL,
                      .d_y = p->d_y.truth,
                      .y = to[0],
                      .d_x = to[1],
                      .d_w_gate_up = to[2],
                      .d_w_down = to[3],
                      .d_b_gate_up = to[4],
                      .d_b_down = to[5],
                      .d_weights = to[6]};
    oracle_run(&o);
}

/* -------------------------------------------------------------------------- comparison ---- */

static bool is_wanted(const problem *p, int result)
{
    if (result == 4 || result == 5) return p->biased;
    return result < 6 || !is_late(p);
}

static void print_problem(const problem *p, int number)
{
    const epic_experts *ex = &p->ex;
    fprintf(stderr,
            "case %d: hidden %u, inner %u, activation %u, ungated %u, interleaved %u, "
            "weighting %u, rows %u, weights %u, gradients %u, alignment %d, biased %d, "
            "accumulate %d, captured %d, tokens",
            number, ex->hidden, ex->inner, ex->activation, ex->ungated, ex->interleaved,
            ex->weighting, ex->row_type, ex->weight_type, p->grad_type, p->alignment, p->biased,
            p->accumulate, p->captured);
    for (uint32_t e = 0; e < ex->num_local_experts; e++) fprintf(stderr, " %d", p->tokens[e]);
    fprintf(stderr, "\n");
}

/* The distance |got - want| / |want| of a result as vectors. If `round` is set, `want` is
 * rounded like the result. */
static double vector_distance(const problem *p, int result, const double *want, bool round)
{
    const both *out = &p->out[result];
    const double before = p->accumulate && result >= 2 && result < 6 ? 0.25 : 0;
    double difference = 0, size = 0;
    for (int64_t i = 0; i < out->count; i++) {
        if ((result < 2 || result == 6) && want[i] == 0)
            continue; /* no token: checked separately */
        const double w = round ? round_to_type(want[i] + before, out->type) : want[i] + before;
        const double d = get_number(out->host, out->type, i) - w;
        difference += d * d;
        size += w * w;
    }
    return size > 0 ? sqrt(difference / size) : sqrt(difference);
}

/* Slots without a token must be zero inside slabs, and poison after the last slab. */
static bool are_rows_clean(const problem *p, int result)
{
    const both *out = &p->out[result];
    const int64_t columns = result < 2 ? p->ex.hidden : 1;
    int64_t first = 0;
    for (uint32_t e = 0; e < p->ex.num_local_experts; e++) {
        for (int64_t i = (first + p->tokens[e]) * columns; i < (first + p->rows[e]) * columns;
             i++)
            if (get_number(out->host, out->type, i) != 0) return false;
        first += p->rows[e];
    }
    for (int64_t i = first * columns; i < out->count; i++)
        if (!is_poison(out, i)) return false;
    return true;
}

/* Gradients of an expert without tokens must be exactly zero or, if the call accumulates,
 * unchanged. */
static bool are_empty_clean(const problem *p, int result)
{
    const both *out = &p->out[result];
    const int64_t each = out->count / p->ex.num_local_experts;
    const double want = p->accumulate ? 0.25 : 0;
    for (int64_t i = 0; i < out->count; i++)
        if (p->tokens[i / each] == 0 && get_number(out->host, out->type, i) != want)
            return false;
    return true;
}

static void compare_results(const problem *p, int number)
{
    const uint32_t type = p->ex.row_type;
    const bool clamped =
        p->ex.activation >= EPIC_CLAMPED_SWIGLU && (type != EPIC_F32 || p->scaled);
    const double exact_plain = p->scaled           ? 8e-2
                               : type == EPIC_BF16 ? 1e-2
                               : type == EPIC_F16  ? 2e-3
                                                   : 1e-5;
    const double most_near = p->scaled          ? 2e-2
                             : type == EPIC_F32 ? 1e-5
                             : type == EPIC_F16 ? 5e-4
                                                : 2e-3;
    const int before = failures;
    for (int i = 0; i < RESULTS; i++) {
        if (!is_wanted(p, i)) continue;
        pull_from_device(&p->out[i]);
        const double exact = vector_distance(p, i, p->exact[i], false);
        const double near = vector_distance(p, i, p->near[i], true);
        const int row = p->scaled ? 3 : type == EPIC_BF16 ? 0 : type == EPIC_F16 ? 1 : 2;
        if (exact > worst[0][row][i]) worst[0][row][i] = exact;
        if (near > worst[1][row][i]) worst[1][row][i] = near;
        /* gradients jump at the limit, and values held in 16 bits may be on its other side */
        const double most_exact = clamped && i > 0 ? 0.2 : exact_plain;
        if (!(exact <= most_exact) || !(near <= most_near)) {
            fprintf(stderr, "%s is %.2e from the float64 loops, %.2e from the rounding loops\n",
                    names[i], exact, near);
            failures++;
        }
        const bool clean = i < 2 || i == 6 ? are_rows_clean(p, i) : are_empty_clean(p, i);
        if (!clean) {
            fprintf(stderr, "%s: %s\n", names[i],
                    i < 2 || i == 6 ? "slots without a token are not as they should be"
                                    : "an expert with no token has a gradient");
            failures++;
        }
    }
    if (failures != before) print_problem(p, number);
}

static void run_case(team_rank *me, int number)
{
    problem p = {.slots = 0};
    random_state = (seed + (uint64_t)number) * 0x9e3779b97f4a7c15u | 1;
    draw_problem(&p);
    make_inputs(&p);
    make_results(&p);
    if (p.captured)
        call_captured(me, &p);
    else
        call_experts(me, &p);
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    ask_oracle(&p, p.exact, EPIC_F64);
    ask_oracle(&p, p.near, p.ex.row_type);
    compare_results(&p, number);
    free_problem(&p);
}

static int run_rank(team_rank *me)
{
    for (int i = 0; i < cases && failures < 20; i++) run_case(me, i);
    static const char *const types[] = {"bf16", "fp16", "float32", "e4m3"};
    for (int t = 0; t < 4; t++)
        for (int i = 0; i < 2; i++) {
            printf("experts: %-7s largest distance from %-14s", types[t],
                   i ? "rounding loops" : "float64 loops");
            for (int r = 0; r < RESULTS; r++) printf(" %.1e", worst[i][t][r]);
            printf("\n");
        }
    printf("experts: %d cases: %s\n", cases, failures ? "WRONG" : "good");
    return failures;
}

int main(int argc, char **argv)
{
    if (argc > 1) cases = scaled_cases(atoi(argv[1]));
    if (argc > 2) seed = (uint64_t)atoll(argv[2]);
    if (argc > 3) most = (uint32_t)atoi(argv[3]);
    const team t = {.num_ranks = 1,
                    .num_gpus = 1,
                    .max_tokens = 16,
                    .max_row_bytes = 64,
                    .timeout_ms = TEAM_LONG_MS,
                    .work = run_rank};
    return team_run(&t) != 0;
}
