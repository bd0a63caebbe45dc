/* SPDX-License-Identifier: Apache-2.0 */
/* Times of tests, in milliseconds. */
#ifndef EPIC_TEST_TIMES_H
#define EPIC_TEST_TIMES_H

#include <stdlib.h>
#include <time.h>

static inline double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

/* Returns EPIC_TEST_SLACK_MS: how much later errors may come on a slow or busy machine. */
static inline double slack_ms(void)
{
    const char *text = getenv("EPIC_TEST_SLACK_MS");
    return text ? atof(text) : 0;
}

#endif
