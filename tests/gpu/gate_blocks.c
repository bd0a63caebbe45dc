/* SPDX-License-Identifier: Apache-2.0 */
/* Checks the gate's backward of several blocks of tokens in one call. The gradients of w_gate
 * and b_gate must have the bits of one call per block, whose results are added in a binary
 * tree, and the rows of d_x those of one call per block. Also compares the gradient of w_gate
 * with a float64 loop, and checks that no kernel writes past the workspace.
 *
 *   gpu_gate_blocks [CASES] [SEED] [large] */
#include <math.h>
#include <unistd.h>

#include "backend/p2p/p2p.h"
#include "cuda/experts/grouped.h"
#include "numbers.h"

typedef struct shape {
    gate_blocks blocks;
    int64_t hidden, columns;
    /* deciding: epic_gate_args.deciding_tokens; a large number selects components on GPUs with
     * tensor cores */
    int64_t deciding;
    uint32_t type;
    bool bias, accumulate, always_split, is_invariant;
} shape;

enum { GUARD_BYTES = 1024 };

/* Gradients on host and device. */
typedef struct results {
    both d_w, d_bias, d_x;
} results;

typedef struct problem {
    const shape *s;
    int64_t tokens, block;
    both x, w, d, also;
    results before, together; /* before: what the gradients are added to */
    uint8_t *workspace;
    int64_t bytes;
} problem;

static p2p_status status;
static epic_group group = {.status = &status, .device_sms = 132};

/* Returns the first token of block `index` of the call. */
static int64_t begin_of(const gate_blocks *b, int64_t index)
{
    const int64_t begin = (b->first + index) * b->units / b->total;
    return (begin - b->first * b->units / b->total) * b->unit;
}

/* Returns a copy of the gradients on the device. */
static results copy_results(const results *from)
{
    results to = {make_both(EPIC_F32, from->d_w.count), make_both(EPIC_F32, from->d_bias.count),
                  make_both(from->d_x.type, from->d_x.count)};
    const both *source[] = {&from->d_w, &from->d_bias, &from->d_x};
    const both *target[] = {&to.d_w, &to.d_bias, &to.d_x};
    for (int i = 0; i < 3; i++) {
        memcpy(target[i]->host, source[i]->host, source[i]->bytes);
        push_to_device(target[i]);
    }
    return to;
}

static void free_results(results *r)
{
    free_both(&r->d_w);
    free_both(&r->d_bias);
    free_both(&r->d_x);
}

/* Returns the bytes that calls of both kinds need, with the method that the shape selects. */
static int64_t measure_workspace(const problem *p)
{
    const shape *s = p->s;
    const int64_t deciding = s->deciding ? s->deciding : p->block;
    const gate_tokens all = {p->tokens, p->block, s->blocks.count, deciding};
    const gate_tokens one = {p->block, p->block, 1, deciding};
    int64_t bytes = gate_backward_bytes(&all, s->hidden, s->columns, s->is_invariant);
    bytes = gate_larger_of(bytes,
                           gate_backward_bytes(&one, s->hidden, s->columns, s->is_invariant));
    if (!s->always_split) return bytes;
    const int64_t components[] = {
        gate_leaves_of(p->tokens, p->block, s->blocks.count, s->hidden, s->columns, true).end,
        gate_components_of(p->block, s->hidden, s->columns, p->block, 1).end,
        gate_pairs_of(p->tokens, s->hidden, s->columns).end};
    for (int i = 0; i < 3; i++) bytes = gate_larger_of(bytes, components[i]);
    return bytes;
}

static problem make_problem(const shape *s)
{
    problem p = {.s = s, .tokens = begin_of(&s->blocks, s->blocks.count)};
    p.block = (s->blocks.units + s->blocks.total - 1) / s->blocks.total * s->blocks.unit;
    p.x = pushed_both(s->type, p.tokens * s->hidden, 1);
    p.w = pushed_both(EPIC_F32, s->hidden * s->columns, 1);
    p.d = pushed_both(EPIC_F32, p.tokens * s->columns, 1);
    p.also = pushed_both(s->type, p.tokens * s->hidden, 1);
    p.before = (results){pushed_both(EPIC_F32, s->hidden * s->columns, 1),
                         pushed_both(EPIC_F32, s->columns, 1),
                         pushed_both(s->type, p.tokens * s->hidden, 1)};
    p.bytes = measure_workspace(&p);
    must_succeed(cudaMalloc((void **)&p.workspace, (size_t)p.bytes + GUARD_BYTES) ==
                     cudaSuccess,
                 "memory");
    return p;
}

static void free_problem(problem *p)
{
    both *all[] = {&p->x, &p->w, &p->d, &p->also};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free_both(all[i]);
    free_results(&p->before);
    free_results(&p->together);
    cudaFree(p->workspace);
}

