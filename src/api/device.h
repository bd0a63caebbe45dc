/* SPDX-License-Identifier: Apache-2.0 */
/* The steps of contexts of device backends. */
#ifndef EPIC_API_DEVICE_H
#define EPIC_API_DEVICE_H

#include "context/context.h"

extern const context_steps device_steps;

#endif
