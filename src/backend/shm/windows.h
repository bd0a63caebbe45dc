/* SPDX-License-Identifier: Apache-2.0 */
/* Windows for ranks that are processes: each rank sends the file descriptor of its memory over
 * the connections (connections.h). */
#ifndef EPIC_SHM_WINDOWS_H
#define EPIC_SHM_WINDOWS_H

#include "backend/shared/shared.h"

extern const epic_window_transport shm_windows;

#endif
