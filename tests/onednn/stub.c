/* SPDX-License-Identifier: Apache-2.0 */
/* A stub of oneDNN made of plain loops, with the threading runtime RUNTIME. If REFUSES is
 * defined, it refuses every product. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct version {
    int major, minor, patch;
    const char *hash;
    unsigned cpu_runtime, gpu_runtime;
} version;

const version *dnnl_version(void);
void omp_set_num_threads(int num_threads);
int omp_get_max_threads(void);
int dnnl_gemm_bf16bf16f32(char op_a, char op_b, int64_t m, int64_t n, int64_t k, float alpha,
                          const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb,
                          float beta, float *c, int64_t ldc);

static int threads = 2;

static void __attribute__((destructor)) check_threads(void)
{
    if (threads == 2) return;
    puts("oneDNN has not its threads back");
    fflush(stdout);
    _exit(1);
}

const version *dnnl_version(void)
{
    static const version ours = {9, 9, 9, "", RUNTIME, 0};
    return &ours;
}

void omp_set_num_threads(int num_threads)
{
    threads = num_threads;
}

int omp_get_max_threads(void)
{
    return threads;
}

static float number(const uint16_t *from)
{
    const uint32_t bits = (uint32_t)*from << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

int dnnl_gemm_bf16bf16f32(char op_a, char op_b, int64_t m, int64_t n, int64_t k, float alpha,
                          const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb,
                          float beta, float *c, int64_t ldc)
{
#ifdef REFUSES
    return 1; /* no memory */
#endif
    if (threads != 1) abort();
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            float sum = 0;
            for (int64_t l = 0; l < k; l++)
                sum += number(op_a == 'T' ? &a[l * lda + i] : &a[i * lda + l]) *
                       number(op_b == 'T' ? &b[j * ldb + l] : &b[l * ldb + j]);
            c[i * ldc + j] = alpha * sum + (beta != 0 ? beta * c[i * ldc + j] : 0);
        }
    return 0;
}
