/* SPDX-License-Identifier: Apache-2.0 */
/* The rows of a router in float32. */
#define REAL float
#define OF(name) name##_f32
#include "router/row_template.h"
