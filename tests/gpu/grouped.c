/* SPDX-License-Identifier: Apache-2.0 */
/* Checks the grouped products, every pass with every kernel that supports it, against float64
 * loops. Named shapes come first, from simple to difficult, so that the first failure shows
 * what is wrong. Random shapes follow. Memory after the slabs must stay unchanged. Padding rows
 * are NaN in the input. In the output they must be zero or, with leave_padding, zero or
 * unchanged.
 *
 *   gpu_grouped [RANDOM_CASES] [SEED] [MOST] [KERNEL]
 *       MOST: largest k and n of random cases; KERNEL: plain, sliced, pairs or alone */
#include <math.h>
#include <signal.h>
#include <unistd.h>

#include "cuda/experts/grouped.h"
#include "scaled.h"
#include "scaled_cases.h"

enum { MOST_EXPERTS = 40, TAIL = 70, SLICES = 3 };

typedef struct shape {
    const char *name;
    int64_t k, n;
    int experts, alignment;
    int tokens[MOST_EXPERTS];
    /* out_type: type of weight gradients or, with E4M3 rows, of results */
    uint32_t type, out_type;
    bool bias, weighted, accumulate;
} shape;

typedef struct problem {
    const shape *s;
    int32_t rows[MOST_EXPERTS], first[MOST_EXPERTS];
    int64_t slots;
    uint32_t y_type;
    both x, w, d, bias, weights, counts, tokens;
    both scales[2];      /* E4M3: scales of x and d */
    scaled_weights of_w; /* only for E4M3 */
    p2p_slabs slabs;
    void *workspace;
} problem;

typedef enum kernel { PLAIN, SLICED, PAIRS, ALONE, KERNELS } kernel;

static const char *const kernels[] = {"plain", "sliced", "pairs", "alone"};
static const char *const passes[] = {"forward", "input", "weight"};
static int good[3][KERNELS], bad[3][KERNELS], left_out[3][KERNELS];
static cudaStream_t stream;
static const char *only; /* name of the only kernel to test */
static char running[160];

/* ---------------------------------------------------------------------------- problems ---- */

static void lay_out(problem *p)
{
    const shape *s = p->s;
    for (int e = 0; e < s->experts; e++) {
        p->first[e] = (int32_t)p->slots;
        p->rows[e] = (s->tokens[e] + s->alignment - 1) / s->alignment * s->alignment;
        p->slots += p->rows[e];
    }
    p->slots += TAIL;
}

/* Rows with a token are random, the others NaN. */
static both make_rows(const problem *p, int64_t columns)
{
    both b = make_both(p->s->type, p->slots * columns);
    for (int e = 0; e < p->s->experts; e++)
        for (int64_t i = 0; i < p->s->tokens[e] * columns; i++)
            set_number(&b, p->first[e] * columns + i, random_number(1));
    push_to_device(&b);
    return b;
}

static both make_pushed(uint32_t type, int64_t count, double size)
{
    both b = random_both(type, count, size);
    push_to_device(&b);
    return b;
}

static both make_counts(const int32_t *counts, int n)
{
    both b = make_both(EPIC_F32, n);
    memcpy(b.host, counts, (size_t)n * sizeof *counts);
    push_to_device(&b);
    return b;
}

static void make_slabs(problem *p)
{
    const epic_experts as = {.num_local_experts = (uint32_t)p->s->experts,
                             .hidden = 8,
                             .inner = 8,
                             .row_type = EPIC_BF16};
    const experts_layout at = experts_layout_of(&as, p->slots, false);
    must_succeed(cudaMalloc(&p->workspace, (size_t)at.activations) == cudaSuccess, "memory");
    uint8_t *work = p->workspace;
    p->slabs = (p2p_slabs){.expert_rows = p->counts.device,
                           .expert_tokens = p->tokens.device,
                           .num_tiles = (int32_t *)(void *)work,
                           .tiles = (slab_tile *)(void *)(work + at.tiles),
                           .slabs = (slab_range *)(void *)(work + at.slabs),
                           .num_slots = p->slots,
                           .num_experts = p->s->experts,
                           .most_tiles = at.most_tiles};
    must_succeed(p2p_launch_slabs(&p->slabs, stream) == cudaSuccess, "launching slabs");
    must_succeed(cudaStreamSynchronize(stream) == cudaSuccess, "slabs");
}