/* Runs backward on `tokens` tokens, from token `first` on, and copies the results to the host.
 * Returns false if a kernel wrote past the workspace. */
static bool run_backward(const problem *p, results *r, int64_t first, int64_t tokens,
                         const gate_blocks *blocks, bool accumulate)
{
    const shape *s = p->s;
    const int64_t row = s->hidden * bytes_of(s->type);
    const epic_gate_args gate = {
        .x = (const char *)p->x.device + first * row,
        .tokens = tokens,
        .hidden = s->hidden,
        .columns = s->columns,
        .block = p->block,
        .deciding_tokens = s->deciding,
        .w_gate = p->w.device,
        .logits = (float *)p->d.device + first * s->columns,
        .workspace = p->workspace,
        .row_type = s->type,
        .d_x = (char *)r->d_x.device + first * row,
        .addend = s->accumulate ? (const char *)p->also.device + first * row : NULL,
        .d_w_gate = r->d_w.device,
        .d_b_gate = s->bias ? r->d_bias.device : NULL,
        .accumulate = accumulate,
        .always_split = s->always_split && tokens,
        .is_invariant = s->is_invariant,
        .blocks = blocks ? *blocks : (gate_blocks){0}};
    const size_t bytes = (size_t)p->bytes + GUARD_BYTES;
    uint8_t guard[GUARD_BYTES];
    bool inside = true;
    must_succeed(cudaMemset(p->workspace, 0xff, bytes) == cudaSuccess, "poison");
    must_succeed(cudaDeviceSynchronize() == cudaSuccess, "poison");
    must_succeed(p2p_gate_backward(&group, &gate) == EPIC_OK, "backward");
    must_succeed(cudaDeviceSynchronize() == cudaSuccess, "a kernel");
    pull_from_device(&r->d_w);
    pull_from_device(&r->d_bias);
    pull_from_device(&r->d_x);
    must_succeed(cudaMemcpy(guard, p->workspace + p->bytes, GUARD_BYTES,
                            cudaMemcpyDeviceToHost) == cudaSuccess,
                 "guard");
    for (int i = 0; i < GUARD_BYTES; i++) inside = inside && guard[i] == 0xff;
    if (!inside) printf("gate blocks: written past the workspace\n");
    return inside;
}

/* Adds the arrays of all blocks [count, n] in a binary tree. Writes the sum to the first array,
 * or adds it to `before`, if that is not NULL, and writes the result. */
static void add_in_tree(float *leaves, int64_t count, int64_t n, const float *before)
{
    for (int64_t distance = 1; distance < count; distance *= 2)
        for (int64_t b = 0; b < count; b += 2 * distance)
            for (int64_t i = 0; i < n; i++) leaves[b * n + i] += leaves[(b + distance) * n + i];
    for (int64_t i = 0; before && i < n; i++) leaves[i] = before[i] + leaves[i];
}

/* Returns true if two arrays have the same bits. Prints the first difference otherwise. */
static bool compare_bits(const char *name, const void *got, const void *want, int64_t count,
                         uint32_t type)
{
    const size_t bytes = (size_t)bytes_of(type);
    for (int64_t i = 0; i < count; i++) {
        if (!memcmp((const char *)got + i * (int64_t)bytes,
                    (const char *)want + i * (int64_t)bytes, bytes))
            continue;
        printf("gate blocks: %s, number %lld has other bits: %a, must be %a\n", name,
               (long long)i, get_number(got, type, i), get_number(want, type, i));
        return false;
    }
    return true;
}

/* Runs one call per block, and compares its results with those of one call for all blocks. */
static bool compare_with_blocks(problem *p)
{
    const shape *s = p->s;
    const int64_t count = s->blocks.count, numbers = s->hidden * s->columns;
    results one = copy_results(&p->before);
    float *d_w = malloc((size_t)(count * numbers) * sizeof *d_w);
    float *d_bias = malloc((size_t)(count * s->columns) * sizeof *d_bias);
    bool good = true;
    for (int64_t b = 0; b < count; b++) {
        const int64_t first = begin_of(&s->blocks, b);
        good = run_backward(p, &one, first, begin_of(&s->blocks, b + 1) - first, NULL, false) &&
               good;
        memcpy(d_w + b * numbers, one.d_w.host, (size_t)numbers * sizeof *d_w);
        memcpy(d_bias + b * s->columns, one.d_bias.host, (size_t)s->columns * sizeof *d_bias);
    }
    add_in_tree(d_w, count, numbers, s->accumulate ? p->before.d_w.host : NULL);
    add_in_tree(d_bias, count, s->columns, s->accumulate ? p->before.d_bias.host : NULL);
    good = compare_bits("w_gate", p->together.d_w.host, d_w, numbers, EPIC_F32) && good;
    if (s->bias)
        good = compare_bits("b_gate", p->together.d_bias.host, d_bias, s->columns, EPIC_F32) &&
               good;
    good = compare_bits("d_x", p->together.d_x.host, one.d_x.host, p->tokens * s->hidden,
                        s->type) &&
           good;
    free(d_w);
    free(d_bias);
    free_results(&one);
    return good;
}

