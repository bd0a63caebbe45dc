/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the plan of a CUDA context, from a copy in host memory or where it lies. */
#ifndef EPIC_DEVICE_READ_H
#define EPIC_DEVICE_READ_H

#include <stdbool.h>

#include "epic/epic.h"

/* Copies bytes from wherever `from` points. */
typedef bool (*device_fetch)(void *to, const void *from, size_t bytes);

/* True: the first words are a CUDA context's plan; then *result is what epic_plan_read returns. */
bool device_plan_read(const void *plan, int64_t plan_bytes, device_fetch fetch,
                      epic_plan_info *out, epic_result *result);

#endif
