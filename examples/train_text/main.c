/* SPDX-License-Identifier: Apache-2.0 */
/* train_text: a small language model whose experts are spread over ranks, trained on real text.
 *
 *     build/examples/train_text                       4 processes, this repository's own text
 *     build/examples/train_text --ranks 2 novel.txt   2 processes, and the text of a file
 *     build/examples/train_text --check               compares 4 ranks with 1 rank, bit by bit
 *     mpirun -n 4 build/examples/train_text           ranks that MPI starts
 *
 * model.h describes the model, train.c has a training step, and launch.c starts the ranks. */
#include <stdio.h>
#include <stdlib.h>

#include "launch.h"
#include "train.h"

int main(int argc, char **argv)
{
    options o;
    text t;
    int status = EXIT_FAILED;
    setvbuf(stdout, NULL, _IOLBF, 0);
    const options_result read = options_read(&o, argc, argv);
    if (read == OPTIONS_HELP) status = EXIT_GOOD;
    if (read == OPTIONS_BAD) status = EXIT_USAGE;
    if (read == OPTIONS_GOOD && text_read(&t, o.data, o.num_data)) {
        status = launch(&o, &t);
        text_free(&t);
    }
    free((void *)(uintptr_t)o.data);
    return status;
}
