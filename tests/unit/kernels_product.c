/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the matrix products of every variant of the host kernels with plain loops, bit for
 * bit, and these loops with float64. Also checks that no variant writes outside of C. */
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"
#include "rules/convert.h"
#include "unit/moe_problem.h"

static const float BEYOND = 12345; /* the value around C */

/* Returns element (row, l) of a matrix, or of its transpose. */
static float element(const void *matrix, epic_type type, int64_t stride, bool transposed,
                     int64_t row, int64_t l)
{
    const int64_t at = transposed ? l * stride + row : row * stride + l;
    if (type == EPIC_F32) return ((const float *)matrix)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)matrix)[at] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Computes one element of C in the order that host/product.c defines. */
static float true_element(const host_product *p, const float *before, int64_t i, int64_t j)
{
    float sum = p->add ? before[i * p->ldc + j] : 0;
    double exact = sum, sizes = fabs((double)sum);
    for (int64_t first = 0; first < p->k; first += HOST_PRODUCT_DEPTH) {
        float chunk = 0;
        for (int64_t l = first; l < p->k && l < first + HOST_PRODUCT_DEPTH; l++) {
            const float a = element(p->a, p->a_type, p->lda, p->transpose_a, i, l);
            const float b = element(p->b, p->b_type, p->ldb, p->transpose_b, l, j);
            chunk = fmaf(a, b, chunk);
            exact += (double)a * b;
            sizes += fabs((double)a * b);
        }
        sum = first || p->add ? sum + chunk : chunk;
    }
    CHECK(fabs(sum - exact) <= (double)(p->k + 2) * 0x1p-24 * sizes, "%.9g is not %.9g",
          (double)sum, exact);
    return sum;
}

static void fill(float *numbers, int64_t n, source *s)
{
    for (int64_t i = 0; i < n; i++) numbers[i] = (float)between(s, -1, 1);
}

/* Returns a matrix of n random numbers of `type`, after `shift` other elements. *memory is
 * what the caller frees. */
static const void *make_matrix(void **memory, epic_type type, int64_t n, int64_t shift,
                               source *s)
{
    const int64_t bytes = type == EPIC_F32 ? 4 : 2;
    float *numbers = malloc((size_t)(n + shift) * sizeof *numbers);
    fill(numbers, n + shift, s);
    if (type == EPIC_BF16) convert_from_float(numbers, type, numbers, n + shift);
    *memory = numbers;
    return (const char *)*memory + shift * bytes;
}

/* Computes a product with every variant. `shift` elements before each matrix make their
 * addresses odd. */
static void test_product(host_product p, int64_t shift, source *s)
{
    const host_kernels *all[4];
    const int variants = host_kernels_all(all);
    const int64_t as = (p.transpose_a ? p.k : p.m) * p.lda;
    const int64_t bs = (p.transpose_b ? p.n : p.k) * p.ldb, cs = p.m * p.ldc;
    void *a, *b;
    float *c = malloc((size_t)(cs + shift) * 4), *before = malloc((size_t)cs * 4);
    float *want = malloc((size_t)cs * 4);
    const bool few = p.m <= HOST_FEW_ROWS && !p.transpose_b;
    p.memory = malloc((few ? HOST_FEW_MEMORY : HOST_PRODUCT_MEMORY) * sizeof *p.memory);
    p.a = make_matrix(&a, p.a_type, as, shift, s);
    p.b = make_matrix(&b, p.b_type, bs, shift, s);
    fill(before, cs, s);
    p.c = c + shift;
    for (int64_t i = 0; i < cs; i++) {
        const int64_t j = i % p.ldc;
        if (j >= p.n) before[i] = BEYOND;
        want[i] = j < p.n ? true_element(&p, before, i / p.ldc, j) : BEYOND;
    }
    for (int v = 0; v < variants; v++) {
        memcpy(p.c, before, (size_t)cs * 4);
        all[v]->product(&p);
        CHECK(!memcmp(p.c, want, (size_t)cs * 4),
              "%s: product of %lld x %lld x %lld (%d%d%d) has other bits", all[v]->name,
              (long long)p.m, (long long)p.n, (long long)p.k, p.transpose_a, p.transpose_b,
              p.add);
    }
    free(a);
    free(b);
    free(c);
    free(before);
    free(want);
    free(p.memory);
}

int main(void)
{
    static const int64_t rows[] = {1, 2, 4, 5, 8, 9, 12, 13, 16, 17, 95, 97, 400, 3, 15};
    static const int64_t columns[] = {1, 7, 8, 16, 17, 63, 96, 97, 128, 250, 33};
    static const int64_t depths[] = {1, 2, 9, 16, 255, 256, 257, 40, 513, 64, 100};
    failures = share(sizeof *failures);
    source s = source_of(1);
    for (uint32_t turn = 0; turn < (uint32_t)run_scaled(240); turn++) {
        host_product p = {.m = rows[turn % 15],
                          .n = columns[below(&s, 11)],
                          .k = depths[below(&s, 11)],
                          .a_type = EPIC_F32,
                          .b_type = EPIC_F32,
                          .transpose_a = turn / 15 % 4 == 1,
                          .transpose_b = turn / 15 % 4 == 2,
                          .add = below(&s, 2)};
        if (p.m <= HOST_FEW_ROWS && turn / 15 % 4 == 3) {
            p.a_type = below(&s, 2) ? EPIC_BF16 : EPIC_F32;
            p.b_type = EPIC_BF16;
        }
        p.lda = (p.transpose_a ? p.m : p.k) + below(&s, 3);
        p.ldb = (p.transpose_b ? p.k : p.n) + below(&s, 3);
        p.ldc = p.n + below(&s, 3);
        test_product(p, below(&s, 3), &s);
    }
    return atomic_load(failures) ? 1 : 0;
}
