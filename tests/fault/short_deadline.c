/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that a peer that closed before the call is reported as EPIC_EPEER, also if the deadline
 * is shorter than the interval in which a waiting rank checks its peers. */
#include <stdatomic.h>

#include "check.h"
#include "run.h"
#include "step.h"

static atomic_bool closed;

static void be_rank(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .timeout_ms = 20000};
    const epic_call call = {.tag = 1, .timeout_ms = 50};
    epic_context *ctx;
    epic_failure_info info;
    step s;
    const epic_result opened = epic_open(&ctx, bootstrap, &config);
    if (!CHECK_SAY(opened == EPIC_OK, "open: %s", epic_error(ctx))) return;
    if (bootstrap->rank == 0) {
        while (!atomic_load(&closed)) run_nap_us(200);
        step_open(&s, ctx, 9, 64);
        const epic_result result = step_call(&s, EPIC_OP_SUM, &call, STEP_SAME);
        CHECK_SAY(result == EPIC_EPEER, "%s: %s", epic_result_name(result), epic_error(ctx));
        CHECK(epic_failure(ctx, &info) == EPIC_OK);
        CHECK(info.num_culprits == 1 && info.culprits[0] == 1);
        step_close(&s);
    }
    epic_close(ctx);
    if (bootstrap->rank == 1) atomic_store(&closed, true);
}

int main(void)
{
    check_begin();
    run_alarm(60);
    run_threads(2, be_rank, NULL);
    return check_end();
}
