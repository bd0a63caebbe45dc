/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that a caller that flushes subnormals to zero gets the same bits, and keeps its
 * setting. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "epic/epic.h"

#if defined(__SSE2__)
#include <xmmintrin.h>

#define FLUSH 0x8040u /* flush to zero, denormals are zero */

static _Alignas(64) unsigned char plan[1 << 16];

static int combine(epic_context *ctx, const float *rows, float *out)
{
    const epic_layer layer = {.num_experts = 2, .top_k = 2};
    const int32_t chosen[2] = {0, 1};
    const epic_plan_args where = {.layer = &layer,
                                  .plan = plan,
                                  .plan_bytes = sizeof plan,
                                  .topk_idx = chosen,
                                  .num_tokens = 1,
                                  .capacity = 2};
    const epic_combine_args home = {.layer = &layer,
                                    .plan = plan,
                                    .plan_bytes = sizeof plan,
                                    .rows = {(void *)(uintptr_t)rows, 2, 16},
                                    .out = {out, 1, 16},
                                    .type = EPIC_F32};
    if (epic_plan(ctx, &where) || epic_combine(ctx, &home)) {
        printf("%s\n", epic_error(ctx));
        return 1;
    }
    return 0;
}

int main(void)
{
    const uint32_t bits[8] = {1, 2, 0x80000003, 0x007fffff, 4, 5, 6, 1};
    const uint32_t sums[4] = {5, 7, 3, 0x00800000};
    float rows[8], out[4] = {0};
    epic_context *ctx;
    const epic_config config = {.max_tokens = 1, .max_row_bytes = 16};
    memcpy(rows, bits, sizeof rows);
    if (epic_open(&ctx, NULL, &config)) {
        printf("%s\n", epic_error(ctx));
        return 1;
    }
    const unsigned before = _mm_getcsr() | FLUSH;
    _mm_setcsr(before);
    const int failed = combine(ctx, rows, out);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before & ~FLUSH);
    epic_close(ctx);
    const int kept = (after & FLUSH) == FLUSH, right = !memcmp(out, sums, sizeof out);
    printf("setting kept: %d, subnormal sums: %d\n", kept, right);
    return failed || !kept || !right;
}
#else
int main(void)
{
    printf("skipped: this processor has no MXCSR\n");
    return 77;
}
#endif
