/* SPDX-License-Identifier: Apache-2.0 */
/* Tests EPIC_TRACE on a CUDA context: open fails with an error text instead of writing an
 * incomplete trace; without EPIC_TRACE the group opens. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epic/epic.h"

static epic_result open_group(epic_context **ctx)
{
    const epic_bootstrap alone = {.num_ranks = 1};
    const epic_config config = {
        .max_tokens = 8, .max_row_bytes = 64, .num_ranks = 1, .backend = "p2p"};
    return epic_open(ctx, &alone, &config);
}

int main(void)
{
    epic_context *ctx;
    setenv("EPIC_TRACE", "/nowhere", 1);
    const epic_result refused = open_group(&ctx);
    const char *why = epic_error(ctx);
    bool good = refused == EPIC_ENOTSUP && strstr(why, "EPIC_TRACE is \"/nowhere\"") &&
                strstr(why, "save topk_idx");
    if (!good) fprintf(stderr, "with EPIC_TRACE: %s: %s\n", epic_result_name(refused), why);
    epic_close(ctx);
    unsetenv("EPIC_TRACE");
    if (open_group(&ctx) != EPIC_OK) {
        fprintf(stderr, "without EPIC_TRACE: %s\n", epic_error(ctx));
        good = false;
    }
    epic_close(ctx);
    if (good) printf("EPIC_TRACE is refused\n");
    return good ? 0 : 1;
}
