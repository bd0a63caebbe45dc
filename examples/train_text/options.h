/* SPDX-License-Identifier: Apache-2.0 */
/* Options of the command line. */
#ifndef TRAIN_OPTIONS_H
#define TRAIN_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct options {
    int64_t ranks; /* 0: not given */
    int64_t steps, stop, every, tokens, hidden, inner, seed, sample, save_every;
    double rate;
    const char *backend, *device, *save, *resume, *log, *picture;
    const char *const *data;
    int num_data;
    bool check;
} options;

typedef enum options_result { OPTIONS_GOOD, OPTIONS_HELP, OPTIONS_BAD } options_result;

/* Reads the command line, and options of the checkpoint to resume. Prints help or errors.
 * The caller frees out->data. */
options_result options_read(options *out, int argc, char **argv);

#endif
