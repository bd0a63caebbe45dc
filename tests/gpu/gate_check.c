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

/* Returns the bytes of the workspace of a call with one block of tokens (in forward, of all
 * blocks), whose size decides on the method. */
static int64_t gate_bytes(int64_t tokens, int64_t block, int64_t hidden, int64_t columns,
                          bool backward, bool invariant)
{
    const gate_tokens t = {tokens, block, 1, block};
    return backward ? gate_backward_bytes(&t, hidden, columns, invariant)
                    : gate_forward_bytes(&t, hidden, columns, invariant);
}

/* Returns the workspace for both methods, forward and backward. */
static size_t workspace_bytes(const shape *s)
{
    const int64_t both_ways[] = {
        gate_bytes(s->tokens, s->tokens, s->hidden, s->columns, false, is_invariant(s)),
        gate_bytes(s->tokens, s->tokens, s->hidden, s->columns, true, is_invariant(s)),
        gate_components_of(s->tokens, s->tokens, s->columns, s->hidden,
                           gate_component_slices(s->hidden, s->columns))
            .end,
        gate_components_of(s->tokens, s->hidden, s->columns, s->tokens, 1).end,
        gate_pairs_of(s->tokens, s->hidden, s->columns).end};
    int64_t most = 0;
    for (int i = 0; i < 5; i++) most = both_ways[i] > most ? both_ways[i] : most;
    return (size_t)most;
}

