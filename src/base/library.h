/* SPDX-License-Identifier: Apache-2.0 */
/* Libraries that are loaded when asked for. */
#ifndef EPIC_LIBRARY_H
#define EPIC_LIBRARY_H

/* dlopen()s it beside the file that holds `self`, an address of the caller's, if it lies there, else
 * where the system looks.  NULL: dlerror() says why. */
void *library_open(const void *self, const char *library);

#endif