/* Returns the largest error of the gradient of w_gate, relative to the bound of gate_check.c,
 * plus one rounding for each level of the tree. */
static double find_error(const problem *p)
{
    const shape *s = p->s;
    double worst = 0;
    for (int64_t i = 0; i < s->hidden * s->columns; i++) {
        const int64_t h = i / s->columns, c = i % s->columns;
        double want = s->accumulate ? p->before.d_w.truth[i] : 0, size = fabs(want);
        for (int64_t t = 0; t < p->tokens; t++) {
            const double term = p->x.truth[t * s->hidden + h] * p->d.truth[t * s->columns + c];
            want += term;
            size += fabs(term);
        }
        const double bound = (8e-7 + 1.5e-10 * (double)p->tokens) * size + 1e-30;
        const double part = fabs(get_number(p->together.d_w.host, EPIC_F32, i) - want) / bound;
        if (!(part <= worst)) worst = part; /* also true for NaN */
    }
    return worst;
}

static bool run_shape(const shape *s)
{
    problem p = make_problem(s);
    p.together = copy_results(&p.before);
    bool good = run_backward(&p, &p.together, 0, p.tokens, &s->blocks, s->accumulate);
    good = compare_with_blocks(&p) && good;
    const double error = find_error(&p);
    good = good && error <= 1;
    printf("gate blocks: %lld of %lld blocks, %lld tokens, hidden %lld, %lld columns, type "
           "%u%s: %.2f of what may be%s\n",
           (long long)s->blocks.count, (long long)s->blocks.total, (long long)p.tokens,
           (long long)s->hidden, (long long)s->columns, s->type,
           s->always_split ? " in components" : "", error, good ? ", equal bits" : ": WRONG");
    free_problem(&p);
    return good;
}

static shape random_shape(void)
{
    static const uint32_t types[] = {EPIC_BF16, EPIC_BF16, EPIC_F16, EPIC_F32};
    const int64_t each = random_below(4) ? 8 : 1, count = 2ll << random_below(3);
    const int64_t batches = 1ll << random_below(3);
    const uint32_t type = types[random_below(4)];
    return (shape){.blocks = {.first = count * random_below((uint32_t)batches),
                              .count = count,
                              .total = count * batches,
                              .units = random_below(random_below(2) ? 40 : 1200),
                              .unit = random_below(4) ? 1 : 1 + random_below(5)},
                   .hidden = each * (1 + random_below(200 / (uint32_t)each)),
                   .columns = each * (1 + random_below(80 / (uint32_t)each)),
                   .deciding = random_below(2) ? 1 << 24 : 0,
                   .type = type,
                   .bias = random_below(2),
                   .accumulate = random_below(2),
                   .always_split = type == EPIC_BF16 && random_below(2),
                   .is_invariant = random_below(2)};
}

int main(int argc, char **argv)
{
    /* layers with 7168 and Qwen3-30B, with 128 and 4096 tokens, on one GPU and on two */
    static const shape large[] = {
        {{0, 8, 8, 128, 1}, 7168, 8, 128, EPIC_BF16, true, false, false, false},
        {{0, 8, 8, 4096, 1}, 7168, 8, 4096, EPIC_BF16, true, true, false, true},
        {{0, 4, 4, 4096, 1}, 2048, 128, 8192, EPIC_BF16, false, false, false, false},
        {{0, 8, 8, 4001, 1}, 2048, 64, 4096, EPIC_BF16, true, true, false, true}};
    const int cases = argc > 1 ? atoi(argv[1]) : 20;
    random_state = argc > 2 ? strtoull(argv[2], NULL, 10) * 7919 + 1 : 1;
    alarm(300);
    must_succeed(p2p_load_plain_gemm() == cudaSuccess && p2p_load_hopper_gemm() == cudaSuccess,
                 "loading");
    int bad = 0;
    for (int i = 0; i < cases; i++) {
        const shape s = random_shape();
        bad += !run_shape(&s);
    }
    for (int i = 0; i < 4 && argc > 3; i++) bad += !run_shape(&large[i]);
    printf("gate blocks: %s\n", bad ? "WRONG" : "good");
    return bad != 0;
}
