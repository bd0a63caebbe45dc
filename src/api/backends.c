/* SPDX-License-Identifier: Apache-2.0 */
/* The built-in backends, in the order in which open tries them. */
#include "backend/backend.h"

extern const epic_backend epic_backend_self, epic_backend_threads, epic_backend_shm;

const epic_backend *const epic_backends[] = {
    &epic_backend_self,
    &epic_backend_threads,
    &epic_backend_shm,
    NULL,
};
