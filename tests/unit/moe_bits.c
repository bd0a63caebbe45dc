/* SPDX-License-Identifier: Apache-2.0 */
/* With EPIC_TREE and EPIC_SUM_DENSE the layer's outputs and gradients have the same bits for 1, 2,
 * 4 and 8 ranks, and so have the sums of replicas: random layers, ranks that come late, threads and processes, with the kernels that
 * OpenBLAS chooses and with those for Haswell, as many BLAS threads as there are cores.
 *
 * The program starts itself once for each of these: OpenBLAS reads its variables when it is
 * loaded, and a process that forks ranks must not have used it before. */
#include <pthread.h>

#include "unit/moe_layer.h"

#define LEAVES 8
#define MOST_NUMBERS (1 << 15) /* of an expert's matrix; keeps a case within milliseconds */

static bool as_processes;

/* --------------------------------------------------------------------- random layers ---- */

static void draw_router(problem *p, source *s)
{
    static const epic_router kinds[] = {
        {.normalize = EPIC_NORMALIZE_SUM},
        {.score = EPIC_SCORE_SIGMOID, .normalize = EPIC_NORMALIZE_SUM, .scale = 2.5},
        {.score = EPIC_SCORE_LOGITS, .weight_rule = EPIC_WEIGHT_SOFTMAX_CHOSEN},
        {.score = EPIC_SCORE_SQRTSOFTPLUS, .num_groups = 4, .topk_groups = 2},
    };
    p->layer.top_k = 1 + below(s, 4);
    p->router = kinds[below(s, 4)];
    p->router.num_experts = p->layer.num_experts;
    p->router.zero_experts = below(s, 3) ? 0 : 4;
    p->router.top_k = p->layer.top_k;
    p->gate_biased = below(s, 2);
    p->bias_given = below(s, 2);
    for (int i = 0; i < 96; i++) p->bias[i] = (float)between(s, -0.2, 0.2);
}

/* They are drawn from a source of their own.  Where blocks of experts change places, gradients of
 * replicas are compared one by one. */
static void draw_replicas(problem *p, uint32_t seed)
{
    source s = source_of(seed + 2000000);
    epic_layer *l = &p->layer;
    if (l->num_experts == LEAVES || below(&s, 3)) return;
    l->num_logical = p->router.num_experts = l->num_experts / 2;
    for (uint32_t e = 0; e < l->num_experts; e++)
        p->logical_of[e] =
            (int32_t)(e * 5 % l->num_experts < l->num_logical ? e * 5 % l->num_experts
                                                              : below(&s, 2));
}

static void draw_experts(problem *p, source *s)
{
    static const uint32_t types[] = {EPIC_F32, EPIC_BF16, EPIC_F32, EPIC_F16};
    const uint32_t hidden = 1 + below(s, below(s, 6) ? 200 : 1100);
    const uint32_t room = MOST_NUMBERS / hidden;
    p->experts = (epic_experts){.num_local_experts = 1,
                                .hidden = hidden,
                                .inner = 1 + below(s, room < 150 ? room : 150),
                                .activation = below(s, 6),
                                .weighting = below(s, 3),
                                .row_type = types[below(s, 4)],
                                .weight_type = below(s, 4)};
    p->has_shared = below(s, 2);
    p->shared_gated = below(s, 2);
    p->biased = below(s, 2);
    p->shared = p->experts;
    p->shared.inner = 1 + below(s, room < 100 ? room : 100);
    p->shared.weighting = EPIC_WEIGHT_LATE;
}

static void draw_losses(problem *p, source *s)
{
    p->moe.flags = EPIC_SUM_DENSE;
    p->moe.balance_coeff = below(s, 3) ? between(s, 0.01, 1) : 0;
    p->moe.z_coeff = below(s, 3) ? between(s, 0.01, 1) : 0;
    p->backward_flags = below(s, 3) ? 0 : EPIC_ACCUMULATE;
}

static problem draw(uint32_t seed)
{
    static const uint32_t alignments[] = {1, 16, 8, 128};
    source s = source_of(seed);
    problem p = {.num_ranks = 1};
    p.layer = (epic_layer){.num_experts = LEAVES << below(&s, 3),
                           .alignment = alignments[seed % 4],
                           .sum_order = EPIC_TREE,
                           .leaves = LEAVES,
                           .partial_type = below(&s, 2) ? EPIC_F32 : 0};
    draw_router(&p, &s);
    draw_replicas(&p, seed);
    p.scaled = seed % 3 == 0;
    draw_experts(&p, &s);
    draw_losses(&p, &s);
    const int64_t block = 1 + below(&s, p.experts.hidden > 200 ? 5 : 24);
    if (below(&s, 4) == 0) p.moe.sequence_tokens = block;
    p.tokens_of[0] = LEAVES * block;
    make_given(&p, &s);
    if (below(&s, 4) == 0) {
        p.layer.overflow = EPIC_OVERFLOW_DROP;
        p.layer.expert_capacity = 1 + below(&s, (uint32_t)p.total / 4);
    }
    p.placed = below(&s, 2);
    snprintf(
        p.name, sizeof p.name,
        "seed %u: %lld tokens, %u experts, top %u, alignment %u, hidden %u, inner %u, %s rows",
        seed, (long long)p.total, p.layer.num_experts, p.layer.top_k, p.layer.alignment,
        p.experts.hidden, p.experts.inner, convert_name(p.experts.row_type));
    return p;
}

