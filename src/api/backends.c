/* SPDX-License-Identifier: Apache-2.0 */
/* Every backend of this build, in the order in which they are tried. */
#include "backend/backend.h"

extern const epic_backend epic_backend_self, epic_backend_threads, epic_backend_shm;

const epic_backend *const epic_backends[] = {
    &epic_backend_self,
    &epic_backend_threads,
    &epic_backend_shm,
    NULL,
};
