/* SPDX-License-Identifier: Apache-2.0 */
/* What happened at each step of this run, and pictures of it. */
#ifndef TRAIN_HISTORY_H
#define TRAIN_HISTORY_H

#include "model.h"

typedef struct history {
    int64_t first, num; /* steps before this run; in it, so far */
    int32_t (*load)[LAYERS][EXPERTS];
    float *training, *held_out; /* bits per byte; held_out NAN where it was not measured */
} history;

void history_open(history *h, int64_t first, int64_t most);
void history_close(history *h);

/* An expert's share of its layer's choices in steps [begin, end) of this run; 1: an even share. */
double history_share(const history *h, int64_t begin, int64_t end, int layer, int expert);

/* The load of the experts over time, in blocks, on stdout. */
void history_print(const history *h);

/* Losses and loads as SVG; complains. */
bool history_draw(const history *h, const char *path);

#endif
