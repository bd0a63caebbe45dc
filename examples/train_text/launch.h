/* SPDX-License-Identifier: Apache-2.0 */
/* Starting the ranks, and seeing to it that all of them end. */
#ifndef TRAIN_LAUNCH_H
#define TRAIN_LAUNCH_H

#include "options.h"
#include "text.h"

/* Runs all ranks, or, where a launcher has started this process, its one; the exit status. */
int launch(const options *o, const text *t);

#endif
