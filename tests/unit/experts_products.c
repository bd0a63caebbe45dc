/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the matrix products of the experts: the loaded library against plain loops, its
 * number of threads, and use by many threads at once. */
#include <dlfcn.h>
#include <pthread.h>

#include "experts/blas.h"
#include "unit/experts_problem.h"

/* Compares the loaded library with plain loops, with and without transposition. */
static void test_products(void)
{
    for (int turn = 0; turn < 24; turn++) {
        const int m = 1 + turn * 5 % 37, n = 1 + turn * 11 % 53, k = 1 + turn * 7 % 61;
        array a = random_array(EPIC_F32, m * k, 1), b = random_array(EPIC_F32, k * n, 1);
        array c = random_array(EPIC_F32, m * n, 1), d = make_array(EPIC_F32, m * n);
        copy_numbers(&d, &c, 0, 0, m * n);
        gemm g = {.m = m, .n = n, .k = k, .a = a.data, .b = b.data, .ldc = n};
        g.transpose_a = turn % 3 == 1;
        g.transpose_b = turn % 3 == 2;
        g.lda = g.transpose_a ? m : k;
        g.ldb = g.transpose_b ? k : n;
        g.add = turn % 2;
        g.c = c.data;
        gemm_f32(&g);
        g.c = d.data;
        gemm_plain_f32(&g);
        CHECK(apart(&d, &c, m * n) < 1e-5, "turn %d", turn);
        free_array(&a);
        free_array(&b);
        free_array(&c);
        free_array(&d);
    }
}

/* Checks that OpenBLAS uses one thread inside, and as many as before afterwards. */
static void test_num_threads(void)
{
    void (*set)(int) = NULL;
    int (*get)(void) = NULL;
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_NOLOAD);
    if (library == NULL) return;
    void *address = dlsym(library, "openblas_set_num_threads");
    memcpy(&set, &address, sizeof set);
    address = dlsym(library, "openblas_get_num_threads");
    memcpy(&get, &address, sizeof get);
    const int before = get();
    set(2);
    experts_blas_enter();
    experts_blas_enter();
    CHECK(get() == 1, "%d threads inside", get());
    experts_blas_leave();
    CHECK(get() == 1, "%d threads inside", get());
    experts_blas_leave();
    CHECK(get() == 2, "%d threads outside", get());
    set(before);
    dlclose(library);
}

static void *run_again(void *problem_of_thread)
{
    for (int i = 0; i < 5; i++) run(problem_of_thread);
    return NULL;
}

/* Checks that many threads at once get the bits that a single thread gets. */
static void test_threads(void)
{
    static const int32_t tokens[3] = {40, 0, 25};
    const epic_experts ex = {
        .num_local_experts = 3, .hidden = 96, .inner = 64, .row_type = EPIC_F32};
    problem alone, many[3];
    pthread_t threads[3];
    make_problem(&alone, &ex, tokens, 8, true);
    run(&alone);
    for (int i = 0; i < 3; i++) {
        make_problem(&many[i], &ex, tokens, 8, true);
        copy_problem(&many[i], &alone);
        pthread_create(&threads[i], NULL, run_again, &many[i]);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        CHECK(same_bits(&many[i].y, 0, &alone.y, 0, alone.occupied * alone.hidden), "y");
        CHECK(same_bits(&many[i].d_w_down, 0, &alone.d_w_down, 0, alone.d_w_down.n),
              "d_w_down");
        free_problem(&many[i]);
    }
    free_problem(&alone);
}

int main(void)
{
    test_products();
    test_num_threads();
    test_threads();
    printf("with %s\n", epic_blas_name());
    if (failures) printf("%d checks failed\n", failures);
    return failures ? 1 : 0;
}
