/* SPDX-License-Identifier: Apache-2.0 */
/* Tests quantization, conversions and copies of every variant of the host kernels, bit for
 * bit (any NaN equals any NaN). */
#include "unit/kernels.h"

/* --------------------------------------------------------------------------- quantize ---- */

static float true_scale_1x128(float max)
{
    const float scale = max / 448.0f;
    return scale == 0.0f ? 1.0f : scale;
}

/* The smallest power of two that keeps max at or below 448, found by trying. */
static int true_scale_1x32(float max)
{
    if (max == 0.0f) return 127;
    int byte = 0;
    while ((double)max > ldexp(448.0, byte - 127)) byte++;
    return byte;
}

static void check_quantized_block(const char *what, const float *x, int64_t count,
                                  const char *q, double scale, bool finite, int64_t n)
{
    const format *f = format_of(EPIC_E4M3);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t truth = finite ? encode(f, (float)((double)x[i] / scale)) : 0x7f;
        if ((uint8_t)q[i] != truth) fail(what, EPIC_E4M3, n, i);
    }
}

static void check_quantize(const host_kernels *k, epic_type type, kind kind, int block)
{
    const char *what = block == 128 ? "quantize 1x128" : "quantize 1x32";
    const int64_t n = random_n();
    const int64_t num_blocks = (n + block - 1) / block;
    const float w = next_random() % 2 ? 1.0f : (float)random_value(PLAIN, EPIC_F32);
    buffer_fill(&sources[0], type, n, kind);
    buffer_clear(&out);
    buffer_clear(&out2);
    if (block == 128)
        k->quantize_1x128(out.row, out2.row, sources[0].row, w, type, n);
    else
        k->quantize_1x32(out.row, out2.row, sources[0].row, w, type, n);
    for (int64_t b = 0; b < num_blocks; b++) {
        const int64_t count = n - b * block < block ? n - b * block : block;
        float x[128], max = 0.0f, got = 0.0f;
        bool finite = true;
        for (int64_t i = 0; i < count; i++) {
            x[i] = w * (float)get(sources[0].row, type, b * block + i);
            finite = finite && isfinite(x[i]);
            max = fmaxf(max, fabsf(x[i]));
        }
        double scale = 1.0;
        if (block == 128) {
            memcpy(&got, out2.row + b * 4, sizeof got);
            scale = finite ? (double)true_scale_1x128(max) : NAN;
            if (!same((double)got, scale)) fail(what, EPIC_F32, n, b);
        } else {
            const int byte = finite ? true_scale_1x32(max) : 255;
            if ((uint8_t)out2.row[b] != byte) fail(what, EPIC_E8M0, n, b);
            scale = ldexp(1.0, byte - 127);
        }
        check_quantized_block(what, x, count, out.row + b * block, scale, finite, n);
    }
    if (!buffer_kept(&out, n) || !buffer_kept(&out2, num_blocks * (block == 128 ? 4 : 1)))
        fail(what, type, n, -1);
}

/* Tests blocks whose largest value is where the scale changes. */
static void check_scale_edges(const host_kernels *k)
{
    for (int exponent = -149; exponent <= 127; exponent++)
        for (int step = -2; step <= 2; step++) {
            float max = ldexpf(1.75f, exponent), x[32] = {0.0f}, scale;
            for (int i = 0; i < abs(step); i++) max = nextafterf(max, step < 0 ? 0 : INFINITY);
            uint8_t q[32], byte;
            x[7] = -max;
            x[8] = max / 3;
            k->quantize_1x32(q, &byte, x, 1.0f, EPIC_F32, 32);
            const int truth = true_scale_1x32(max);
            if (byte != truth) fail("scale 1x32", EPIC_E8M0, exponent, step);
            check_quantized_block("edge 1x32", x, 32, (char *)q, ldexp(1, truth - 127), true,
                                  0);
            k->quantize_1x128(q, &scale, x, 1.0f, EPIC_F32, 32);
            if (scale != true_scale_1x128(max)) fail("scale 1x128", EPIC_F32, exponent, step);
            check_quantized_block("edge 1x128", x, 32, (char *)q, (double)scale, true, 0);
        }
}

/* ------------------------------------------------------------------------ conversions ---- */

