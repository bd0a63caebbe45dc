/* SPDX-License-Identifier: Apache-2.0 */
/* Starts the ranks and waits until all of them have ended. */
#ifndef TRAIN_LAUNCH_H
#define TRAIN_LAUNCH_H

#include "options.h"
#include "text.h"

/* Runs all ranks, or only this process's rank if a launcher started it. Returns the exit
 * status. */
int launch(const options *o, const text *t);

#endif
