/* SPDX-License-Identifier: Apache-2.0 */
/* Records the steps of a run, and prints the picture for the terminal. */
#include "history.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

void history_open(history *h, int64_t first, int64_t most)
{
    *h = (history){.first = first,
                   .load = memory(most * (int64_t)sizeof *h->load),
                   .training = memory(most * 4),
                   .held_out = memory(most * 4)};
    for (int64_t i = 0; i < most; i++) h->held_out[i] = NAN;
}

void history_close(history *h)
{
    free(h->load);
    free(h->training);
    free(h->held_out);
    *h = (history){0};
}

double history_share(const history *h, int64_t begin, int64_t end, int layer, int expert)
{
    int64_t all = 0, its = 0;
    for (int64_t s = begin; s < end; s++)
        for (int e = 0; e < EXPERTS; e++) {
            all += h->load[s][layer][e];
            if (e == expert) its += h->load[s][layer][e];
        }
    return all ? (double)its * EXPERTS / (double)all : 0;
}

void history_print(const history *h)
{
    static const char *const blocks[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
    const int64_t width = h->num < 64 ? h->num : 64;
    printf("\nload of the experts, steps %lld to %lld; ▄ is an even share, █ twice that or "
           "more\n",
           (long long)h->first + 1, (long long)(h->first + h->num));
    for (int layer = 0; layer < LAYERS; layer++)
        for (int e = 0; e < EXPERTS; e++) {
            printf("  layer %d expert %d  ", layer, e);
            for (int64_t c = 0; c < width; c++) {
                const double share =
                    history_share(h, c * h->num / width, (c + 1) * h->num / width, layer, e);
                fputs(blocks[share >= 2 ? 8 : (int)(share * 4 + 0.5)], stdout);
            }
            printf("  %.1f %%\n", 100 * history_share(h, 0, h->num, layer, e) / EXPERTS);
        }
}
