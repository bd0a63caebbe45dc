/* SPDX-License-Identifier: Apache-2.0 */
/* Checks the products of the router's gate against float64 loops, in shapes that use tensor
 * cores and in others. All bits of the float32 operand must count, whichever method multiplies.
 *
 *   gpu_gate_check [CASES] [SEED] [large] */
#include <math.h>
#include <unistd.h>

#include "backend/p2p/p2p.h"
#include "cuda/experts/grouped.h"
#include "numbers.h"
#include "scaled_cases.h"

typedef struct shape {
    int64_t tokens, hidden, columns;
    uint32_t type;
    bool bias, accumulate, always_split; /* accumulate: also adds `also` to d_x */
} shape;

/* Returns true for odd numbers of tokens, which test the method of EPIC_INVARIANT. */
static bool is_invariant(const shape *s)
{
    return s->tokens % 2;
}

typedef struct problem {
    const shape *s;
    both x, w, bias, logits, d, d_w, d_bias, d_x, also;
    void *workspace;
    double worst; /* largest error so far, relative to the bound */
} problem;

static p2p_status status;
static epic_group group = {.status = &status, .device_sms = 132};

static both pushed_both(uint32_t type, int64_t count)
{
    both b = random_both(type, count, 1);
    push_to_device(&b);
    return b;
}

/* Returns the workspace for both methods, forward and backward. */
static size_t workspace_bytes(const shape *s)
{
    const int64_t both_ways[] = {
        gate_bytes(s->tokens, s->tokens, s->hidden, s->columns, false, is_invariant(s)),
        gate_bytes(s->tokens, s->tokens, s->hidden, s->columns, true, is_invariant(s)),
        gate_components_of(s->tokens, s->tokens, s->columns, s->hidden).end,
        gate_components_of(s->tokens, s->hidden, s->columns, s->tokens).end,
        gate_pairs_of(s->tokens, s->hidden, s->columns).end};
    int64_t most = 0;
    for (int i = 0; i < 5; i++) most = both_ways[i] > most ? both_ways[i] : most;
    return (size_t)most;
}

static problem make_problem(const shape *s)
{
    problem p = {.s = s,
                 .x = pushed_both(s->type, s->tokens * s->hidden),
                 .w = pushed_both(EPIC_F32, s->hidden * s->columns),
                 .bias = pushed_both(EPIC_F32, s->columns),
                 .logits = make_both(EPIC_F32, s->tokens * s->columns),
                 .d = pushed_both(EPIC_F32, s->tokens * s->columns),
                 .d_w = pushed_both(EPIC_F32, s->hidden * s->columns),
                 .d_bias = pushed_both(EPIC_F32, s->columns),
                 .d_x = pushed_both(s->type, s->tokens * s->hidden),
                 .also = pushed_both(s->type, s->tokens * s->hidden)};
    const size_t bytes = workspace_bytes(s);
    push_to_device(&p.logits);
    must_succeed(cudaMalloc(&p.workspace, bytes) == cudaSuccess, "memory");
    must_succeed(cudaMemset(p.workspace, 0xff, bytes) == cudaSuccess, "poison");
    must_succeed(cudaDeviceSynchronize() == cudaSuccess, "poison");
    return p;
}

static void free_problem(problem *p)
{
    both *all[] = {&p->x,   &p->w,      &p->bias, &p->logits, &p->d,
                   &p->d_w, &p->d_bias, &p->d_x,  &p->also};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free_both(all[i]);
    cudaFree(p->workspace);
}

/* A sum of `depth` products, `step` elements apart, added to `begin`. */
typedef struct sum {
    const double *a, *b;
    int64_t step_a, step_b, depth;
    double begin, rounding; /* relative rounding of the result */
} sum;

/* Checks a number. The bound is the rounding of all these sums, which tensor cores round
 * towards zero. */
static void judge_number(problem *p, double got, sum s)
{
    double want = s.begin, size = fabs(s.begin);
    for (int64_t i = 0; i < s.depth; i++) {
        const double term = s.a[i * s.step_a] * s.b[i * s.step_b];
        want += term;
        size += fabs(term);
    }
    const double bound = (5e-7 + 1.5e-10 * (double)s.depth) * size + s.rounding * fabs(want);
    const double part = fabs(got - want) / (bound + 1e-30);
    if (!(part <= p->worst)) p->worst = part; /* also true for NaN */
}

static void check_logits(problem *p)
{
    const shape *s = p->s;
    for (int64_t i = 0; i < s->tokens * s->columns; i++) {
        const int64_t t = i / s->columns, c = i % s->columns;
        judge_number(p, get_number(p->logits.host, EPIC_F32, i),
                     (sum){.a = &p->x.truth[t * s->hidden],
                           .step_a = 1,
                           .b = &p->w.truth[c],
                           .step_b = s->columns,
                           .depth = s->hidden,
                           .begin = s->bias ? p->bias.truth[c] : 0});
    }
}

static void check_gradient(problem *p)
{
    const shape *s = p->s;
    for (int64_t i = 0; i < s->hidden * s->columns; i++) {
        const int64_t h = i / s->columns, c = i % s->columns;
        judge_number(p, get_number(p->d_w.host, EPIC_F32, i),
                     (sum){.a = &p->x.truth[h],
                           .step_a = s->hidden,
                           .b = &p->d.truth[c],
                           .step_b = s->columns,
                           .depth = s->tokens,
                           .begin = s->accumulate ? p->d_w.truth[i] : 0});
    }
}

