/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the addresses of rows whose offsets need more than 32 bits; no other test moves so many
 * rows. */
#include <cstdio>
#include <cuda_device.h>

#include "cuda/net/staging.cuh"

static int failed;

static void expect_offset(const char *what, int64_t offset, int64_t wanted)
{
    if (offset == wanted) return;
    fprintf(stderr, "%s: %lld, not %lld\n", what, (long long)offset, (long long)wanted);
    failed = 1;
}

int main()
{
    const RowShape wide = {14336, 896, 7, true}, narrow = {2, 1, 1, false};
    const int32_t most = 0x7fffffef; /* slots are int32 */
    uint8_t *const box = (uint8_t *)0x10000;
    expect_offset("row 149797 of 14336 bytes", row_offset(149797, wide), 149797ll * 14336);
    expect_offset("row 299594 of 14336 bytes", row_offset(299594, wide), 299594ll * 14336);
    expect_offset("the last row of 14336 bytes", row_offset(most, wide), most * 14336ll);
    expect_offset("the last row of 2 bytes", row_offset(most, narrow), most * 2ll);
    expect_offset("staged token 149797", (uint8_t *)staged_row(box, 149797, 896) - box,
                  149797ll * 14336);
    expect_offset("staged token 1048575", (uint8_t *)staged_row(box, 1048575, 896) - box,
                  1048575ll * 14336);
    printf("emulated_offsets: %s\n", failed ? "WRONG" : "good");
    return failed;
}
