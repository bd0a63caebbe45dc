/* SPDX-License-Identifier: Apache-2.0 */
/* The number of random cases of a program of this folder. */
#ifndef GPU_SCALED_CASES_H
#define GPU_SCALED_CASES_H

#include <stdlib.h>

/* Tests with at most this many cases use cases that somebody has selected. */
#define SELECTED_CASES 4
#define FEWEST_CASES 2 /* EPIC_TEST_SCALE leaves at least this many cases */

/* Returns `count` times the environment variable EPIC_TEST_SCALE, at least FEWEST_CASES. If
 * `count` is not larger than SELECTED_CASES, or if the variable is not set, returns `count`. */
static inline int scaled_cases(int count)
{
    const char *text = getenv("EPIC_TEST_SCALE");
    const double scale = text ? atof(text) : 1;
    if (count <= SELECTED_CASES || scale <= 0) return count;
    const int scaled = (int)(count * scale + 0.5);
    return scaled > FEWEST_CASES ? scaled : FEWEST_CASES;
}

#endif