static problem make_problem(const shape *s)
{
    problem p = {.s = s, .y_type = s->type == EPIC_E4M3 ? s->out_type : s->type};
    int32_t tokens[MOST_EXPERTS];
    for (int e = 0; e < s->experts; e++) tokens[e] = s->tokens[e];
    lay_out(&p);
    p.x = make_rows(&p, s->k);
    p.d = make_rows(&p, s->n);
    p.w = make_pushed(s->type, s->experts * s->k * s->n, 0.3);
    p.bias = make_pushed(p.y_type, s->experts * s->n, 1);
    if (s->type == EPIC_E4M3) {
        p.scales[0] = scale_rows(&p.x, s->k);
        p.scales[1] = scale_rows(&p.d, s->n);
        p.of_w = scale_weights(&p.w, s->experts, s->k, s->n);
    }
    p.weights = make_pushed(EPIC_F32, p.slots, 1);
    p.counts = make_counts(p.rows, s->experts);
    p.tokens = make_counts(tokens, s->experts);
    make_slabs(&p);
    return p;
}

static void free_problem(problem *p)
{
    both *all[] = {&p->x,      &p->w,      &p->d,         &p->bias,     &p->weights,
                   &p->counts, &p->tokens, &p->scales[0], &p->scales[1]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free_both(all[i]);
    free_scaled(&p->of_w);
    cudaFree(p->workspace);
}

/* ------------------------------------------------------------------------------- truth ---- */

/* Returns the expected number (line, column) of the result. A line is a slot, or expert * k + a
 * row of its weights. *size becomes the sum of the absolute values. */
static double truth_at(const problem *p, uint32_t pass, int expert, int64_t line,
                       int64_t column, double *size)
{
    const int64_t k = p->s->k, n = p->s->n, first = p->first[expert];
    double sum = 0, all = 0;
    if (pass == EPIC_GEMM_WEIGHT)
        for (int64_t r = first; r < first + p->s->tokens[expert]; r++) {
            const double term = p->x.truth[r * k + line % k] * p->d.truth[r * n + column];
            sum += term;
            all += fabs(term);
        }
    else
        for (int64_t i = 0; i < (pass == EPIC_GEMM_FORWARD ? k : n); i++) {
            const double term =
                pass == EPIC_GEMM_FORWARD
                    ? p->x.truth[line * k + i] * p->w.truth[(expert * k + i) * n + column]
                    : p->d.truth[line * n + i] * p->w.truth[(expert * k + column) * n + i];
            sum += term;
            all += fabs(term);
        }
    if (pass == EPIC_GEMM_FORWARD && p->s->bias) {
        const double w = p->s->weighted ? p->weights.truth[line] : 1;
        sum += w * p->bias.truth[expert * n + column];
        all += fabs(w * p->bias.truth[expert * n + column]);
    }
    *size += all;
    return sum;
}

typedef struct verdict {
    /* position of the first wrong number, after the counts */
    int64_t wrong, checked, line, column;
    int expert;
    double got, want;
    int64_t boxes[2][4]; /* wrong numbers in its tile, by boxes of 64 x 64 */
} verdict;

static void judge_number(verdict *v, int expert, int64_t line, int64_t column, double got,
                         double want, double slack)
{
    v->checked++;
    if (fabs(got - want) <= slack) return;
    if (v->wrong++ == 0) {
        v->expert = expert;
        v->line = line;
        v->column = column;
        v->got = got;
        v->want = want;
    }
}

static void count_box(const problem *p, const verdict *v, verdict *to, uint32_t pass,
                      int64_t line, int64_t column)
{
    const int64_t first = pass == EPIC_GEMM_WEIGHT ? v->expert * p->s->k : p->first[v->expert];
    const int64_t row = line - first, tile = (v->line - first) / 128;
    if (row / 128 != tile || column / 256 != v->column / 256) return;
    to->boxes[row % 128 / 64][column % 256 / 64]++;
}

/* Tensor cores add 32 products of e4m3 with 13 bits after the leading bit of the largest. */
static double slack_of(uint32_t type, double want, double size, bool short_sums)
{
    const double round = type == EPIC_BF16 ? 0x1.02p-8 : type == EPIC_F16 ? 0x1.02p-11 : 0;
    return round * fabs(want) + (short_sums ? 1e-3 : 2e-6) * size +
           (type == EPIC_F16 ? 1e-7 : 1e-30);
}

/* Checks the whole result. `before`: its initial value, if the product accumulates. `left`:
 * padding rows may be unchanged. */
static verdict check_product(const problem *p, uint32_t pass, kernel how, const both *out,
                             double before, bool left)
{
    const shape *s = p->s;
    const bool weight = pass == EPIC_GEMM_WEIGHT;
    const bool short_sums = s->type == EPIC_E4M3 && how > SLICED;
    const int64_t columns = pass == EPIC_GEMM_INPUT ? s->k : s->n;
    verdict v = {0};
    for (int round = 0; round < 2; round++) { /* the second round only counts boxes */
        verdict again = v;
        for (int e = 0; e < s->experts; e++) {
            const int64_t first = weight ? e * s->k : p->first[e];
            const int64_t lines = weight ? s->k : p->rows[e];
            for (int64_t i = 0; i < lines * columns; i++) {
                const int64_t line = first + i / columns, column = i % columns;
                double size = before, want = before;
                const bool has_token = weight || i / columns < s->tokens[e];
                if (left && !has_token && is_poison(out, line * columns + column)) continue;
                if (has_token) want += truth_at(p, pass, e, line, column, &size);
                const double got = get_number(out->host, out->type, line * columns + column);
                const double slack = slack_of(out->type, want, size, short_sums);
                if (round == 0)
                    judge_number(&v, e, line, column, got, want, slack);
                else if (!(fabs(got - want) <= slack))
                    count_box(p, &v, &again, pass, line, column);
            }
        }
        if (round == 1) v = again;
        if (v.wrong == 0) break;
    }
    for (int64_t i = (p->slots - TAIL) * columns; !weight && i < p->slots * columns; i++)
        if (!is_poison(out, i)) judge_number(&v, 0, i / columns, i % columns, 1, 0, 0);
    return v;
}

static void print_verdict(const problem *p, uint32_t pass, kernel how, bool left,
                          const verdict *v)
{
    const shape *s = p->s;
    const int64_t first = pass == EPIC_GEMM_WEIGHT ? v->expert * s->k : p->first[v->expert];
    const int64_t row = v->line - first;
    printf("WRONG  %s, %s, \"%s\"%s: %lld of %lld\n", passes[pass], kernels[how], s->name,
           left ? ", padding left" : "", (long long)v->wrong, (long long)v->checked);
    printf("       k %lld n %lld, alignment %d, type %u, out %u, bias %d%d, add %d, tokens",
           (long long)s->k, (long long)s->n, s->alignment, s->type, s->out_type, s->bias,
           s->weighted, s->accumulate);
    for (int e = 0; e < s->experts; e++) printf(" %d", s->tokens[e]);
    printf("\n       first: expert %d, its row %lld (tile %lld, row %lld of it), column %lld "
           "(tile %lld, box %lld, column %lld of it): %.9g, expected %.9g\n",
           v->expert, (long long)row, (long long)row / 128, (long long)row % 128,
           (long long)v->column, (long long)v->column / 256, (long long)v->column % 256 / 64,
           (long long)v->column % 64, v->got, v->want);
    printf("       wrong in the 64 x 64 boxes of that tile:");
    for (int half = 0; half < 2; half++)
        printf("  %lld %lld %lld %lld", (long long)v->boxes[half][0],
               (long long)v->boxes[half][1], (long long)v->boxes[half][2],
               (long long)v->boxes[half][3]);
    printf("\n");
}

/* ------------------------------------------------------------------------------- cases ---- */

static p2p_gemm job_of(const problem *p, uint32_t pass, const both *out, kernel how)
{
    const shape *s = p->s;
    const bool input = pass == EPIC_GEMM_INPUT, turned = s->type == EPIC_E4M3 && !input;
    const both *w = turned ? &p->of_w.turned : &p->w;
    return (p2p_gemm){.slabs = p->slabs,
                      .a = input ? p->d.device : p->x.device,
                      .b = pass == EPIC_GEMM_WEIGHT ? p->d.device : w->device,
                      .a_scales = p->scales[input].device,
                      .b_scales = (turned ? &p->of_w.turned_scales : &p->of_w.scales)->device,
                      .out = out->device,
                      .bias = pass == EPIC_GEMM_FORWARD && s->bias ? p->bias.device : NULL,
                      .bias_weights = s->weighted ? p->weights.device : NULL,
                      .k = s->k,
                      .n = s->n,
                      .pass = pass,
                      .row_type = s->type,
                      .y_type = p->y_type,
                      .weight_type = s->type,
                      .out_type = s->out_type,
                      .accumulate = pass == EPIC_GEMM_WEIGHT && s->accumulate,
                      .sms = how <= SLICED ? 8 : 132,
                      .no_clusters = how == ALONE};
}

/* A kernel with wrong barriers never ends, so this ends the program after a time. */
static void give_up(int number)
{
    (void)number;
    if (write(STDOUT_FILENO, running, strlen(running)) < 0) _exit(2);
    _exit(1);
}

/* Returns whether the kernel supports the job. Sums are split only if one slab fills all slots.
 */
static bool is_ready(const shape *s, const p2p_gemm *job, kernel how)
{
    if (how == PLAIN) return true;
    if (how == SLICED)
        return s->experts == 1 && s->alignment == 1 && s->type != EPIC_E4M3 && s->tokens[0];
    return !p2p_gemm_is_slow(job) && (how == PAIRS || s->type != EPIC_F16);
}

/* Limits the job to the slab, because only this kernel uses the number of slots. */
static void cut_sums(p2p_gemm *job, const problem *p, both *parts)
{
    const int64_t lines = job->pass == EPIC_GEMM_WEIGHT ? p->s->k : p->s->tokens[0];
    *parts = make_both(EPIC_F32,
                       SLICES * lines * (job->pass == EPIC_GEMM_INPUT ? p->s->k : p->s->n));
    push_to_device(parts);
    job->slabs.num_slots = p->s->tokens[0];
    job->slices = SLICES;
    job->slice_sums = parts->device;
}

static void run_product(const problem *p, uint32_t pass, kernel how, bool left)
{
    const shape *s = p->s;
    if (only && strcmp(only, kernels[how]) != 0) return;
    snprintf(running, sizeof running, "WRONG  %s, %s, \"%s\": never ends\n", passes[pass],
             kernels[how], s->name);
    alarm(60);
    const bool weight = pass == EPIC_GEMM_WEIGHT;
    const int64_t columns = pass == EPIC_GEMM_INPUT ? s->k : s->n;
    both out = make_both(weight ? s->out_type : p->y_type,
                         (weight ? s->experts * s->k : p->slots) * columns);
    const double before = weight && s->accumulate ? 0.5 : 0;
    p2p_gemm job = job_of(p, pass, &out, how);
    job.leave_padding = left;
    both parts = {0};
    const bool ready = is_ready(s, &job, how);
    if (ready && how == SLICED) cut_sums(&job, p, &parts);
    for (int64_t i = 0; before != 0 && i < out.count; i++)
        put_number(out.host, out.type, i, before);
    push_to_device(&out);
    if (!ready) {
        left_out[pass][how]++;
    } else {
        const cudaError_t error = how <= SLICED ? p2p_launch_plain_gemm(&job, stream)
                                                : p2p_launch_hopper_gemm(&job, stream);
        must_succeed(error == cudaSuccess, "launching");
        if (cudaStreamSynchronize(stream) != cudaSuccess) {
            printf("WRONG  %s, %s, \"%s\": the kernel has failed\n", passes[pass], kernels[how],
                   s->name);
            must_succeed(false, "a kernel"); /* after this error no call works */
        }
        pull_from_device(&out);
        const verdict v = check_product(p, pass, how, &out, before, left);
        if (v.wrong && bad[pass][how] < 4) print_verdict(p, pass, how, left, &v);
        *(v.wrong ? &bad[pass][how] : &good[pass][how]) += 1;
    }
    free_both(&out);
    free_both(&parts);
}

static void run_shape(const shape *s)
{
    problem p = make_problem(s);
    for (uint32_t pass = 0; pass < (s->type == EPIC_E4M3 ? 2 : 3); pass++)
        for (kernel how = PLAIN; how < KERNELS; how++) {
            const bool can_leave = pass != EPIC_GEMM_WEIGHT && how != SLICED;
            const bool odd = s->tokens[0] % 2; /* the slow kernel runs only one of the two */
            if (how != PLAIN || !can_leave || !odd) run_product(&p, pass, how, false);
            if (can_leave && (how != PLAIN || odd)) run_product(&p, pass, how, true);
        }
    free_problem(&p);
    fflush(stdout);
}

#define BASE .type = EPIC_BF16, .out_type = EPIC_F32, .alignment = 128
#define E4M3 .type = EPIC_E4M3, .out_type = EPIC_BF16, .alignment = 128

static const shape shapes[] = {
    {"one tile, one step", 64, 256, 1, BASE, .tokens = {128}},
    {"two steps", 128, 256, 1, BASE, .tokens = {128}},
    {"stages begin again", 320, 320, 1, BASE, .tokens = {128}},
    {"two tiles across", 64, 512, 1, BASE, .tokens = {128}},
    {"two tiles down", 128, 256, 1, BASE, .tokens = {256}},
    {"three tiles down", 384, 256, 1, BASE, .tokens = {384}},
    {"half a tile", 128, 256, 1, BASE, .tokens = {64}},
    {"a ragged tile", 128, 256, 1, BASE, .tokens = {100}},
    {"one token", 128, 256, 1, BASE, .tokens = {1}},
    {"two experts", 128, 256, 2, BASE, .tokens = {128, 128}},
    {"an empty expert between", 128, 256, 3, BASE, .tokens = {130, 0, 70}},
    {"no_tokens", 128, 256, 2, BASE, .tokens = {0, 0}},
    {"slabs anywhere", 128, 256, 4, .type = EPIC_BF16, .out_type = EPIC_F32, .alignment = 1,
     .tokens = {77, 3, 0, 150}},
    {"edges of 8", 72, 264, 2, BASE, .tokens = {128, 40}},
    {"few tokens", 136, 264, 10, BASE, .tokens = {15, 1, 16, 0, 17, 33, 63, 64, 65, 97}},
    {"bias", 128, 256, 2, BASE, .tokens = {128, 40}, .bias = true},
    {"weighted bias", 128, 264, 2, BASE, .tokens = {128, 40}, .bias = true, .weighted = true},
    {"16-bit gradients", 128, 256, 2, .type = EPIC_BF16, .out_type = EPIC_BF16, .alignment = 8,
     .tokens = {128, 40}},
    {"gradients added", 128, 256, 3, BASE, .tokens = {128, 0, 40}, .accumulate = true},
    {"16-bit gradients added", 128, 256, 3, .type = EPIC_BF16, .out_type = EPIC_BF16,
     .alignment = 8, .tokens = {128, 0, 40}, .accumulate = true},
    {"16-bit gradients added, edges", 200, 264, 2, .type = EPIC_BF16, .out_type = EPIC_BF16,
     .alignment = 8, .tokens = {70, 9}, .accumulate = true},
    {"float16 gradients added", 136, 256, 2, .type = EPIC_F16, .out_type = EPIC_F16,
     .alignment = 8, .tokens = {128, 40}, .accumulate = true},
    {"float16", 128, 256, 2, .type = EPIC_F16, .out_type = EPIC_F32, .alignment = 16,
     .tokens = {128, 40}},
    {"float16 gradients", 128, 256, 2, .type = EPIC_F16, .out_type = EPIC_F16, .alignment = 16,
     .tokens = {128, 40}},
    {"float32", 72, 264, 2, .type = EPIC_F32, .out_type = EPIC_F32, .alignment = 4,
     .tokens = {128, 40}},
    {"e4m3", 128, 256, 1, E4M3, .tokens = {128}},
    {"e4m3, scales of many blocks", 1152, 520, 1, E4M3, .tokens = {128}},
    {"e4m3, slabs anywhere", 256, 384, 4, .type = EPIC_E4M3, .out_type = EPIC_F16,
     .alignment = 1, .tokens = {77, 3, 0, 150}},
    {"e4m3, few tokens", 272, 272, 10, E4M3, .tokens = {15, 1, 16, 0, 17, 33, 63, 64, 65, 97}},
    {"e4m3, edges of 16", 80, 272, 3, E4M3, .tokens = {130, 0, 40}},
    {"e4m3, weighted bias", 272, 144, 2, E4M3, .tokens = {40, 9}, .bias = true,
     .weighted = true},
    {"e4m3 to float32, odd numbers", 37, 131, 2, .type = EPIC_E4M3, .out_type = EPIC_F32,
     .alignment = 4, .tokens = {130, 5}},
    {"odd numbers", 37, 101, 2, .type = EPIC_BF16, .out_type = EPIC_F32, .alignment = 4,
     .tokens = {130, 5}},
    {"a sum cut unevenly", 150, 70, 1, .type = EPIC_BF16, .out_type = EPIC_F32, .alignment = 1,
     .tokens = {200}, .bias = true, .accumulate = true},
    {"slices without a step", 17, 33, 1, .type = EPIC_F32, .out_type = EPIC_F32, .alignment = 1,
     .tokens = {3}, .bias = true},
};

static shape random_shape(uint32_t most)
{
    static const uint32_t types[] = {EPIC_BF16, EPIC_BF16, EPIC_F16, EPIC_F32, EPIC_E4M3};
    static const uint32_t results[] = {EPIC_BF16, EPIC_F16, EPIC_F32};
    static const int alignments[] = {1, 1, 8, 16, 64, 128, 128, 7};
    shape s = {"random", .experts = 1 + (int)random_below(random_below(4) ? 8 : MOST_EXPERTS)};
    const uint32_t step = random_below(5) ? 8 : 1;
    s.type = types[random_below(5)];
    const uint32_t wide = s.type == EPIC_E4M3 && step > 1 ? 16 : step;
    s.k = (1 + random_below(most / wide)) * wide;
    s.n = (1 + random_below(most / wide)) * wide;
    s.out_type = s.type == EPIC_E4M3 ? results[random_below(3)]
                 : random_below(2)   ? EPIC_F32
                                     : s.type;
    s.alignment = alignments[random_below(8)];
    s.bias = random_below(2);
    s.weighted = random_below(2);
    s.accumulate = random_below(3) == 0;
    const uint32_t tokens = s.experts > 8 ? 20 : 300;
    for (int e = 0; e < s.experts; e++)
        s.tokens[e] = random_below(4) ? (int)random_below(random_below(2) ? tokens : 9) : 0;
    return s;
}

int main(int argc, char **argv)
{
    const int cases = scaled_cases(argc > 1 ? atoi(argv[1]) : 40);
    const uint64_t seed = argc > 2 ? (uint64_t)atoll(argv[2]) : 1;
    const uint32_t most = argc > 3 ? (uint32_t)atoi(argv[3]) : 400;
    only = argc > 4 ? argv[4] : NULL;
    signal(SIGALRM, give_up);
    int wrong = 0;
    must_succeed(!p2p_load_slabs() && !p2p_load_plain_gemm() && !p2p_load_hopper_gemm(),
                 "loading");
    must_succeed(!cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) run_shape(&shapes[i]);
    for (int i = 0; i < cases; i++) {
        random_state = (seed + (uint64_t)i) * 0x9e3779b97f4a7c15u | 1;
        const shape s = random_shape(most);
        run_shape(&s);
    }
    for (int pass = 0; pass < 3; pass++)
        for (int how = 0; how < KERNELS; how++) {
            printf("grouped: %-8s %-6s %3d good, %3d wrong, %3d not for it\n", passes[pass],
                   kernels[how], good[pass][how], bad[pass][how], left_out[pass][how]);
            wrong += bad[pass][how];
        }
    cudaStreamDestroy(stream);
    return wrong != 0;
}
