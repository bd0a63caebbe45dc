/* SPDX-License-Identifier: Apache-2.0 */
/* Tests how long ranks poll before they sleep: the effect of getting the core back late, and
 * whether all ranks, bound to cores or not, have a core each. */
#include "base/cores.h"
#include "base/patience.h"
#include "check.h"

#define EARLY_NS 1000
#define LATE 3000000

static int sleeps_left(patience *p)
{
    int count = 0;
    while (patience_is_over(p)) count++;
    return count;
}

/* A single late return, for example when a layer computes between short operations, must not
 * make all waits sleep. */
static void test_one_late_return(void)
{
    patience p = {0};
    CHECK_EQ(sleeps_left(&p), 0);
    patience_learn(&p, LATE);
    CHECK_EQ(sleeps_left(&p), LEAST_SLEEPS);
    for (int i = 0; i < 100; i++) patience_learn(&p, EARLY_NS);
    CHECK_EQ(sleeps_left(&p), 0);
    patience_learn(&p, LATE);
    CHECK_EQ(sleeps_left(&p), LEAST_SLEEPS);
}

/* If a program computes all the time, polling must become rare. */
static void test_many_late_returns(void)
{
    patience p = {0};
    int before = 0;
    for (int i = 0; i < 7; i++) {
        patience_learn(&p, LATE);
        const int sleeps = sleeps_left(&p);
        CHECK(sleeps >= 2 * before);
        before = sleeps;
        patience_learn(&p, EARLY_NS); /* one early return does not compensate for it */
        before -= before > 0;
    }
    for (int i = 0; i < 10; i++) patience_learn(&p, LATE);
    CHECK_EQ(sleeps_left(&p), MOST_SLEEPS);
}

static void test_cores(void)
{
    core_set set = cores_of_thread();
    CHECK(cores_count(&set) >= 1);
    set = (core_set){{1, [CORE_WORDS - 1] = 1ull << 63}};
    CHECK_EQ(cores_count(&set), 2);
    set = (core_set){{0}};
    CHECK_EQ(cores_count(&set), 0);
}

int main(void)
{
    check_begin();
    test_one_late_return();
    test_many_late_returns();
    test_cores();
    return check_end();
}
