/* SPDX-License-Identifier: Apache-2.0 */
/* Lists the backends inside libepic.so in the order in which epic_open tries them.
 * api/plugins.c loads the backends that are separate libraries. */
#include "backend/backend.h"

extern const epic_backend epic_backend_self, epic_backend_threads, epic_backend_shm;

const epic_backend *const epic_backends[] = {
    &epic_backend_self,
    &epic_backend_threads,
    &epic_backend_shm,
    NULL,
};
