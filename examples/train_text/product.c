/* SPDX-License-Identifier: Apache-2.0 */
/* Products by the same library that the experts use, on one thread: one call has the same bits
 * wherever it is made. */
#include "product.h"

#include <dlfcn.h>
#include <string.h>

enum { ROW_MAJOR = 101, AS_IT_LIES = 111, TRANSPOSED = 112 }; /* of the C interface to BLAS */

static void (*sgemm)(int order, int op_a, int op_b, int m, int n, int k, float alpha,
                     const float *a, int lda, const float *b, int ldb, float beta, float *c,
                     int ldc);

#ifdef EPIC_HAVE_BLAS

void product_start(void)
{
    void (*set_num_threads)(int) = NULL;
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    void *address = library ? dlsym(library, "openblas_set_num_threads") : NULL;
    if (!address) return;
    memcpy(&set_num_threads, &address, sizeof address);
    set_num_threads(1);
    address = dlsym(library, "cblas_sgemm");
    memcpy(&sgemm, &address, sizeof address);
}

#else

void product_start(void)
{
}

#endif

static float element(const float *at, bool transposed, int64_t row, int64_t column,
                     int64_t rows, int64_t columns)
{
    return transposed ? at[column * rows + row] : at[row * columns + column];
}

static void multiply_plainly(const product *p)
{
    memset(p->c, 0, (size_t)(p->m * p->n) * sizeof *p->c);
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t l = 0; l < p->k; l++) {
            const float a = element(p->a, p->transpose_a, i, l, p->m, p->k);
            float *c = p->c + i * p->n;
            if (p->transpose_b)
                for (int64_t j = 0; j < p->n; j++) c[j] += a * p->b[j * p->k + l];
            else
                for (int64_t j = 0; j < p->n; j++) c[j] += a * p->b[l * p->n + j];
        }
}

void multiply(const product *p)
{
    if (!sgemm) {
        multiply_plainly(p);
        return;
    }
    sgemm(ROW_MAJOR, p->transpose_a ? TRANSPOSED : AS_IT_LIES,
          p->transpose_b ? TRANSPOSED : AS_IT_LIES, (int)p->m, (int)p->n, (int)p->k, 1, p->a,
          (int)(p->transpose_a ? p->m : p->k), p->b, (int)(p->transpose_b ? p->k : p->n), 0,
          p->c, (int)p->n);
}
