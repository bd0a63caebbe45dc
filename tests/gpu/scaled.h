/* SPDX-License-Identifier: Apache-2.0 */
/* Rows and weights of e4m3 with scales. Their expected values are the numbers that they
 * represent. */
#ifndef EPIC_TEST_SCALED_H
#define EPIC_TEST_SCALED_H

#include "numbers.h"
#include "rules/experts_layout.h"

/* Makes the scales of rows [lines, columns], with poison where the rows are poison. */
static inline both scale_rows(both *rows, int64_t columns)
{
    const int64_t each = experts_blocks(columns);
    both scales = make_both(EPIC_F32, rows->count / columns * each);
    for (int64_t i = 0; i < rows->count; i++) {
        const int64_t at = i / columns * each + i % columns / 128;
        if (is_poison(rows, i)) continue;
        if (i % columns % 128 == 0) set_number(&scales, at, 0.5 + random_number(0.25));
        rows->truth[i] *= scales.truth[at];
    }
    push_to_device(&scales);
    return scales;
}

/* Weights [experts, k, n] with one scale per block of 128 x 128. Transposed weights are
 * [experts, n, k]. */
typedef struct scaled_weights {
    both scales, turned, turned_scales;
} scaled_weights;

static inline scaled_weights scale_weights(both *w, int64_t experts, int64_t k, int64_t n)
{
    const int64_t down = experts_blocks(k), across = experts_blocks(n);
    scaled_weights s = {make_both(EPIC_F32, experts * down * across),
                        make_both(EPIC_E4M3, w->count),
                        make_both(EPIC_F32, experts * down * across)};
    for (int64_t i = 0; i < s.scales.count; i++)
        set_number(&s.scales, i, 0.5 + random_number(0.25));
    for (int64_t i = 0; i < w->count; i++) {
        const int64_t e = i / (k * n), row = i / n % k, column = i % n;
        const double scale = s.scales.truth[(e * down + row / 128) * across + column / 128];
        set_number(&s.turned, (e * n + column) * k + row, w->truth[i]);
        set_number(&s.turned_scales, (e * across + column / 128) * down + row / 128, scale);
        w->truth[i] *= scale;
    }
    push_to_device(&s.scales);
    push_to_device(&s.turned);
    push_to_device(&s.turned_scales);
    return s;
}

static inline void free_scaled(scaled_weights *s)
{
    free_both(&s->scales);
    free_both(&s->turned);
    free_both(&s->turned_scales);
}

#endif
