/* SPDX-License-Identifier: Apache-2.0 */
/* Opening what the user names. */
#ifndef TRAIN_FILE_H
#define TRAIN_FILE_H

#include <stdio.h>

/* A regular file, for reading.  Others (a pipe could be waited for without end, a device read
 * without end) are refused; complains. */
FILE *file_open(const char *path);

#endif