/* Checks that rows are rounded once, whatever is added. */
static void check_rows(problem *p)
{
    const shape *s = p->s;
    const double rounding = s->type == EPIC_BF16 ? 0x1p-8 : s->type == EPIC_F16 ? 0x1p-11 : 0;
    for (int64_t i = 0; i < s->tokens * s->hidden; i++) {
        const int64_t t = i / s->hidden, h = i % s->hidden;
        judge_number(p, get_number(p->d_x.host, s->type, i),
                     (sum){.a = &p->d.truth[t * s->columns],
                           .step_a = 1,
                           .b = &p->w.truth[h * s->columns],
                           .step_b = 1,
                           .depth = s->columns,
                           .begin = p->d_x.truth[i] + (s->accumulate ? p->also.truth[i] : 0),
                           .rounding = rounding});
    }
}

static bool run_shape(const shape *s)
{
    problem p = make_problem(s);
    epic_gate_args gate = {.x = p.x.device,
                           .tokens = s->tokens,
                           .hidden = s->hidden,
                           .columns = s->columns,
                           .block = s->tokens,
                           .w_gate = p.w.device,
                           .b_gate = s->bias ? p.bias.device : NULL,
                           .logits = p.logits.device,
                           .workspace = p.workspace,
                           .row_type = s->type,
                           .accumulate = s->accumulate,
                           .always_split = s->always_split && s->tokens,
                           .is_invariant = is_invariant(s)};
    must_succeed(p2p_gate(&group, &gate) == EPIC_OK, "forward");
    gate.logits = p.d.device;
    gate.d_w_gate = p.d_w.device;
    gate.d_b_gate = p.d_bias.device;
    gate.d_x = p.d_x.device;
    gate.addend = s->accumulate ? p.also.device : NULL;
    must_succeed(p2p_gate_backward(&group, &gate) == EPIC_OK, "backward");
    must_succeed(cudaDeviceSynchronize() == cudaSuccess, "a kernel");
    pull_from_device(&p.logits);
    pull_from_device(&p.d_w);
    pull_from_device(&p.d_x);
    check_logits(&p);
    const double forward = p.worst;
    check_gradient(&p);
    const double weights = p.worst;
    check_rows(&p);
    const bool good = p.worst <= 1;
    printf("gate: %lld tokens, hidden %lld, %lld columns, type %u%s: %.2f, %.2f and %.2f of "
           "what may be%s\n",
           (long long)s->tokens, (long long)s->hidden, (long long)s->columns, s->type,
           s->always_split ? " in pieces" : "", forward, weights, p.worst,
           good ? "" : ": WRONG");
    free_problem(&p);
    return good;
}

/* Forward uses all blocks of a layer at once, backward one by one. Checks that the workspace is
 * large enough. */
static int check_room(void)
{
    int bad = 0;
    for (int64_t tokens = 512; tokens <= 8192; tokens *= 2)
        for (int64_t block = 512; block <= tokens; block *= 2)
            for (int64_t columns = 16; columns <= 512; columns *= 2) {
                const int64_t hidden = 7168;
                const int64_t there = gate_bytes(tokens, block, hidden, columns, false, false);
                const int64_t back = gate_bytes(tokens, block, hidden, columns, true, false);
                if (!gate_is_large(block, columns, hidden)) continue;
                bad += there < gate_components_of(tokens, tokens, columns, hidden).end;
                bad += back < gate_components_of(block, hidden, columns, block).end;
                bad += back < gate_pairs_of(block, hidden, columns).end;
            }
    if (bad) printf("gate: too little workspace, %d times\n", bad);
    return bad;
}

static shape random_shape(void)
{
    static const uint32_t types[] = {EPIC_BF16, EPIC_BF16, EPIC_F16, EPIC_F32};
    const int64_t each = random_below(4) ? 8 : 1;
    const uint32_t type = types[random_below(4)];
    return (shape){.tokens = 1 + random_below(300),
                   .hidden = each * (1 + random_below(400 / (uint32_t)each)),
                   .columns = each * (1 + random_below(160 / (uint32_t)each)),
                   .type = type,
                   .bias = random_below(2),
                   .accumulate = random_below(2),
                   .always_split = type == EPIC_BF16 && random_below(3)};
}

int main(int argc, char **argv)
{
    static const shape first[] = {{3, 8, 8, EPIC_BF16, true, false, true},
                                  {130, 64, 16, EPIC_BF16, false, true, true},
                                  {64, 7168, 256, EPIC_BF16, false, false, true},
                                  {64, 7168, 256, EPIC_BF16, false, false, false},
                                  {0, 64, 16, EPIC_BF16, false, false, true}};
    static const shape large = {1024, 2048, 256, EPIC_BF16, true, true, false};
    const int cases = scaled_cases(argc > 1 ? atoi(argv[1]) : 20);
    random_state = argc > 2 ? strtoull(argv[2], NULL, 10) * 7919 + 1 : 1;
    alarm(300);
    must_succeed(p2p_load_plain_gemm() == cudaSuccess && p2p_load_hopper_gemm() == cudaSuccess,
                 "loading");
    int bad = check_room();
    for (size_t i = 0; i < sizeof first / sizeof *first; i++) bad += !run_shape(&first[i]);
    for (int i = 0; i < cases; i++) {
        const shape s = random_shape();
        bad += !run_shape(&s);
    }
    if (argc > 3) bad += !run_shape(&large);
    printf("gate: %s\n", bad ? "WRONG" : "good");
    return bad != 0;
}
