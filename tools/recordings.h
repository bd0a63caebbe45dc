/* SPDX-License-Identifier: Apache-2.0 */
/* Finds flight recorders of this user's processes on this host: files in memory, which
 * /proc/PID/fd lists. */
#ifndef EPIC_RECORDINGS_H
#define EPIC_RECORDINGS_H

#include <sys/types.h>

#include "base/recorder.h"

#define MAX_RECORDINGS 1024

/* A recorder that was found. A forked child holds its parent's recorder too, so the file
 * identifies it, not the process. */
typedef struct recording {
    const recorder_page *page;
    dev_t device;
    ino_t file;
    int holder; /* the process that it was found in */
} recording;

typedef struct recordings {
    recording list[MAX_RECORDINGS];
    int num;
} recordings;

/* Finds the recorders of all groups, sorted by group and rank. *out must be zeroed. Its
 * pages stay mapped until the program ends. */
void recordings_find(recordings *out);

#endif
