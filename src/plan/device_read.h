/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the plan of a CUDA context on the host. The plan may be in host or in device memory. */
#ifndef EPIC_DEVICE_READ_H
#define EPIC_DEVICE_READ_H

#include <stdbool.h>

#include "epic/epic.h"

/* Copies `bytes` bytes from host or device memory to host memory. Returns false on failure. */
typedef bool (*device_fetch)(void *to, const void *from, size_t bytes);

/* Reads the header of a CUDA context's plan, and counts how many choices have each fate (kept,
 * or the reason for a drop). `fetch` copies the plan's bytes to host memory. If the bytes do
 * not begin like a plan of a CUDA context, returns false. If they do, returns true and sets
 * *result to the result of epic_plan_read. If *result is EPIC_OK, also fills in *out. */
bool device_plan_read(const void *plan, int64_t plan_bytes, device_fetch fetch,
                      epic_plan_info *out, epic_result *result);

#endif
