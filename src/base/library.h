/* SPDX-License-Identifier: Apache-2.0 */
/* Loads EPIC's plugins for CUDA, MPI and UCX when a context needs them. */
#ifndef EPIC_LIBRARY_H
#define EPIC_LIBRARY_H

/* Loads the file `library`. Looks first in the folder of the library or program that contains
 * the address `self`, then in the system's search path. Returns a dlopen() handle, or NULL on
 * failure. After a failure dlerror() returns the reason. */
void *library_open(const void *self, const char *library);

#endif
