/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the flight recorders of this user's processes on this host. A flight recorder is a file
 * in memory, which /proc/PID/fd lists. */
#ifndef EPIC_RECORDINGS_H
#define EPIC_RECORDINGS_H

#include <sys/types.h>

#include "base/recorder.h"

#define MAX_RECORDINGS 1024

/* A flight recorder that was found. A forked child has its parent's recorder open too, so a
 * recorder is identified by the device and inode of its file, and not by the process. */
typedef struct recording {
    const recorder_page *page;
    dev_t device;
    ino_t file;
    int holder;        /* the process in which the recorder was found */
    int32_t num_ranks; /* page->num_ranks when the recorder was found */
} recording;

typedef struct recordings {
    recording list[MAX_RECORDINGS];
    int num;
} recordings;

/* Finds the flight recorders of all groups, sorted by group and rank. *out must be zero before
 * the call. The pages in *out stay mapped until the program exits. */
void recordings_find(recordings *out);

#endif