static void check_narrow(const host_kernels *k, const format *f, float x)
{
    uint16_t code = 0;
    k->from_float(&code, f->type, x);
    if (!same(decode(f, code), decode(f, encode(f, x))))
        fail("from_float", f->type, (int64_t)code, (int64_t)encode(f, x));
    if (isnan(x) && f->type == EPIC_E4M3 && code != 0x7f) fail("NaN", f->type, code, 0);
}

/* Tests every code, the middle between it and the next one, and the neighbors of that
 * middle. */
static void check_format(const host_kernels *k, const format *f)
{
    for (uint32_t code = 0; code < 2 * sign_of(f); code++) {
        const uint16_t both = (uint16_t)code;
        if (!same(k->to_double(&both, f->type), decode(f, code)))
            fail("to_double", f->type, 0, code);
        const uint32_t size = code & (sign_of(f) - 1);
        check_narrow(k, f, (float)decode(f, code));
        if (size >= f->infinity) continue;
        double middle = (size_of_code(f, size) + size_of_code(f, size + 1)) / 2;
        if (code != size) middle = -middle;
        check_narrow(k, f, (float)middle);
        check_narrow(k, f, nextafterf((float)middle, INFINITY));
        check_narrow(k, f, nextafterf((float)middle, -INFINITY));
    }
    for (int i = 0; i < 100000; i++) check_narrow(k, f, float_of_bits((uint32_t)next_random()));
    for (int i = 0; i < 20000; i++)
        check_narrow(k, f, (float)random_value(i % 2 ? PLAIN : SMALL, f->type));
    check_narrow(k, f, INFINITY);
    check_narrow(k, f, -INFINITY);
}

static void check_wide(const host_kernels *k)
{
    for (int i = 0; i < 20000; i++) {
        const float x = float_of_bits((uint32_t)next_random());
        float single = 0.0f;
        double wide = 0.0;
        k->from_float(&single, EPIC_F32, x);
        k->from_float(&wide, EPIC_F64, x);
        if (!same((double)single, (double)x) || !same(wide, (double)x) ||
            !same(k->to_double(&single, EPIC_F32), (double)x) ||
            !same(k->to_double(&wide, EPIC_F64), (double)x))
            fail("wide", EPIC_F32, 0, i);
    }
    for (int i = 0; i < 256; i++) {
        const uint8_t byte = (uint8_t)i;
        if (!same(k->to_double(&byte, EPIC_E8M0), i == 255 ? NAN : ldexp(1.0, i - 127)))
            fail("to_double", EPIC_E8M0, 0, i);
    }
}

/* ------------------------------------------------------------------------------- copy ---- */

static void check_copy(const host_kernels *k, size_t n)
{
    buffer_clear(&sources[0]);
    buffer_clear(&out);
    for (size_t i = 0; i < n; i++) sources[0].row[i] = (char)next_random();
    k->copy(out.row, sources[0].row, n);
    k->fence_copies();
    if (memcmp(out.row, sources[0].row, n) != 0 || !buffer_kept(&out, (int64_t)n))
        fail("copy", EPIC_BYTES, (int64_t)n, 0);
}

/* -------------------------------------------------------------------------------- all ---- */

static void check_variant(const host_kernels *k)
{
    check_wide(k);
    for (int i = 0; i < 3; i++) check_format(k, &formats[i]);
    check_scale_edges(k);
    for (int i = 0; i < 60; i++) check_copy(k, next_random() % (MAX_N * 8));
    for (size_t n = 0; n < 70; n++) check_copy(k, n);
    for (int i = 0; i < 60 * NUM_KINDS; i++)
        for (int t = 0; t < 3; t++) {
            check_quantize(k, row_types[t], (enum kind)(i % NUM_KINDS), 128);
            check_quantize(k, row_types[t], (enum kind)(i % NUM_KINDS), 32);
        }
}

static void check_types(void)
{
    static const size_t bytes[] = {0, 4, 2, 2, 8, 1, 1, 4, 8, 0};
    variant = "types";
    for (uint32_t type = 0; type < 10; type++)
        if (epic_type_bytes(type) != bytes[type] || !epic_type_name(type))
            fail("bytes", EPIC_BYTES, type, 0);
    if (epic_type_bytes(UINT32_MAX) != 0) fail("bytes", EPIC_BYTES, -1, 0);
}
int main(void)
{
    check_types();
    return kernels_check(check_variant);
}
