/* SPDX-License-Identifier: Apache-2.0 */
/* A stub of OpenBLAS made of plain loops. NAME(x) defines its symbol names, and `integer` the
 * type of its arguments. */
#include <stdint.h>

char *NAME(openblas_get_config)(void);
char *NAME(openblas_get_corename)(void);
void NAME(openblas_set_num_threads)(int num_threads);
int NAME(openblas_get_num_threads)(void);

static int threads = 2;

char *NAME(openblas_get_config)(void)
{
    return "OpenBLAS 9.9.9 " CONFIG;
}

char *NAME(openblas_get_corename)(void)
{
    return "Stub";
}

void NAME(openblas_set_num_threads)(int num_threads)
{
    threads = num_threads;
}

int NAME(openblas_get_num_threads)(void)
{
    return threads;
}

#define GEMM(function, real)                                                                \
    void NAME(function)(int order, int op_a, int op_b, integer m, integer n, integer k,     \
                        real alpha, const real *a, integer lda, const real *b, integer ldb, \
                        real beta, real *c, integer ldc);                                   \
    void NAME(function)(int order, int op_a, int op_b, integer m, integer n, integer k,     \
                        real alpha, const real *a, integer lda, const real *b, integer ldb, \
                        real beta, real *c, integer ldc)                                    \
    {                                                                                       \
        (void)order;                                                                        \
        for (integer i = 0; i < m; i++)                                                     \
            for (integer j = 0; j < n; j++) {                                               \
                real sum = 0;                                                               \
                for (integer l = 0; l < k; l++)                                             \
                    sum += (op_a == 112 ? a[l * lda + i] : a[i * lda + l]) *                \
                           (op_b == 112 ? b[j * ldb + l] : b[l * ldb + j]);                 \
                c[i * ldc + j] = alpha * sum + (beta != 0 ? beta * c[i * ldc + j] : 0);     \
            }                                                                               \
    }

GEMM(cblas_sgemm, float)
GEMM(cblas_dgemm, double)
