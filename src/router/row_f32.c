/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the router for one token in float32 (row_template.h). */
#define REAL float
#define OF(name) name##_f32
#include "router/row_template.h"
