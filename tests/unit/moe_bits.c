/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that with EPIC_TREE and EPIC_SUM_DENSE the layer's outputs and gradients have the same
 * bits for 1, 2, 4 and 8 ranks, and so have the sums of replicas. The layers are random, ranks
 * come late, and ranks are threads or processes. The test runs with the kernels that OpenBLAS
 * selects and with those for Haswell, with one BLAS thread per core.
 *
 * The program starts itself once for each combination. OpenBLAS reads its variables when it is
 * loaded, and a process must not have used it before it forks ranks. */
#include <pthread.h>

#include "run.h"
#include "unit/moe_bits.h"

static bool as_processes;

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
    part_print_failure(t);
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

/* Gives every fifth layer float64 rows and new numbers. Replicas need float32. */
static void make_f64(problem *p, uint32_t seed)
{
    if (seed % 5 != 4 || p->layer.num_logical) return;
    source s = source_of(seed + 10000000);
    free_given(p);
    p->layer.partial_type = 0;
    p->experts.row_type = EPIC_F64;
    p->experts.weight_type = 0;
    if (p->has_shared) p->shared.row_type = EPIC_F64;
    p->shared.weight_type = 0;
    make_given(p, &s);
    snprintf(p->name, sizeof p->name, "seed %u with F64 rows", seed);
}

static int run_all(uint32_t count)
{
    failures = share(sizeof *failures);
    for (uint32_t seed = 0; seed < count; seed++) {
        problem given = draw(seed);
        make_f64(&given, seed);
        problem one = spread(&given, 1, seed);
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
    const pid_t child = run_fork();
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
        const int failed = run_all((uint32_t)run_scaled(as_processes ? 10 : 100));
        printf("%s, %s: %s\n", argv[1], epic_blas_name(), failed ? "bits differ" : "same bits");
        return failed;
    }
    int failed = 0;
    const char *const cores[] = {NULL, "HASWELL"};
    const int num_cores =
        run_is_sanitized() ? 1 : 2; /* sanitizers do not instrument the BLAS */
    for (int i = 0; i < num_cores; i++) {
        failed += start("/proc/self/exe", "threads", cores[i]);
        failed += start("/proc/self/exe", "processes", cores[i]);
    }
    return failed != 0;
}