/* The same layer over so many ranks, whose blocks of experts may be anywhere. */
static problem spread(const problem *one, int num_ranks, uint32_t seed)
{
    source s = source_of(seed + 1000u * (uint32_t)num_ranks);
    problem p = *one;
    const uint32_t ranks = (uint32_t)num_ranks, turn = below(&s, ranks),
                   flip = below(&s, ranks);
    p.num_ranks = num_ranks;
    p.moe.capacity =
        p.total * p.layer.top_k + p.layer.num_experts / ranks * (p.layer.alignment - 1);
    for (int r = 0; r < num_ranks; r++) p.tokens_of[r] = p.total / num_ranks;
    for (uint32_t e = 0; e < p.layer.num_experts; e++)
        p.rank_of_expert[e] =
            (int32_t)(((e / (p.layer.num_experts / ranks) + turn) % ranks) ^ flip);
    make_results(&p);
    return p;
}

/* -------------------------------------------------------------------------- comparing ---- */

static void delay(source *s)
{
    if (below(s, 2)) usleep(below(s, 1500));
}

static void run_once(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    source s = source_of((uint64_t)(uintptr_t)ctx + (uint64_t)rank);
    part *t = part_make(p, rank, config, 3);
    delay(&s);
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    delay(&s);
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    if (!p->placed)
        CHECK(part_sum_replicas(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    part_tell(t);
    part_free(t);
}

static void run(problem *p)
{
    const epic_config config = config_of(p);
    if (as_processes)
        team_processes(run_once, p, &config);
    else
        team_threads(run_once, p, &config);
}

static void same(const problem *p, const char *what, const void *a, const void *b, size_t bytes)
{
    CHECK(bytes == 0 || !memcmp(a, b, bytes), "%s: %s has other bits with %d ranks", p->name,
          what, p->num_ranks);
}

static void compare(const problem *one, const problem *many)
{
    same(many, "out", one->out.data, many->out.data, array_bytes(&one->out));
    for (int r = 0; r < many->num_ranks; r++)
        same(many, "the loss", one->loss.data, number_at(&many->loss, r), sizeof(float));
    for (int i = 0; i < NUM_GIVEN; i++) {
        const size_t bytes = array_bytes(&one->gradient[i]);
        for (int r = 0; r < (is_dense(i) ? many->num_ranks : 1); r++)
            same(many, given_names[i], one->gradient[i].data,
                 (char *)many->gradient[i].data + (size_t)r * bytes, bytes);
    }
}

static int run_all(uint32_t count)
{
    failures = share(sizeof *failures);
    for (uint32_t seed = 0; seed < count; seed++) {
        problem given = draw(seed), one = spread(&given, 1, seed);
        run(&one);
        for (int ranks = 2; ranks <= LEAVES; ranks *= 2) {
            problem many = spread(&given, ranks, seed);
            run(&many);
            compare(&one, &many);
            free_results(&many);
        }
        free_results(&one);
        free_given(&given);
    }
    return atomic_load(failures) ? 1 : 0;
}

/* ------------------------------------------------------------------------ environments ---- */

static int start(const char *self, const char *how, const char *core)
{
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        unsetenv("OPENBLAS_NUM_THREADS");
        unsetenv("OPENBLAS_CORETYPE");
        if (core) setenv("OPENBLAS_CORETYPE", core, 1);
        execl(self, self, how, (char *)NULL);
        _exit(127);
    }
    int status = 1;
    waitpid(child, &status, 0);
    return status != 0;
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        as_processes = !strcmp(argv[1], "processes");
        const int failed = run_all(cases(as_processes ? 10 : 100));
        printf("%s, %s: %s\n", argv[1], epic_blas_name(), failed ? "bits differ" : "same bits");
        return failed;
    }
    int failed = 0;
    const char *const cores[] = {NULL, "HASWELL"};
    const int num_cores = PATIENCE > 1 ? 1 : 2; /* the BLAS is not what sanitizers see */
    for (int i = 0; i < num_cores; i++) {
        failed += start("/proc/self/exe", "threads", cores[i]);
        failed += start("/proc/self/exe", "processes", cores[i]);
    }
    return failed != 0;
}
