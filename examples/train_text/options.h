/* SPDX-License-Identifier: Apache-2.0 */
/* What the command line says. */
#ifndef TRAIN_OPTIONS_H
#define TRAIN_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct options {
    int64_t ranks; /* 0: not said */
    int64_t steps, stop, every, tokens, hidden, inner, seed, sample, save_every;
    double rate;
    const char *backend, *device, *save, *resume, *log, *picture;
    const char *const *data;
    int num_data;
    bool check;
} options;

typedef enum options_result { OPTIONS_GOOD, OPTIONS_HELP, OPTIONS_BAD } options_result;

/* Reads the command line, and of a checkpoint to resume what it says; prints help or complains.
 * out->data is to be freed. */
options_result options_read(options *out, int argc, char **argv);

#endif