static problem make_problem(const shape *s)
{
    problem p = {.s = s,
                 .x = pushed_both(s->type, s->tokens * s->hidden, 1),
                 .w = pushed_both(EPIC_F32, s->hidden * s->columns, 1),
                 .bias = pushed_both(EPIC_F32, s->columns, 1),
                 .logits = make_both(EPIC_F32, s->tokens * s->columns),
                 .d = pushed_both(EPIC_F32, s->tokens * s->columns, 1),
                 .d_w = pushed_both(EPIC_F32, s->hidden * s->columns, 1),
                 .d_bias = pushed_both(EPIC_F32, s->columns, 1),
                 .d_x = pushed_both(s->type, s->tokens * s->hidden, 1),
                 .also = pushed_both(s->type, s->tokens * s->hidden, 1)};
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

/* A gate with EPIC_INVARIANT whose tokens are computed in many selections. */
typedef struct invariant_gate {
    int64_t most, hidden, columns; /* most: number of all tokens */
    uint32_t type;
} invariant_gate;

/* The arrays of an invariant_gate. `all` has the logits of all tokens, computed together. */
typedef struct invariant_arrays {
    both x, w, bias, logits;
    float *all;
    uint8_t *workspace;
} invariant_arrays;

enum { GUARD_BYTES = 1024 };

/* Computes the logits of `tokens` tokens from token `first` on, with at most `sms` CTAs at a
 * time, and copies them to the host. Returns false if the kernels wrote past the workspace. */
static bool run_selection(const invariant_gate *g, invariant_arrays *a, int64_t first,
                          int64_t tokens, int sms)
{
    const int64_t bytes = gate_bytes(tokens, tokens, g->hidden, g->columns, false, true);
    const size_t logits_bytes = (size_t)(tokens * g->columns) * sizeof(float);
    const epic_gate_args gate = {.x = (const char *)a->x.device +
                                      first * g->hidden * bytes_of(g->type),
                                 .tokens = tokens,
                                 .hidden = g->hidden,
                                 .columns = g->columns,
                                 .block = 1 + random_below(4096),
                                 .w_gate = a->w.device,
                                 .b_gate = a->bias.device,
                                 .logits = a->logits.device,
                                 .workspace = a->workspace,
                                 .row_type = g->type,
                                 .is_invariant = 1};
    uint8_t guard[GUARD_BYTES];
    bool inside = true;
    group.device_sms = sms;
    must_succeed(cudaMemset(a->logits.device, 0xff, logits_bytes) == cudaSuccess, "poison");
    must_succeed(cudaMemset(a->workspace, 0xff, (size_t)bytes + GUARD_BYTES) == cudaSuccess,
                 "poison");
    must_succeed(cudaDeviceSynchronize() == cudaSuccess, "poison");
    must_succeed(p2p_gate(&group, &gate) == EPIC_OK, "forward");
    must_succeed(cudaDeviceSynchronize() == cudaSuccess, "a kernel");
    must_succeed(cudaMemcpy(a->logits.host, a->logits.device, logits_bytes,
                            cudaMemcpyDeviceToHost) == cudaSuccess,
                 "logits");
    must_succeed(cudaMemcpy(guard, a->workspace + bytes, GUARD_BYTES, cudaMemcpyDeviceToHost) ==
                     cudaSuccess,
                 "guard");
    for (int i = 0; i < GUARD_BYTES; i++) inside = inside && guard[i] == 0xff;
    return inside;
}

/* Checks a selection: its logits must have the bits that all tokens together have. */
static bool check_selection(const invariant_gate *g, invariant_arrays *a, int64_t first,
                            int64_t tokens, int sms)
{
    const bool inside = run_selection(g, a, first, tokens, sms);
    const float *got = a->logits.host, *want = a->all + first * g->columns;
    const int64_t count = tokens * g->columns;
    const bool equal = !memcmp(got, want, (size_t)count * sizeof *got);
    for (int64_t i = 0; i < count && !equal; i++) {
        if (!memcmp(&got[i], &want[i], sizeof *got)) continue;
        printf("gate, invariant: token %lld of %lld, column %lld has other bits: %a, must be "
               "%a\n",
               (long long)(i / g->columns), (long long)tokens, (long long)(i % g->columns),
               (double)got[i], (double)want[i]);
        return false;
    }
    if (!inside) printf("gate, invariant: written past the workspace\n");
    return inside;
}

/* Checks that a token's logits depend only on its row: for 0 to g->most tokens, in steps of
 * `step`, and for 100 random selections with random numbers of SMs. Other tokens of the array
 * follow those of a selection, so a kernel that reads too many rows is noticed. */
static bool run_invariant(const invariant_gate *g, int64_t step)
{
    static const int sms[] = {132, 1, 2, 7, 48};
    invariant_arrays a = {.x = pushed_both(g->type, g->most * g->hidden, 1),
                          .w = pushed_both(EPIC_F32, g->hidden * g->columns, 1),
                          .bias = pushed_both(EPIC_F32, g->columns, 1),
                          .logits = make_both(EPIC_F32, g->most * g->columns)};
    const size_t logits_bytes = (size_t)(g->most * g->columns) * sizeof *a.all;
    const size_t bytes =
        (size_t)gate_bytes(g->most, g->most, g->hidden, g->columns, false, true) + GUARD_BYTES;
    must_succeed(cudaMalloc((void **)&a.workspace, bytes) == cudaSuccess, "memory");
    a.all = malloc(logits_bytes);
    bool good = run_selection(g, &a, 0, g->most, sms[0]);
    memcpy(a.all, a.logits.host, logits_bytes);
    for (int64_t tokens = 0; tokens <= g->most && good; tokens += step)
        good = check_selection(g, &a, 0, tokens, sms[0]);
    for (int i = 0; i < 100 && good; i++) {
        const int64_t first = random_below((uint32_t)g->most);
        const int64_t most = random_below(3) ? g->most - first : 1;
        good = check_selection(g, &a, first, 1 + random_below((uint32_t)most),
                               sms[random_below(5)]);
    }
    printf("gate, invariant: 0 to %lld tokens, hidden %lld, %lld columns, type %u, %d slices: "
           "%s\n",
           (long long)g->most, (long long)g->hidden, (long long)g->columns, g->type,
           gate_component_slices(g->hidden, g->columns), good ? "equal bits" : "WRONG");
    both *arrays[] = {&a.x, &a.w, &a.bias, &a.logits};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free_both(arrays[i]);
    cudaFree(a.workspace);
    free(a.all);
    group.device_sms = 132;
    return good;
}

/* Checks that slices cover every sum, none is empty, and they need little memory. */
static int check_slices(void)
{
    int bad = 0;
    for (int64_t hidden = 8; hidden <= 16384; hidden += 8)
        for (int64_t columns = 8; columns <= 1024; columns += 8) {
            const int32_t slices = gate_component_slices(hidden, columns);
            const int64_t terms = gate_slice_terms(hidden, slices);
            bad += slices < 1 || slices > GATE_SLICES || terms % GATE_STEP;
            bad += slices * terms < hidden || (slices - 1) * terms >= hidden;
            bad += slices > 1 && slices * GATE_COMPONENTS * columns * 4 > hidden * 2;
        }
    if (bad) printf("gate: wrong slices, %d times\n", bad);
    return bad;
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
                bad += there < gate_components_of(tokens, tokens, columns, hidden, 1).end;
                bad += back < gate_components_of(block, hidden, columns, block, 1).end;
                bad += back < gate_pairs_of(block, hidden, columns).end;
            }
    /* rows are so short that only the gradient of w_gate uses pieces */
    const int64_t many = 40000, narrow = 136;
    const bool only_weight = gate_is_large(narrow, 8, many) && !gate_is_large(many, 8, narrow);
    bad += !only_weight || gate_bytes(many, many, narrow, 8, true, false) <
                               gate_components_of(many, narrow, 8, many, 1).end;
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
    /* odd numbers of tokens, which are computed as with EPIC_INVARIANT, in 8, 8, 3, 5 and 1
     * slices */
    static const shape sliced[] = {{1, 7168, 32, EPIC_BF16, true, false, false},
                                   {129, 7168, 64, EPIC_BF16, false, true, false},
                                   {127, 2880, 128, EPIC_BF16, true, false, false},
                                   {201, 1100, 32, EPIC_BF16, true, false, false},
                                   {65, 2048, 256, EPIC_BF16, false, false, false}};
    static const invariant_gate few[] = {
        {300, 256, 8, EPIC_BF16},
        {200, 200, 24, EPIC_F16},
        {150, 136, 7, EPIC_F32},
        {140, 130, 5, EPIC_BF16},
        {140, 1100, 70, EPIC_F32}}; /* the kernel for few rows */
    static const invariant_gate many[] = {{4096, 7168, 32, EPIC_BF16},
                                          {4096, 2880, 128, EPIC_BF16}};
    static const invariant_gate wide[] = {{4096, 7168, 256, EPIC_BF16},
                                          {4096, 2048, 256, EPIC_BF16},
                                          {4096, 1100, 24, EPIC_BF16}};
    static const shape large = {1024, 2048, 256, EPIC_BF16, true, true, false};
    const int cases = scaled_cases(argc > 1 ? atoi(argv[1]) : 20);
    random_state = argc > 2 ? strtoull(argv[2], NULL, 10) * 7919 + 1 : 1;
    alarm(900); /* `make test-night` runs ten times the cases */
    must_succeed(p2p_load_plain_gemm() == cudaSuccess && p2p_load_hopper_gemm() == cudaSuccess,
                 "loading");
    int bad = check_room() + check_slices();
    for (size_t i = 0; i < sizeof first / sizeof *first; i++) bad += !run_shape(&first[i]);
    for (int i = 0; i < cases; i++) {
        const shape s = random_shape();
        bad += !run_shape(&s);
    }
    for (int i = 0; i < 5; i++) bad += !run_invariant(&few[i], 13);
    if (argc > 3) {
        bad += !run_shape(&large);
        for (int i = 0; i < 5; i++) bad += !run_shape(&sliced[i]);
        for (int i = 0; i < 2; i++) bad += !run_invariant(&many[i], 1);
        for (int i = 0; i < 3; i++) bad += !run_invariant(&wide[i], 37);
    }
    printf("gate: %s\n", bad ? "WRONG" : "good");
    return bad != 0;
}
