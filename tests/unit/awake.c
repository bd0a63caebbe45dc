/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that a rank that sleeps in a wait wakes when a peer aborts, and does not sleep past its
 * deadline. */
#include <stdatomic.h>
#include <string.h>

#include "check.h"
#include "run.h"

#define TRIES 4     /* repeat, because the machine may be busy; a real bug is late every time */
#define SOON_MS 400 /* a sleep that no event ends lasts one second */

static _Atomic uint64_t aborted_ns;

static epic_context *opened(const epic_bootstrap *bootstrap)
{
    const epic_config config = {.max_tokens = 4, .max_row_bytes = 64, .max_in_flight = 2};
    epic_context *ctx = NULL;
    CHECK_SAY(epic_open(&ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(ctx));
    return ctx;
}

static void keep_least(void *self, uint64_t ns)
{
    uint64_t *least = self;
    if (*least == 0 || ns < *least) *least = ns;
}

static void hear_abort(const epic_bootstrap *bootstrap, void *self)
{
    float number = 1;
    const epic_allreduce_sum_args sum = {.call.timeout_ms = 30000, .data = &number, .count = 1};
    epic_context *ctx = opened(bootstrap);
    if (bootstrap->rank == 1) {
        run_nap_us(200000); /* until the other rank sleeps */
        atomic_store(&aborted_ns, run_now_ns());
        epic_abort(ctx, 0, "no more data");
        run_nap_us(1300000); /* closing must also wake the rank */
    } else {
        CHECK_EQ(epic_allreduce_sum(ctx, &sum), EPIC_EPEER);
        keep_least(self, run_now_ns() - atomic_load(&aborted_ns));
        CHECK_SAY(strstr(epic_error(ctx), "no more data") != NULL, "%s", epic_error(ctx));
    }
    epic_close(ctx);
}

static void be_late(const epic_bootstrap *bootstrap, void *self)
{
    float number = 1;
    const epic_allreduce_sum_args sum = {.call.timeout_ms = 100, .data = &number, .count = 1};
    epic_context *ctx = opened(bootstrap);
    if (bootstrap->rank == 1) {
        run_nap_us(1800000);
    } else {
        const uint64_t start = run_now_ns();
        CHECK_EQ(epic_allreduce_sum(ctx, &sum), EPIC_ETIMEOUT);
        CHECK(run_now_ns() - start >= 100000000);
        keep_least(self, run_now_ns() - start - 100000000);
    }
    epic_close(ctx);
}

static void check_soon(const char *what, run_body *body)
{
    uint64_t least = 0;
    for (int i = 0; i < TRIES && (i == 0 || least > SOON_MS * 1000000ull); i++)
        run_threads(2, body, &least);
    CHECK_SAY(least < SOON_MS * 1000000ull, "%s: %llu us late", what,
              (unsigned long long)least / 1000);
}

int main(void)
{
    check_begin();
    run_alarm(60);
    check_soon("an abort", hear_abort);
    check_soon("the deadline", be_late);
    return check_end();
}
