/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products by the library that the experts use, on one thread, so that a product has
 * the same bits on every rank. */
#include "product.h"

#include <dlfcn.h>
#include <link.h>
#include <string.h>

#include "epic/epic.h"

/* Constants of the C interface to BLAS. */
enum { ROW_MAJOR = 101, AS_IT_LIES = 111, TRANSPOSED = 112 };

static void (*sgemm)(int order, int op_a, int op_b, int m, int n, int k, float alpha,
                     const float *a, int lda, const float *b, int ldb, float beta, float *c,
                     int ldc);

#ifdef EPIC_HAVE_BLAS

static void *library;

static bool find(const char *name, const char *name_of_pip, void *function)
{
    void *address = dlsym(library, name);
    if (!address) address = dlsym(library, name_of_pip);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

static int open_openblas(struct dl_phdr_info *info, size_t size, void *unused)
{
    (void)size;
    (void)unused;
    const char *slash = strrchr(info->dlpi_name, '/');
    if (slash && strstr(slash, "openblas"))
        library = dlopen(info->dlpi_name, RTLD_NOW | RTLD_NOLOAD);
    return library != NULL;
}

/* Looks up the library among those of the process. epic_blas_name() loads the one that the
 * experts use. */
void product_start(void)
{
    void (*set_num_threads)(int) = NULL;
    if (strncmp(epic_blas_name(), "OpenBLAS", 8) || !dl_iterate_phdr(open_openblas, NULL) ||
        !find("openblas_set_num_threads", "scipy_openblas_set_num_threads", &set_num_threads))
        return;
    set_num_threads(1);
    find("cblas_sgemm", "scipy_cblas_sgemm", &sgemm);
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
