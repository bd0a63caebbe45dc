/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the plan of a CUDA context, from a copy in host memory or from device memory. */
#ifndef EPIC_DEVICE_READ_H
#define EPIC_DEVICE_READ_H

#include <stdbool.h>

#include "epic/epic.h"

/* Copies bytes to the host from memory of any kind. Returns false on failure. */
typedef bool (*device_fetch)(void *to, const void *from, size_t bytes);

/* Returns true if the bytes begin like a plan of a CUDA context. Then it sets *result to the
 * result of epic_plan_read and, on success, fills in *out. */
bool device_plan_read(const void *plan, int64_t plan_bytes, device_fetch fetch,
                      epic_plan_info *out, epic_result *result);

#endif
