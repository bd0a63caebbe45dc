/* SPDX-License-Identifier: Apache-2.0 */
/* EPIC_TEST_SLACK_MS: how many milliseconds later errors may come on a slow or busy machine. */
#ifndef EPIC_TEST_SLACK_H
#define EPIC_TEST_SLACK_H

#include <stdlib.h>

static inline double slack_ms(void)
{
    const char *text = getenv("EPIC_TEST_SLACK_MS");
    return text ? atof(text) : 0;
}

#endif
