/* SPDX-License-Identifier: Apache-2.0 */
/* Records each step of this run, and draws pictures of it. */
#ifndef TRAIN_HISTORY_H
#define TRAIN_HISTORY_H

#include "model.h"

typedef struct history {
    int64_t first, num; /* number of steps before this run, and in it so far */
    int32_t (*load)[LAYERS][EXPERTS];
    float *training, *held_out; /* bits per byte; held_out is NAN where it was not measured */
} history;

void history_open(history *h, int64_t first, int64_t most);
void history_close(history *h);

/* Returns an expert's share of its layer's choices in steps [begin, end) of this run,
 * divided by an even share. */
double history_share(const history *h, int64_t begin, int64_t end, int layer, int expert);

/* Prints the load of the experts over time in blocks, to stdout. */
void history_print(const history *h);

/* Draws losses and loads as SVG. Prints an error if the file cannot be written. */
bool history_draw(const history *h, const char *path);

#endif
