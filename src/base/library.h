/* SPDX-License-Identifier: Apache-2.0 */
/* Loads EPIC's plugins (CUDA, MPI, UCX) when a context needs them. */
#ifndef EPIC_LIBRARY_H
#define EPIC_LIBRARY_H

/* Loads a library from the folder of the file that contains the address `self`, or if it is not
 * there, from the system's search path.  Returns NULL on failure; dlerror() has the reason. */
void *library_open(const void *self, const char *library);

#endif
