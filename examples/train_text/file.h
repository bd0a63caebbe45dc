/* SPDX-License-Identifier: Apache-2.0 */
/* Opens files that the user names. */
#ifndef TRAIN_FILE_H
#define TRAIN_FILE_H

#include <stdio.h>

/* Opens a regular file for reading. Refuses others, because reading a pipe or a device may
 * never end. Prints an error. */
FILE *file_open(const char *path);

#endif
